"""How many calls a server gets at a time: a bound that follows how the server does.

Owns the bound and the queue in front of it. The bound doubles with every round trip while the server keeps up. A
refusal because of load (429) tells how many calls the server has taken: the bound becomes that number, and then grows
again, first by one, and by twice as many after each round trip without a refusal, so that it soon finds capacity that
comes back. A server that queues instead of refusing shows it by its throughput: where a larger bound brings no more
answers per second, the bound goes back, and the larger one is tried again later.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

START = 32
"""Calls at a time before anything is known about the server."""
GAIN = 0.25
"""Throughput has to grow by this share of the bound's growth for a larger bound to be worth it."""
TELLING = 1.5
"""The bound has to grow by this factor for a difference of throughput to mean more than noise."""
HOLD = 16
"""Round trips after which a bound that brought nothing is tried again."""


class Limiter:
    """Places for calls; used from one event loop.

    Args:
        cap: the bound is never larger.
        fixed: the bound is always the cap.
    """

    def __init__(
        self, cap: int, *, start: int = START, fixed: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cap = cap
        self.limit = cap if fixed else min(start, cap)
        self.fixed = fixed
        self.in_flight = 0
        self._clock = clock
        self._queue: deque[asyncio.Future[None]] = deque()
        self._step = 0  # 0: the bound still doubles, because the server has refused nothing yet
        self._round = _Round(clock())
        self._refused_at = -math.inf
        self._trip = 0.0
        """Seconds of a round trip, smoothed."""
        self._best: tuple[float, int] = (0.0, 0)
        """Answers per second, and the bound that brought them."""
        self._hold = 0

    @property
    def waiting(self) -> int:
        """How many calls wait for a place."""
        return len(self._queue)

    async def acquire(self) -> None:
        """Wait for a place."""
        if self.in_flight < self.limit and not self._queue:
            self.in_flight += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(place)
        self._round.saturated = True
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.release()  # the place was given to this call in the same moment
            raise

    def release(self) -> None:
        """Give a place back."""
        self.in_flight -= 1
        self._admit()

    def fix(self, cap: int | None = None) -> None:
        """Keep the bound at the cap from now on, however the server does."""
        self.cap = min(self.cap, cap or self.cap)
        self.limit, self.fixed = self.cap, True
        self._admit()

    def answered(self, seconds: float) -> None:
        """Note that a call came back after that time."""
        if self.fixed:
            return
        self._trip = seconds if self._trip == 0 else 0.8 * self._trip + 0.2 * seconds
        self._round.answers += 1
        now = self._clock()
        if now - self._round.began >= self._trip and self._round.answers >= min(self.limit, self.in_flight):
            self._end_round(now)

    def refused(self) -> None:
        """Note that a call was refused because of load; the server has taken the others in flight."""
        if self.fixed:
            return
        now = self._clock()
        taken = max(1, self.in_flight - 1)
        if now - self._refused_at > self._trip or taken < self.limit:
            self.limit = max(1, min(self.limit, taken))
        self._refused_at = now
        self._step, self._hold, self._best = 1, 0, (0.0, 0)
        self._round = _Round(now)

    def _end_round(self, now: float) -> None:
        round_, self._round = self._round, _Round(now)
        if not round_.saturated:
            return  # nobody would have used a larger bound
        rate = round_.answers / (now - round_.began)
        if self._hold:
            self._hold -= 1
            return
        best, at = self._best
        if self.limit >= TELLING * at:
            if rate < best * (1 + GAIN * (self.limit / at - 1) if at else 0):
                self.limit, self._hold, self._step, self._best = at, HOLD, 1, (0.0, 0)
                return
            self._best = (rate, self.limit)
        self._grow()

    def _grow(self) -> None:
        step = self.limit if self._step == 0 else self._step
        self._step *= 2
        self.limit = min(self.cap, self.limit + step)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.in_flight < self.limit:
            place = self._queue.popleft()
            if not place.done():
                self.in_flight += 1
                place.set_result(None)


class _Round:
    """Counts of one round trip: how many answers came, and whether a call had to wait for a place."""

    __slots__ = ("answers", "began", "saturated")

    def __init__(self, began: float) -> None:
        self.began, self.answers, self.saturated = began, 0, False
