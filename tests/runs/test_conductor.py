"""The conductor: places are kept filled, rows repeat, nothing slow holds up the rest, closing releases everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from typing import Any

from hermes_rl.data.rows import Row, Rows
from hermes_rl.rollouts.admission import Fixed
from hermes_rl.rollouts.rollout import RolloutKey
from hermes_rl.runs.run import Plan, RowSource, Run
from tests.rollouts.worlds import Policy, World, row, rows
from tests.waiting import until


def run(world: World, given: Any, **plan: Any) -> Run:
    return Run(world, given, Plan(**{"size": 2, **plan}))


class First:
    """The first so many groups."""

    def __init__(self, count: int) -> None:
        self.count, self.taken = count, 0

    @property
    def satisfied(self) -> bool:
        return self.taken >= self.count

    def wants(self, running: int) -> bool:
        return self.taken + running < self.count


async def first(played: Run, count: int) -> list[str]:
    """The ids of the first groups, in the order of their ending."""
    demand, found = First(count), []
    async for group in played.groups(demand=demand):
        demand.taken += 1
        found.append(group.id)
    return found


async def test_every_row_runs_once() -> None:
    played = run(World(), rows(5), repeat=False, concurrency=4)
    assert sorted([group.id async for group in played.groups()]) == [f"row{n}" for n in range(5)]
    assert played.runner.open == 0


async def test_places_are_filled_up_to_the_bound() -> None:
    world = World(policy=Policy(delay=0.01))
    async for _ in run(world, rows(12), repeat=False, concurrency=8).groups():
        pass
    assert world.policy.most == 8


async def test_repeatedly_changed_concurrency_is_respected() -> None:
    world = World(policy=Policy(delay=0.02))
    played = run(world, rows(6), size=8, repeat=False, concurrency=4)
    changes = iter([9, 5, 7])
    async for _ in played.groups():
        if (change := next(changes, None)) is not None:
            played.set_concurrency(change)
    assert 4 < world.policy.most <= 9


async def test_new_concurrency_limit_counts_rollouts_in_flight() -> None:
    world = World(policy=Policy(delay=0.02))
    world.policy.gate.clear()
    runner = run(world, rows(1), repeat=False).runner
    plays = [asyncio.create_task(runner.member(RolloutKey(row(), "group", index, 12))) for index in range(12)]
    await until(lambda: world.policy.in_flight == 12)
    runner.slots.bound(5)
    world.policy.gate.set()
    plays += [asyncio.create_task(runner.member(RolloutKey(row(), "other", index, 12))) for index in range(12)]
    await asyncio.wait(plays, return_when=asyncio.FIRST_COMPLETED)
    world.policy.most = 0
    await asyncio.gather(*plays)
    assert world.policy.most == 5


async def test_admission_receives_the_open_rollouts_of_other_runs() -> None:
    beside: list[Run] = []
    first, second = (Run(World(), rows(1), Plan(size=2, repeat=False), sibling_runs=beside) for _ in range(2))
    first.runner.open = 7
    told: list[tuple[int, int]] = []

    class Asked(Fixed):
        def admits(self, open_rollouts: int, beside: int = 0) -> bool:
            told.append((open_rollouts, beside))
            return super().admits(open_rollouts, beside)

    second.admission = Asked(4)
    assert len([group async for group in second.groups()]) == second.started_groups == 1
    assert told[0] == (0, 7)


async def test_rows_repeat_under_new_ids_without_skipped_groups() -> None:
    played = run(World(), rows(2), concurrency=2)
    found, demand = [], First(4)
    async for group in played.groups(skip=lambda row, group, epoch: group == "row1:0", demand=demand):
        demand.taken += 1
        found.append((group.id, group.epoch))
    assert found == [("row0:0", 0), ("row0:1", 1), ("row1:1", 1), ("row0:2", 2)]


async def test_others_have_their_turn_while_thousands_of_rows_are_passed_by() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    played = run(World(), rows(10_000), repeat=False)
    assert [group async for group in played.groups(skip=lambda row, group, epoch: True)] == []
    counting.cancel()
    assert turns > 30


async def test_equal_rows_have_distinct_group_ids() -> None:
    played = run(World(), [row("same"), row("same")], repeat=False)
    assert sorted([group.id async for group in played.groups()]) == ["same", "same:1"]


async def test_no_rows_end_the_run() -> None:
    assert [group async for group in run(World(), []).groups()] == []


async def test_only_the_requested_number_of_groups_starts() -> None:
    world = World()
    assert len(await first(run(world, rows(1), concurrency=64), 3)) == 3
    assert world.policy.calls == 6


async def test_closing_early_cancels_and_releases_what_is_in_flight() -> None:
    world = World(policy=Policy(delay=0.0))
    played = run(world, rows(3), concurrency=6)
    async with aclosing(played.groups()) as playing:
        await anext(playing)
        world.policy.delay = 60.0
    assert world.opened == world.closed
    assert played.runner.open == 0


def slow_rows(gate: Any) -> Rows:
    def make() -> Iterator[Row]:
        yield row("first")
        gate()
        yield row("second")

    return Rows(make, length=None, fingerprint="")


async def test_slow_row_source_does_not_block_the_event_loop() -> None:
    import threading

    ticked, waited = threading.Event(), list[bool]()

    async def tick() -> None:
        for _ in range(10):
            await asyncio.sleep(0.005)
        ticked.set()

    ticking = asyncio.create_task(tick())
    played = run(World(), slow_rows(lambda: waited.append(ticked.wait(30))), repeat=False).groups()
    assert len([1 async for _ in played]) == 2
    await ticking
    assert waited == [True]


async def test_finished_group_is_returned_while_the_next_row_loads() -> None:
    import threading

    handed_on = threading.Event()
    waited: list[bool] = []
    found = []
    async for group in run(World(), slow_rows(lambda: waited.append(handed_on.wait(30))), repeat=False).groups():
        found.append(group.id)
        handed_on.set()
    assert (found, waited) == (["first", "second"], [True]), "the second row came after the first group was handed on"


async def test_first_row_of_a_stream_is_read_without_restarting_it() -> None:
    begun = 0

    def make() -> Iterator[Row]:
        nonlocal begun
        begun += 1
        yield from rows(3)

    source = RowSource(Rows(make, length=None, fingerprint=""))
    assert await source.first() == rows(1)[0]
    assert [one.key async for one in source] == ["row0", "row1", "row2"]
    assert begun == 1
    assert [one.key async for one in source] == ["row0", "row1", "row2"]
    assert begun == 2


async def test_rows_may_come_asynchronously() -> None:
    async def coming() -> AsyncIterator[Row]:
        for one in rows(3):
            await asyncio.sleep(0)
            yield one

    played = run(World(), coming(), repeat=False)
    assert sorted([group.id async for group in played.groups()]) == ["row0", "row1", "row2"]


async def test_a_row_that_came_too_late_to_be_wanted_is_not_waited_for() -> None:
    async def slow() -> AsyncIterator[Row]:
        yield row("first")
        await asyncio.sleep(60)
        yield row("second")

    async with asyncio.timeout(20):
        assert await first(run(World(), slow(), repeat=False), 1) == ["first"]


async def test_closing_early_ends_what_waits_in_the_source() -> None:
    left = asyncio.Event()

    async def endless() -> AsyncIterator[Row]:
        try:
            yield row("first")
            await asyncio.sleep(60)
        finally:
            left.set()

    async with aclosing(run(World(), endless(), repeat=False).groups()) as playing:
        await anext(playing)
    assert left.is_set()
