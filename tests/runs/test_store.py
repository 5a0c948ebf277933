"""What is on disk is not played again: members of a group, groups, and rollouts that wait to be compared."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.agent.result import AgentResult, ModelCall, ToolCall
from hermes_rl.errors import JudgeFailure, ToolError, UserError
from hermes_rl.rollouts.rollout import Rollout, RolloutKey, RolloutState
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.store import RolloutStore, rollout_of, rollout_record
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.servers.base import ChatReply
from hermes_rl.servers.usage import Usage
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.transcript import TokenSequence
from tests.rollouts.worlds import Policy, World, row, rows
from tests.runs.playing import EvaluatePlan, ProcessPlan, lines, play_evaluate, play_process, rollouts_of
from tests.waiting import until


class Halts(Policy):
    """Answers so many calls, then none."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    async def chat(self, request: Any) -> Any:
        if self.calls >= self.after:
            await asyncio.sleep(3600)
        return await super().chat(request)


def by_index(key: RolloutKey) -> float:
    return float(key.index)


def written(folder: Path) -> int:
    files = [folder / "rollouts.jsonl", folder / "waiting.jsonl"]
    return sum(file.read_text("utf-8").count("\n") for file in files if file.exists())


async def halted(work: Any, policy: Halts, folder: Path) -> None:
    """Cancel the run once its policy answers no more, and what it has answered is written."""
    run = asyncio.create_task(work)
    await until(lambda: run.done() or written(folder) >= policy.after, seconds=60)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


@pytest.mark.parametrize("answered", [1, 4, 7, 11])
async def test_process_runs_only_the_missing_members(tmp_path: Path, answered: int) -> None:
    plan = ProcessPlan(4, 3, concurrency=6)
    first = Halts(answered)
    await halted(play_process(World(on_grade=by_index, policy=first), tmp_path, plan), first, tmp_path)
    assert len(lines(tmp_path / "rollouts.jsonl")) == answered
    world = World(on_grade=by_index)
    await play_process(world, tmp_path, plan)
    assert world.policy.calls == 12 - answered
    assert sorted(line["group"] for line in lines(tmp_path / "groups.jsonl")) == ["row0:0", "row1:0", "row2:0"]
    assert len({line["id"] for line in lines(tmp_path / "rollouts.jsonl")}) == 12


async def test_missing_or_wrong_groups_are_rewritten_from_their_rollouts(tmp_path: Path) -> None:
    plan = ProcessPlan(2, 3)
    await play_process(World(on_grade=by_index), tmp_path, plan)
    before = lines(tmp_path / "groups.jsonl")
    wrong = {**before[0], "scores": [5.0, 5.0]}
    (tmp_path / "groups.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (wrong, before[1], before[1])))
    world = World(on_grade=by_index)
    summary = await play_process(world, tmp_path, plan)
    assert (summary.existing, summary.written, world.policy.calls) == (1, 2, 0)
    assert sorted(lines(tmp_path / "groups.jsonl"), key=str) == sorted(before, key=str)


@pytest.mark.parametrize("answered", [1, 3, 6, 7])
async def test_interrupted_evaluation_resumes_to_the_same_metrics(tmp_path: Path, answered: int) -> None:
    plan = EvaluatePlan(rollouts=2, concurrency=3)
    whole = await play_evaluate(World(on_grade=by_index), plan, folder=tmp_path / "whole")
    first = Halts(answered)
    cut = tmp_path / "cut"
    await halted(play_evaluate(World(on_grade=by_index, policy=first), plan, folder=cut), first, cut)
    world = World(on_grade=by_index)
    found = await play_evaluate(world, plan, folder=tmp_path / "cut")
    assert world.policy.calls == 8 - answered
    assert found.metrics == whole.metrics
    assert [line["id"] for line in rollouts_of(found)] == [line["id"] for line in rollouts_of(whole)]


def compared(values: list[float]) -> Any:
    """A group-level reward that gives the next of `values` to a whole group."""
    left = iter(values)

    def rank(members: list[Rollout]) -> None:
        value = next(left)
        for place, rollout in enumerate(members):
            rollout.rewards["rank"] = RewardValue(value * place)

    return rank


async def test_rollouts_that_wait_for_their_group_outlive_a_crash(tmp_path: Path) -> None:
    plan = ProcessPlan(3, 1)
    first = Halts(2)
    crashed = play_process(World(policy=first, on_group=compared([1.0])), tmp_path, plan, count=1)
    await halted(crashed, first, tmp_path)
    assert lines(tmp_path / "rollouts.jsonl") == []
    assert len(lines(tmp_path / "waiting.jsonl")) == 2
    world = World(on_group=compared([1.0]))
    await play_process(world, tmp_path, plan, count=1)
    assert world.policy.calls == 1
    (group,) = lines(tmp_path / "groups.jsonl")
    assert group["scores"] == [1.0, 2.0, 3.0]
    assert not (tmp_path / "waiting.jsonl").exists()


async def test_group_with_a_failed_comparison_is_compared_when_resumed(tmp_path: Path) -> None:
    def broken(members: list[Rollout]) -> None:
        raise JudgeFailure("the judge is down")

    first = await play_evaluate(World(on_group=lambda members: None), given=rows(1), folder=tmp_path / "other")
    assert first.metrics["eval/mean_reward"] == 1.0
    plan = EvaluatePlan(rollouts=2)
    with pytest.raises(Exception, match="the judge is down"):
        await play_evaluate(World(on_group=broken), plan, given=rows(1), folder=tmp_path)
    assert {line["error"] for line in lines(tmp_path / "rollouts.jsonl")} == {"the judge is down"}
    world = World(on_group=compared([2.0]))
    found = await play_evaluate(world, plan, given=rows(1), folder=tmp_path)
    assert world.policy.calls == 0
    assert [line["score"] for line in rollouts_of(found)] == [1.0, 3.0]
    assert len(lines(tmp_path / "rollouts.jsonl")) == 2


async def test_a_group_of_which_some_scores_were_written_is_compared_as_a_whole(tmp_path: Path) -> None:
    plan = ProcessPlan(3, 1)
    await play_process(World(on_group=compared([1.0])), tmp_path, plan, count=1)
    torn = (tmp_path / "rollouts.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rollouts.jsonl").write_text(torn[0])
    waiting = [{**json.loads(line), "score": None, "state": "waiting"} for line in torn[1:]]
    (tmp_path / "waiting.jsonl").write_text("".join(json.dumps(line) + "\n" for line in waiting))
    (tmp_path / "groups.jsonl").unlink()
    world = World(on_group=compared([10.0]))
    await play_process(world, tmp_path, plan, count=1)
    assert world.policy.calls == 0
    (group,) = lines(tmp_path / "groups.jsonl")
    assert group["scores"] == [1.0, 11.0, 21.0], "all by one comparison"
    assert [line["score"] for line in lines(tmp_path / "rollouts.jsonl")] == [1.0, 11.0, 21.0]


async def test_retry_after_a_restart_has_an_unused_id(tmp_path: Path) -> None:
    def never(key: RolloutKey) -> float:
        raise JudgeFailure("down")

    with pytest.raises(Exception, match="none of 1 rollouts"):
        await play_evaluate(World(on_grade=never), given=rows(1), folder=tmp_path)
    found = await play_evaluate(World(), given=rows(1), folder=tmp_path)
    assert [line["id"] for line in lines(tmp_path / "rollouts.jsonl")] == ["row0-0", "row0-0r1", "row0-0r2", "row0-0r3"]
    assert (found.ungraded, found.rollouts) == (0, 1)


async def test_a_row_with_another_content_is_refused(tmp_path: Path) -> None:
    await play_evaluate(World(), EvaluatePlan(rollouts=1), given=rows(1), folder=tmp_path)
    changed = type(row())(key="row0", columns={"key": "other"}, index=0, digest="1" * 64)
    with pytest.raises(UserError, match=r"row row0 has changed since .*--fresh"):
        await play_evaluate(World(), EvaluatePlan(rollouts=1), given=[changed], folder=tmp_path)


texts = st.text(max_size=8)
jsons = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | texts, lambda x: st.lists(x, max_size=2))


@given(
    turns=st.lists(st.tuples(st.dictionaries(texts, jsons, max_size=2), texts, st.booleans()), max_size=3),
    stop_reason=st.sampled_from(StopReason),
    score=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    attempt=st.integers(0, 12),
    group=st.from_regex(r"[\w:-]{1,9}", fullmatch=True),
)
def test_a_record_gives_the_rollout_back(
    turns: Any, stop_reason: StopReason, score: float | None, attempt: int, group: str
) -> None:
    result = AgentResult(messages=[{"role": "user", "content": "go"}], prompt_length=1, stop_reason=stop_reason)
    for number, (arguments, told, coerced) in enumerate(turns, 1):
        written = json.dumps(arguments)
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": written}}
        result.messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        result.messages.append({"role": "tool", "tool_call_id": "c", "content": told})
        result.reasoning_per_turn.append(None)
        ran: Any = written if coerced else json.loads(written)
        result.tool_calls.append(ToolCall(number, "c", "f", ran, told, seconds=0.5, started_at=1.5))
        result.model_calls.append(ModelCall(1.25, 0.25, 3, 4))
        result.tool_errors.append(ToolError(number, "f", written, "no", told))
    result.turns_used, result.usage = len(turns), Usage(3, 4)
    result.finished_naturally = stop_reason.finished_naturally
    result.replies.append(ChatReply({}, None, {}, "m", "stub"))
    key = RolloutKey(row("r"), group, 1, 2, attempt)
    rewards = {"a": RewardValue(1.0, "why", {"m": 2.0}, (1.0,)).timed(0.5)}
    rewards["a"] = replace(rewards["a"], started_at=2.5)
    sequence = TokenSequence.from_lists([1, 2], [-100, 2], [1.0, -0.5])
    rollout = Rollout(key, 0, stop_reason, result, rewards, score, None if score is not None else "e")
    rollout.state = RolloutState.FAILED if score is None else RolloutState.SCORED
    rollout.sequences, rollout.started_at = [sequence], 1.0
    rollout.sandbox_start = {"started_at": 1.0, "seconds": 0.125}
    line = json.loads(json.dumps(rollout_record(rollout)))
    back = rollout_of(line, RolloutKey(row("r"), group, 1, 2))
    assert repr(back) == repr(rollout), "nan is not equal to itself"
    assert rollout_record(back) == rollout_record(rollout)


def test_the_store_of_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(UserError, match=r"rollouts\.jsonl:1: this line has no 'id'"):
        RolloutStore(RunDirectory(tmp_path), 1)
