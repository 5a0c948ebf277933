"""Track the weights of a server: their version, and the pauses in which the server loads new ones.

Versions only rise. So a version read before a call was sent is a lower bound of the one it was sampled with, and a
version read after the response is an upper bound. While calls are in flight, the server is polled for pauses, so that
they do not count as working time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hermes_rl.servers.base import version_of
from hermes_rl.servers.transport import AttemptFailed, Transport

LONGEST_PAUSE = 3600.0
"""Seconds after which a server that reports a pause has failed."""
LOOK = 0.25
"""Seconds between two polls for a pause."""
_VERSIONS = ("weight_version", "version", "update_count", "step")
_MISSING = (404, 405, 501)
"""HTTP statuses of a server without this path."""
_PAUSED = ("is_paused", "paused")


class Versions:
    """Version of a server's weights; None if it does not report it.

    The paths that may report it are tried in order; a missing one is tried once. If a trainer sets the version, which
    `pushed` returns, the server is not asked.
    """

    def __init__(
        self, transport: Transport, paths: Sequence[str], pushed: Callable[[], int | None] | None = None
    ) -> None:
        self._transport, self._paths, self._pushed = transport, list(paths), pushed or (lambda: None)
        self.newest_version: int | None = None
        """Newest version that was read: a lower bound of the server's version."""
        self._reading: asyncio.Task[None] | None = None

    async def before(self) -> int | None:
        """Return a lower bound, before a request is sent."""
        if (pushed := self._pushed()) is not None:
            return pushed
        if self.newest_version is None:
            await self._query_version()
        return self.newest_version

    async def after(self, answered: int | None = None) -> int | None:
        """Return the server's current version; `answered` is the one in its response, if any."""
        if (pushed := self._pushed()) is not None:
            return pushed
        if answered is not None:
            self.hear(answered)
            return answered
        await self._query_version()
        return self.newest_version

    async def _query_version(self) -> None:
        """Query the server; the result of a query sent before this call would be outdated."""
        if not self._paths:
            return
        if self._reading is not None and not self._reading.done():
            await asyncio.shield(self._reading)
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._ask_version())
        await asyncio.shield(self._reading)

    async def _ask_version(self) -> None:
        while self._paths:
            status, data = await self._transport.get_json(self._paths[0])
            if status not in _MISSING:
                self.hear(_response_field(data, _VERSIONS))
                return
            del self._paths[0]

    def hear(self, value: Any) -> None:
        """Record a version; an older or invalid one is ignored."""
        version = version_of(value)
        if version is not None and (self.newest_version is None or version > self.newest_version):
            self.newest_version = version


class Pauses:
    """Measure how long a server is paused while calls are in flight."""

    def __init__(self, transport: Transport, path: str | None) -> None:
        self._transport, self._path = transport, path
        self.seconds = 0.0
        """Total seconds of observed pauses."""
        self._calls = 0
        self._watching: asyncio.Task[None] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch for pauses while a call is in flight."""
        self._calls += 1
        if self._path is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._calls -= 1
            if self._calls == 0 and self._watching is not None:
                self._watching.cancel()
                self._watching = None

    async def now(self) -> bool:
        """Return True if the server is paused; False if it does not report that."""
        if self._path is None:
            return False
        status, data = await self._transport.get_json(self._path)
        if status in _MISSING:
            self._path = None
        return _response_field(data, _PAUSED) is True

    async def wait_for_resume(self) -> float:
        """Wait until the server is not paused; return the seconds of waiting.

        Raises:
            AttemptFailed: it is paused for an hour, longer than any update of weights takes.
        """
        started = time.monotonic()
        while await self.now():
            if time.monotonic() - started > LONGEST_PAUSE:
                raise AttemptFailed(f"the server has reported for {LONGEST_PAUSE / 60:.0f} minutes that it is paused")
            await asyncio.sleep(LOOK)
        return time.monotonic() - started

    async def _watch(self) -> None:
        looked, was_paused = time.monotonic(), False
        while self._calls and self._path is not None:
            await asyncio.sleep(LOOK)
            paused = await self.now()
            now = time.monotonic()
            if paused or was_paused:
                # A pause starts or ends between two polls: half of that interval counts.
                self.seconds += (now - looked) * (1.0 if paused and was_paused else 0.5)
            looked, was_paused = now, paused


def _response_field(data: Any, names: tuple[str, ...]) -> Any:
    """Return the field of a response that is an object, else the response itself."""
    if not isinstance(data, dict):
        return data
    return next((data[name] for name in names if name in data), None)
