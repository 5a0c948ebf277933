"""The servers of one role and the choice among them.

Owns which server takes a call: the one with the fewest requests in flight, always the same for one
rollout (its prefix cache is there), none that keeps failing; and how many each gets at a time. Where all
are down, calls wait, and one probe at a time finds out when that is over. Leaves sending to the servers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hermes_rl.servers.base import Backend, ChatReply, ChatRequest, ContextLengthExceeded
from hermes_rl.servers.concurrency import Limiter
from hermes_rl.servers.health import Health
from hermes_rl.servers.redact import public_url
from hermes_rl.servers.retry import AttemptFailed

logger = logging.getLogger(__name__)

_LOOK = 0.05
"""Seconds, at least, between two looks at whether a server may be probed."""
_NOTICED = 1e-4
"""Seconds of waiting for a place that are accounted for."""
_REMEMBERED = 65_536
"""Rollouts whose server is remembered; the oldest is forgotten first, in case nobody says it is over."""


@dataclass(eq=False, slots=True)
class PooledServer:
    """One server with what the role knows about it."""

    backend: Backend
    health: Health = field(default_factory=Health)
    in_flight: int = 0
    rollouts: int = 0
    """Rollouts that stay with this server."""
    served: int = 0
    limiter: Limiter = field(init=False)
    announced: bool = False
    """Whether it was said that the server is down."""

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.backend.config.max_concurrency)

    @property
    def place(self) -> str:
        """What to call it: its address without secrets."""
        return public_url(self.backend.config.base_url or self.backend.config.type)

    def load(self) -> tuple[int, int, int]:
        return self.in_flight, self.rollouts, self.served


class ServerPool:
    """All servers of a role."""

    def __init__(self, backends: Sequence[Backend], clock: Callable[[], float] = time.monotonic) -> None:
        self._servers = [PooledServer(backend) for backend in backends]
        self._home: OrderedDict[str, PooledServer] = OrderedDict()
        self.clock = clock
        self._changed: asyncio.Event | None = None
        self.say: Callable[[str], None] = logger.warning
        """Told once when a server is down, and once when it is back."""

    def __iter__(self) -> Iterator[PooledServer]:
        return iter(self._servers)

    async def up(self) -> None:
        """Wait while every server is down, but for the one call that may probe."""
        while all(server.health.down and not server.health.available(self.clock()) for server in self._servers):
            self._changed = self._changed or asyncio.Event()
            changed = self._changed
            soonest = min(server.health.resting_until for server in self._servers) - self.clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(soonest, _LOOK)):
                    await changed.wait()

    def pick(self, rollout_id: str | None, tried: Collection[PooledServer]) -> PooledServer:
        """The server for the next attempt of a call that has already `tried` some."""
        if len(self._servers) == 1:
            return self._servers[0]
        home = self._home.get(rollout_id) if rollout_id is not None else None
        if home is not None and home not in tried and home.health.available(self.clock()):
            return home
        chosen = self._least_loaded(tried)
        if rollout_id is not None:
            self._settle(rollout_id, chosen)
        return chosen

    def untried(self, tried: Collection[PooledServer]) -> bool:
        """Whether a server that deserves a call has not been tried by it."""
        now = self.clock()
        return any(server not in tried and server.health.available(now) for server in self._servers)

    def forget(self, rollout_id: str) -> None:
        """The rollout is over."""
        server = self._home.pop(rollout_id, None)
        if server is not None:
            server.rollouts -= 1

    async def attempt(self, server: PooledServer, request: ChatRequest) -> ChatReply:
        """One attempt on a server, counted for the choice of the next one."""
        asked = self.clock()
        server.in_flight += 1
        try:
            await server.limiter.acquire()
            try:
                return await self._placed(server, request, self.clock() - asked)
            finally:
                server.limiter.release()
        finally:
            server.in_flight -= 1

    async def _placed(self, server: PooledServer, request: ChatRequest, queued: float) -> ChatReply:
        server.served += 1
        probe = server.health.began()
        began = self.clock()
        try:
            reply = await server.backend.attempt(request)
            server.limiter.answered(self.clock() - began)
            self._succeeded(server)
        except ContextLengthExceeded:
            self._succeeded(server)
            raise
        except AttemptFailed as failed:
            self._failed(server, failed, probe=probe)
            raise
        finally:
            server.health.ended(probe)
            if probe:
                self._wake()
        if queued < _NOTICED:
            return reply
        return replace(reply, timing=replace(reply.timing, queued=reply.timing.queued + queued))

    def _succeeded(self, server: PooledServer) -> None:
        down_since = server.health.down_since
        server.health.succeeded()
        if down_since is not None:
            self._wake()
        if down_since is not None and server.announced:
            server.announced = False
            self.say(f"the server at {server.place} is back after {self.clock() - down_since:.0f} s; the run goes on")

    def _failed(self, server: PooledServer, failed: AttemptFailed, *, probe: bool) -> None:
        was_down = server.health.down
        server.health.failed(self.clock(), failed.retry_after, unreachable=failed.unreachable)
        if failed.overloaded:
            server.limiter.refused()
        failed.outage = server.health.down and all(other.health.down for other in self._servers)
        # The first rest often ends an outage that nobody needs to hear of.
        if probe and was_down and failed.outage and not server.announced:
            server.announced = True
            self.say(f"the server at {server.place} is down ({failed}); calls wait, and go on by themselves")

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _least_loaded(self, tried: Collection[PooledServer]) -> PooledServer:
        now = self.clock()
        available = [server for server in self._servers if server.health.available(now)]
        fresh = [server for server in available if server not in tried]
        if fresh or available:
            return min(fresh or available, key=PooledServer.load)
        return min(self._servers, key=lambda server: server.health.resting_until)

    def _settle(self, rollout_id: str, server: PooledServer) -> None:
        self.forget(rollout_id)
        if len(self._home) >= _REMEMBERED:
            self.forget(next(iter(self._home)))
        self._home[rollout_id] = server
        server.rollouts += 1
