"""Groups of many rows: places are kept filled, sources repeat, closing releases everything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from hermes_rl.data.rows import Row, Rows
from hermes_rl.rollouts.admission import Fixed
from hermes_rl.rollouts.groups import once, play_groups, repeated
from hermes_rl.rollouts.player import Player
from tests.rollouts.worlds import Policy, World, rows


async def test_every_row_is_played_once() -> None:
    player = Player(World())
    found = [group async for group in play_groups(player, once(rows(5)), 2, admission=Fixed(4))]
    assert sorted(group.id for group in found) == [f"row{n}" for n in range(5)]
    assert player.open == 0


async def test_places_are_filled_up_to_the_bound() -> None:
    world = World(policy=Policy(delay=0.01))
    player = Player(world, concurrency=(8))
    async for _ in play_groups(player, once(rows(12)), 2, admission=Fixed(8)):
        pass
    assert world.policy.most == 8


async def test_rows_repeat_under_new_ids_and_finished_groups_are_left_out() -> None:
    source = repeated(rows(2), skip=lambda row, group: group in {"row1:0"})
    ids = [(await anext(source))[1] for _ in range(4)]
    assert ids == ["row0:0", "row0:1", "row1:1", "row0:2"]


async def test_no_rows_end_the_source() -> None:
    assert [group async for group in play_groups(Player(World()), repeated([]), 2, admission=Fixed(4))] == []


async def test_no_more_groups_begin_than_are_wanted() -> None:
    player, taken = Player(World()), 0
    playing = play_groups(player, repeated(rows(1)), 2, admission=Fixed(64), wanted=lambda running: taken + running < 3)
    async for _ in playing:
        taken += 1
    assert taken == 3


async def test_closing_early_cancels_and_releases_what_is_in_flight() -> None:
    world = World(policy=Policy(delay=0.0))
    player = Player(world)
    async with aclosing(play_groups(player, repeated(rows(3)), 2, admission=Fixed(6))) as playing:
        await anext(playing)
        world.policy.delay = 60.0
    assert world.opened == world.closed
    assert player.open == 0


async def test_a_source_that_waits_holds_back_no_group_that_has_ended() -> None:
    going = asyncio.Event()

    async def slow() -> AsyncIterator[tuple[Row, str]]:
        yield rows(1)[0], "first"
        await going.wait()
        yield rows(1)[0], "second"

    async with asyncio.timeout(20):
        async with aclosing(play_groups(Player(World()), slow(), 2, admission=Fixed(8))) as playing:
            assert (await anext(playing)).id == "first"
            going.set()
            assert [group.id async for group in playing] == ["second"]


async def test_a_row_that_came_too_late_to_be_wanted_is_not_waited_for() -> None:
    taken = 0

    async def slow() -> AsyncIterator[tuple[Row, str]]:
        yield rows(1)[0], "first"
        await asyncio.sleep(0.05)
        yield rows(1)[0], "second"

    async with asyncio.timeout(20):
        playing = play_groups(Player(World()), slow(), 2, admission=Fixed(8), wanted=lambda running: taken == 0)
        async for _ in playing:
            taken += 1
    assert taken == 1


async def test_closing_early_ends_what_waits_in_the_source() -> None:
    left = asyncio.Event()

    async def endless() -> AsyncIterator[tuple[Row, str]]:
        try:
            yield rows(1)[0], "first"
            await asyncio.sleep(60)
        finally:
            left.set()

    async with aclosing(play_groups(Player(World()), endless(), 2, admission=Fixed(8))) as playing:
        await anext(playing)
    assert left.is_set()


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
