"""Functions that block, in threads: each has one, and threads are used again."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from hermes_rl import threads
from hermes_rl.threads import in_thread, one_at_a_time


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
