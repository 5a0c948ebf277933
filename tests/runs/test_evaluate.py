"""Evaluate says what the rollouts show, how sure it is, and what could not be graded."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from atroposlib.envs.base import BaseEnv
from atroposlib.type_definitions import EvaluationSample

from hermes_rl.agent.result import ToolCall
from hermes_rl.errors import RewardFailure, RunError, ToolError
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.evaluate import write_evaluation
from hermes_rl.runs.run import RunBudget
from hermes_rl.stop_reasons import StopReason
from tests.rollouts.worlds import Policy, World, rows
from tests.runs.playing import EvaluatePlan, lines, play_evaluate, rollouts_of


def scores(table: Sequence[Sequence[float | None]]) -> Any:
    """A reward by row and member; None: the reward fails, so that the rollout cannot be graded."""

    def grade(key: RolloutKey) -> float:
        score = table[int(key.row.key.removeprefix("row"))][key.index]
        if score is None:
            raise RewardFailure("cannot tell")
        return score

    return grade


async def test_every_row_runs_the_requested_number_of_rollouts() -> None:
    world = World()
    found = await play_evaluate(world, EvaluatePlan(rollouts=3))
    assert [line["id"] for line in rollouts_of(found)] == [f"row{n}-{i}" for n in range(4) for i in range(3)]
    assert world.policy.calls == 12


async def test_the_standard_error_takes_rollouts_of_a_row_as_one() -> None:
    table = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]]
    metrics = (await play_evaluate(World(on_grade=scores(table)), EvaluatePlan(rollouts=2))).metrics
    assert metrics["eval/mean_reward"] == 5 / 8
    means = [1.0, 0.0, 0.5, 1.0]
    spread = sum((mean - 5 / 8) ** 2 for mean in means) / 3
    assert metrics["eval/mean_reward_stderr"] == pytest.approx(math.sqrt(spread / 4))


async def test_pass_at_k_and_pass_hat_k_count_from_the_score_of_success() -> None:
    table = [[1.0, 0.5], [0.5, 0.5], [0.2, 0.1], [0.9, 0.0]]
    found = await play_evaluate(World(on_grade=scores(table)), EvaluatePlan(rollouts=2, success=0.5))
    assert found.metrics["eval/pass@1"] == 5 / 8
    assert found.metrics["eval/pass^1"] == 5 / 8
    assert found.metrics["eval/pass@2"] == 3 / 4
    assert found.metrics["eval/pass^2"] == 2 / 4
    assert sum(sample["correct"] for sample in found.samples()) == 5


async def test_where_all_are_graded_the_bounds_are_the_mean() -> None:
    metrics = (await play_evaluate(World(on_grade=scores([[1.0], [0.0], [0.0], [1.0]])))).metrics
    assert metrics["eval/mean_reward_lower"] == metrics["eval/mean_reward_upper"] == metrics["eval/mean_reward"] == 0.5


async def test_ungraded_rollouts_are_not_zero_and_widen_the_mean_bounds() -> None:
    table = [[1.0, 1.0], [None, 1.0], [1.0, 1.0], [1.0, None]]
    found = await play_evaluate(World(on_grade=scores(table)), EvaluatePlan(rollouts=2))
    assert found.ungraded == found.metrics["eval/ungraded"] == 2
    assert found.metrics["eval/mean_reward"] == 1.0
    assert (found.metrics["eval/mean_reward_lower"], found.metrics["eval/mean_reward_upper"]) == (6 / 8, 1.0)
    assert found.metrics["eval/pass@1"] == found.metrics["eval/pass@2"] == 1.0
    assert found.metrics["eval/pass_count/2"] == 2, "rows that have two grades"
    assert "eval/pass_count/1" not in found.metrics, "all rows have one"
    ungraded = [sample for sample in found.samples() if sample["score"] is None]
    assert [(sample["correct"], sample["error"]) for sample in ungraded] == [(None, "cannot tell")] * 2


@pytest.mark.parametrize(("failing", "reliable"), [(0, True), (1, True), (2, False)])
async def test_more_than_two_percent_without_a_grade_are_not_reliable(failing: int, reliable: bool) -> None:
    def grade(key: RolloutKey) -> float:
        if int(key.row.key.removeprefix("row")) < failing:
            raise RewardFailure("cannot tell")
        return 1.0

    found = await play_evaluate(World(on_grade=grade), given=rows(50))
    assert found.ungraded == failing
    assert found.reliable is reliable


async def test_nothing_graded_is_a_failed_run_with_the_cause() -> None:
    with pytest.raises(RunError, match=r"none of 4 rollouts could be graded\. The first: cannot tell"):
        await play_evaluate(World(on_grade=scores([[None]] * 4)))


async def test_no_rows_are_a_failed_run() -> None:
    with pytest.raises(RunError, match="no rows to evaluate on"):
        await play_evaluate(World(), given=[])


async def test_failed_attempt_is_retried_and_the_second_one_counts() -> None:
    def second_time(key: RolloutKey) -> float:
        if key.attempt == 0:
            raise RewardFailure("flaky")
        return 1.0

    heard: list[Rollout] = []
    found = await play_evaluate(World(on_grade=second_time), listener=heard.append)
    assert (found.ungraded, found.metrics["eval/mean_reward"]) == (0, 1.0)
    assert len(heard) == 8


async def test_stop_reasons_are_fractions_of_all_rollouts() -> None:
    class Cut(Policy):
        async def chat(self, request: Any) -> Any:
            self.finish_reason = "length" if request.messages[0]["content"] == "row0" else "stop"
            return await super().chat(request)

    metrics = (await play_evaluate(World(policy=Cut()), EvaluatePlan(concurrency=1))).metrics
    assert metrics["eval/stop_reason/finished"] == 0.75
    assert metrics["eval/stop_reason/length"] == 0.25


async def test_stop_reason_with_a_fixed_score_is_graded_with_it() -> None:
    world = World(policy=Policy(finish_reason="length"), on_stop_policies={StopReason.LENGTH: 0})
    assert (await play_evaluate(world)).metrics["eval/mean_reward"] == 0.0


async def test_usage_turns_and_tool_errors_are_averaged() -> None:
    class Careless(World):
        async def grade(self, rollout: Rollout, runtime: Any) -> None:
            await super().grade(rollout, runtime)
            assert rollout.result is not None
            rollout.result.tool_calls = [ToolCall(1, "c", "terminal", {}, "", repaired=2)] * 4
            if rollout.key.row.key == "row0":
                rollout.result.tool_errors = [ToolError(1, "terminal", "{}", "wrong", "")] * 2

    metrics = (await play_evaluate(Careless())).metrics
    assert metrics["eval/tool_error_rate"] == 2 / 16
    assert metrics["eval/tool_calls"] == 4
    assert metrics["eval/repaired_call_rate"] == 1.0
    assert metrics["eval/turns"] == 1
    assert (metrics["eval/prompt_tokens"], metrics["eval/completion_tokens"]) == (10, 1)


async def test_each_reward_has_a_mean_metric() -> None:
    metrics = (await play_evaluate(World(on_grade=scores([[1.0], [0.5], [0.5], [0.0]])))).metrics
    assert metrics["eval/reward/reward"] == 0.5


async def test_budget_stops_the_evaluation_with_partial_results() -> None:
    plan = EvaluatePlan(concurrency=1)
    found = await play_evaluate(World(), plan, given=rows(9), budget=RunBudget(max_tokens=30))
    assert found.stopped == "budget.max_tokens (30) is used up"
    assert found.metrics["eval/rows"] == 3


async def test_a_budget_that_leaves_no_room_is_not_said_to_be_a_lack_of_rows() -> None:
    with pytest.raises(RunError, match=r"budget\.deadline \(0 s\) has passed"):
        await play_evaluate(World(), budget=RunBudget(deadline=0.0))


async def test_too_many_failed_rows_end_it() -> None:
    with pytest.raises(RunError, match="max_failures"):
        await play_evaluate(World(on_grade=scores([[None]] * 3 + [[1.0]])), budget=RunBudget(max_failures=1))


async def test_failed_member_leaves_the_others_uncompared_with_a_reason() -> None:
    world = World(on_grade=scores([[None, 1.0], [1.0, 0.0]]), on_group=lambda rollouts: None)
    heard: list[Rollout] = []
    found = await play_evaluate(world, EvaluatePlan(rollouts=2), given=rows(2), listener=heard.append)
    other = next(line for line in rollouts_of(found) if line["id"] == "row0-1")
    assert other["id"] in {rollout.id for rollout in heard}
    assert other["score"] is None
    assert "cannot tell" in other["error"]


async def test_group_members_of_a_failed_rollout_are_ungraded_and_widen_bounds() -> None:
    table = [[None, 1.0], [1.0, 1.0], [None, 1.0], [1.0, 1.0]]
    world = World(on_grade=scores(table), on_group=lambda rollouts: None)
    found = await play_evaluate(world, EvaluatePlan(rollouts=2))
    assert found.metrics["eval/ungraded"] == found.ungraded == 4
    assert found.causes == {"reward_failure": 4}
    assert (found.metrics["eval/mean_reward_lower"], found.metrics["eval/mean_reward_upper"]) == (0.5, 1.0)
    assert "eval/dropped" not in found.metrics
    assert not found.reliable
    assert [(row["row_key"], row["cause"], row["detail"]) for row in found.ungraded_rows] == [
        ("row0", "reward_failure", "cannot tell"),
        ("row2", "reward_failure", "cannot tell"),
    ]


async def test_group_members_of_a_dropped_rollout_are_dropped_with_it() -> None:
    class CutOnce(Policy):
        async def chat(self, request: Any) -> Any:
            self.finish_reason = "length" if self.calls == 0 else "stop"
            return await super().chat(request)

    world = World(policy=CutOnce(), on_stop_policies={StopReason.LENGTH: "drop"}, on_group=lambda rollouts: None)
    found = await play_evaluate(world, EvaluatePlan(rollouts=2, concurrency=1))
    assert (found.ungraded, found.metrics["eval/dropped"], found.metrics["eval/rollouts"]) == (0, 2, 6)
    assert found.metrics["eval/mean_reward_lower"] == found.metrics["eval/mean_reward_upper"] == 1.0
    assert found.reliable


async def test_another_policy_can_be_evaluated() -> None:
    world, other = World(), Policy()
    await play_evaluate(world, policy=other)
    assert (world.policy.calls, other.calls) == (0, 4)


class Evaluated(BaseEnv):  # type: ignore[misc]
    """Just enough of an environment for atroposlib's own `evaluate_log`."""

    def __init__(self, folder: Path) -> None:
        self.name = "world"
        self.config = type("Config", (), {"data_dir_to_save_evals": str(folder), "max_token_length": 5})()

    async def get_next_item(self) -> None: ...

    async def evaluate(self, *args: Any, **kwargs: Any) -> None: ...


async def test_the_files_have_the_keys_of_atroposlibs_evaluate_log(tmp_path: Path) -> None:
    plan = EvaluatePlan(rollouts=2, generation_params={"max_new_tokens": 5})
    found = await play_evaluate(World(), plan)
    write_evaluation(found, RunDirectory(tmp_path / "ours"))
    await Evaluated(tmp_path / "theirs").evaluate_log(
        found.metrics, model_name="stub", start_time=0.0, end_time=1.5, samples=list(found.samples()), verbose=False
    )
    ours, theirs = (json.loads((tmp_path / who / "metrics.json").read_text()) for who in ("ours", "theirs"))
    assert set(ours) == set(theirs)
    assert set(ours["config_general"]) == set(theirs["config_general"])
    assert ours["results"] == theirs["results"]
    for key in ("model_name", "generation_parameters"):
        assert ours["config_general"][key] == theirs["config_general"][key]
    assert isinstance(ours["config_general"]["total_evaluation_time_seconds"], str)
    assert lines(tmp_path / "ours" / "samples.jsonl") == lines(tmp_path / "theirs" / "samples.jsonl")
    shared = {"messages", "score", "correct", "finish_reason"}
    assert shared <= set(next(found.samples())) & set(EvaluationSample.__annotations__)
