"""Manage the runner's processes for user code: a call gets a free one, or a new fork of a warm one."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from hermes_rl.errors import HermesRLError, RewardFailure
from hermes_rl.plugins import Code, identity
from hermes_rl.threads import acquire_in_thread, done_in_thread, run_detached
from hermes_rl.user_code.environment import listed_variables
from hermes_rl.user_code.failures import EndedError, ForeignError, NotCarriedError
from hermes_rl.user_code.worker import Warm, Worker

log = logging.getLogger(__name__)
T = TypeVar("T")

FREE = max(4, 2 * len(os.sched_getaffinity(0)))
"""Maximum number of idle processes, and of busy ones above which a call waits briefly for one before another is
started.
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
        self._busy = self._ended = 0
        self._took = 0.0
        """Mean seconds of a call, in which recent calls have more weight."""
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()

    async def call(
        self,
        code: Code,
        arguments: Mapping[str, Any],
        plain: str,
        timeout: float,
        read: Callable[[Any], T] = identity,
    ) -> T:
        """Call code in a process and return its result, converted by `plain` in that process.

        Cancelling the caller ends the process.

        Args:
            code: a function, sync or async.
            arguments: arguments of the function, by name.
            plain: reference to a function that converts the return value to plain values.
            timeout: maximum seconds.
            read: converts the plain value in the runner; raises `WireError` if `plain` cannot have created it.

        Raises:
            ForeignError: the code raised.
            HermesRLError: it raised an `AgentFault`, or passed on an exception that the runner has sent.
            OvertimeError, EndedError: it timed out, its process ended, or it sent an invalid message.
            NotCarriedError: the arguments cannot be pickled.
        """
        worker = await self._worker(code)
        stays, began = False, time.monotonic()
        try:
            returned = await worker.call(code, arguments, plain, timeout, read)
            stays = True
        except (ForeignError, HermesRLError, NotCarriedError):
            stays = True
            raise
        except EndedError as error:
            how = await done_in_thread(worker.close)
            raise type(error)(str(error) or how) from error
        finally:
            self._took += (time.monotonic() - began - self._took) / 8
            self._leave(worker, stays=stays)
        return returned

    async def hold(self, *codes: Code, reused: bool = False) -> OwnProcess:
        """Return a process with this code for exclusive use; the caller closes it. `reused`: it may have been used
        before.
        """
        worker = None
        if reused:
            with self._lock:
                worker = self._fit(*codes)
        if worker is None:
            worker = await acquire_in_thread(partial(self._begin, *codes), Worker.close)
        return OwnProcess(worker, self._take_back if reused else None)

    def _take_back(self, worker: Worker) -> None:
        """Put an exclusively used process back into the pool."""
        with self._lock:
            self._busy += 1
        self._pass_on(worker)

    def load(self, *codes: Code) -> Warm:
        """Return the warm process after it has loaded this code; blocks during the import."""
        with self._lock:
            if self._warm is None or not self._warm.alive:
                self._let_go()
                self._warm = Warm()
            elif self._warm.listed != listed_variables():  # the old one stays until its last fork has ended
                self._bury_free()
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
                log.info("the processes for rewards begin with the first one: %s", error)

        if codes:
            run_detached(load)

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        with self._lock:
            warm, self._warm = self._warm, None
            self._let_go()
        if warm is not None:
            warm.close()

    def _bury_free(self) -> None:
        while self._free:
            run_detached(partial(_reap, self._free.pop()))

    def _let_go(self) -> None:
        while self._free:
            self._free.pop().let_go()

    async def _worker(self, code: Code) -> Worker:
        """Return a process that has this code: a free one, or a new one if none becomes free."""
        waiting = None
        with self._lock:
            worker = self._fit(code)
            if worker is None and self._busy >= FREE:
                waiting = _Waiting(code)
                self._waiting.append(waiting)
            else:
                self._busy += 1
        if waiting is not None:
            worker = await self._turn(waiting)
        try:
            return worker if worker is not None else await acquire_in_thread(partial(self._begin, code), Worker.close)
        except BaseException:  # also on cancellation: a slot that is not returned is lost permanently
            self._pass_on(None)
            raise

    def _begin(self, *codes: Code) -> Worker:
        return Worker(self.load(*codes))

    async def _turn(self, waiting: _Waiting) -> Worker | None:
        """Wait for a released process or slot, or until all are busy with long calls."""
        waiting.look(self._wait, self._overdue, self._ended)
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():  # the result arrived at the same moment
                self._pass_on(waiting.turn.result())
            raise
        finally:
            waiting.timer.cancel()

    @property
    def _wait(self) -> float:
        return PATIENCE if self._took < SHORT else MOMENT

    def _overdue(self, waiting: _Waiting, ended: int) -> None:
        if waiting.turn.done():
            return
        with self._lock:
            late = ended == self._ended
            self._busy += late
        if late:
            waiting.turn.set_result(None)
        else:
            waiting.look(self._wait, self._overdue, self._ended)

    def _fit(self, *codes: Code) -> Worker | None:
        """Return a free process that has this code, or None; processes without it, or ended ones, are removed."""
        while self._free:
            worker = self._free.pop()
            if worker.fits(*codes):
                return worker
            run_detached(partial(_reap, worker))
        return None

    def _leave(self, worker: Worker, *, stays: bool) -> None:
        """Release a process after a call."""
        self._ended += 1
        stays = stays and self._warm is worker.warm
        self._pass_on(worker if stays else None)
        if not stays:
            worker.end("was given up")
            run_detached(partial(_reap, worker))

    def _pass_on(self, worker: Worker | None) -> None:
        """Give a process, or a free slot, to the call that has waited longest; later calls cannot overtake it."""
        with self._lock:
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.turn.done() and waiting.call_soon(partial(self._take, waiting, worker)):
                    return
            self._busy -= 1
            stays = worker is not None and len(self._free) < FREE and self._warm is worker.warm
            if worker is not None and stays:
                self._free.append(worker)
        if worker is not None and not stays:
            run_detached(partial(_reap, worker))

    def _take(self, waiting: _Waiting, worker: Worker | None) -> None:
        """Resume a waiting call on its loop, unless it was cancelled or has started another process meanwhile."""
        if waiting.turn.done():
            self._pass_on(worker)
        elif worker is None or worker.fits(waiting.code):
            waiting.turn.set_result(worker)
        else:
            run_detached(partial(_reap, worker))
            waiting.turn.set_result(None)


class _Waiting:
    """A call that waits for a process, on its own loop."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self._loop = asyncio.get_running_loop()
        self.turn: asyncio.Future[Worker | None] = self._loop.create_future()
        """The process, or None if there is a slot for a new one."""

    def look(self, wait: float, overdue: Callable[[_Waiting, int], None], ended: int) -> None:
        """Check after `wait` seconds if any call has ended since."""
        self.timer = self._loop.call_later(wait, overdue, self, ended)

    def call_soon(self, give: Callable[[], None]) -> bool:
        """Call `give` on its loop; return False if the loop is closed."""
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                self._loop.call_soon(give)
            else:
                self._loop.call_soon_threadsafe(give)
            return True
        return False


def _reap(worker: Worker) -> None:
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
        plain: str,
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
                return await worker.call(code, arguments, plain, timeout, read)
            except NotCarriedError:
                raise
            except EndedError as error:
                self._worker = None
                how = str(error) or await done_in_thread(worker.close)
                self.ended = f"{how} in an earlier call"
                raise type(error)(how) from error
            except asyncio.CancelledError:
                self._worker, self.ended = None, "was ended in an earlier call, for which nobody waited any more"
                worker.end("was given up")
                run_detached(partial(_reap, worker))
                raise

    async def close(self) -> None:
        """End the process even if it is busy; an idle process that may be reused stays."""
        worker, self._worker = self._worker, None
        if worker is not None and self._take_back is not None and not self._calling.locked():
            self._take_back(worker)
        elif worker is not None:
            worker.end("was closed")
            async with self._calling:  # the call that this ends still holds the connection
                await done_in_thread(partial(_reap, worker))


POOL = ProcessPool()
"""Pool of this process: loaded code serves all of its runs."""
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.__init__)  # type: ignore[misc]  # the processes are the parent's
