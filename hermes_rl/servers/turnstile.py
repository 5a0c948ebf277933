"""A few at a time through the event loop, where thousands become ready at once."""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 8
"""Answers per turn of the loop: what each of them leads to takes about half a millisecond."""


class Turnstile:
    """Lets `AT_ONCE` tasks through in each turn of the event loop, in the order in which they came.

    The loop itself gives everybody who is ready a step in each turn. Of thousands of answers that come together none
    would lead to the next request before all are read, and everything else would wait that long. Used from one loop.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._left = AT_ONCE
        self._turning = False

    async def pass_through(self) -> None:
        """Wait for those before."""
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            loop.call_soon(self._turn, loop)
        if self._left > 0:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = AT_ONCE
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():  # else its task was cancelled
                place.set_result(None)
                self._left -= 1
        self._turning = self._left < AT_ONCE or bool(self._waiting)
        if self._turning:
            loop.call_soon(self._turn, loop)
