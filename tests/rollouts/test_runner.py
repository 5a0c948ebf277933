"""Groups are whole or dropped; failures are played anew and never scored; nothing is leaked."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from hermes_rl.errors import RewardFailure, RunError, SandboxFailure, UserError
from hermes_rl.rollouts.rollout import Encoder, Rollout, RolloutKey, RolloutState
from hermes_rl.rollouts.runner import NullRolloutLog, RolloutRunner, WorkerLostError
from hermes_rl.rollouts.teacher import Teacher
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.servers.base import ContextLengthExceeded
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.transcript import TokenSequence, ids
from tests.panics import panic
from tests.rollouts.worlds import Policy, World, row
from tests.waiting import turns, until


class Written(NullRolloutLog):
    """The states of what was recorded together."""

    def __init__(self) -> None:
        self.states: list[list[str]] = []

    def record(self, *rollouts: Rollout) -> None:
        self.states.append([str(rollout.state) for rollout in rollouts])


async def test_a_group_has_a_score_for_every_member() -> None:
    group = await RolloutRunner(World(on_grade=lambda key: key.index)).start(row(), "g", 3)
    assert group.dropped is None
    assert group.scores == [0.0, 1.0, 2.0]
    assert [rollout.id for rollout in group.rollouts] == ["g-0", "g-1", "g-2"]


async def test_failed_member_is_retried_in_a_fresh_sandbox() -> None:
    heard: list[Rollout] = []

    def grade(key: RolloutKey) -> float:
        if key.index == 1 and key.attempt == 0:
            raise RewardFailure("flaky")
        return 1.0

    world = World(on_grade=grade)
    group = await RolloutRunner(world, on_played=heard.append).start(row(), "g", 2)
    assert group.scores == [1.0, 1.0]
    assert group.rollouts[1].id == "g-1r1"
    assert world.opened == world.closed == 3
    failed = next(rollout for rollout in heard if rollout.error)
    assert (failed.id, failed.score, failed.stop_reason) == ("g-1", None, StopReason.REWARD_FAILURE)


async def test_member_with_exhausted_retries_drops_the_group_and_stops_others() -> None:
    def grade(key: RolloutKey) -> float:
        if key.index == 0:
            raise SandboxFailure("no space")
        return 1.0

    world = World(on_grade=grade)
    slow = Policy(delay=0.0)
    group = await RolloutRunner(world, policy=slow).start(row(), "g", 4)
    assert group.dropped == StopReason.SANDBOX_FAILURE
    assert group.detail == "no space"
    assert world.opened == world.closed


async def test_a_failure_is_never_a_score() -> None:
    def grade(key: RolloutKey) -> float:
        raise RewardFailure("always")

    heard: list[Rollout] = []
    await RolloutRunner(World(on_grade=grade), on_played=heard.append).start(row(), "g", 1)
    assert Counter(rollout.score for rollout in heard) == {None: 3}
    assert all(not rollout.stop_reason.graded for rollout in heard)
    assert all({"sandbox", "rewards", "total"} <= rollout.timings.keys() for rollout in heard)


async def test_evaluation_runs_every_member_even_if_one_fails() -> None:
    def grade(key: RolloutKey) -> float:
        if key.index == 0:
            raise RewardFailure("always")
        return 1.0

    group = await RolloutRunner(World(on_grade=grade)).start(row(), "g", 3, require_complete=False)
    assert [rollout.score for rollout in group.rollouts] == [None, 1.0, 1.0]


@pytest.mark.parametrize("error", [StopIteration("end"), ZeroDivisionError("by zero"), RecursionError("deep"), panic()])
async def test_an_unexpected_error_ends_its_rollout_alone(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def grade(key: RolloutKey) -> float:
        if key.index == 0:
            raise error
        return 1.0

    world = World(on_grade=grade)
    group = await RolloutRunner(world).start(row(), "g", 3, require_complete=False)
    assert [rollout.score for rollout in group.rollouts] == [None, 1.0, 1.0]
    assert type(error).__name__ in str(group.rollouts[0].error)
    assert not group.rollouts[0].stop_reason.graded
    assert world.opened == world.closed
    reported = [record for record in caplog.records if record.exc_info]
    assert [record.exc_info is not None and record.exc_info[1] is not None for record in reported] == [True]


async def test_cancelling_a_group_releases_every_machine() -> None:
    world = World(policy=Policy(delay=60.0))
    task = RolloutRunner(world).start(row(), "g", 4)
    await until(lambda: world.policy.in_flight == 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.opened == world.closed == 4


async def test_cancelling_a_group_before_it_starts_leaves_no_tasks() -> None:
    world = World(policy=Policy(delay=60.0))
    task = RolloutRunner(world).start(row(), "g", 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert world.opened == world.closed
    assert len(asyncio.all_tasks()) == 1


async def test_no_more_rollouts_than_allowed_are_in_flight() -> None:
    world = World(policy=Policy(delay=0.005))
    player = RolloutRunner(world, concurrency=3)
    await asyncio.gather(*(player.start(row(f"r{n}"), f"g{n}", 4) for n in range(5)))
    assert world.policy.most == 3


async def test_stop_reason_may_be_masked_dropped_or_scored() -> None:
    cut = Policy(finish_reason="length")
    masked = await RolloutRunner(World(policy=cut, on_stop_policies={StopReason.LENGTH: "mask"})).start(row(), "a", 1)
    assert (masked.rollouts[0].masked, masked.scores) == (True, [1.0])
    fixed = await RolloutRunner(World(policy=cut, on_stop_policies={StopReason.LENGTH: 0})).start(row(), "b", 1)
    assert (fixed.rollouts[0].masked, fixed.scores) == (False, [0.0])
    dropped = await RolloutRunner(World(policy=cut, on_stop_policies={StopReason.LENGTH: "drop"})).start(row(), "c", 1)
    assert dropped.dropped == StopReason.LENGTH
    assert dropped.scores == []
    assert {"sandbox", "generation", "total"} <= dropped.rollouts[0].timings.keys()


async def test_group_level_rewards_see_all_members_before_any_score_is_known() -> None:
    def rank(rollouts: list[Rollout]) -> None:
        assert [rollout.score for rollout in rollouts] == [None, None]
        for place, rollout in enumerate(rollouts):
            rollout.rewards["rank"] = RewardValue(10.0 * place)

    store = Written()
    group = await RolloutRunner(World(on_group=rank), store=store).start(row(), "g", 2)
    assert group.scores == [1.0, 11.0]
    assert store.states == [["waiting"], ["waiting"], ["scored", "scored"]], "both scores are written together"


async def test_a_failed_group_level_reward_drops_the_group() -> None:
    def fail(rollouts: list[Rollout]) -> None:
        raise RewardFailure("cannot compare")

    group = await RolloutRunner(World(on_group=fail)).start(row(), "g", 2)
    assert group.dropped == StopReason.REWARD_FAILURE
    assert group.scores == []


async def test_the_sampling_seed_depends_on_the_seat_alone() -> None:
    first, second = Policy(), Policy()
    for policy in (first, second):
        await RolloutRunner(World(policy=policy)).start(row(), "g", 2)
    seeds = [request.seed for request in first.requests]
    assert sorted(seeds) == sorted(request.seed for request in second.requests)
    assert len(set(seeds)) == 2


def never(*lost: int) -> World:
    """A world in which these members of each group are never graded, and the others score their number."""

    def grade(key: RolloutKey) -> float:
        if key.index in lost:
            raise SandboxFailure("no space")
        return float(key.index)

    return World(on_grade=grade)


async def test_a_member_that_was_lost_counts_as_the_worst_and_has_no_score() -> None:
    store = Written()
    group = await RolloutRunner(never(0), store=store).start(row(), "g", 4, keep_lost=True)
    assert (group.dropped, group.scores) == (None, [1.0, 1.0, 2.0, 3.0])
    lost = group.rollouts[0]
    assert (lost.score, lost.error, lost.state, lost.masked) == (None, "no space", RolloutState.RETRIES_EXHAUSTED, True)
    assert group.advantages("mean") == [None, -0.75, 0.25, 1.25]
    assert sorted(store.states) == [["failed"], ["failed"], ["retries_exhausted"], ["scored"], ["scored"], ["scored"]]


async def test_a_group_in_which_fewer_than_two_have_a_score_is_dropped() -> None:
    store = Written()
    group = await RolloutRunner(never(0, 2), store=store).start(row(), "g", 3, keep_lost=True)
    assert (group.dropped, group.detail) == (StopReason.SANDBOX_FAILURE, "no space")
    assert [str(rollout.state) for rollout in group.rollouts] == ["failed", "scored", "failed"]
    assert len(store.states) == 2 * 3 + 1
    alone = await RolloutRunner(never(0)).start(row(), "g", 1, keep_lost=True)
    assert alone.dropped is StopReason.SANDBOX_FAILURE


async def test_dropped_stop_reason_drops_a_group_that_retains_failed_members() -> None:
    world = never(0)
    world.on_stop_policies, world.policy = {StopReason.LENGTH: "drop"}, Policy(finish_reason="length")
    group = await RolloutRunner(world).start(row(), "g", 3, keep_lost=True)
    assert group.dropped is StopReason.LENGTH


async def test_members_with_exhausted_retries_are_not_compared() -> None:
    compared: list[list[int]] = []

    def compare(rollouts: list[Rollout]) -> None:
        compared.append([rollout.key.index for rollout in rollouts])
        for rollout in rollouts:
            rollout.rewards["rank"] = RewardValue(10.0)

    world = never(1)
    world.on_group = compare
    group = await RolloutRunner(world, store=(store := Written())).start(row(), "g", 3, keep_lost=True)
    assert (compared, group.dropped, group.scores) == ([[0, 2]], None, [10.0, 10.0, 12.0])
    assert store.states[-2:] == [["scored", "scored"], ["retries_exhausted"]]


async def test_user_error_stops_the_run_only_before_the_first_graded_rollout() -> None:
    def grade(key: RolloutKey) -> float:
        if key.row.key == "wrong":
            raise UserError("the row has no such column")
        return 1.0

    runner = RolloutRunner(World(on_grade=grade))
    with pytest.raises(UserError, match="no such column"):
        await runner.start(row("wrong"), "g", 2)
    assert (await runner.start(row(), "h", 2)).dropped is None
    group = await runner.start(row("wrong"), "i", 2)
    assert (group.dropped, group.detail) == (StopReason.REWARD_FAILURE, "the row has no such column")


async def test_what_is_equal_for_every_rollout_ends_the_run_whenever_it_comes() -> None:
    def grade(key: RolloutKey) -> float:
        if key.group == "h":
            raise RunError("the disk is full")
        return 1.0

    runner = RolloutRunner(World(on_grade=grade))
    assert (await runner.start(row(), "g", 2)).dropped is None
    with pytest.raises(RunError, match="the disk is full"):
        await runner.start(row(), "h", 2)


async def test_user_error_in_a_comparison_fails_only_its_group_after_success() -> None:
    def compare(rollouts: list[Rollout]) -> None:
        if rollouts[0].key.group == "wrong":
            raise UserError("no such role")

    runner = RolloutRunner(World(on_group=compare))
    with pytest.raises(UserError, match="no such role"):
        await runner.start(row(), "wrong", 2)
    assert (await runner.start(row(), "g", 2)).dropped is None
    assert (await runner.start(row(), "wrong", 2)).detail == "no such role"


class Dying:
    """Others that play, and die over one row."""

    async def run(self, key: RolloutKey, split: str) -> Rollout:
        if key.row.key == "wrong":
            raise WorkerLostError("3 workers died")
        rollout = Rollout(key, 0)
        rollout.scored(1.0)
        return rollout

    async def compare(self, rollouts: list[Rollout]) -> None: ...


async def test_rollout_that_kills_workers_fails_alone_after_a_success() -> None:
    runner = RolloutRunner(World(), elsewhere=Dying())
    with pytest.raises(RunError, match="3 workers died"):
        await runner.start(row("wrong"), "g", 1)
    assert (await runner.start(row(), "h", 1)).dropped is None
    lost = await runner.start(row("wrong"), "i", 1)
    assert lost.detail == "3 workers died"
    assert all(rollout.worker_died for rollout in lost.rollouts)


class ShortTeacher:
    """The role of a teacher into whose context nothing fits."""

    name = "teacher"

    def bind_to_loop(self) -> None: ...

    def forget(self, rollout: str) -> None: ...

    async def scored(self, *asked: object) -> None:
        raise ContextLengthExceeded("1,024 tokens")


@pytest.mark.parametrize("keep_lost", [False, True])
async def test_a_rollout_that_is_too_long_for_the_teacher_is_not_drawn_again(keep_lost: bool) -> None:
    class First(Encoder):
        async def encode(self, rollout: Rollout) -> None:
            rollout.sequences = [TokenSequence(ids((1, 2)), ())] if rollout.key.index == 0 else None

    world = World(on_grade=lambda key: float(key.index), teacher=Teacher(ShortTeacher(), 1))  # type: ignore[arg-type]
    group = await RolloutRunner(world, encoder=First(None)).start(row(), "g", 3, keep_lost=keep_lost)
    assert world.opened <= 3
    if keep_lost:
        assert (group.dropped, group.scores) == (None, [1.0, 1.0, 2.0])
    else:
        assert (group.dropped, "does not fit the teacher's context" in str(group.detail)) == (
            StopReason.TOKEN_BUDGET,
            True,
        )
