"""Groups are whole or dropped; failures are played anew and never scored; nothing is leaked."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from hermes_rl.endings import Ending
from hermes_rl.errors import RewardFailure, SandboxFailure
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.rollouts.runner import RolloutRunner, Unrecorded
from hermes_rl.scoring.value import RewardValue
from tests.rollouts.worlds import Policy, World, row


class Written(Unrecorded):
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


async def test_a_failed_member_is_played_anew_on_a_fresh_machine() -> None:
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
    assert (failed.id, failed.score, failed.ending) == ("g-1", None, Ending.REWARD_FAILURE)


async def test_a_member_that_fails_for_good_drops_the_group_and_ends_the_others() -> None:
    def grade(key: RolloutKey) -> float:
        if key.index == 0:
            raise SandboxFailure("no space")
        return 1.0

    world = World(on_grade=grade)
    slow = Policy(delay=0.0)
    group = await RolloutRunner(world, policy=slow).start(row(), "g", 4)
    assert group.dropped == Ending.SANDBOX_FAILURE
    assert group.detail == "no space"
    assert world.opened == world.closed


async def test_a_failure_is_never_a_score() -> None:
    def grade(key: RolloutKey) -> float:
        raise RewardFailure("always")

    heard: list[Rollout] = []
    await RolloutRunner(World(on_grade=grade), on_played=heard.append).start(row(), "g", 1)
    assert Counter(rollout.score for rollout in heard) == {None: 3}
    assert all(not rollout.ending.graded for rollout in heard)


async def test_evaluation_plays_every_member_also_where_one_fails() -> None:
    def grade(key: RolloutKey) -> float:
        if key.index == 0:
            raise RewardFailure("always")
        return 1.0

    group = await RolloutRunner(World(on_grade=grade)).start(row(), "g", 3, whole=False)
    assert [rollout.score for rollout in group.rollouts] == [None, 1.0, 1.0]


async def test_cancelling_a_group_releases_every_machine() -> None:
    world = World(policy=Policy(delay=60.0))
    task = RolloutRunner(world).start(row(), "g", 4)
    while world.policy.in_flight < 4:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.opened == world.closed == 4


async def test_cancelling_a_group_before_it_began_leaves_nothing_running() -> None:
    world = World(policy=Policy(delay=60.0))
    task = RolloutRunner(world).start(row(), "g", 4)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.01)
    assert world.opened == world.closed
    assert len(asyncio.all_tasks()) == 1


async def test_no_more_rollouts_than_allowed_are_in_flight() -> None:
    world = World(policy=Policy(delay=0.005))
    player = RolloutRunner(world, concurrency=3)
    await asyncio.gather(*(player.start(row(f"r{n}"), f"g{n}", 4) for n in range(5)))
    assert world.policy.most == 3


async def test_an_ending_can_be_masked_dropped_or_given_a_score() -> None:
    cut = Policy(finish_reason="length")
    masked = await RolloutRunner(World(policy=cut, ending_policies={Ending.LENGTH: "mask"})).start(row(), "a", 1)
    assert (masked.rollouts[0].masked, masked.scores) == (True, [1.0])
    fixed = await RolloutRunner(World(policy=cut, ending_policies={Ending.LENGTH: 0})).start(row(), "b", 1)
    assert (fixed.rollouts[0].masked, fixed.scores) == (False, [0.0])
    dropped = await RolloutRunner(World(policy=cut, ending_policies={Ending.LENGTH: "drop"})).start(row(), "c", 1)
    assert dropped.dropped == Ending.LENGTH
    assert dropped.scores == []


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
    assert group.dropped == Ending.REWARD_FAILURE
    assert group.scores == []


async def test_the_sampling_seed_depends_on_the_seat_alone() -> None:
    first, second = Policy(), Policy()
    for policy in (first, second):
        await RolloutRunner(World(policy=policy)).start(row(), "g", 2)
    seeds = [request.seed for request in first.requests]
    assert sorted(seeds) == sorted(request.seed for request in second.requests)
    assert len(set(seeds)) == 2
