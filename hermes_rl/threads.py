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
import math
import os
import queue
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from hermes_rl.errors import UserError

T = TypeVar("T")


IDLE = 2.0
"""Seconds that a thread stays without work."""
LEAVING = 5.0
"""Seconds that user code has to end after it was cancelled."""
PATIENCE = 0.5
"""Seconds between two looks at whether the loop that is to answer still runs."""


class Waits:
    """Waits of threads for event loops that are given up together, such as those for one call of user code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[concurrent.futures.Future[Any]] | None = set()

    def add(self, future: concurrent.futures.Future[Any]) -> None:
        """Cancel this wait as soon as all are given up."""
        with self._lock:
            if self._futures is not None:
                self._futures.add(future)
                future.add_done_callback(self._futures.discard)
                return
        future.cancel()

    def give_up(self) -> None:
        """Cancel what is waited for, now and from now on."""
        with self._lock:
            futures, self._futures = self._futures, None
        for future in tuple(futures or ()):
            future.cancel()


WAITS: contextvars.ContextVar[Waits | None] = contextvars.ContextVar("waits", default=None)
"""To which the waits of a context belong."""


def wait_for_loop(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run `work` on a loop of another thread and wait for its result; the opposite of `in_thread`.

    Whatever ends the wait before the work has ended, such as Ctrl-C, cancels the work. Raises `LoopGoneError` where the
    loop has ended; a bare wait for its answer would never end.
    """
    step: _Step | None = getattr(_here, "step", None)
    if step is not None and step.loop is loop:
        return step.wait(work)
    future = asyncio.run_coroutine_threadsafe(work, loop)
    if (waits := WAITS.get()) is not None:
        waits.add(future)
    try:
        while not future.done():
            concurrent.futures.wait([future], timeout=PATIENCE)
            if not future.done() and not loop.is_running():
                raise LoopGoneError
    except BaseException:  # Ctrl-C too: the work would go on for nobody
        future.cancel()
        raise
    return future.result()


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended, whatever they end with."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ended_within(tasks: Iterable[asyncio.Future[Any]], seconds: float) -> set[asyncio.Future[Any]]:
    """Cancel tasks of user code, which may swallow that, and wait so long; return those that go on."""
    tasks = set(tasks)
    for task in tasks:
        task.cancel()
    if not tasks:
        return set()
    done, running = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        if not task.cancelled():
            task.exception()  # nobody else looks at it
    return running


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

    hand_over(work)
    return future


_Jobs = queue.SimpleQueue[Callable[[], None]]
_idle: list[_Jobs] = []
"""Where threads without work wait for some, the last one first. Its steps are atomic, so it needs no lock."""
os.register_at_fork(after_in_child=_idle.clear)  # the threads stay behind, and work handed to them would never end


def hand_over(work: Callable[[], None]) -> None:
    """Let a thread do this; it must not raise, and nobody waits for it."""
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_work_on, args=(jobs,), name="hermes-rl-tool", daemon=True).start()
    jobs.put(work)


def _work_on(jobs: _Jobs) -> None:
    work: Callable[[], None] | None = jobs.get()  # as an argument of the thread it would be kept as long as that
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
        loop = asyncio.get_running_loop()
        semaphore = self._by_loop.get(loop)
        if semaphore is None:
            semaphore = self._by_loop[loop] = asyncio.Semaphore(self._count)
        return semaphore


_one = PerLoopSemaphore(1)
BRISK = 0.0002
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

    def end(future: asyncio.Future[T]) -> None:
        if future.exception() is None:
            unmake(future.result())

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


async def one_at_a_time(work: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """Do work on a large text in a thread, while no other such work is done.

    Such work hardly lets go of the interpreter. Several threads of it would be no faster than one, and the event loop,
    which then waits for its turn behind all of them, would be late by tenths of a second. Where the loop hears late
    that the work has ended, it has much to do, and the next such work begins later by as much.
    """
    loop, turn, ended = asyncio.get_running_loop(), _one.here(), math.inf

    def timed() -> T:
        nonlocal ended
        try:
            return work(*arguments, **more)
        finally:
            ended = loop.time()

    await turn.acquire()
    try:
        with _briskly():
            return await asyncio.to_thread(timed)
    finally:
        loop.call_later(max(0.0, loop.time() - ended), turn.release)


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


# ------------------------------------------------- A coroutine on the loop that may wait for the loop without await
# Code of a user awaits on the loop of the run, since what it made there (a semaphore, a session) works nowhere else. In
# the middle of it a call without await asks that very loop for an answer, which could never come there.
# So each step of the coroutine, from one await to the next, has the stack of a thread, while the loop's thread stands
# still: the two never run at once. A call without await gives the loop its turn back until it is answered.


class OverlongError(Exception):
    """A coroutine has held the loop, or has not ended, for longer than it may; it is left where it is."""


_Word = tuple[str, Any]
"""What the thread of a step says to that of the loop: it `awaits` or `waits` for something, `returned` or `raised`."""
_here = threading.local()
"""`step`, where this thread runs one."""
stepping: dict[int, int] = {}
"""Threads that stand in for those of event loops at this moment, by the thread of the loop."""


class _Step:
    """What a coroutine does from one await to the next."""

    def __init__(self, advance: Callable[[Any], Any], value: Any, context: contextvars.Context) -> None:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        self.words, self.answers = queue.SimpleQueue[_Word](), queue.SimpleQueue[_Word]()
        self._advance, self._value, self._context = advance, value, context
        self._loop_thread, self._hooks = threading.get_ident(), sys.get_asyncgen_hooks()
        self._left = False

    def begin(self, longest: float) -> _Word:
        """Begin it in a thread, and return its first word."""
        hand_over(self._run)
        return self._word(longest)

    def answer(self, kind: str, value: Any, longest: float) -> _Word:
        """Answer its call without await, and return its next word."""
        self.answers.put((kind, value))
        return self._word(longest)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, for which the loop has its turn meanwhile; called in the thread of the step."""
        if self._left:
            work.close()
            raise OverlongError
        stepping.pop(self._loop_thread, None)
        self.words.put(("waits", work))
        kind, value = self.answers.get()
        stepping[self._loop_thread] = threading.get_ident()
        if kind == "raised":
            raise value
        return value  # type: ignore[no-any-return]

    def _word(self, longest: float) -> _Word:
        try:
            return self.words.get(timeout=longest)
        except queue.Empty:
            self._left = True
            stepping.pop(self._loop_thread, None)
            raise OverlongError(f"has held the event loop for {longest:g} s") from None

    def _run(self) -> None:
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(*self._hooks)
        asyncio._set_running_loop(self.loop)
        entered = asyncio.current_task() is None and self.task is not None  # newer Pythons ask the thread for its task
        if entered:
            asyncio.tasks._enter_task(self.loop, self.task)  # type: ignore[arg-type]
        _here.step, stepping[self._loop_thread] = self, threading.get_ident()
        try:
            word: _Word = ("awaits", self._context.run(self._advance, self._value))
        except StopIteration as end:
            word = ("returned", end.value)
        except BaseException as error:  # noqa: BLE001 - carried to the loop, whatever it is
            word = ("raised", error)
        if stepping.get(self._loop_thread) == threading.get_ident():
            del stepping[self._loop_thread]
        del _here.step
        if entered:
            asyncio.tasks._leave_task(self.loop, self.task)  # type: ignore[arg-type]
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(*before)
        self.words.put(word)


def may_wait_for(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether `wait_for_loop` works here: not on the thread of the loop, but for steps of `in_steps`."""
    step: _Step | None = getattr(_here, "step", None)
    return asyncio._get_running_loop() is not loop or (step is not None and step.loop is loop)


@types.coroutine
def in_steps(work: Coroutine[Any, Any, T], seconds: float, longest: float) -> Generator[Any, Any, T]:
    """Await `work` on the running loop, where it may also wait for this loop without await (`wait_for_loop`).

    Once it has taken `seconds` it has to end when it is cancelled, which is the caller's to do. Raises `OverlongError`
    where it did not, or one of its steps has held the loop for more than `longest` seconds.
    """
    end, context = time.monotonic() + seconds, contextvars.copy_context()
    advance, sent = work.send, None
    while True:
        step = _Step(advance, sent, context)
        kind, value = step.begin(longest)
        while kind == "waits":
            try:
                answer = yield from value.__await__()
            except BaseException as error:  # noqa: BLE001 - raised where it waits
                kind, value = step.answer("raised", error, longest)
            else:
                kind, value = step.answer("returned", answer, longest)
        if kind == "returned":
            return value  # type: ignore[no-any-return]
        if kind == "raised":
            raise _carried(value)
        if time.monotonic() > end:
            raise OverlongError(f"did not end within {seconds:g} s, nor when it was cancelled")
        advance, sent = work.send, None
        try:
            yield value
        except GeneratorExit:  # there is no loop any more
            work.close()
            raise
        except BaseException as error:  # noqa: BLE001 - raised where it awaits
            advance, sent = work.throw, error


RARE = (10_000, 5, 200)
"""Thresholds of the three generations. To look at a young object takes a microsecond, and those of a turn are gone by
this number of new ones. All objects are looked at once in ten million new ones, which is some ten thousand rollouts."""


@contextlib.contextmanager
def rare_full_collections() -> Iterator[None]:
    """Within it the event loop is not stopped by full collections, which find next to nothing here.

    Such a one looks at every object that there is. With thousands of rollouts in flight that takes half a second, and
    Python's own thresholds ask for it each time that a quarter more have begun. What is there already (the program
    itself) is never looked at again, also afterwards: Python cannot say whether a caller had frozen objects without
    looking at each of them.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
