"""`isolate: sandbox` of a spec: what rewards, states and tools cannot reach from there, and that they work."""

from __future__ import annotations

import socket
import textwrap
from pathlib import Path

import pytest

from hermes_rl.data.load import load_rows
from hermes_rl.errors import UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Group
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.sandbox import bubblewrap
from hermes_rl.spec.load import parse_spec

SECRET = "s3cr3t-of-the-runner"
SCORER = """
    from hermes_rl.scoring.reward_value import Score

    def right(value):
        return 1.0 if value == 42 else 0.0

    def evaluated(result):
        try:
            return right(eval(result.final_response))
        except Exception as error:
            return Score(0.0, reason=type(error).__name__)
"""
WORLD = """
    import os

    class World:
        def __init__(self, item):
            self.number = item["number"]

        def save(self, text: str) -> str:
            '''Write a file.'''
            try:
                open("save", "x").write(text)
            except FileExistsError:
                return open("save").read()
            return "saved"

    def count(expression: str) -> str:
        '''Evaluate an expression.'''
        return str(eval(expression))
"""
REWARDS = """
    def saved(state, result):
        import os
        answers = [message["content"] for message in result.messages if message["role"] == "tool"]
        return 1.0 if answers == ["saved"] and os.listdir() == ["save"] else 0.0
"""


@pytest.fixture(name="place")
def _place(tmp_path: Path) -> Path:
    for directory, name, text in (
        ("code", "scorer.py", SCORER),
        ("code", "world.py", WORLD),
        ("rewards", "saved.py", REWARDS),
    ):
        (tmp_path / directory).mkdir(exist_ok=True)
        (tmp_path / directory / name).write_text(textwrap.dedent(text))
    return tmp_path


def _compiled(place: Path, text: str) -> CompiledSpec:
    spec = f"name: t\nprompt: {{user: go}}\nservers: {{policy: {{type: scripted}}}}\n{textwrap.dedent(text)}"
    return CompiledSpec(parse_spec(spec, folder=place))


async def _groups(compiled: CompiledSpec, size: int = 1) -> list[Group]:
    async with compiled:
        rows = load_rows(compiled.spec, "train", notify=print)
        return [await RolloutRunner(compiled).start(row, str(number), size) for number, row in enumerate(rows)]


REWARD = """
    dataset: {{items: {answers}}}
    solution: {{turns: [{{say: "{{{{ answer }}}}"}}]}}
    rewards: {{evaluated: {{fn: "code/scorer.py:evaluated", isolate: sandbox}}}}
"""


async def test_a_reward_that_evaluates_answers_reaches_nothing_outside(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_SECRET", SECRET)
    (place / "secret").write_text(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as server:
        attacks = {
            f"open({str(place / 'code' / 'written')!r}, 'w') and 42": "OSError",
            f"__import__('socket').create_connection({server.getsockname()!r}, 5) and 42": "OSError",
            "__import__('os').environ['RUNNER_SECRET'] and 42": "KeyError",
            f"open({str(place / 'secret')!r}).read() and 42": "FileNotFoundError",
            "globals().update(right=lambda value: 1.0) or 1": None,
            "41": None,
            "6 * 7": None,
        }
        answers = [{"answer": answer} for answer in attacks]
        groups = await _groups(_compiled(place, REWARD.format(answers=answers)))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [group.rollouts[0].error for group in groups] == [None] * 7
    values = [group.rollouts[0].rewards["evaluated"] for group in groups]
    assert [value.value for value in values] == [0.0] * 6 + [1.0]
    assert [value.reason for value in values] == list(attacks.values())
    assert not (place / "code" / "written").exists()


async def test_a_state_keeps_its_files_from_other_rollouts_and_from_the_runner(place: Path) -> None:
    before = sorted(Path.cwd().iterdir())
    compiled = _compiled(
        place,
        """
        dataset: {items: [{number: 1}, {number: 2}]}
        state: {python: "code/world.py:World", isolate: sandbox}
        tools: [{state: save}]
        solution: {turns: [{tools: [{name: save, args: {text: mine}}]}, {say: done}]}
        rewards: {saved: {fn: "rewards/saved.py:saved"}}
        """,
    )
    groups = await _groups(compiled, size=2)
    assert [rollout.rewards["saved"].value for group in groups for rollout in group.rollouts] == [1.0] * 4
    assert sorted(Path.cwd().iterdir()) == before


async def test_a_tool_evaluates_in_a_process_of_each_call(place: Path) -> None:
    compiled = _compiled(
        place,
        """
        dataset: {items: [{}]}
        tools: [{python: "code/world.py:count", isolate: sandbox}]
        solution:
          turns:
            - {tools: [{name: count, args: {expression: "open('a', 'x') and os.getpid()"}}]}
            - {tools: [{name: count, args: {expression: "os.listdir()"}}]}
            - {say: done}
        rewards: {tool_usage: {args: {any_of: [count]}}}
        """,
    )
    (group,) = await _groups(compiled)
    result = group.rollouts[0].result
    assert result is not None
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == ["1", "[]"]


async def test_a_reward_whose_process_cannot_be_confined_is_not_graded(place: Path) -> None:
    scorer = place / "code" / "scorer.py"
    unconfined = "import hermes_rl.sandbox.user_code_child as child\nchild.CAPSET = {}\n"
    scorer.write_text(unconfined + scorer.read_text())  # so no fork can give up its capabilities
    (group,) = await _groups(_compiled(place, REWARD.format(answers=[{"answer": "42"}])))
    (rollout,) = group.rollouts
    assert rollout.score is None
    assert "no process for user code can be made" in str(rollout.error)


def test_reward_that_shares_the_state_cannot_use_another_sandbox(place: Path) -> None:
    with pytest.raises(UserError, match=r"rewards\.saved\.isolate: .*set `isolate: sandbox` for the state"):
        _compiled(
            place,
            """
            dataset: {items: [{number: 1}]}
            state: {python: "code/world.py:World"}
            rewards: {saved: {fn: "rewards/saved.py:saved", isolate: sandbox}}
            """,
        )


def test_a_machine_without_bubblewrap_is_named_before_the_first_rollout(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(bubblewrap, "_bundled_bwrap", lambda: None)
    bubblewrap.find_bwrap.cache_clear()
    with pytest.raises(UserError, match=r"rewards\.evaluated\.isolate: .*not available.*write `isolate: process`"):
        try:
            _compiled(place, REWARD.format(answers=[{"answer": "42"}]))
        finally:
            bubblewrap.find_bwrap.cache_clear()
