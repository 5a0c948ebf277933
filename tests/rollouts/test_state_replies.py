"""A state may speak in the user's place, with its own tools and ends."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hermes_rl import Group, Rollout, StopReason, UserError, attach_provenance, open_env
from hermes_rl.data.check import check_spec
from hermes_rl.errors import SpecError
from hermes_rl.runs.metrics import Played
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.runs.store import result_of, rollout_record
from hermes_rl.spec.load import parse_spec
from tests.api import summing

WORLD = '''
"""A game of guessing a number, and a shop."""
import os
import re


class Game:
    """Guess the number."""

    pids = set()

    def __init__(self, item):
        self.number, self.guesses, self.over, self.closed = item["number"], 0, False, item.get("closed")
        self.item = item

    def answer(self, words):
        if words is None:
            return "Guess a number from 1 to 9."
        if words == "crash":
            raise KeyError(words)
        if words in ("odd", "nothing", "wish"):
            return {"odd": 7, "nothing": {"tools": []}, "wish": {"say": "?", "tools": ["rm"]}}[words]
        self.guesses += 1
        guess = int(words)
        if guess == self.number:
            return {"say": "Right!", "done": True, "reward": 1.0}
        return {"say": "Higher." if guess < self.number else "Lower.", "reward": -0.1}

    async def later(self, words):
        return self.answer(words)

    def look(self) -> str:
        """Look at the number of guesses."""
        return str(self.guesses)

    def commit(self, value: int) -> str:
        """Commit to a number."""
        if not 0 < value < 10:
            raise ValueError("from 1 to 9")
        self.over = value == self.number
        return "committed"

    @property
    def broken(self):
        raise RuntimeError("no idea")

    def finish(self):
        with open(self.closed, "a") as file:
            file.write(f"{self.guesses} {os.getpid()}\\n")


def value(result, state):
    return state.guesses


def commits(result):
    return sum(call.name == "commit" for call in result.tool_calls)
'''


def spec_of(folder: Path, turns: list[Any], **sections: Any) -> Any:
    (folder / "world.py").write_text(WORLD)
    spec: dict[str, Any] = {
        "name": "guessing",
        "dataset": {"items": [{"number": 7, "closed": str(folder / "closed")}]},
        "prompt": {"system": "Play."},
        "state": "world.py:Game",
        "user": {"state": "answer", "speaks_first": True},
        "rewards": {"guesses": {"fn": "world.py:value", "range": [0, 9]}, "environment_rewards": {}},
        "solution": {"turns": turns},
        "servers": {"policy": {"type": "scripted"}},
        "process": {"groups": 1, "group_size": 2},
        **sections,
    }
    return parse_spec(yaml.safe_dump({key: part for key, part in spec.items() if part is not None}), folder=folder)


async def play(spec: Any) -> Rollout:
    async with open_env(spec) as env:
        return await env.run(env.rows()[0])


def says(*words: str) -> list[Any]:
    return [{"say": word} for word in words]


def calls(name: str, **args: Any) -> dict[str, Any]:
    return {"tools": [{"name": name, "args": args}]}


def heard(rollout: Rollout) -> list[str]:
    assert rollout.result is not None
    return [message["content"] for message in rollout.result.messages if message["role"] == "user"]


APART = pytest.mark.parametrize("apart", [False, True])


@APART
@pytest.mark.parametrize("method", ["answer", "later"])
async def test_code_answers_the_agent_gives_rewards_and_ends_the_rollout(
    tmp_path: Path, apart: bool, method: str
) -> None:
    state = {"python": "world.py:Game", "isolate": "process" if apart else "none", "close": "finish"}
    turns = says("5", "8", "7", "never said")
    rollout = await play(spec_of(tmp_path, turns, state=state, user={"state": method, "speaks_first": True}))
    assert (rollout.stop_reason, rollout.turns) == (StopReason.ENVIRONMENT_DONE, 3)
    assert heard(rollout) == ["Guess a number from 1 to 9.", "Higher.", "Lower.", "Right!"]
    assert rollout.rewards["guesses"].value == 3
    assert rollout.rewards["environment_rewards"].per_turn == (-0.1, -0.1, 1.0)
    assert rollout.result is not None
    assert rollout.result.finished_naturally
    assert (tmp_path / "closed").read_text().split()[0] == "3", "it was closed once, when all was graded"
    assert len((tmp_path / "closed").read_text().splitlines()) == 1


@APART
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("crash", "KeyError"),
        ("odd", "has to answer with a text, null, or a mapping"),
        ("nothing", "`say` with a text, unless `done` is true"),
        ("wish", "names of the agent's tools (look)"),
        ("no number", "invalid literal"),
    ],
)
async def test_state_error_caused_by_the_agent_is_its_stop_reason(
    tmp_path: Path, apart: bool, words: str, said: str
) -> None:
    state = {"python": "world.py:Game", "isolate": "process" if apart else "none"}
    rollout = await play(spec_of(tmp_path, says("5", words), state=state, tools=[{"state": "look"}]))
    assert (rollout.stop_reason, rollout.turns) == (StopReason.ENVIRONMENT_ERROR, 2)
    assert rollout.score is not None
    assert rollout.result is not None
    (error,) = rollout.result.tool_errors
    assert said in error.error, error


async def test_isolated_state_is_created_only_in_its_process(tmp_path: Path) -> None:
    made = 'self.guesses, self.over, self.closed = item["number"], 0, False, item.get("closed")\n'
    assert made in WORLD
    spec = spec_of(tmp_path, says("7"), state={"python": "world.py:Game", "isolate": "process"})
    note = f"        open({str(tmp_path / 'made')!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    (tmp_path / "world.py").write_text(WORLD.replace(made, made + note))
    async with open_env(spec) as env:
        for row in env.rows()[:1] * 2:
            await env.run(row)
    pids = (tmp_path / "made").read_text().split()
    assert len(pids) == 2 and str(os.getpid()) not in pids


async def test_its_turns_are_bounded(tmp_path: Path) -> None:
    rollout = await play(
        spec_of(tmp_path, says("1", "2", "3"), user={"state": "answer", "speaks_first": True, "max_turns": 3})
    )
    assert (rollout.stop_reason, rollout.turns) == (StopReason.USER_TURNS, 2)


async def test_user_code_that_cannot_start_is_a_user_error(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, says("1"), user={"state": "commit", "speaks_first": True})
    with pytest.raises(UserError, match=r"user\.state: commit of the state: TypeError"):
        await play(spec)


@APART
@pytest.mark.parametrize(
    ("sections", "turns", "stop_reason", "played"),
    [
        (
            {"tools": [{"state": "commit", "ends_rollout": ["commit"]}]},
            [calls("commit", value=3)],
            StopReason.ENVIRONMENT_DONE,
            1,
        ),
        (  # a call that is an error ends nothing
            {"tools": [{"state": "commit", "ends_rollout": ["commit"]}]},
            [calls("commit", value=33), calls("commit"), calls("commit", value=3)],
            StopReason.ENVIRONMENT_DONE,
            3,
        ),
        (
            {"tools": [{"state": "commit"}], "over": "over"},
            [calls("commit", value=3), calls("commit", value=7)],
            StopReason.ENVIRONMENT_DONE,
            2,
        ),
        ({"tools": [{"state": "look"}], "over": "broken"}, [calls("look")], StopReason.ENVIRONMENT_ERROR, 1),
        (
            {"tools": [{"state": "look"}], "agent": {"max_tool_errors": 3}},
            [calls("look"), calls("none"), {"tools": [{"name": "none", "args": {}}] * 2}],
            StopReason.TOOL_ERRORS,
            3,
        ),
        (
            {"tools": [{"state": "look"}], "user": {"state": "answer", "speaks_first": True, "max_agent_turns": 2}},
            [calls("look"), {"say": "5"}, calls("look"), calls("look"), calls("look")],
            StopReason.MAX_TURNS,
            4,
        ),
    ],
)
async def test_tools_and_the_state_end_a_rollout(
    tmp_path: Path, apart: bool, sections: dict[str, Any], turns: list[Any], stop_reason: StopReason, played: int
) -> None:
    sections = dict(sections)
    state = {"python": "world.py:Game", "isolate": "process" if apart else "none", "done": sections.pop("over", None)}
    state = {key: value for key, value in state.items() if value is not None}
    rollout = await play(spec_of(tmp_path, [*turns, calls("look"), calls("look")], state=state, **sections))
    assert (rollout.stop_reason, rollout.turns) == (stop_reason, played)


async def test_scripted_turns_add_and_remove_tools(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        [calls("commit", value=1), {"say": "No such tool."}, calls("commit", value=2), {"say": "Done."}, {"say": "?"}],
        dataset={"items": [{"number": 7, "second": "And now commit."}]},
        tools=[{"state": "look"}, {"state": "commit"}],
        user={
            "speaks_first": True,
            "turns": [{"say": "Commit.", "tools": ["look"]}, {"say": "{{ second }}", "tools": ["commit"]}],
        },
        rewards={"commits": {"fn": "world.py:commits"}},
    )
    rollout = await play(spec)
    assert (rollout.stop_reason, rollout.turns) == (StopReason.FINISHED, 4)
    assert heard(rollout) == ["Commit.", "And now commit."]
    assert rollout.result is not None
    assert [call.error is None for call in rollout.result.tool_calls] == [False, True]
    assert "there is no tool named 'commit' (there are: look)" in rollout.result.tool_errors[0].error


async def test_changed_tools_start_a_new_sequence_and_all_tokens_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [summing.CALL.replace("add", "look").format(1, 2).replace('"a": 1, "b":  2', ""), "  Once.\n\n", "Twice."]
    monkeypatch.setattr(summing, "write", lambda text, right=True: turns[text.count("<|im_start|>assistant") - 1])
    spec = spec_of(
        tmp_path,
        [],
        solution=None,
        tools=[{"state": "look"}, {"state": "commit"}],
        user={
            "speaks_first": True,
            "turns": [{"say": "Look.", "tools": ["look"]}, {"say": "And?", "tools": ["look", "commit"]}],
        },
        rewards={"guesses": {"fn": "world.py:value", "range": [0, 9]}},
    )
    sampler = summing.Sampler()
    async with open_env(spec) as env:
        rollout = await env.run(env.rows()[0], sampler.policy())
    assert (rollout.stop_reason, rollout.turns) == (StopReason.FINISHED, 3), rollout.error
    assert len(rollout.sequences or ()) == 2
    assert summing.trained([rollout]) == summing.sampled(sampler.answers)
    assert attach_provenance(Group("g", rollout.key.row, [rollout])).exact


async def test_the_row_has_the_words(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        says("one", "two", "three"),
        dataset={"items": [{"number": 7, "words": ["First.", {"say": "Second.", "tools": []}]}]},
        prompt={"user": "Begin."},
        tools=[{"state": "look"}],
        user={"turns": "{{ words }}"},
    )
    rollout = await play(spec)
    assert (rollout.stop_reason, heard(rollout)) == (StopReason.FINISHED, ["Begin.", "First.", "Second."])


async def test_environment_rewards_are_restored_from_the_record(tmp_path: Path) -> None:
    rollout = await play(spec_of(tmp_path, says("5", "7")))
    line = json.loads(json.dumps(rollout_record(rollout)))
    assert result_of(line).environment_rewards == [(1, -0.1), (2, 1.0)]


@APART
async def test_run_with_concurrent_stateful_rollouts_completes(tmp_path: Path, apart: bool) -> None:
    spec = spec_of(
        tmp_path,
        says("5", "{{ number }}"),
        dataset={"items": [{"number": number} for number in range(1, 10)]},
        state={"python": "world.py:Game", "isolate": "process" if apart else "none"},
        process={"groups": 9, "group_size": 4, "concurrency": 36},
    )
    await run_process(spec, RunOptions("process", out=tmp_path / "run", progress=Progress(quiet=True)))
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 36
    assert {line["stop_reason"] for line in lines} == {"environment_done"}
    for line in lines:
        right = line["row"]["number"] if "row" in line else None
        assert right is None or line["rewards"]["guesses"]["value"] == (1 if right == 5 else 2)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no such method": ({"user": {"state": "answr"}}, "has no `answr`"),
    "no state": ({"state": None}, "there is no `state:` in this spec that could answer"),
    "two kinds": ({"user": {"state": "answer", "turns": ["x"]}}, "`turns` is for another kind of user than `state`"),
    "a server": ({"user": {"state": "answer", "server": "user"}}, "`server` is for another kind of user"),
    "turns of words": ({"user": {"turns": ["x"], "max_turns": 3}}, "as many turns as there are words"),
    "no attribute": ({"state": {"python": "world.py:Game", "done": "ended"}}, "has no `ended`"),
    "no close": ({"state": {"python": "world.py:Game", "close": "shut"}}, "has no `shut`"),
    "another name": ({"tools": [{"python": "world.py:commits", "ends_rollout": ["commit"]}]}, "is named `commits`"),
    "no errors": ({"agent": {"max_tool_errors": 0}}, "spec.yaml:2:20: must be at least 1"),
    "words without a text": ({"user": {"turns": [{"tools": ["look"]}]}}, "say"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_spec_mistakes_are_reported_with_their_location(tmp_path: Path, name: str) -> None:
    sections, message = MISTAKES[name]
    (tmp_path / "world.py").write_text(WORLD)
    spec: dict[str, Any] = {
        "dataset": {"items": [{"number": 7}]},
        "prompt": {"user": "Play."},
        "state": "world.py:Game",
        "rewards": {"environment_rewards": {}},
        "servers": {"policy": {"type": "scripted"}},
        **sections,
    }
    if name == "no state":
        spec["user"] = {"state": "answer"}
    text = yaml.safe_dump({key: part for key, part in spec.items() if part is not None})
    assert any(message in problem for problem in problems_of(text, tmp_path)), problems_of(text, tmp_path)


def problems_of(text: str, folder: Path) -> list[str]:
    """The problems of a spec, each with its place."""
    try:
        problems, _ = check_spec(parse_spec(text, folder=folder, name="spec.yaml"))
    except SpecError as error:
        problems = list(error.problems)
    return [str(problem) for problem in problems]


# ------------------------------------------------------------- Tools that the state describes, and arguments as sent

DESCRIBED = """
from typing import ClassVar


class World:
    documents: ClassVar = [
        {"name": name, "description": "Say what was sent.", "parameters": {
            "type": "object", "properties": {"items": {"type": "array"}}, "required": ["items"]}}
        for name in ("first", "second")
    ]
    broken: ClassVar = [{"name": "no good name", "parameters": {}}]

    def __init__(self, item):
        self.item = item

    def call(self, name, arguments):
        return f"{name} {arguments!r}"

    def count(self, items: list[int]) -> str:
        \"\"\"Count things.\"\"\"
        return f"{type(items).__name__} {len(items)}"
"""


def described(folder: Path, tool: dict[str, Any], turns: list[Any], apart: bool) -> Any:
    (folder / "described.py").write_text(DESCRIBED)
    state = {"python": "described.py:World", "isolate": "process" if apart else "none"}
    return spec_of(folder, turns, state=state, tools=[tool], user=None, prompt={"user": "Go."}, rewards=None)


def answers(rollout: Rollout) -> list[str]:
    assert rollout.result is not None
    return [message["content"] for message in rollout.result.messages if message["role"] == "tool"]


@APART
async def test_a_method_answers_for_tools_that_the_state_describes(tmp_path: Path, apart: bool) -> None:
    turns = [calls("first", items=[1]), calls("second", items="[1]"), calls("third"), *says("Done.")]
    rollout = await play(described(tmp_path, {"state": "call", "schemas": "documents"}, turns, apart))
    first, second, third = answers(rollout)
    assert first == "first {'items': [1]}"
    assert "items" in second and "array" in second
    assert "third" in third


@APART
@pytest.mark.parametrize(
    ("arguments", "sent", "answer"),
    [
        ("strict", "[1, 2]", "str 6"),
        ("repair", "[1, 2]", "list 2"),
        (None, "[1, 2]", "items"),
        ("strict", ["1"], "list 1"),
    ],
)
async def test_arguments_are_handed_on_as_sent_or_repaired(
    tmp_path: Path, apart: bool, arguments: str | None, sent: Any, answer: str
) -> None:
    tool = {"state": "count"} | ({} if arguments is None else {"arguments": arguments})
    rollout = await play(described(tmp_path, tool, [calls("count", items=sent), *says("Done.")], apart))
    assert answer in answers(rollout)[0]
    assert (arguments is None) == ("error" in answers(rollout)[0])
    assert rollout.result is not None
    repaired = [call.repaired for call in rollout.result.tool_calls]
    assert repaired == [arguments == "repair"], "what was repaired is counted"
    line = json.loads(json.dumps(rollout_record(rollout)))
    assert [call.repaired for call in result_of(line).tool_calls] == repaired
    assert Played.from_record(line).repaired == sum(repaired)


async def test_what_describes_no_tools_is_the_spec_s_mistake(tmp_path: Path) -> None:
    spec = described(tmp_path, {"state": "call", "schemas": "broken"}, says("Done."), False)
    with pytest.raises(UserError, match="'broken' of the state World has to be a list of tools"):
        await play(spec)
    problems = problems_of("tools: [{state: call, schemas: docs}]\n" + yaml.safe_dump({
        "dataset": {"items": [{"q": 1}]}, "prompt": {"user": "Go."}, "state": "described.py:World",
        "servers": {"policy": {"type": "scripted"}},
    }), tmp_path)  # fmt: skip
    assert "1:32" in problems[0] and "has no `docs`" in problems[0]


CHOSEN = '''
"""Tools that a decorator marks, beside helpers that no model could call."""
import functools


def tool(function):
    function.is_tool = True
    return function


def helper(anything):
    return anything


@tool
def weigh(what: str) -> str:
    """Weigh something."""
    return f"weighed {what}"


@tool
def measure(what: str) -> str:
    """Measure something."""
    return f"measured {what}"


class Shop:
    """A shop with tools and helpers."""

    def __init__(self, item):
        self.item, self.desk = item, self

    @tool
    def get_order(self, number: str) -> str:
        """Get an order."""
        return self.helper(number)

    @tool
    def get_user(self, number: str) -> str:
        """Get a user."""
        return f"user {number}"

    @tool
    def cancel(self, number: str) -> str:
        """Cancel an order."""
        return "cancelled"

    def helper(self, anything):
        return f"order {anything}"

    def call(self, name, arguments):
        return f"{name} of {self.item['q']}: {arguments}"
'''
PARAMETERS = {"type": "object", "properties": {"number": {"type": "string"}}}
DOCUMENT = [{"name": name, "description": "A tool.", "parameters": PARAMETERS} for name in ("first", "second")]


def chosen(folder: Path, tools: list[Any], turns: list[Any], apart: bool, **row: Any) -> Any:
    (folder / "chosen.py").write_text(CHOSEN)
    state = {"python": "chosen.py:Shop", "isolate": "process" if apart else "none"}
    rows = {"items": [{"q": "a", **row}]}
    given = {"user": None, "prompt": {"user": "Go."}, "rewards": None, "dataset": rows}
    return spec_of(folder, turns, state=state, tools=tools, **given)


def offered(rollout: Rollout) -> list[str]:
    assert rollout.result is not None
    return [schema["function"]["name"] for schema in rollout.result.tool_schemas]


DESK = {"state": "desk", "decorated_with": "is_tool"}
OF_ROW = {"state": "call", "schemas": "{{ documents }}", "arguments": "strict"}


@APART
@pytest.mark.parametrize(
    ("entry", "names"),
    [
        (DESK, ["get_order", "get_user", "cancel"]),
        (DESK | {"names": ["get_*"]}, ["get_order", "get_user"]),
        (DESK | {"names": ["cancel", "get_user"]}, ["get_user", "cancel"]),
        (DESK | {"names": "{{ may }}"}, ["get_order", "cancel"]),
        ({"state": "desk", "names": ["{{ may[0] }}"]}, ["get_order"]),
        ({"python": "chosen.py:*", "decorated_with": "is_tool"}, ["weigh", "measure"]),
        ({"python": "chosen.py:*", "decorated_with": "is_tool", "names": ["w*"], "isolate": "process"}, ["weigh"]),
        (OF_ROW, ["first", "second"]),
        (OF_ROW | {"names": ["second"]}, ["second"]),
        ({"state": "call", "schemas": {"file": "tools.json"}}, ["first", "second"]),
    ],
)
async def test_tools_are_chosen_by_a_mark_a_name_the_row_or_a_document(
    tmp_path: Path, entry: dict[str, Any], names: list[str], apart: bool
) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": each} for each in DOCUMENT]))
    argument = {"what" if "python" in entry else "number": "7"}
    turns = [calls(name, **argument) for name in names] + says("Done.")
    rollout = await play(chosen(tmp_path, [entry], turns, apart, may=["get_order", "cancel"], documents=DOCUMENT))
    assert (offered(rollout), rollout.error) == (names, None)
    heard_back = {
        "get_order": "order 7", "get_user": "user 7", "cancel": "cancelled", "weigh": "weighed 7",
        "measure": "measured 7", "first": "first of a: {'number': '7'}", "second": "second of a: {'number': '7'}",
    }  # fmt: skip
    assert answers(rollout) == [heard_back[name] for name in names]


@APART
async def test_another_row_has_other_tools(tmp_path: Path, apart: bool) -> None:
    spec = chosen(tmp_path, [OF_ROW], says("Done."), apart)
    rows = [{"q": each["name"], "documents": [each]} for each in DOCUMENT] + [{"q": "none", "documents": []}]
    spec = spec.model_copy(update={"dataset": spec.dataset.model_copy(update={"items": tuple(rows)})})
    async with open_env(spec) as env:
        assert [offered(await env.run(row)) for row in env.rows()] == [["first"], ["second"], []]


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (DESK | {"names": ["get_oder"]}, r"desk of the state Shop has no tool 'get_oder'; did you mean `get_order`\?"),
        (DESK | {"decorated_with": "is_tol"}, "desk of the state Shop has no function or method with 'is_tol'"),
        ({"python": "chosen.py:*", "decorated_with": "is_tol"}, "no function or method with 'is_tol'"),
        (
            {"python": "chosen.py:*", "decorated_with": "is_tool", "names": ["wiegh"]},
            "has no tool 'wiegh'; did you mean `weigh`",
        ),
        ({"state": "call", "schemas": {"file": "broken.json"}}, r"broken\.json cannot be read as JSON"),
        (OF_ROW | {"schemas": "{{ [q] }}"}, "a tool is a mapping of `name`"),
    ],
)
async def test_tools_that_are_not_there_are_the_spec_s_mistake(
    tmp_path: Path, entry: dict[str, Any], problem: str
) -> None:
    (tmp_path / "broken.json").write_text("[")
    with pytest.raises(UserError, match=problem):
        await play(chosen(tmp_path, [entry], says("Done."), False))


EDITED = '''
class Hall:
    """A hall that hears what a model says in it, and how often its agent has answered."""

    def __init__(self, item):
        self.item, self.answered, self.heard = item, 0, []

    def edit(self, words):
        self.heard.append(words)
        if "crash" in words:
            raise ValueError(words)
        if "bye" in words:
            return {"say": "Goodbye.", "done": True}
        return {"say": words.upper(), "tools": ["look"] if "tools" in words else []}

    def count(self):
        self.answered += 1
        if self.item["fails"] == self.answered:
            raise RuntimeError("too often")

    def look(self) -> str:
        """Look around."""
        return f"answered {self.answered}"


def answered(state):
    return state.answered


def heard(state):
    return len(state.heard)
'''


def in_hall(folder: Path, turns: list[Any], apart: bool, user: dict[str, Any], fails: int = 0, **state: Any) -> Any:
    (folder / "hall.py").write_text(EDITED)
    return spec_of(
        folder,
        turns,
        dataset={"items": [{"fails": fails}]},
        state={"python": "hall.py:Hall", "isolate": "process" if apart else "none", **state},
        tools=[{"state": "look"}],
        user=user,
        prompt={"user": "Begin."},
        rewards={name: {"fn": f"hall.py:{name}", "range": [0, 9]} for name in ("answered", "heard")},
        servers={"policy": {"type": "scripted"}, "user": {"type": "scripted"}},
    )


MODEL = {"transform": "edit", "stop": ["END"]}


@APART
@pytest.mark.parametrize(
    ("words", "told", "stop_reason"),
    [
        (["so", "and"], ["SO", "AND", "END"], StopReason.USER_STOP),
        (["so", "bye now", "never"], ["SO", "Goodbye."], StopReason.ENVIRONMENT_DONE),
    ],
)
async def test_code_has_the_last_word_on_what_a_model_says_as_the_user(
    tmp_path: Path, apart: bool, words: list[str], told: list[str], stop_reason: StopReason
) -> None:
    turns = [{"say": "Yes.", "user": each} for each in words] + says("Done.")
    rollout = await play(in_hall(tmp_path, turns, apart, MODEL))
    assert (rollout.error, rollout.stop_reason, heard(rollout)[1:]) == (None, stop_reason, told)
    assert rollout.rewards["heard"].value == len(told)


@APART
async def test_code_that_fails_over_a_model_s_words_loses_no_rollout(tmp_path: Path, apart: bool) -> None:
    """The agent could ask its user for such words."""
    turns = [{"say": "Yes.", "user": "crash"}, *says("Done.")]
    rollout = await play(in_hall(tmp_path, turns, apart, MODEL))
    assert (rollout.error, rollout.stop_reason) == (None, StopReason.ENVIRONMENT_ERROR)
    assert rollout.result is not None
    assert "user.transform" in rollout.result.tool_errors[-1].error


async def test_edited_words_bring_tools(tmp_path: Path) -> None:
    turns = [{"say": "Yes.", "user": "tools, please"}, calls("look"), {"say": "Now?", "user": "so"}, *says("Done.")]
    rollout = await play(in_hall(tmp_path, turns, False, MODEL, before_user_turn="count"))
    assert answers(rollout) == ["answered 1"]


@APART
@pytest.mark.parametrize(
    ("user", "turns", "count"),
    [
        (MODEL, [{"say": "Yes.", "user": "so"}, *says("Done.")], 2),
        ({"turns": ["Go on.", "And on."]}, [calls("look"), *says("a", "b", "c")], 3),
        ({"state": "edit"}, says("a", "bye"), 2),
    ],
)
async def test_a_hook_is_called_between_the_user_s_turns(
    tmp_path: Path, apart: bool, user: dict[str, Any], turns: list[Any], count: int
) -> None:
    rollout = await play(in_hall(tmp_path, turns, apart, user, before_user_turn="count"))
    assert (rollout.error, rollout.rewards["answered"].value) == (None, count)
    rollout = await play(in_hall(tmp_path, turns, apart, user, fails=2, before_user_turn="count"))
    assert (rollout.error, rollout.stop_reason, rollout.rewards["answered"].value) == (
        None,
        StopReason.ENVIRONMENT_ERROR,
        2,
    )


async def test_the_example_of_the_docs_offers_what_is_marked_and_named(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "spec.md").read_text()
    blocks = re.findall(r"^```(?:yaml|python)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    spec, code = (next(block for block in blocks if begin in block) for begin in ("name: marked", "# marked.py"))
    (tmp_path / "marked.py").write_text(code)
    async with open_env(parse_spec(spec, folder=tmp_path)) as env:
        rollouts = [await env.run(row) for row in env.rows()]
    assert [offered(rollout) for rollout in rollouts] == [["get_order"], ["get_order", "cancel"]]
    assert [rollout.score for rollout in rollouts] == [1, 1]
