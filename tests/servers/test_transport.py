"""Answers that come together pass a few at a time, in order, and none is lost."""

from __future__ import annotations

import asyncio

from hermes_rl.servers.transport import AT_ONCE, in_turn


async def test_no_turn_of_the_loop_has_more_than_a_few_and_the_order_stays() -> None:
    passed, turns = [], []

    async def one(number: int) -> None:
        await in_turn()
        passed.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(10 * AT_ONCE)]
    while not all(task.done() for task in tasks):
        before = len(passed)
        await asyncio.sleep(0)
        turns.append(len(passed) - before)
    assert passed == list(range(10 * AT_ONCE))
    assert max(turns) <= AT_ONCE


async def test_cancelled_waiting_task_does_not_block_others() -> None:
    tasks = [asyncio.create_task(in_turn()) for _ in range(5 * AT_ONCE)]
    await asyncio.sleep(0)
    for task in tasks[AT_ONCE : 4 * AT_ONCE]:
        task.cancel()
    ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert sum(one is None for one in ended) == 2 * AT_ONCE


async def test_who_comes_alone_does_not_wait() -> None:
    for _ in range(3 * AT_ONCE):
        await asyncio.wait_for(in_turn(), 30)
        await asyncio.sleep(0)
