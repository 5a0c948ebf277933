"""Groups in files have Atropos' format and contain no invented values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.data.rows import Row
from hermes_rl.errors import RewardFailure, SandboxFailure
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey
from hermes_rl.runs.groups import group_lines
from hermes_rl.runs.parquet import table_rows
from hermes_rl.runs.store import rollout_of, rollout_record
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.transcript import TokenSequence

ROW = Row(key="row", columns={}, index=0, digest="0" * 64)


def rollout(index: int, score: float, sequence: TokenSequence | None, *, masked: bool = False) -> Rollout:
    result = AgentResult(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": []}])
    made = Rollout(RolloutKey(ROW, "row:0", index, 2), seed=1, stop_reason=StopReason.FINISHED, result=result)
    made.score, made.masked = score, masked
    made.sequences = None if sequence is None else [sequence]
    made.rewards = {"r": RewardValue(score, reason="because", metrics={"m": 1.0})}
    return made


def group(*rollouts: Rollout) -> Group:
    return Group("row:0", ROW, list(rollouts))


def tokens(logprobs: bool = True) -> TokenSequence:
    return TokenSequence.from_lists([1, 2, 3], [-100, 2, 3], [1.0, -0.5, -0.25] if logprobs else None)


def test_group_record_has_the_keys_of_scored_data_group() -> None:
    from atroposlib.envs.base import ScoredDataGroup

    made = group_lines(group(rollout(0, 1.0, tokens()), rollout(1, 0.0, tokens())), {"temperature": 1.0})[0]
    assert set(made) == set(ScoredDataGroup.__annotations__) | {"group", "row_key", "run"}


def test_the_trajectory_api_accepts_a_group() -> None:
    from atroposlib.api.server import ScoredData

    made = group_lines(group(rollout(0, 1.0, tokens()), rollout(1, 0.0, tokens(False))), {})[0]
    accepted = ScoredData.model_validate(json.loads(json.dumps(made)))
    assert accepted.tokens == [[1, 2, 3]] * 2
    assert accepted.inference_logprobs == []


def test_without_tokens_of_one_member_the_group_has_none() -> None:
    made = group_lines(group(rollout(0, 1.0, tokens()), rollout(1, 0.0, None)), {})[0]
    assert made["tokens"] is None
    assert made["masks"] is None
    assert len(made["messages"]) == 2


def test_a_masked_rollout_stays_for_the_baseline_and_trains_nothing() -> None:
    made = group_lines(group(rollout(0, 1.0, tokens(), masked=True), rollout(1, 0.0, tokens())), {})[0]
    assert made["masks"] == [[-100, -100, -100], [-100, 2, 3]]
    assert made["inference_logprobs"] == [[1.0, 1.0, 1.0], [1.0, -0.5, -0.25]]
    assert made["overrides"] == [{"set_advantage_to_zero": True}, {}]
    rows = list(table_rows(group(rollout(0, 1.0, tokens(), masked=True), rollout(1, 0.0, tokens())), ["r"]))
    assert [row["masks"] for row in rows] == made["masks"]
    assert [row["logprobs"] for row in rows] == made["inference_logprobs"]
    assert [row["masked"] for row in rows] == [True, False]
    assert made["scores"] == [1.0, 0.0]


def test_every_message_has_content() -> None:
    made = group_lines(group(rollout(0, 1.0, None)), {})[0]
    assert all("content" in message for conversation in made["messages"] for message in conversation)


def test_rollout_record_contains_reward_results() -> None:
    record = rollout_record(rollout(0, 0.5, None))
    assert record["id"] == "row:0-0"
    assert record["rewards"] == {"r": {"value": 0.5, "reason": "because", "metrics": {"m": 1.0}}}
    assert record["stop_reason"] == "finished"
    assert record["error"] is None


@pytest.mark.parametrize("key", ["messages", "usage", "tool_errors", "timings", "policy", "turns"])
def test_record_of_an_unstarted_rollout_has_every_key(key: str) -> None:
    empty: dict[str, Any] = rollout_record(Rollout(RolloutKey(ROW, "row:0", 0, 1), seed=0))
    assert key in empty


def test_reward_failure_record_keeps_the_stop_reason_of_the_agent() -> None:
    played = rollout(0, 0.0, tokens())
    assert played.result is not None
    played.result.stop_reason, played.result.finished_naturally = StopReason.FINISHED, True
    played.fail(RewardFailure("it raised"))
    read = rollout_of(rollout_record(played), played.key)
    assert read.stop_reason is StopReason.REWARD_FAILURE and read.result is not None
    assert read.result.stop_reason is StopReason.FINISHED and read.result.finished_naturally
    assert rollout_record(read) == rollout_record(played)


def test_a_rollout_that_had_no_sandbox_is_read_without_a_conversation() -> None:
    failed = Rollout(RolloutKey(ROW, "row:0", 0, 2), seed=1)
    failed.fail(SandboxFailure("none was left"))
    read = rollout_of(rollout_record(failed), failed.key)
    assert read.result is None
    assert rollout_record(read) == rollout_record(failed)
