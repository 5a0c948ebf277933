"""Functions that block, in threads: each has one, and threads are used again."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from hermes_rl import threads
from hermes_rl.threads import in_thread, made_in_thread, one_at_a_time


async def test_a_thread_that_has_ended_its_work_does_more() -> None:
    assert len({await in_thread(threading.current_thread) for _ in range(100)}) < 100


async def test_a_call_never_waits_for_another_one() -> None:
    let_go = threading.Event()
    hanging = [asyncio.create_task(in_thread(let_go.wait)) for _ in range(50)]
    await asyncio.sleep(0)
    assert await in_thread(lambda: "done") == "done"
    let_go.set()
    assert await asyncio.gather(*hanging) == [True] * 50


async def test_a_thread_without_work_ends() -> None:
    alive = await in_thread(threading.current_thread)
    await asyncio.to_thread(alive.join, threads.IDLE + 30)
    assert not alive.is_alive()


async def test_work_is_not_lost_where_a_thread_is_about_to_end() -> None:
    before, threads.IDLE = threads.IDLE, 0.0005
    try:
        for number in range(200):
            assert await asyncio.wait_for(in_thread(lambda number=number: number), 30) == number
            await asyncio.sleep(0.0004 + number % 5 * 0.0001)
    finally:
        threads.IDLE = before


@pytest.mark.parametrize("times", [1, 2])
async def test_what_a_thread_makes_for_somebody_who_is_cancelled_is_unmade(times: int) -> None:
    begun, go_on, unmade = threading.Event(), threading.Event(), list[str]()

    def make() -> str:
        begun.set()
        go_on.wait(10)
        return "a folder"

    waiting = asyncio.create_task(made_in_thread(make, unmade.append))
    assert await asyncio.to_thread(begun.wait, 10)
    for _ in range(times):
        waiting.cancel()
        await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(10):
        while not unmade:
            await asyncio.sleep(0)
    assert unmade == ["a folder"]
    assert await made_in_thread(make, unmade.append) == "a folder"
    assert len(unmade) == 1


async def test_what_a_thread_cannot_make_is_said_where_it_is_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        await made_in_thread(lambda: 1 // 0, print)


async def test_work_on_large_texts_is_done_one_at_a_time() -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1

    await asyncio.gather(*(one_at_a_time(work) for _ in range(8)))
    assert (most, running) == (1, 0)


async def test_threads_take_turns_sooner_while_such_work_is_done() -> None:
    before = sys.getswitchinterval()
    seen = await asyncio.gather(*(one_at_a_time(sys.getswitchinterval) for _ in range(4)))
    with pytest.raises(ZeroDivisionError):
        await one_at_a_time(lambda: 1 // 0)
    assert max(seen) < before
    assert sys.getswitchinterval() == before
