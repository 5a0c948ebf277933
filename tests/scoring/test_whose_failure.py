"""A reward that fails: whose doing it is, asked by trying, and what the rollout gets."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.endings import Ending
from hermes_rl.errors import RewardFailure
from hermes_rl.foreign.stand_ins import lives_in_runner
from hermes_rl.scoring.grader import GradedReward, Grader, RewardFunction, find_reward
from hermes_rl.scoring.value import RewardValue, Weighting

CODE = """
import os, re, time
from hermes_rl import Score
from hermes_rl.errors import RewardFailure

def number(result): return float(result.final_response)
def column(item): return item["missing"]
def nearly(result): return float("nan") if "evil" in result.final_response else 0.5
def slow(result): return re.match("(a+)+$", result.final_response) is not None
def ends(result): return os._exit(1) if "evil" in result.final_response else 1.0
def penalty(result):
    said = result.final_response
    return -2.0 if "bad" in said else 1 / len(said.replace("evil", ""))
def refuses(result): raise RewardFailure("I cannot tell")
def unreachable(result):
    if "evil" in result.final_response:
        raise ConnectionRefusedError(111, "Connection refused")
    return 1.0
def once(result):
    flag = "FOLDER/flag"
    if not os.path.exists(flag):
        open(flag, "w").close()
        raise OSError("by chance")
    return 1.0
def killed(result):
    flag = "FOLDER/killed"
    if not os.path.exists(flag):
        open(flag, "w").close()
        os.kill(os.getpid(), 9)
    return 1.0
class InvalidURL(ValueError): __module__ = "requests.exceptions"
def asks(result):
    if "evil" in result.final_response: raise InvalidURL(result.final_response)
    return 1.0
def hears(result):
    import json
    class NoJSON(ConnectionError, json.JSONDecodeError): pass
    if "evil" in result.final_response: raise NoJSON("no", "<html>", 0)
    return 1.0
def together(group):
    lengths = [len(one.final_response) + 0 / (one.final_response != "evil") for one in group]
    return [length / max(lengths) if max(lengths) else 0.0 for length in lengths]
def none_of(group): raise ValueError("never")
"""


def answered(text: str) -> AgentResult:
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": text}]
    return AgentResult(messages=messages, turns_used=1, prompt_length=1, ending=Ending.FINISHED)


class Graded:
    """A grader with one reward of a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "code.py").write_text(CODE.replace("FOLDER", str(folder)))

    def grader(self, name: str, weight: float = 1.0, timeout: float | None = None, gate: bool = False) -> Grader:
        function = find_reward(name, f"{self.folder}/code.py:{name}")
        function = RewardFunction.of(name, function.function, function.code)
        object.__setattr__(function, "timeout", timeout)
        return Grader((GradedReward(function, Weighting(name, weight, gate)),), lambda args, item: args)

    async def value(self, grader: Grader, text: str, item: dict[str, Any] | None = None) -> RewardValue:
        values: dict[str, RewardValue] = {}
        await grader.grade_rollout(item or {"answer": "42"}, answered(text), None, None, values)
        return next(iter(values.values()))


@pytest.fixture
def graded(tmp_path: Path) -> Graded:
    return Graded(tmp_path)


async def test_what_an_answer_brings_about_is_0_with_the_reason(graded: Graded) -> None:
    grader = graded.grader("number")
    assert (await graded.value(grader, "7")).value == 7
    value = await graded.value(grader, "e7")
    assert value.value == 0
    assert "ValueError" in str(value.reason) and "with another answer it works" in str(value.reason)


@pytest.mark.parametrize("name", ["nearly", "ends"])
async def test_not_finite_and_a_lost_process_are_asked_like_an_exception(graded: Graded, name: str) -> None:
    assert (await graded.value(graded.grader(name), "evil")).value == 0


async def test_a_reward_that_an_answer_keeps_busy_is_ended_and_is_0(graded: Graded) -> None:
    value = await graded.value(graded.grader("slow", timeout=0.3), "a" * 64 + "b")
    assert value.value == 0
    assert "did not return within 0.3 s" in str(value.reason)


async def test_what_fails_whatever_is_answered_is_nobodys_grade(graded: Graded) -> None:
    for name in ("column", "refuses"):
        with pytest.raises(RewardFailure):
            await graded.value(graded.grader(name), "anything")


async def test_who_could_not_be_reached_is_no_grade_even_where_another_answer_asks_nobody(graded: Graded) -> None:
    with pytest.raises(RewardFailure, match="Connection refused"):
        await graded.value(graded.grader("unreachable"), "evil")


async def test_a_folder_that_is_gone_is_nobodys_failure(
    graded: Graded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader = graded.grader("number")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert (await graded.value(grader, "7")).value == 7


async def test_what_fails_on_the_way_to_the_process_is_ours(graded: Graded, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("hermes_rl.scoring.grader.POOL.call", fails)
    with pytest.raises(RewardFailure, match="could not be called"):
        await graded.value(graded.grader("number"), "7")


async def test_what_happens_by_chance_is_tried_once_more(graded: Graded) -> None:
    assert (await graded.value(graded.grader("once"), "anything")).value == 1


async def test_a_gate_that_an_answer_opens_too_far_is_closed(graded: Graded) -> None:
    grader = graded.grader("number", gate=True)
    assert (await graded.value(grader, "0.5")).value == 0.5
    value = await graded.value(grader, "7")
    assert (value.value, "between 0 and 1" in str(value.reason)) == (0, True)


async def test_who_loses_its_process_once_may_be_the_victim_of_others(graded: Graded) -> None:
    """Where memory ends, the kernel ends whose it likes."""
    assert (await graded.value(graded.grader("killed"), "anything")).value == 1


async def test_what_nobody_can_be_asked_is_the_agents_doing_and_what_a_service_answers_is_not(graded: Graded) -> None:
    assert (await graded.value(graded.grader("asks"), "evil")).value == 0
    with pytest.raises(RewardFailure, match="no"):
        await graded.value(graded.grader("hears"), "evil")


@pytest.mark.parametrize(
    ("weight", "before", "value"), [(1.0, "bad", -2.0), (-1.0, "x", 1.0), (-1.0, None, 1.0), (1.0, None, 0.0)]
)
async def test_nobody_gets_more_by_making_a_reward_fail(
    graded: Graded, weight: float, before: str | None, value: float
) -> None:
    grader = graded.grader("penalty", weight)
    if before is not None:
        await graded.value(grader, before)
    assert (await graded.value(grader, "evil")).value == value


async def test_of_a_group_only_the_member_pays_that_is_in_the_way(graded: Graded) -> None:
    grader = graded.grader("together")
    values: list[dict[str, RewardValue]] = [{}, {}, {}]
    await grader.grade_group({}, [answered("ab"), answered("evil"), answered("abcd")], values)
    assert [value["together"].value for value in values] == [0.5, 0.0, 1.0]
    assert "ZeroDivisionError" in str(values[1]["together"].reason)
    with pytest.raises(RewardFailure, match="never"):
        await graded.grader("none_of").grade_group({}, [answered("a")], [{}])


@lives_in_runner("hermes_rl.foreign.stand_ins:ContextStandIn")
class Machine:
    """Two sandboxes: the agent's, and one that no agent has seen."""

    def __init__(self, text: str, clean: str = "") -> None:
        self.text, self.clean = text, clean

    def stand_in_fields(self) -> dict[str, Any]:
        return {"task_id": "x"}

    def read_file(self, path: str) -> dict[str, str]:
        return {"content": self.text}

    def restore(self) -> None:
        pass

    def untouched(self) -> Any:
        return nullcontext(Machine(self.clean))


async def test_what_looks_into_a_sandbox_is_asked_in_a_clean_one_or_by_what_it_has_graded(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("def file(ctx): return float(ctx.read_file('out')['content'])")
    function = find_reward("file", f"{tmp_path}/code.py:file")
    grader = Grader((GradedReward(function, Weighting("file")),), lambda args, item: args)

    async def value(machine: Machine) -> float | None:
        values: dict[str, RewardValue] = {}
        await grader.grade_rollout({}, answered("done"), lambda _: nullcontext(machine), None, values)
        return values["file"].value

    assert await value(Machine("junk", clean="1")) == 0
    with pytest.raises(RewardFailure):
        await value(Machine("junk"))
    assert await value(Machine("0.5")) == 0.5
    assert await value(Machine("junk")) == 0, "it has graded others, so what this agent left is the cause"
