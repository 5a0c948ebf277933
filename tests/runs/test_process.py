"""Process writes as many groups as asked for, each whole and once, whatever fails or ends it on the way."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import RewardFailure, RunError, SandboxFailure, UserError
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.runs.run import RunBudget
from tests.rollouts.worlds import Policy, World
from tests.runs.playing import ProcessPlan, lines, play_process

TOKENS = 11
"""Of one rollout of the stub world."""


def by_index(key: RolloutKey) -> float:
    return float(key.index)


def easy(*keys: str) -> Any:
    """Every rollout of these rows scores 1, of the others its index."""
    return lambda key: 1.0 if key.row.key in keys else float(key.index)


def broken(*keys: str) -> Any:
    """Rows whose sandbox never starts."""

    def grade(key: RolloutKey) -> float:
        if key.row.key in keys:
            raise SandboxFailure("no space left")
        return float(key.index)

    return grade


async def test_as_many_groups_as_asked_for_are_written_over_and_over_the_rows(tmp_path: Path) -> None:
    summary = await play_process(World(on_grade=by_index), tmp_path, ProcessPlan(2, 5), count=2)
    groups = lines(tmp_path / "groups.jsonl")
    assert summary.written == 5
    assert sorted(group["group"] for group in groups) == ["row0:0", "row0:1", "row0:2", "row1:0", "row1:1"]
    assert all(group["scores"] == [0.0, 1.0] for group in groups)
    assert sorted(line["group"] for line in lines(tmp_path / "rollouts.jsonl")) == sorted(
        group["group"] for group in groups for _ in range(2)
    )


async def test_groups_run_concurrently(tmp_path: Path) -> None:
    world = World(on_grade=by_index, policy=Policy(delay=0.02))
    await play_process(world, tmp_path, ProcessPlan(2, 8, concurrency=16), count=8)
    assert world.policy.most == 16


async def test_uniform_groups_are_written_unless_excluded(tmp_path: Path) -> None:
    world = World(on_grade=easy("row0"))
    kept = await play_process(world, tmp_path / "kept", ProcessPlan(2, 3))
    assert (kept.written, kept.uniform) == (3, 0)
    excluded = await play_process(world, tmp_path / "excluded", ProcessPlan(2, 4, drop_uniform=True))
    assert excluded.written == 4
    assert excluded.uniform >= 1
    assert {group["row_key"] for group in lines(tmp_path / "excluded" / "groups.jsonl")} == {"row1", "row2"}
    assert {line["row_key"] for line in lines(tmp_path / "excluded" / "rollouts.jsonl")} == {"row0", "row1", "row2"}


async def test_a_group_of_one_is_never_uniform(tmp_path: Path) -> None:
    summary = await play_process(World(), tmp_path, ProcessPlan(1, 3, drop_uniform=True))
    assert (summary.written, summary.uniform) == (3, 0)


async def test_one_hears_of_a_task_in_which_every_group_is_uniform(tmp_path: Path) -> None:
    said = io.StringIO()
    budget = RunBudget(max_tokens=TOKENS * 2 * 25)
    plan = ProcessPlan(2, 3, drop_uniform=True, concurrency=2)
    summary = await play_process(World(), tmp_path, plan, budget=budget, said=said)
    assert summary.uniform == 25
    assert "excluded 10 uniform groups, and 0 by the environment's code; 0 of 3 are written" in said.getvalue()


async def test_a_dropped_group_is_replaced_by_the_next_row_and_counted_by_cause(tmp_path: Path) -> None:
    said = io.StringIO()
    plan = ProcessPlan(2, 4, concurrency=2)
    summary = await play_process(World(on_grade=broken("row0")), tmp_path, plan, count=4, said=said)
    assert summary.written == 4
    assert summary.failed == {"sandbox_failure": 2}
    assert {group["row_key"] for group in lines(tmp_path / "groups.jsonl")} == {"row1", "row2", "row3"}
    assert "group row0:0 dropped (sandbox_failure): no space left" in said.getvalue()
    failed = [line for line in lines(tmp_path / "rollouts.jsonl") if line["row_key"] == "row0"]
    assert {(line["score"], line["error"]) for line in failed} == {(None, "no space left")}


async def test_no_group_is_ever_written_in_part(tmp_path: Path) -> None:
    def flaky(key: RolloutKey) -> float:
        if (key.index, key.row.key) == (3, "row1"):
            raise RewardFailure("cannot tell")
        return float(key.index)

    await play_process(World(on_grade=flaky), tmp_path, ProcessPlan(4, 6), count=3)
    assert [len(group["scores"]) for group in lines(tmp_path / "groups.jsonl")] == [4] * 6


async def test_failures_over_the_budget_stop_the_run_with_their_causes(tmp_path: Path) -> None:
    world = World(on_grade=broken("row0", "row1", "row2"))
    with pytest.raises(RunError, match=r"3 groups .*sandbox_failure: 3.*max_failures \(2\).*no space left"):
        await play_process(world, tmp_path, ProcessPlan(2, 3), budget=RunBudget(max_failures=2))
    assert world.opened == world.closed


async def test_as_many_failures_as_the_budget_allows_do_not(tmp_path: Path) -> None:
    plan = ProcessPlan(2, 2, concurrency=2)
    world = World(on_grade=broken("row0"))
    assert (await play_process(world, tmp_path, plan, budget=RunBudget(max_failures=1))).written == 2


async def test_a_token_budget_ends_the_run_cleanly_with_whole_groups(tmp_path: Path) -> None:
    world = World(on_grade=by_index)
    plan = ProcessPlan(2, 100, concurrency=2)
    summary = await play_process(world, tmp_path, plan, budget=RunBudget(max_tokens=TOKENS * 5))
    assert summary.stopped == f"budget.max_tokens ({TOKENS * 5}) is used up"
    assert summary.written == 3
    assert [len(group["scores"]) for group in lines(tmp_path / "groups.jsonl")] == [2] * 3


async def test_tokens_of_attempts_that_failed_are_spent_too(tmp_path: Path) -> None:
    def second_time(key: RolloutKey) -> float:
        if key.attempt == 0:
            raise RewardFailure("flaky")
        return float(key.index)

    budget = RunBudget()
    await play_process(World(on_grade=second_time), tmp_path, ProcessPlan(2, 3), budget=budget)
    assert budget.tokens == TOKENS * 2 * 3 * 2


async def test_a_deadline_ends_the_run_cleanly(tmp_path: Path) -> None:
    world = World(on_grade=by_index, policy=Policy(delay=0.05))
    plan = ProcessPlan(2, 1000, concurrency=2)
    summary = await play_process(world, tmp_path, plan, budget=RunBudget(deadline=0.2))
    assert summary.stopped == "budget.deadline (0.2 s) has passed"
    assert summary.written == len(lines(tmp_path / "groups.jsonl")) >= 1
    assert world.opened == world.closed


async def test_no_rows_are_a_failed_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no rows to run"):
        await play_process(World(), tmp_path, ProcessPlan(2, 1), count=0)


async def interrupted(world: World, folder: Path, plan: ProcessPlan, *, after: int) -> None:
    """Cut the run short once this many rollouts and a group are written, with groups in flight."""
    run = asyncio.create_task(play_process(world, folder, plan))

    def written(name: str) -> int:
        path = folder / name
        return len(path.read_text().splitlines()) if path.is_file() else 0

    while written("rollouts.jsonl") < after or not written("groups.jsonl"):
        await asyncio.sleep(0.001)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)


async def test_interrupted_run_resumes_without_repeating_rollouts(tmp_path: Path) -> None:
    plan = ProcessPlan(3, 9, concurrency=5)

    class Uneven(Policy):
        async def chat(self, request: Any) -> Any:
            self.delay = 0.002 * (self.calls % 5)
            if self.calls >= 16:
                await asyncio.Event().wait()  # in flight when the run is cut short
            return await super().chat(request)

    await interrupted(World(on_grade=by_index, policy=Uneven()), tmp_path, plan, after=13)
    before = [group["group"] for group in lines(tmp_path / "groups.jsonl")]
    played = len(lines(tmp_path / "rollouts.jsonl"))
    assert 0 < 3 * len(before) < played < 27
    world = World(on_grade=by_index)
    summary = await play_process(world, tmp_path, plan)
    groups = [group["group"] for group in lines(tmp_path / "groups.jsonl")]
    rollouts = lines(tmp_path / "rollouts.jsonl")
    assert (summary.existing, summary.written) == (len(before), 9 - len(before))
    assert world.policy.calls == 27 - played, "only what was not finished"
    assert len(groups) == len(set(groups)) == 9
    assert len({line["id"] for line in rollouts}) == len(rollouts) == 27
    assert {line["group"] for line in rollouts} == set(groups)


async def test_complete_run_adds_only_the_missing_groups(tmp_path: Path) -> None:
    await play_process(World(on_grade=by_index), tmp_path, ProcessPlan(2, 3))
    again, more = World(on_grade=by_index), World(on_grade=by_index)
    assert (await play_process(again, tmp_path, ProcessPlan(2, 3))).written == 0
    assert (await play_process(more, tmp_path, ProcessPlan(2, 5))).written == 2
    assert (again.policy.calls, more.policy.calls) == (0, 4)


async def test_excluded_uniform_groups_are_remembered_when_resuming(tmp_path: Path) -> None:
    plan = ProcessPlan(2, 2, drop_uniform=True, concurrency=2)
    first = await play_process(World(on_grade=easy("row0")), tmp_path, plan)
    assert first.uniform == 1
    world = World(on_grade=easy("row0"))
    await play_process(world, tmp_path, ProcessPlan(2, 3, drop_uniform=True, concurrency=2))
    played = [line["group"] for line in lines(tmp_path / "rollouts.jsonl") if line["row_key"] == "row0"]
    assert played.count("row0:0") == 2
    asked = [request.messages[0]["content"] for request in world.policy.requests]
    assert asked == ["row0", "row0", "row1", "row1"], "the second pass, not the first again"


async def test_failed_group_is_retried_under_the_same_ids(tmp_path: Path) -> None:
    await play_process(World(on_grade=broken("row0")), tmp_path, ProcessPlan(2, 2))
    await play_process(World(on_grade=by_index), tmp_path, ProcessPlan(2, 3))
    ids = [line["id"] for line in lines(tmp_path / "rollouts.jsonl")]
    assert len(ids) == len(set(ids))
    assert "row0:0-0" in ids


async def test_a_file_of_groups_from_elsewhere_is_refused_with_its_name(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"tokens": [[1]], "scores": [1.0]}\n')
    with pytest.raises(UserError, match=r"other\.jsonl:1: this line has no 'group', so no run"):
        await play_process(World(), tmp_path / "run", ProcessPlan(1, 2, groups_path=other))
    assert len(lines(other)) == 1


async def test_groups_file_may_be_elsewhere_and_the_run_resumes_from_it(tmp_path: Path) -> None:
    plan = ProcessPlan(2, 2, groups_path=tmp_path / "else" / "where.jsonl")
    await play_process(World(on_grade=by_index), tmp_path / "run", plan)
    assert len(lines(tmp_path / "else" / "where.jsonl")) == 2
    assert not (tmp_path / "run" / "groups.jsonl").exists()
    assert (await play_process(World(on_grade=by_index), tmp_path / "run", plan)).existing == 2


async def test_members_of_an_uncomparable_group_are_recorded_with_the_reason(tmp_path: Path) -> None:
    def rank(rollouts: list[Rollout]) -> None: ...

    def grade(key: RolloutKey) -> float:
        if (key.row.key, key.index) == ("row0", 0):
            raise RewardFailure("cannot tell")
        return float(key.index)

    await play_process(World(on_grade=grade, on_group=rank), tmp_path, ProcessPlan(2, 2), count=2)
    other = next(line for line in lines(tmp_path / "rollouts.jsonl") if line["id"] == "row0:0-1")
    assert other["score"] is None
    assert "another member failed: cannot tell" in other["error"]


async def test_repeatedly_failing_row_is_quarantined_and_reported(tmp_path: Path) -> None:
    said = io.StringIO()
    world = World(on_grade=broken("row0"))
    summary = await play_process(world, tmp_path, ProcessPlan(2, 12, concurrency=2), said=said)
    assert summary.written == 12
    assert summary.failed == {"sandbox_failure": 2}
    entry = {"row_key": "row0", "cause": "sandbox_failure", "detail": "no space left"}
    assert summary.quarantined == [entry]
    assert "quarantined row row0: it failed repeatedly (no space left)" in said.getvalue()


async def test_a_row_that_failed_once_is_not(tmp_path: Path) -> None:
    failing = iter([True] * 3)

    def grade(key: RolloutKey) -> float:
        if key.row.key == "row0" and next(failing, False):
            raise SandboxFailure("no space left")
        return float(key.index)

    summary = await play_process(World(on_grade=grade), tmp_path, ProcessPlan(1, 12, concurrency=1))
    assert (summary.failed, summary.quarantined) == ({"sandbox_failure": 1}, [])


async def test_run_stops_with_the_reason_if_every_row_is_quarantined(tmp_path: Path) -> None:
    world = World(on_grade=broken("row0", "row1", "row2"))
    with pytest.raises(RunError, match=r"every row is quarantined.*no space left"):
        await play_process(world, tmp_path, ProcessPlan(2, 12, concurrency=2))


class Priced(Policy):
    usage = {"cost": 0.25}


async def test_a_budget_of_cost_ends_the_run_cleanly_where_the_server_tells_it(tmp_path: Path) -> None:
    world = World(on_grade=by_index, policy=Priced())
    plan = ProcessPlan(2, 100, concurrency=2)
    summary = await play_process(world, tmp_path / "told", plan, budget=RunBudget(max_cost=1.4))
    assert (summary.stopped, summary.written) == ("budget.max_cost (1.4 $) is used up", 3)
    assert lines(tmp_path / "told" / "rollouts.jsonl")[0]["usage"]["cost"] == 0.25
    with pytest.raises(RunError, match=r"max_cost cannot be enforced.*max_tokens"):
        await play_process(World(on_grade=by_index), tmp_path / "not", plan, budget=RunBudget(max_cost=1.4))


async def test_rows_with_mixed_groups_are_preferred_after_resuming(tmp_path: Path) -> None:
    world = World(on_grade=easy("row0"))
    # A group may begin before the one just in front of it has been looked at: with one rollout at a time that is
    # always one of the other row.
    plan = ProcessPlan(2, 5, prefer_differing=True, concurrency=1)
    await play_process(world, tmp_path, plan, count=2)
    await play_process(world, tmp_path, replace(plan, groups=12), count=2)
    played = [group["group"] for group in lines(tmp_path / "groups.jsonl")]
    assert len(played) == len(set(played)) == 12
    epochs = {row: sorted(int(g.split(":")[1]) for g in played if g.startswith(row)) for row in ("row0", "row1")}
    assert epochs == {"row0": [0, 2, 4, 8], "row1": list(range(8))}
