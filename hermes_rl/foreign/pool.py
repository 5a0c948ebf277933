"""The processes of foreign code of this runner: a call takes one that is free, or another is begun from a warm one."""

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
from hermes_rl.foreign.environment import listed_variables
from hermes_rl.foreign.failures import EndedError, ForeignError, NotCarriedError
from hermes_rl.foreign.worker import Warm, Worker
from hermes_rl.plugins import Code, itself
from hermes_rl.threads import done_in_thread, hand_over, made_in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

FREE = max(4, 2 * len(os.sched_getaffinity(0)))
"""Processes that stay without work, and from which on a call waits a moment for one before another is begun."""
MOMENT = 0.02
"""Seconds of that wait where calls are long."""
SHORT, PATIENCE = 0.1, 0.25
"""Calls that took fewer seconds lately are short, and the seconds that are waited for the end of one: on a busy machine
none may end for a moment, and a process that does one short call costs as much as a hundred such calls."""


class ProcessPool:
    """All processes of foreign code of this runner, for all of its event loops."""

    def __init__(self) -> None:
        self._warm: Warm | None = None
        self._free: list[Worker] = []
        self._busy = self._ended = 0
        self._took = 0.0
        """Seconds of a call, as a mean in which the last calls count most."""
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()

    async def call(
        self,
        code: Code,
        arguments: Mapping[str, Any],
        plain: str,
        timeout: float,
        read: Callable[[Any], T] = itself,
    ) -> T:
        """Call code in a process and return what `plain`, run there too, makes of its result.

        Who is cancelled while it waits ends the process.

        Args:
            code: a function, sync or async.
            arguments: of the function, by name.
            plain: reference to a function that makes plain values of what it returns.
            timeout: seconds that it may use.
            read: returns what the runner takes for the plain value; raises `WireError` where `plain` makes no such one.

        Raises:
            ForeignError: the code raised.
            HermesRLError: it raised an `AgentFault`, or let an exception pass that the runner has sent it.
            OvertimeError, EndedError: it took too long, or its process ended, or sent what it may not send.
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
        """Return a process with this code for one user alone, who closes it; `reused`: others may have had it."""
        worker = None
        if reused:
            with self._lock:
                worker = self._fit(*codes)
        if worker is None:
            worker = await made_in_thread(partial(self._begin, *codes), Worker.close)
        return OwnProcess(worker, self._take_back if reused else None)

    def _take_back(self, worker: Worker) -> None:
        """Let the next user have a process that one had alone."""
        with self._lock:
            self._busy += 1
        self._pass_on(worker)

    def load(self, *codes: Code) -> Warm:
        """Return the warm process, which has this code from now on; blocks while that is imported."""
        with self._lock:
            if self._warm is None or not self._warm.alive:
                self._let_go()
                self._warm = Warm()
            elif self._warm.listed != listed_variables():  # the old one stays until its last process has ended
                self._bury_free()
                self._warm = Warm()
            warm = self._warm
        for code in codes:
            warm.load(code)
        return warm

    def prepare(self, codes: Sequence[Code]) -> None:
        """Begin to load code in the background, so that the first call does not wait for it."""

        def load() -> None:
            try:
                self.load(*codes)
            except (OSError, RewardFailure) as error:
                log.info("the processes for rewards begin with the first one: %s", error)

        if codes:
            hand_over(load)

    def close(self) -> None:
        """End all processes; the next call begins anew."""
        with self._lock:
            warm, self._warm = self._warm, None
            self._let_go()
        if warm is not None:
            warm.close()

    def _bury_free(self) -> None:
        while self._free:
            hand_over(partial(_bury, self._free.pop()))

    def _let_go(self) -> None:
        while self._free:
            self._free.pop().let_go()

    async def _worker(self, code: Code) -> Worker:
        """Return a process that has this code: one that waits, or another one where none becomes free."""
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
            return worker if worker is not None else await made_in_thread(partial(self._begin, code), Worker.close)
        except BaseException:  # a cancellation too: a place that is not given back is lost for good
            self._pass_on(None)
            raise

    def _begin(self, *codes: Code) -> Worker:
        return Worker(self.load(*codes))

    async def _turn(self, waiting: _Waiting) -> Worker | None:
        """Wait until somebody leaves a process, or its place alone, or until all are busy with something long."""
        waiting.look(self._wait, self._overdue, self._ended)
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():  # it came in the same moment
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
        """Take a free process that has this code; those that have not, or have ended, go."""
        while self._free:
            worker = self._free.pop()
            if worker.fits(*codes):
                return worker
            hand_over(partial(_bury, worker))
        return None

    def _leave(self, worker: Worker, *, stays: bool) -> None:
        """Give a process back after a call."""
        self._ended += 1
        stays = stays and self._warm is worker.warm
        self._pass_on(worker if stays else None)
        if not stays:
            worker.end("was given up")
            hand_over(partial(_bury, worker))

    def _pass_on(self, worker: Worker | None) -> None:
        """Give a process, or the place of one, to whoever has waited longest; nobody who comes later is before them."""
        with self._lock:
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.turn.done() and waiting.hand(partial(self._take, waiting, worker)):
                    return
            self._busy -= 1
            stays = worker is not None and len(self._free) < FREE and self._warm is worker.warm
            if worker is not None and stays:
                self._free.append(worker)
        if worker is not None and not stays:
            hand_over(partial(_bury, worker))

    def _take(self, waiting: _Waiting, worker: Worker | None) -> None:
        """On the loop of whoever waits: let it go on, unless it has meanwhile given up or begun another."""
        if waiting.turn.done():
            self._pass_on(worker)
        elif worker is None or worker.fits(waiting.code):
            waiting.turn.set_result(worker)
        else:
            hand_over(partial(_bury, worker))
            waiting.turn.set_result(None)


class _Waiting:
    """A call that waits for a process, on the loop that made it."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self._loop = asyncio.get_running_loop()
        self.turn: asyncio.Future[Worker | None] = self._loop.create_future()
        """The process, or None where there is a place for another one."""

    def look(self, wait: float, overdue: Callable[[_Waiting, int], None], ended: int) -> None:
        """See after so many seconds whether any call has ended since."""
        self.timer = self._loop.call_later(wait, overdue, self, ended)

    def hand(self, give: Callable[[], None]) -> bool:
        """Let its loop call this; False where the loop is closed."""
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                self._loop.call_soon(give)
            else:
                self._loop.call_soon_threadsafe(give)
            return True
        return False


def _bury(worker: Worker) -> None:
    with suppress(RewardFailure):  # the warm process is gone, and with it all of its forks
        worker.close()


class OwnProcess:
    """A process that one user has to itself: what its calls leave in memory is there for the next one."""

    def __init__(self, worker: Worker, take_back: Callable[[Worker], None] | None = None) -> None:
        self._worker: Worker | None = worker
        self._take_back = take_back
        self._calling = asyncio.Lock()
        self.ended: str | None = None
        """How it has ended, as a predicate; None while it is there."""

    async def call(
        self,
        code: Code,
        arguments: Mapping[str, Any],
        plain: str,
        timeout: float,
        read: Callable[[Any], T] = itself,
    ) -> T:
        """See `ProcessPool.call`; one call after the other. Behind one that has ended the process, each says so."""
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
                hand_over(partial(_bury, worker))
                raise

    async def close(self) -> None:
        """End the process, whatever it does; where it is to be reused and is at rest, it stays."""
        worker, self._worker = self._worker, None
        if worker is not None and self._take_back is not None and not self._calling.locked():
            self._take_back(worker)
        elif worker is not None:
            worker.end("was closed")
            await done_in_thread(partial(_bury, worker))


POOL = ProcessPool()
"""Of this process: what is loaded once serves all of its runs."""
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.__init__)  # type: ignore[misc]  # the processes are the parent's
