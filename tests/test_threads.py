"""Functions that block, in threads: each has one, and threads are used again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hermes_rl import threads
from hermes_rl.threads import TURNS, CallThrottle, acquire_in_thread, done_in_thread, run_exclusively, run_in_thread


async def test_a_thread_that_has_ended_its_work_does_more() -> None:
    assert len({await run_in_thread(threading.current_thread) for _ in range(100)}) < 100


async def test_a_call_never_waits_for_another_one() -> None:
    let_go = threading.Event()
    hanging = [asyncio.create_task(run_in_thread(let_go.wait)) for _ in range(50)]
    await asyncio.sleep(0)
    assert await run_in_thread(lambda: "done") == "done"
    let_go.set()
    assert await asyncio.gather(*hanging) == [True] * 50


async def test_a_thread_without_work_ends() -> None:
    alive = await run_in_thread(threading.current_thread)
    await asyncio.to_thread(alive.join, threads.IDLE + 30)
    assert not alive.is_alive()


async def test_work_is_not_lost_where_a_thread_is_about_to_end() -> None:
    before, threads.IDLE = threads.IDLE, 0.0005
    try:
        for number in range(200):
            assert await asyncio.wait_for(run_in_thread(lambda number=number: number), 30) == number
            await asyncio.sleep(0.0004 + number % 5 * 0.0001)
    finally:
        threads.IDLE = before


@pytest.mark.parametrize("times", [1, 2])
async def test_resource_acquired_for_a_cancelled_caller_is_released(times: int) -> None:
    begun, go_on, unmade = threading.Event(), threading.Event(), list[str]()

    def make() -> str:
        begun.set()
        go_on.wait(10)
        return "a folder"

    waiting = asyncio.create_task(acquire_in_thread(make, unmade.append))
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
    assert await acquire_in_thread(make, unmade.append) == "a folder"
    assert len(unmade) == 1


async def test_work_ends_before_its_caller_that_is_cancelled_before_a_thread_is_free() -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    let_go, done = threading.Event(), list[str]()
    occupied = asyncio.create_task(asyncio.to_thread(let_go.wait, 30))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(done_in_thread(lambda: done.append("removed")))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done == ["removed"]
    await occupied
    assert await done_in_thread(lambda: "a result") == "a result"
    with pytest.raises(ZeroDivisionError):
        await done_in_thread(lambda: 1 // 0)


async def test_error_in_the_thread_is_raised_to_the_waiting_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await acquire_in_thread(lambda: 1 // 0, print)


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

    await asyncio.gather(*(run_exclusively(work) for _ in range(8)))
    assert (most, running) == (1, 0)


async def test_the_next_work_on_a_large_text_waits_as_long_as_the_loop_was_late() -> None:
    ended = asyncio.get_running_loop().time
    busy = asyncio.create_task(run_exclusively(time.sleep, 0.05))
    ends = asyncio.create_task(run_exclusively(ended))
    await asyncio.sleep(0.02)
    time.sleep(0.2)  # noqa: ASYNC251 - the loop is held up while the first ends
    held_until = ended()
    await busy
    assert await ends - held_until > 0.1


async def test_threads_take_turns_sooner_while_such_work_is_done() -> None:
    before = sys.getswitchinterval()
    seen = await asyncio.gather(*(run_exclusively(sys.getswitchinterval) for _ in range(4)))
    with pytest.raises(ZeroDivisionError):
        await run_exclusively(lambda: 1 // 0)
    assert max(seen) < before
    assert sys.getswitchinterval() == before


class Busy:
    """A function that computes, and how many calls of it did so at the same time."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now, self.most, self.calls = seconds, 0, 0, 0
        self._lock = threading.Lock()

    def __call__(self) -> str:
        with self._lock:
            self.now, self.calls = self.now + 1, self.calls + 1
            self.most = max(self.most, self.now)
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        with self._lock:
            self.now -= 1
        return "computed"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the machine is busy, a call that computes may get next to nothing of a core for a tenth of a second."""
    monkeypatch.setattr(threads, "POLL_INTERVAL", 2.0)


@pytest.mark.usefixtures("patient")
async def test_calls_that_compute_take_turns() -> None:
    turns, busy = CallThrottle(), Busy(0.03)
    assert await asyncio.gather(*(turns.call(busy) for _ in range(24))) == ["computed"] * 24
    assert 1 <= busy.most <= TURNS


@pytest.mark.usefixtures("patient")
async def test_functions_take_turns_with_each_other() -> None:
    busy = Busy(0.03)
    await asyncio.gather(*(CallThrottle().call(busy) for _ in range(24)))
    assert busy.most <= TURNS


async def test_calls_that_wait_run_side_by_side() -> None:
    turns, all_of_them = CallThrottle(), threading.Barrier(4 * TURNS)
    waited = await asyncio.gather(*(turns.call(lambda: all_of_them.wait(60)) for _ in range(4 * TURNS)))
    assert sorted(waited) == list(range(4 * TURNS))


async def test_a_function_that_was_seen_to_wait_takes_no_turns() -> None:
    waits, busy = CallThrottle(), Busy(0.05)
    await waits.call(lambda: None)
    others = [asyncio.create_task(CallThrottle().call(busy)) for _ in range(3 * TURNS)]
    await asyncio.sleep(0)
    assert await waits.call(lambda: busy.calls) < 3 * TURNS
    await asyncio.gather(*others)


async def test_a_function_that_computes_no_more_takes_no_turns_after_a_while() -> None:
    turns, busy = CallThrottle(), Busy(0.05)
    await turns.call(busy)
    for _ in range(3):
        await turns.call(lambda: None)
    all_of_them = threading.Barrier(2 * TURNS)
    await asyncio.gather(*(turns.call(lambda: all_of_them.wait(60)) for _ in range(2 * TURNS)))


async def test_a_call_that_is_cancelled_leaves_its_turn_to_another_one() -> None:
    turns, let_go = CallThrottle(), threading.Event()
    hanging = [asyncio.create_task(turns.call(let_go.wait)) for _ in range(3 * TURNS)]
    await asyncio.sleep(0.01)
    for task in hanging:
        task.cancel()
    assert await asyncio.gather(*hanging, return_exceptions=True) != []
    assert await turns.call(lambda: "done") == "done"
    let_go.set()


async def test_what_a_call_raises_reaches_the_caller() -> None:
    turns = CallThrottle()
    for _ in range(2):  # in a turn, and without one
        with pytest.raises(ZeroDivisionError):
            await turns.call(lambda: 1 / 0)


FROZEN = """
import gc
from hermes_rl.threads import RARE, reduce_gc_pauses
gc.get_freeze_count = None  # it looks at each frozen object
thresholds = gc.get_threshold()
assert len(gc.get_objects()) > 1_000
with reduce_gc_pauses():
    assert gc.get_threshold() == RARE
    assert len(gc.get_objects()) < 100
assert gc.get_threshold() == thresholds
assert len(gc.get_objects()) < 100
"""


def test_run_freezes_the_program_and_restores_the_thresholds() -> None:
    subprocess.run([sys.executable, "-c", FROZEN], check=True, timeout=60)
