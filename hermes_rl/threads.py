"""Between threads and event loops: a function that blocks, run without holding up the loop, and the way back.

No call waits for the thread of another one, and none of them keeps the program alive: the pool of the event loop has
few threads, and a function that hangs would take one of them from everybody for good. A thread that has nothing left to
do stays for a while, since to begin one costs more than most calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import gc
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, TypeVar

from hermes_rl.errors import UserError

T = TypeVar("T")


IDLE = 2.0
"""Seconds that a thread stays without work."""
PATIENCE = 0.5
"""Seconds between two looks at whether the loop that is to answer still runs."""


def wait_for_loop(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run `work` on a loop of another thread and wait for its result; the opposite of `in_thread`.

    Whatever ends the wait before the work has ended, such as Ctrl-C, cancels the work.

    Raises:
        LoopGoneError: the loop has ended; a bare wait for its answer would never end.
    """
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        while not future.done():
            concurrent.futures.wait([future], timeout=PATIENCE)
            if not future.done() and not loop.is_running():
                raise LoopGoneError
    except BaseException:  # Ctrl-C too: the work would go on for nobody
        future.cancel()
        raise
    return future.result()


class LoopGoneError(UserError):
    """What was asked for belongs to a run that has ended."""

    def __init__(self) -> None:
        super().__init__("the run has ended, and its sandboxes and servers with it")


async def in_thread(function: Callable[[], T]) -> T:
    """Return the result of `function`. When the caller is cancelled the thread runs on, and its result is dropped."""
    return await _begun(function)


def _begun(function: Callable[[], T]) -> asyncio.Future[T]:
    """Begin `function` in a thread. No task, which would let SystemExit out of the event loop, holds its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(deliver: Callable[[], None]) -> None:
        if not future.done():
            deliver()

    def work() -> None:
        try:
            result = context.run(function)
        except BaseException as error:  # noqa: BLE001 - carried to the caller, whatever it is
            failure = _carried(error)
            deliver = lambda: future.set_exception(failure)  # noqa: E731
        else:
            deliver = lambda: future.set_result(result)  # noqa: E731
        try:
            loop.call_soon_threadsafe(settle, deliver)
        except RuntimeError:
            return  # the loop was closed: nobody waits any more

    _hand_over(work)
    return future


_Jobs = queue.SimpleQueue[Callable[[], None]]
_idle: list[_Jobs] = []
"""Where threads without work wait for some, the last one first. Its steps are atomic, so it needs no lock."""
os.register_at_fork(after_in_child=_idle.clear)  # the threads stay behind, and work handed to them would never end


def _hand_over(work: Callable[[], None]) -> None:
    try:
        _idle.pop().put(work)
    except IndexError:
        threading.Thread(target=_work_on, args=(work,), name="hermes-rl-tool", daemon=True).start()


def _work_on(work: Callable[[], None] | None) -> None:
    jobs: _Jobs = queue.SimpleQueue()
    while work is not None:
        work()
        work = None  # what the call held is free while the thread waits
        _idle.append(jobs)
        work = _next(jobs)


def _next(jobs: _Jobs) -> Callable[[], None] | None:
    try:
        return jobs.get(timeout=IDLE)
    except queue.Empty:
        pass
    try:
        _idle.remove(jobs)
    except ValueError:
        return jobs.get()  # somebody took it from the list in the same moment, and is about to hand work over
    return None


def _carried(error: BaseException) -> BaseException:
    """Return the exception as a future can hold it: StopIteration would end the coroutine that waits."""
    if isinstance(error, StopIteration):
        return RuntimeError(f"the function raised StopIteration: {error}")
    return error


class PerLoopSemaphore:
    """So many at once on each event loop, since a semaphore belongs to one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def here(self) -> asyncio.Semaphore:
        """Those of the running loop; use it with ``async with``."""
        return self._by_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._count))


_one = PerLoopSemaphore(1)
BRISK = 0.001
"""Seconds after which a thread lets go of the interpreter while work on a large text is done; Python's own are 5 ms."""
_brisk_lock = threading.Lock()
_brisk: list[float] = []
"""Python's interval before each such work that is being done, the first one's being that of the program."""


@contextlib.contextmanager
def _briskly() -> Iterator[None]:
    """Let threads take turns sooner: the event loop waits for a turn behind each thread that wants one."""
    with _brisk_lock:
        _brisk.append(sys.getswitchinterval())
        sys.setswitchinterval(min(BRISK, _brisk[0]))
    try:
        yield
    finally:
        with _brisk_lock:
            first = _brisk[0]
            _brisk.pop()
            if not _brisk:
                sys.setswitchinterval(first)


async def made_in_thread(make: Callable[[], T], unmake: Callable[[T], object]) -> T:
    """Return what `make` makes in a thread; where the caller is cancelled meanwhile, it is unmade once it is there.

    The thread cannot be stopped, and nobody else knows what it has made: a folder, a descriptor.
    """
    making = asyncio.get_running_loop().run_in_executor(None, make)

    def end(made: asyncio.Future[T]) -> None:
        if made.exception() is None:
            unmake(made.result())

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(end)
        await asyncio.wait([making])
        raise


async def done_in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, which is done in a thread also where the caller is cancelled before it has begun.

    `asyncio.to_thread` then drops it, and what it was to close or to remove is left.
    """
    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, work))


async def one_at_a_time(work: Callable[..., T], *given: Any, **more: Any) -> T:
    """Do work on a large text in a thread, while no other such work is done.

    Such work hardly lets go of the interpreter. Several threads of it would be no faster than one, and the event loop,
    which then waits for its turn behind all of them, would be late by tenths of a second.
    """
    async with _one.here():
        with _briskly():
            return await asyncio.to_thread(work, *given, **more)


COMPUTES = 0.02
"""Seconds of computing in a call from which on the calls of a function take turns."""
TURNS = 4
"""Calls that compute at the same time, of all functions together."""
GLANCE = 0.1
"""Seconds between two looks at whether a call that has a turn computes."""
COMPUTING = 0.02
"""Share of that time which a call that computes uses at least, however many others it shares the cores with."""

_turns = PerLoopSemaphore(TURNS)


class Turns:
    """The calls of one function of somebody else's, in threads: few at a time where it computes, else all at once.

    A thread that computes in Python holds the interpreter, and the event loop waits for its turn behind each of them:
    with some dozens it would be late by seconds. Whether a function computes, or waits for a sandbox or a service, is
    known once a call has ended.
    """

    def __init__(self) -> None:
        self._seconds: float | None = None
        """Of computing in the last calls; None before one has ended."""

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, like `in_thread`; a caller that is cancelled waits for no turn any more."""
        thread = _Clock()
        run = partial(self._timed, function, thread)
        running: asyncio.Future[T] | None = None
        if self._computes:
            async with _turns.here():
                if self._computes:  # a call that has ended in the meantime may have shown that it only waits
                    running = _begun(run)
                    with _briskly():
                        await _until_it_waits(running, thread)
        return await (running or _begun(run))

    @property
    def _computes(self) -> bool:
        return self._seconds is None or self._seconds >= COMPUTES

    def _timed(self, function: Callable[[], T], thread: _Clock) -> T:
        thread.begin()
        try:
            return function()
        finally:
            self._seconds = max(thread.seconds(), (self._seconds or 0.0) / 2)


class _Clock:
    """How long one call has computed; any thread may ask."""

    def __init__(self) -> None:
        self._id: int | None = None
        self._began = 0.0

    def begin(self) -> None:
        """Begin in the thread that computes."""
        self._began = time.thread_time()
        self._id = time.pthread_getcpuclockid(threading.get_ident())

    def seconds(self) -> float:
        """Return 0 before it has begun."""
        return 0.0 if self._id is None else time.clock_gettime(self._id) - self._began


async def _until_it_waits(running: asyncio.Future[Any], thread: _Clock) -> None:
    """Return when it has ended, or has hardly computed for a while: then another one may have its turn."""
    used = -GLANCE  # it may not have begun at the first look
    try:
        while not (await asyncio.wait([running], timeout=GLANCE))[0]:
            before, used = used, thread.seconds()
            if used - before < COMPUTING * GLANCE:
                return
    except asyncio.CancelledError:
        running.cancel()
        raise


RARE = (2_000, 5, 1_000)
"""Thresholds of the three generations. Young garbage is found as ever; all objects are looked at once in ten million
new ones, which is some ten thousand rollouts."""


@contextlib.contextmanager
def rare_full_collections() -> Iterator[None]:
    """Within it the event loop is not stopped by full collections, which find next to nothing here.

    Such a one looks at every object that there is. With thousands of rollouts in flight that takes half a second, and
    Python's own thresholds ask for it each time that a quarter more have begun. What is there already (the program
    itself) is never looked at.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
