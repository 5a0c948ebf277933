"""The cause of a failed reward is found by experiment; the policy's failures get the low end of the range."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import hermes_rl
from hermes_rl.agent.result import AgentResult
from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import ONLY_SEAT
from hermes_rl.scoring.grader import GradedReward, Grader
from hermes_rl.scoring.reward_function import RewardFunction, find_reward
from hermes_rl.scoring.reward_value import RewardValue, Weighting
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.scripted.play import Script
from hermes_rl.spec.load import parse_spec
from hermes_rl.stop_reasons import StopReason
from hermes_rl.user_code.proxies import lives_in_runner

CODE = """
import json, os, re, time, urllib.request
from hermes_rl import Score
from hermes_rl.errors import RewardFailure, UserError
from hermes_rl.scoring.reward_value import value_range

def number(result): return float(result.final_response)
def column(item): return item["missing"]
def nearly(result): return float("nan") if "evil" in result.final_response else 0.5
def slow(result): return re.match("(a+)+$", result.final_response) is not None
def ends(result): return os._exit(1) if "evil" in result.final_response else 1.0
@value_range(0, 1, written=True)
def written(result): return float(result.final_response)
def penalty(result):
    said = result.final_response
    return -2.0 if "bad" in said else 1 / len(said.replace("evil", ""))
def refuses(result): raise RewardFailure("I cannot tell")
def fetched(result):
    if result.final_response.startswith("http"): urllib.request.urlopen(result.final_response)
    return 1.0
def service(result): return float(urllib.request.urlopen("ADDRESS").read())
def unsure(result): return None if "evil" in result.final_response else 1.0
def poisons(result):
    # What an answer leaves in a process that others use.
    if "evil" in result.final_response: json.dumps = None
    json.dumps({})
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
def together(group):
    lengths = [len(one.final_response) + 0 / (one.final_response != "evil") for one in group]
    return [length / max(lengths) if max(lengths) else 0.0 for length in lengths]
def none_of(group): raise ValueError("never")
def different(group):
    said = [one.final_response for one in group if one.final_response]
    if "evil" in said or len(set(said)) < len(said): raise ValueError("two are the same")
    return [float(bool(one.final_response)) for one in group]
def misused(result): raise UserError("no key")
"""


def closed_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def answered(text: str) -> AgentResult:
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": text}]
    return AgentResult(messages=messages, turns_used=1, prompt_length=1, stop_reason=StopReason.FINISHED)


class Graded:
    """A grader with one reward of a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        code = CODE.replace("FOLDER", str(folder)).replace("ADDRESS", f"http://127.0.0.1:{closed_port()}/")
        (folder / "code.py").write_text(code)

    def grader(
        self,
        name: str,
        weight: float = 1.0,
        timeout: float | None = None,
        gate: bool = False,
        bounds: tuple[float, float] | None = None,
    ) -> Grader:
        function = find_reward(name, f"{self.folder}/code.py:{name}")
        function = RewardFunction.from_function(name, function.function, function.code)
        object.__setattr__(function, "timeout", timeout)
        return Grader((GradedReward(function, Weighting(name, weight, gate), range=bounds),), lambda args, item: args)

    async def value(self, grader: Grader, text: str, item: dict[str, Any] | None = None) -> RewardValue:
        values: dict[str, RewardValue] = {}
        await grader.grade_rollout(item or {"answer": "42"}, answered(text), None, None, values)
        return next(iter(values.values()))


@pytest.fixture
def graded(tmp_path: Path) -> Graded:
    return Graded(tmp_path)


async def test_what_an_answer_brings_about_is_0_with_the_reason(graded: Graded) -> None:
    grader = graded.grader("number", bounds=(0, 10))
    assert (await graded.value(grader, "7")).value == 7
    value = await graded.value(grader, "e7")
    assert value.value == 0
    assert "ValueError" in str(value.reason) and "works without what the agent has said" in str(value.reason)


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


async def test_unreachable_url_in_a_reply_is_caused_by_the_policy(graded: Graded) -> None:
    address = f"http://127.0.0.1:{closed_port()}/"
    value = await graded.value(graded.grader("fetched", bounds=(-1, 1)), address, {"url": address})
    assert (value.value, "Connection refused" in str(value.reason)) == (-1, True)


async def test_service_unreachable_for_every_reply_is_a_reward_failure(graded: Graded) -> None:
    with pytest.raises(RewardFailure, match="Connection refused"):
        await graded.value(graded.grader("service"), "anything")


async def test_an_answer_for_which_a_reward_cannot_tell_is_graded(graded: Graded) -> None:
    value = await graded.value(graded.grader("unsure"), "evil")
    assert (value.value, "could not tell" in str(value.reason)) == (0, True)


async def test_what_an_answer_leaves_in_a_process_costs_no_other_rollout(graded: Graded) -> None:
    grader = graded.grader("poisons")
    assert (await graded.value(grader, "evil")).value == 0
    assert (await graded.value(grader, "honest")).value == 1


async def test_a_folder_that_is_gone_is_nobodys_failure(
    graded: Graded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grader = graded.grader("number", bounds=(0, 10))
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert (await graded.value(grader, "7")).value == 7


async def test_error_on_the_way_to_the_process_is_an_infrastructure_failure(
    graded: Graded, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("hermes_rl.scoring.reward_function.POOL.call", fails)
    monkeypatch.setattr("hermes_rl.scoring.reward_function.POOL.hold", fails)
    with pytest.raises(RewardFailure, match="could not be called"):
        await graded.value(graded.grader("number"), "7")


async def test_what_happens_by_chance_is_tried_once_more(graded: Graded) -> None:
    assert (await graded.value(graded.grader("once"), "anything")).value == 1


@pytest.mark.parametrize("gate", [False, True])
async def test_a_value_outside_of_the_range_is_clamped_counted_and_reported_once(
    graded: Graded, caplog: pytest.LogCaptureFixture, gate: bool
) -> None:
    grader = graded.grader("number", gate=gate)
    assert await graded.value(grader, "0.5") == RewardValue(0.5, seconds=ANY)
    for said, value in (("7", 1.0), ("-1e99", 0.0)):
        assert await graded.value(grader, said) == RewardValue(value, metrics={"clamped": 1.0}, seconds=ANY)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    (warning,) = warnings
    assert "rewards.number.range: clamped 7 to [0, 1]" in warning


async def test_written_number_outside_the_range_gets_the_minimum(graded: Graded) -> None:
    grader = graded.grader("written", bounds=(-1, 1))
    assert (await graded.value(grader, "0.5")).value == 0.5
    value = await graded.value(grader, "1e99")
    assert (value.value, value.reason) == (-1, "written: 1e+99 was written, which is not from -1 to 1")


async def test_who_loses_its_process_once_may_be_the_victim_of_others(graded: Graded) -> None:
    """Where memory ends, the kernel ends whose it likes."""
    assert (await graded.value(graded.grader("killed"), "anything")).value == 1


@pytest.mark.parametrize(("weight", "value"), [(1.0, -2.0), (-1.0, 1.0)])
async def test_a_failing_reward_gives_the_end_of_the_range_that_lowers_the_score(
    graded: Graded, weight: float, value: float
) -> None:
    """The value does not depend on the rollouts that have ended before."""
    grader = graded.grader("penalty", weight, bounds=(-2, 1))
    assert (await graded.value(grader, "evil")).value == value
    for other in ("bad", "x", "a longer answer"):
        await graded.value(grader, other)
    assert (await graded.value(grader, "evil")).value == value


async def test_of_a_group_only_the_member_pays_that_is_in_the_way(graded: Graded) -> None:
    grader = graded.grader("together")
    values: list[dict[str, RewardValue]] = [{}, {}, {}]
    await grader.grade_group({}, [answered("ab"), answered("evil"), answered("abcd")], values)
    assert [value["together"].value for value in values] == [0.5, 0.0, 1.0]
    assert "ZeroDivisionError" in str(values[1]["together"].reason)
    with pytest.raises(RewardFailure, match="never"):
        await graded.grader("none_of").grade_group({}, [answered("a")], [{}])


async def test_a_group_whose_members_all_make_a_reward_fail_is_graded(graded: Graded) -> None:
    values: list[dict[str, RewardValue]] = [{}, {}]
    await graded.grader("together").grade_group({}, [answered("evil"), answered("evil")], values)
    assert [value["together"].value for value in values] == [0.0, 0.0]


async def test_members_that_fail_together_only_cost_no_other_member(graded: Graded) -> None:
    said = ["same", "evil", "other", "same"]
    values: list[dict[str, RewardValue]] = [{} for _ in said]
    await graded.grader("different").grade_group({}, [answered(text) for text in said], values)
    assert [value["different"].value for value in values] == [1.0, 0.0, 1.0, 0.0]


async def test_reward_that_refuses_every_answer_is_the_users_mistake(graded: Graded) -> None:
    with pytest.raises(UserError, match="no key"):
        await graded.value(graded.grader("misused"), "anything")


@lives_in_runner("hermes_rl.user_code.proxies:ContextStandIn")
class Machine:
    """A sandbox with one file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def stand_in_fields(self) -> dict[str, Any]:
        return {"task_id": "x"}

    def read_file(self, path: str) -> dict[str, str]:
        return {"content": self.text}

    def restore(self) -> None:
        pass


@pytest.mark.parametrize(
    ("clean", "solved", "value"),
    [("1", "", 0.0), ("", "1", 0.0), ("", "", None)],
    ids=["works in a new sandbox", "works on the solution", "works nowhere"],
)
async def test_failed_sandbox_reward_is_retried_in_a_new_one_and_on_the_solution(
    tmp_path: Path, clean: str, solved: str, value: float | None
) -> None:
    (tmp_path / "code.py").write_text("def file(ctx): return float(ctx.read_file('out')['content'])")
    function = find_reward("file", f"{tmp_path}/code.py:file")
    grader = Grader(
        (GradedReward(function, Weighting("file")),),
        lambda args, item: args,
        trial=lambda item, with_solution: nullcontext((Machine(solved if with_solution else clean), None)),
        solution=lambda item: "done",
    )

    async def graded(text: str) -> float | None:
        values: dict[str, RewardValue] = {}
        await grader.grade_rollout({}, answered("done"), lambda _: nullcontext(Machine(text)), None, values)
        return values["file"].value

    assert await graded("0.5") == 0.5
    if value is None:
        with pytest.raises(RewardFailure):
            await graded("junk")
    else:
        assert await graded("junk") == value


STATE = """
class World:
    def __init__(self, item): self.items, self.note = {"a": 1.0}, None
    def remove(self, key: str) -> str:
        "Remove."
        del self.items[key]
        return "ok"
    def keep(self, text: str) -> str:
        "Keep."
        self.note = text
        return "ok"
    def leave(self) -> str:
        "Leave."
        import os
        os._exit(7)
def ratio(state): return 1.0 / state.items["a"]
def note(state): return float(len(state.note))
"""
SPEC = """
dataset: {items: [{n: 1}]}
prompt: {user: "Go {{ n }}."}
state: {python: "world.py:World", isolate: ISOLATE}
tools: [{state: remove}, {state: keep}, {state: leave}]
rewards: {mark: {fn: "world.py:REWARD", range: [-1, 1]}}
solution: {turns: [{tools: [{name: keep, args: {text: x}}]}, {say: ok}]}
servers: {policy: {type: scripted}}
"""


@pytest.mark.parametrize(
    ("reward", "call", "args", "isolate", "value"),
    [
        ("ratio", "remove", {"key": "a"}, "process", -1.0),  # works on a new state
        ("note", "remove", {"key": "b"}, "process", -1.0),  # works on the solution's state alone
        ("ratio", "leave", {}, "process", -1.0),  # the process has ended
        ("ratio", "remove", {"key": "a"}, "none", -1.0),
        ("note", "keep", {"text": "x"}, "process", 1.0),
    ],
)
async def test_a_state_that_the_policy_broke_is_graded_from_the_first_rollout_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reward: str,
    call: str,
    args: dict[str, str],
    isolate: str,
    value: float,
) -> None:
    (tmp_path / "world.py").write_text(STATE)
    turns = [{"tools": [{"name": call, "args": args}]}, {"say": "done"}]
    monkeypatch.setattr(
        CompiledSpec, "script", lambda self, key, prior, seat=ONLY_SEAT: Script.from_turns(turns, prior)
    )
    spec = SPEC.replace("ISOLATE", isolate).replace("REWARD", reward)
    async with hermes_rl.open_env(parse_spec(spec, folder=tmp_path)) as env:
        rollout = await env.run(next(iter(env.rows())), retries=0)
    assert (rollout.error, rollout.score) == (None, value)


async def test_solution_trial_works_with_another_policy(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(STATE)
    spec = SPEC.replace("ISOLATE", "none").replace("REWARD", "note").replace("servers: {policy: {type: scripted}}", "")
    async with create_client("policy", [ServerConfig(type="scripted")]) as policy:
        env = CompiledSpec(parse_spec(spec, folder=tmp_path)).with_policy(policy)
        notes = []
        for solved in (False, True):
            async with env.grader.trial({"n": 1}, solved) as (_, state):
                notes.append(state.note)
    assert notes == [None, "x"]
