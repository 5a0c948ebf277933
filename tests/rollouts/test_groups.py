"""Groups of many rows: places are kept filled, sources repeat, closing releases everything."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from hermes_rl.data.rows import Row, Rows
from hermes_rl.rollouts.admission import Fixed
from hermes_rl.rollouts.groups import once, play_groups, repeated
from hermes_rl.rollouts.runner import RolloutRunner
from tests.rollouts.worlds import Policy, World, rows


async def test_every_row_is_played_once() -> None:
    player = RolloutRunner(World())
    found = [group async for group in play_groups(player, once(rows(5)), 2, admission=Fixed(4))]
    assert sorted(group.id for group in found) == [f"row{n}" for n in range(5)]
    assert player.open == 0


async def test_places_are_filled_up_to_the_bound() -> None:
    world = World(policy=Policy(delay=0.01))
    player = RolloutRunner(world, concurrency=(8))
    async for _ in play_groups(player, once(rows(12)), 2, admission=Fixed(8)):
        pass
    assert world.policy.most == 8


async def test_rows_repeat_under_new_ids_and_finished_groups_are_left_out() -> None:
    source = repeated(rows(2), skip=lambda row, group: group in {"row1:0"})
    ids = [(await anext(source))[1] for _ in range(4)]
    assert ids == ["row0:0", "row0:1", "row1:1", "row0:2"]


async def test_no_rows_end_the_source() -> None:
    assert [group async for group in play_groups(RolloutRunner(World()), repeated([]), 2, admission=Fixed(4))] == []


async def test_no_more_groups_begin_than_are_wanted() -> None:
    player, taken = RolloutRunner(World()), 0
    playing = play_groups(player, repeated(rows(1)), 2, admission=Fixed(64), wanted=lambda running: taken + running < 3)
    async for _ in playing:
        taken += 1
    assert taken == 3


async def test_closing_early_cancels_and_releases_what_is_in_flight() -> None:
    world = World(policy=Policy(delay=0.0))
    player = RolloutRunner(world)
    async with aclosing(play_groups(player, repeated(rows(3)), 2, admission=Fixed(6))) as playing:
        await anext(playing)
        world.policy.delay = 60.0
    assert world.opened == world.closed
    assert player.open == 0


async def test_a_source_that_waits_does_not_hold_up_the_loop() -> None:
    def slow() -> list[Row]:
        import time

        time.sleep(0.2)
        return rows(1)

    endless = Rows(lambda: iter(slow()), length=None, fingerprint="")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    source = once(endless)
    assert (await anext(source))[1] == "row0"
    ticking.cancel()
    assert ticks >= 10
