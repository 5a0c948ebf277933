"""Manage the runner's processes for user code: a call gets a free one, or a new fork of a warm one."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from hermes_rl.errors import HermesRLError, RewardFailure
from hermes_rl.plugins import Code, identity
from hermes_rl.threads import acquire_in_thread, done_in_thread, run_detached
from hermes_rl.user_code.environment import listed_variables
from hermes_rl.user_code.failures import EndedError, ForeignError, NotCarriedError
from hermes_rl.user_code.worker import Warm, Worker

log = logging.getLogger(__name__)
T = TypeVar("T")

FREE = max(4, 2 * len(os.sched_getaffinity(0)))
"""Maximum number of idle processes, and of calls of an event loop at a time above which one waits briefly before it
gets a further process.
"""
MOMENT = 0.02
"""Seconds of this wait if calls are long."""
SHORT, PATIENCE = 0.1, 0.25
"""Calls whose recent mean duration is below the first value are short; the second is the wait for the end of one. On a
busy host none may end for a moment, and starting a process costs as much as a hundred short calls.
"""


class ProcessPool:
    """All processes for user code of this runner, for all of its event loops."""

    def __init__(self) -> None:
        self._warm: Warm | None = None
        self._free: list[Worker] = []
        self.ended = 0
        """Number of calls that have ended."""
        self._took = 0.0
        """Mean seconds of a call, in which recent calls have more weight."""
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, _Slots] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def call(
        self,
        code: Code,
        arguments: Mapping[str, Any],
        converter: str,
        timeout: float,
        read: Callable[[Any], T] = identity,
    ) -> T:
        """Call code in a process and return its result, converted by `converter` in that process.

        Cancelling the caller ends the process.

        Args:
            code: a function, sync or async.
            arguments: arguments of the function, by name.
            converter: reference to a function that converts the return value to plain values.
            timeout: maximum seconds.
            read: converts the plain value in the runner; raises `WireError` if `converter` cannot have created it.

        Raises:
            ForeignError: the code raised.
            HermesRLError: it raised an `AgentFault`, or passed on an exception that the runner has sent.
            OvertimeError, EndedError: it timed out, its process ended, or it sent an invalid message.
            NotCarriedError: the arguments cannot be pickled.
        """
        async with self._slots_here():
            worker = await self._worker(code)
            stays, started_at = False, time.monotonic()
            try:
                returned = await worker.call(code, arguments, converter, timeout, read)
                stays = True
            except (ForeignError, HermesRLError, NotCarriedError):
                stays = True
                raise
            except EndedError as error:
                how = await done_in_thread(worker.close)
                raise type(error)(str(error) or how) from error
            finally:
                self._took += (time.monotonic() - started_at - self._took) / 8
                self.ended += 1
                self._leave(worker, stays=stays)
        return returned

    async def hold(self, *codes: Code, reused: bool = False) -> OwnProcess:
        """Return a process with this code for exclusive use; the caller closes it. `reused`: it may have been used
        before.
        """
        worker = await self._worker(*codes, fresh=not reused)
        return OwnProcess(worker, partial(self._leave, stays=True) if reused else None)

    def load(self, *codes: Code) -> Warm:
        """Return the warm process after it has loaded this code; blocks during the import."""
        with self._lock:
            if self._warm is None or not self._warm.alive:
                self._let_go()
                self._warm = Warm()
            elif self._warm.variables != listed_variables():  # the old one stays until its last fork has ended
                while self._free:
                    run_detached(partial(_close_worker, self._free.pop()))
                self._warm = Warm()
            warm = self._warm
        for code in codes:
            warm.load(code)
        return warm

    def prepare(self, codes: Sequence[Code]) -> None:
        """Load code in the background, so that the first call does not wait for it."""

        def load() -> None:
            try:
                self.load(*codes)
            except (OSError, RewardFailure) as error:
                log.info("the processes for rewards start with the first reward: %s", error)

        if codes:
            run_detached(load)

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        with self._lock:
            warm, self._warm = self._warm, None
            self._let_go()
        if warm is not None:
            warm.close()

    def _let_go(self) -> None:
        while self._free:
            self._free.pop().let_go()

    def _slots_here(self) -> _Slots:
        """Return the slots for calls on the running event loop."""
        loop = asyncio.get_running_loop()
        slots = self._slots.get(loop)
        if slots is None:
            slots = self._slots[loop] = _Slots(self)
        return slots

    async def _worker(self, *codes: Code, fresh: bool = False) -> Worker:
        """Return a process that has this code: a free one unless it has to be `fresh`, or a new one."""
        with self._lock:
            worker = None if fresh else self._find_free(*codes)
        if worker is None:
            worker = await acquire_in_thread(lambda: Worker(self.load(*codes)), Worker.close)
        return worker

    @property
    def patience(self) -> float:
        """Seconds for which a call waits for the end of another one before it gets a further process."""
        return PATIENCE if self._took < SHORT else MOMENT

    def _find_free(self, *codes: Code) -> Worker | None:
        """Return a free process that has this code, or None; processes without it, or ended ones, are removed."""
        while self._free:
            worker = self._free.pop()
            if worker.fits(*codes):
                return worker
            run_detached(partial(_close_worker, worker))
        return None

    def _leave(self, worker: Worker, *, stays: bool) -> None:
        """Keep a process for further calls, or end it."""
        with self._lock:
            stays = stays and len(self._free) < FREE and self._warm is worker.warm
            if stays:
                self._free.append(worker)
        if not stays:
            worker.end("was abandoned")
            run_detached(partial(_close_worker, worker))


class _Slots:
    """Slots for the calls of one event loop, as a context manager: `FREE` of them, and further ones for long calls.

    They are given in the order of the calls.
    """

    def __init__(self, pool: ProcessPool) -> None:
        self._pool, self._semaphore = pool, asyncio.Semaphore(FREE)
        self._further = self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        """Set while calls wait."""

    async def __aenter__(self) -> None:
        if not self._semaphore.locked():
            await self._semaphore.acquire()
            return
        self._waiting += 1
        if self._timer is None:
            self._look_later()
        try:
            await self._semaphore.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(self, *_: object) -> None:
        if self._further and not self._waiting:
            self._further -= 1
        else:
            self._semaphore.release()

    def _look_later(self) -> None:
        look = partial(self._give_slots, self._pool.ended)
        self._timer = asyncio.get_running_loop().call_later(self._pool.patience, look)

    def _give_slots(self, ended: int) -> None:
        """Give a slot to each call that waits if none has ended since: all are busy with long ones then."""
        self._timer = None
        if not self._waiting:
            return
        for _ in range(self._waiting if ended == self._pool.ended else 0):
            self._further += 1
            self._semaphore.release()
        self._look_later()


def _close_worker(worker: Worker) -> None:
    with suppress(RewardFailure):  # the warm process has ended, and with it all of its forks
        worker.close()


class OwnProcess:
    """A process for exclusive use: data that its calls leave in memory is available to the next one."""

    def __init__(self, worker: Worker, take_back: Callable[[Worker], None] | None = None) -> None:
        self._worker: Worker | None = worker
        self._take_back = take_back
        self._calling = asyncio.Lock()
        self.ended: str | None = None
        """Reason for its end, as a predicate; None while it exists."""

    async def call(
        self,
        code: Code,
        arguments: Mapping[str, Any],
        converter: str,
        timeout: float,
        read: Callable[[Any], T] = identity,
    ) -> T:
        """See `ProcessPool.call`; calls are sequential. After a call that ended the process, each call raises the
        cause.
        """
        async with self._calling:
            worker = self._worker
            if worker is None:
                raise EndedError(self.ended or "was closed")
            try:
                return await worker.call(code, arguments, converter, timeout, read)
            except NotCarriedError:
                raise
            except EndedError as error:
                self._worker = None
                how = str(error) or await done_in_thread(worker.close)
                self.ended = f"{how} in an earlier call"
                raise type(error)(how) from error
            except asyncio.CancelledError:
                self._worker, self.ended = None, "was ended in an earlier call, whose caller no longer waited"
                worker.end("was abandoned")
                run_detached(partial(_close_worker, worker))
                raise

    async def close(self) -> None:
        """End the process even if it is busy; an idle process that may be reused stays."""
        worker, self._worker = self._worker, None
        if worker is not None and self._take_back is not None and not self._calling.locked():
            self._take_back(worker)
        elif worker is not None:
            worker.end("was closed")
            async with self._calling:  # the call that this ends still holds the connection
                await done_in_thread(partial(_close_worker, worker))


POOL = ProcessPool()
"""Pool of this process: loaded code serves all of its runs."""
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.__init__)  # type: ignore[misc]  # the processes are the parent's
