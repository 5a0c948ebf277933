"""Connect threads and event loops: run blocking functions without blocking the loop, and call a loop from a thread.

No call waits for the thread of another one, and none of them keeps the program alive: the pool of the event loop has
few threads, and a function that hangs would block one of them permanently. An idle thread stays for a while, because
starting one costs more than most calls. The threads of an event loop's own pool do not keep a command alive either: see
`run_loop` and `end_process`.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import gc
import logging
import math
import os
import queue
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn, TypeVar

from hermes_rl.errors import UserError

T = TypeVar("T")
logger = logging.getLogger(__name__)


IDLE = 2.0
"""Seconds for which an idle thread stays."""
LEAVING = 5.0
"""Seconds for user code to end after it was cancelled."""
PATIENCE = 0.5
"""Seconds between two checks that the awaited loop is still running."""


class Waits:
    """Waits of threads for event loops that are cancelled together, such as those for one call of user code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[concurrent.futures.Future[Any]] | None = set()

    def add(self, future: concurrent.futures.Future[Any]) -> None:
        """Register a wait, which is cancelled as soon as all are cancelled."""
        with self._lock:
            if self._futures is not None:
                self._futures.add(future)
                future.add_done_callback(self._futures.discard)
                return
        future.cancel()

    def give_up(self) -> None:
        """Cancel all current and future waits."""
        with self._lock:
            futures, self._futures = self._futures, None
        for future in tuple(futures or ()):
            future.cancel()


WAITS: contextvars.ContextVar[Waits | None] = contextvars.ContextVar("waits", default=None)
"""Group of the waits of a context."""


def wait_for_loop(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    """Run `work` on a loop of another thread and wait for its result; the opposite of `run_in_thread`.

    Any event that ends the wait before the work has ended, such as Ctrl-C, cancels the work. Raises `LoopGoneError` if
    the loop has ended; a plain wait for its result would never end.
    """
    step: _Step | None = getattr(_thread_state, "step", None)
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
    except BaseException:  # also on Ctrl-C: the work would continue without a receiver
        future.cancel()
        raise
    return future.result()


async def end_tasks(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended, with any outcome."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def ended_within(tasks: Iterable[asyncio.Future[Any]], seconds: float) -> set[asyncio.Future[Any]]:
    """Cancel tasks of user code, which may suppress that, and wait for `seconds`; return those still running."""
    tasks = set(tasks)
    for task in tasks:
        task.cancel()
    if not tasks:
        return set()
    done, running = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved
    return running


async def settled(name: str, function: Callable[..., Awaitable[T]], *arguments: Any) -> asyncio.Future[T]:
    """Wait for a call of user code in a separate task, and return it; it may have been cancelled by its own code.

    `sys.exit` would end the event loop, and is a RuntimeError of the call. If the caller is cancelled, the call is too.
    One that suppresses that delays its caller for at most `LEAVING` seconds. `name` is the function in the warning.
    """

    async def called() -> T:
        try:
            return await function(*arguments)
        except (SystemExit, BaseExceptionGroup) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    call = asyncio.ensure_future(called())
    try:
        await asyncio.wait((call,))
    except asyncio.CancelledError:
        if await ended_within((call,), LEAVING):
            logger.warning(
                "abandoned %s, still running %g s after its cancellation: re-raise CancelledError in the code that "
                "catches it",
                name,
                LEAVING,
            )
        raise
    return call


class OfThisProcess:
    """Base of objects that belong to an event loop or to processes: they cannot be copied or pickled."""

    def __reduce__(self) -> Any:
        raise UserError(f"{type(self).__name__} cannot be copied or pickled: make one in each process")


class LoopGoneError(UserError):
    """The requested object belongs to a run that has ended."""

    def __init__(self) -> None:
        super().__init__("the run has ended, and its sandboxes and servers with it")


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as `asyncio.run` does, which would also wait for threads that block; see `end_process`."""

    async def with_own_pool() -> T:
        try:
            return await work
        finally:  # what is awaited has ended, so that only abandoned calls still run in the threads of the old pool
            asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor())

    return asyncio.run(with_own_pool())


def end_process(status: int) -> NoReturn:
    """End the process after its exit functions, without waiting for threads that block, or for a full output."""
    for stop_signal in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop_signal, lambda *_: os._exit(status))  # an exit function may block too
    atexit._run_exitfuncs()
    os._exit(status)


async def run_in_thread(function: Callable[[], T]) -> T:
    """Return the result of `function`. If the caller is cancelled, the thread continues, and its result is dropped."""
    return await start_in_thread(function)


def start_in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Start `function` in a thread. No task holds its result: a task would let SystemExit out of the event loop."""
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
            failure = _as_future_error(error)
            deliver = lambda: future.set_exception(failure)  # noqa: E731
        else:
            deliver = lambda: future.set_result(result)  # noqa: E731
        try:
            loop.call_soon_threadsafe(settle, deliver)
        except RuntimeError:
            return  # the loop was closed: no caller waits any more

    run_detached(work)
    return future


_Jobs = queue.SimpleQueue[Callable[[], None]]
_idle: list[_Jobs] = []
"""Queues of idle threads, the most recent one first. Its operations are atomic, so it needs no lock."""
# the threads do not exist in a fork, so work passed to them would never end
os.register_at_fork(after_in_child=_idle.clear)


def run_detached(work: Callable[[], None]) -> None:
    """Run `work` in a background thread. `work` must not raise."""
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_work_on, args=(jobs,), name="hermes-rl-tool", daemon=True).start()
    jobs.put(work)


def _work_on(jobs: _Jobs) -> None:
    work: Callable[[], None] | None = jobs.get()  # not a thread argument, so that the first job is freed when it ends
    while work is not None:
        work()
        work = None  # release the call's objects while the thread waits
        _idle.append(jobs)
        work = _next_job(jobs)


def _next_job(jobs: _Jobs) -> Callable[[], None] | None:
    try:
        return jobs.get(timeout=IDLE)
    except queue.Empty:
        pass
    try:
        _idle.remove(jobs)
    except ValueError:
        return jobs.get()  # another thread has just claimed this one; its job arrives next
    return None


def _as_future_error(error: BaseException) -> BaseException:
    """Return the exception in a form that a future can hold: StopIteration would end the waiting coroutine."""
    if isinstance(error, StopIteration):
        return RuntimeError(f"the function raised StopIteration: {error}")
    return error


class PerLoopSemaphore:
    """Semaphores with `count` slots, one for each event loop, since a semaphore belongs to one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    def get_semaphore(self) -> asyncio.Semaphore:
        """Return the semaphore of the running loop; use it with ``async with``."""
        loop = asyncio.get_running_loop()
        semaphore = self._by_loop.get(loop)
        if semaphore is None:
            semaphore = self._by_loop[loop] = asyncio.Semaphore(self._count)
        return semaphore


_one = PerLoopSemaphore(1)
SWITCH_INTERVAL = 0.0002
"""Switch interval of threads in seconds during work on a large text; Python's default is 5 ms."""
_brisk_lock = threading.Lock()
_brisk: list[float] = []
"""Switch intervals of Python from before each such work in progress; the first is the program's setting."""


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Let threads switch more often: the event loop waits for its turn after each thread that wants one."""
    with _brisk_lock:
        _brisk.append(sys.getswitchinterval())
        sys.setswitchinterval(min(SWITCH_INTERVAL, _brisk[0]))
    try:
        yield
    finally:
        with _brisk_lock:
            first = _brisk[0]
            _brisk.pop()
            if not _brisk:
                sys.setswitchinterval(first)


async def acquire_in_thread(make: Callable[[], T], unmake: Callable[[T], object]) -> T:
    """Return the result of `make`, run in a thread; if the caller is cancelled meanwhile, `unmake` is called on it.

    The thread cannot be stopped, and no other code knows the created object: a directory, a descriptor.
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
    """Return the result of `work`, which runs in a thread to its end even if the caller is cancelled.

    `asyncio.to_thread` would drop it, and resources that it should close or remove would remain.
    """
    return await acquire_in_thread(work, lambda _: None)


async def run_exclusively(work: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """Run work on a large text in a thread, one job at a time per event loop.

    Such work rarely releases the interpreter. Several threads of it would be no faster than one, and the event loop,
    which waits for its turn after all of them, would be late by tenths of a second. If the loop learns late that the
    work has ended, it is busy, and the next such work starts later by the same amount.
    """
    loop, turn, ended = asyncio.get_running_loop(), _one.get_semaphore(), math.inf

    def timed() -> T:
        nonlocal ended
        try:
            return work(*arguments, **more)
        finally:
            ended = loop.time()

    await turn.acquire()
    try:
        with _short_switch_interval():
            return await asyncio.to_thread(timed)
    finally:
        loop.call_later(max(0.0, loop.time() - ended), turn.release)


COMPUTES = 0.02
"""Seconds of computing in a call from which the calls of a function take turns."""
TURNS = 4
"""Maximum number of concurrent computing calls, of all functions together."""
POLL_INTERVAL = 0.1
"""Seconds between two checks if a call with a turn computes."""
COMPUTING = 0.02
"""Minimum fraction of that time that a computing call uses, however many others share the cores."""

_turns = PerLoopSemaphore(TURNS)


class CallThrottle:
    """Limit concurrent calls of one user function in threads if it computes.

    Threads that compute in Python compete with the event loop for the interpreter; dozens of them would delay it by
    seconds. The first call shows if a function computes, or waits for a sandbox or a service.
    """

    def __init__(self) -> None:
        self._seconds: float | None = None
        """Seconds of computing in the last calls; None before one has ended."""

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of `function`, like `run_in_thread`. A cancelled caller loses its turn."""
        thread = _Clock()
        run = partial(self._run_timed, function, thread)
        running: asyncio.Future[T] | None = None
        if self._is_computing:
            async with _turns.get_semaphore():
                if self._is_computing:  # a call that has ended in the meantime may have shown that it only waits
                    running = start_in_thread(run)
                    with _short_switch_interval():
                        await _until_it_waits(running, thread)
        return await (running or start_in_thread(run))

    @property
    def _is_computing(self) -> bool:
        return self._seconds is None or self._seconds >= COMPUTES

    def _run_timed(self, function: Callable[[], T], thread: _Clock) -> T:
        thread.start()
        try:
            return function()
        finally:
            self._seconds = max(thread.seconds(), (self._seconds or 0.0) / 2)


class _Clock:
    """Computing time of one call; any thread may read it."""

    def __init__(self) -> None:
        self._id: int | None = None
        self._started_at = 0.0

    def start(self) -> None:
        """Start the clock in the thread that computes."""
        self._started_at = time.thread_time()
        self._id = time.pthread_getcpuclockid(threading.get_ident())

    def seconds(self) -> float:
        """Return the computing seconds; 0 before the start."""
        return 0.0 if self._id is None else time.clock_gettime(self._id) - self._started_at


async def _until_it_waits(running: asyncio.Future[Any], thread: _Clock) -> None:
    """Return when the call has ended, or has hardly computed for a while: then another one may have its turn."""
    used = -POLL_INTERVAL  # it may not have started at the first check
    try:
        while not (await asyncio.wait([running], timeout=POLL_INTERVAL))[0]:
            before, used = used, thread.seconds()
            if used - before < COMPUTING * POLL_INTERVAL:
                return
    except asyncio.CancelledError:
        running.cancel()
        raise


# ------------------------------------------------- A coroutine on the loop that may wait for the loop without await
# User code awaits on the run's loop, because objects created there (a semaphore, a session) work nowhere else. A call
# without await within it requests a result from the same loop, which would never arrive. So each step of the coroutine,
# from one await to the next, runs on the stack of another thread, while the loop's thread is blocked: the two never run
# at once. A call without await lets the loop run until the result is available.


class OverlongError(Exception):
    """A coroutine has blocked the loop, or has not ended, for longer than allowed; it is abandoned."""


_Word = tuple[str, Any]
"""Message from the thread of a step to the loop's thread: `awaits` or `waits` for something, `returned` or `raised`."""
_thread_state = threading.local()
"""`step`, if this thread runs one."""
stepping: dict[int, int] = {}
"""Threads that currently act for event loops, by the thread of the loop."""


class _Step:
    """The part of a coroutine from one await to the next."""

    def __init__(self, advance: Callable[[Any], Any], value: Any, context: contextvars.Context) -> None:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        self.messages, self.answers = queue.SimpleQueue[_Word](), queue.SimpleQueue[_Word]()
        self._advance, self._value, self._context = advance, value, context
        self._loop_thread, self._hooks = threading.get_ident(), sys.get_asyncgen_hooks()
        self._is_abandoned = False

    def start(self, longest: float) -> _Word:
        """Start it in a thread, and return its first message."""
        run_detached(self._run)
        return self._next_word(longest)

    def answer(self, kind: str, value: Any, longest: float) -> _Word:
        """Pass the result of a call to the step, and return the next message of the step."""
        self.answers.put((kind, value))
        return self._next_word(longest)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, for which the loop runs meanwhile; called in the thread of the step."""
        if self._is_abandoned:
            work.close()
            raise OverlongError
        stepping.pop(self._loop_thread, None)
        self.messages.put(("waits", work))
        kind, value = self.answers.get()
        stepping[self._loop_thread] = threading.get_ident()
        if kind == "raised":
            raise value
        return value  # type: ignore[no-any-return]

    def _next_word(self, longest: float) -> _Word:
        try:
            return self.messages.get(timeout=longest)
        except queue.Empty:
            self._is_abandoned = True
            stepping.pop(self._loop_thread, None)
            raise OverlongError(f"has held the event loop for {longest:g} s") from None

    def _run(self) -> None:
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(*self._hooks)
        asyncio._set_running_loop(self.loop)
        entered = asyncio.current_task() is None and self.task is not None  # newer Pythons store the task per thread
        if entered:
            asyncio.tasks._enter_task(self.loop, self.task)  # type: ignore[arg-type]
        _thread_state.step, stepping[self._loop_thread] = self, threading.get_ident()
        try:
            word: _Word = ("awaits", self._context.run(self._advance, self._value))
        except StopIteration as end:
            word = ("returned", end.value)
        except BaseException as error:  # noqa: BLE001 - carried to the loop, whatever it is
            word = ("raised", error)
        if stepping.get(self._loop_thread) == threading.get_ident():
            del stepping[self._loop_thread]
        del _thread_state.step
        if entered:
            asyncio.tasks._leave_task(self.loop, self.task)  # type: ignore[arg-type]
        asyncio._set_running_loop(None)
        sys.set_asyncgen_hooks(*before)
        self.messages.put(word)


def may_wait_for(loop: asyncio.AbstractEventLoop) -> bool:
    """Return True if `wait_for_loop` works here: not on the loop's thread, except in steps of `run_interleaved`."""
    step: _Step | None = getattr(_thread_state, "step", None)
    return asyncio._get_running_loop() is not loop or (step is not None and step.loop is loop)


@types.coroutine
def run_interleaved(work: Coroutine[Any, Any, T], seconds: float, longest: float) -> Generator[Any, Any, T]:
    """Await `work` on the running loop; `work` may also wait for this loop without await (`wait_for_loop`).

    After `seconds` it must end when the caller cancels it.

    Raises:
        OverlongError: it did not end, or one of its steps blocked the loop for more than `longest` seconds.
    """
    end, context = time.monotonic() + seconds, contextvars.copy_context()
    advance, sent = work.send, None
    while True:
        step = _Step(advance, sent, context)
        kind, value = step.start(longest)
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
            raise _as_future_error(value)
        if time.monotonic() > end:
            raise OverlongError(f"did not end within {seconds:g} s, nor when it was cancelled")
        advance, sent = work.send, None
        try:
            yield value
        except GeneratorExit:  # the loop no longer exists
            work.close()
            raise
        except BaseException as error:  # noqa: BLE001 - raised where it awaits
            advance, sent = work.throw, error


RARE = (10_000, 5, 200)
"""Thresholds of the three generations. Scanning a young object takes a microsecond, and the objects of a turn are
freed within this number of new ones. A full collection happens every ten million new objects, about ten thousand
rollouts.
"""


@contextlib.contextmanager
def reduce_gc_pauses() -> Iterator[None]:
    """Prevent full collections, which find almost nothing here, from stopping the event loop within the block.

    A full collection scans every object. With thousands of rollouts in flight that takes half a second, and Python's
    own thresholds trigger it each time that a quarter more have started. Existing objects (the program itself) are
    never scanned again, even afterwards: Python cannot report if a caller had frozen objects without scanning each of
    them.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
