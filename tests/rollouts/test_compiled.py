"""A compiled spec: what each rollout is given, and whose mistake a broken part is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from hermes_rl.data.load import load_rows
from hermes_rl.errors import UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Group, RolloutKey
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.model import Spec

CODE = '''
class Shelf:
    def __init__(self, item):
        if item["n"] < 0:
            raise ValueError("n is negative")
        self.books = item["n"]

    def take(self, count: int) -> int:
        """Take books.

        Args:
            count: how many
        """
        self.books -= count
        return self.books


def emptied(state) -> float:
    return float(state.books == 0)


async def asked(judge) -> float:
    return float(await judge.chat([{"role": "user", "content": "?"}]) != "")
'''
DESK = '''

class Tools:
    def __init__(self, owner):
        self.owner = owner

    def take(self, count: int) -> int:
        """Take books.

        Args:
            count: how many
        """
        return self.owner.take(count)


class Desk(Shelf):
    @property
    def desk(self):
        return Tools(self)
'''
TEXT = """
dataset: {items: [{n: 2}]}
prompt: {user: "There are {{ n }} books."}
state: shelf.py:Shelf
tools: [{state: take}]
rewards: {emptied: {fn: "shelf.py:emptied"}}
solution: {turns: [{tools: [{name: take, args: {count: "{{ n }}"}}]}, {say: done}]}
servers: {policy: {type: scripted, error_rate: 0.5}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shelf.py").write_text(CODE)
    return tmp_path


async def play(spec: Spec, size: int = 4) -> Group:
    async with CompiledSpec(spec) as world:
        row = load_rows(spec, "train", notify=print)[0]
        return await RolloutRunner(world).start(row, "g", size)


async def test_each_rollout_has_a_separate_state(folder: Path) -> None:
    (folder / "shelf.py").write_text(CODE + DESK)
    text = TEXT.replace("tools: [{state: take}]", "tools: [{state: desk}]").replace("Shelf\n", "Desk\n")
    group = await play(parse_spec(text, folder=folder))
    assert sorted(group.scores) == [0.0, 0.0, 1.0, 1.0]


async def test_concurrent_runs_of_the_same_row_do_not_interfere(folder: Path) -> None:
    spec = parse_spec(TEXT, folder=folder)
    groups = await asyncio.gather(play(spec), play(spec), play(spec))
    assert [sorted(group.scores) for group in groups] == [[0.0, 0.0, 1.0, 1.0]] * 3
    assert len({rollout.key.id for group in groups for rollout in group.rollouts}) == 4, "each has the id of its place"


async def test_a_state_that_cannot_be_made_is_the_specs_mistake(folder: Path) -> None:
    text = TEXT.replace("{n: 2}", "{n: -1}").replace("tools: [{state: take}]\n", "")
    with pytest.raises(UserError, match=r"state: .*Shelf raised ValueError: n is negative at .*shelf\.py:5"):
        await play(parse_spec(text, folder=folder))


async def test_a_reward_may_ask_a_server_role(folder: Path) -> None:
    text = (
        "dataset: {items: [{q: hi}]}\nprompt: {user: '{{ q }}'}\nrewards: {asked: {fn: 'shelf.py:asked'}}\n"
        "servers: {policy: {type: scripted}, judge: {type: scripted}}\n"
    )
    group = await play(parse_spec(text, folder=folder), size=1)
    assert group.scores == [1.0]


async def test_an_argument_of_a_row_that_does_not_fit_names_row_and_argument() -> None:
    text = (
        "dataset: {key: id, items: [{id: seven, c: [{name: take, parameters: {}}]}]}\nprompt: {user: go}\n"
        "rewards: {calls: {fn: tool_calls_match, args: {calls: '{{ c }}'}}}\nservers: {policy: {type: scripted}}\n"
    )
    with pytest.raises(UserError, match=r"<text>:3:55: .* no key `parameters` here \(row seven\)"):
        await play(parse_spec(text), size=1)


@pytest.mark.parametrize("key", ["First line.\nSecond line.", "é\r\nX-Other: 1", "k" * 20_000, "../\0%", "\t"])
async def test_any_key_of_a_row_names_its_rollouts(key: str) -> None:
    """The key is part of a header, by which the scripted server knows whose turns to play."""
    text = (
        f"dataset: {{items: [{{q: {json.dumps(key)}}}], key: q}}\nprompt: {{user: '{{{{ q }}}}'}}\n"
        "rewards: {exact_match: {args: {target: yes indeed}}}\n"
        "solution: {turns: [{say: yes indeed}]}\nservers: {policy: {type: scripted}}\n"
    )
    assert (await play(parse_spec(text), size=2)).scores == [1.0, 1.0]


async def test_toolset_draw_is_fixed_per_group_and_varies_between_groups() -> None:
    text = (
        "dataset: {items: [{q: hi}]}\nprompt: {user: '{{ q }}'}\nservers: {policy: {type: scripted}}\n"
        "toolsets: {distribution: {terminal: 0.5, file: 0.5, todo: 0.5}}\n"
    )
    async with CompiledSpec(parse_spec(text)) as world:
        drawn = {group: world.tooling.shared(group).names for group in map(str, range(20))}
        assert all(world.tooling.shared(group).names == names for group, names in drawn.items())
        assert len(set(drawn.values())) > 1


async def test_examples_in_the_prompt_are_not_trained_on() -> None:
    from hermes_rl.rollouts.rollout import Encoder

    text = (
        "dataset: {items: [{q: hi}]}\nsolution: {turns: [{say: real}]}\nservers: {policy: {type: scripted}}\n"
        "prompt:\n  messages:\n    - {role: user, content: example}\n    - {role: assistant, content: shown}\n"
        "    - {role: user, content: '{{ q }}'}\n"
    )
    group = await play(parse_spec(text), size=1)
    encoder = Encoder.load(None)
    await encoder.encode_group(group)
    sequence = group.rollouts[0].sequence
    assert sequence is not None and encoder.tokenizer is not None
    assert encoder.tokenizer.decode(sequence.trained) == "real<|im_end|>"


def test_members_have_distinct_ids_and_seeds_and_retries_keep_the_seed() -> None:
    from tests.rollouts.worlds import row

    seats = [RolloutKey(row(), "g", index, 2, attempt) for index in range(2) for attempt in range(2)]
    assert len({key.id for key in seats}) == 4
    assert [key.seed(0) for key in seats[::2]] == [key.seed(0) for key in seats[1::2]], "a replay leaves no trace"
    assert len({key.seed(0) for key in seats}) == 2
    assert seats[0].seed(0) != seats[0].seed(1)


@pytest.mark.parametrize(
    ("agent", "evaluation", "seeded"),
    [("{}", "{}", (True, True)), ("{seed: none}", "{}", (False, False)), ("{}", "{seed: none}", (True, False))],
)
async def test_calls_have_a_seed_unless_the_spec_says_none(
    agent: str, evaluation: str, seeded: tuple[bool, bool]
) -> None:
    from tests.rollouts.worlds import Policy, row

    text = (
        "dataset: {items: [{q: hi}]}\nprompt: {user: hi}\nservers: {policy: {type: scripted}}\n"
        f"agent: {agent}\nevaluate: {{agent: {evaluation}}}\n"
    )
    async with CompiledSpec(parse_spec(text)) as world:
        for split, expected in zip(("train", "eval"), seeded, strict=True):
            policy = Policy()
            await RolloutRunner(world, split=split, policy=policy).start(row(), "g", 2)
            assert [request.seed is not None for request in policy.requests] == [expected] * 2


TESTED = """
dataset: {items: [{code: "def one(): return 1"}]}
prompt: {user: Write one.py.}
toolsets: [terminal, file]
artifacts: {one: {path: one.py}}
rewards:
  tests_pass:
    sandbox: fresh
    args:
      files: [{to: test_one.py, content: "CASE"}]
      command: python3 -m unittest -q test_one
      reference: solution
servers: {policy: {type: scripted, error_rate: 0}}
solution:
"""
CASE = r"import unittest, one\nclass T(unittest.TestCase):\n    def test_one(self): self.assertEqual(one.one(), 1)\n"
TURNS = '  turns: [{tools: [{name: write_file, args: {path: one.py, content: "{{ code }}"}}]}, {say: done}]'
PATCH = r'  patch: "--- /dev/null\n+++ b/one.py\n@@ -0,0 +1 @@\n+{{ code }}\n"'


@pytest.mark.parametrize("solution", [TURNS, PATCH], ids=["turns", "patch"])
async def test_solution_serves_as_the_reference_of_tests_if_configured(solution: str) -> None:
    group = await play(parse_spec(TESTED.replace("CASE", CASE) + solution), size=1)
    (rollout,) = group.rollouts
    assert rollout.score == 1.0
    assert rollout.rewards["tests_pass"].metrics["canaries_planted"] > 0
