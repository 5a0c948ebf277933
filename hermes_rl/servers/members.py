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
class Member:
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


class Members:
    """All servers of a role."""

    def __init__(self, backends: Sequence[Backend], clock: Callable[[], float] = time.monotonic) -> None:
        self._members = [Member(backend) for backend in backends]
        self._home: OrderedDict[str, Member] = OrderedDict()
        self.clock = clock
        self._changed: asyncio.Event | None = None
        self.say: Callable[[str], None] = logger.warning
        """Told once when a server is down, and once when it is back."""

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    async def up(self) -> None:
        """Wait while every server is down, but for the one call that may probe."""
        while all(member.health.down and not member.health.available(self.clock()) for member in self._members):
            self._changed = self._changed or asyncio.Event()
            changed = self._changed
            soonest = min(member.health.resting_until for member in self._members) - self.clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(soonest, _LOOK)):
                    await changed.wait()

    def pick(self, rollout_id: str | None, tried: Collection[Member]) -> Member:
        """The server for the next attempt of a call that has already `tried` some."""
        if len(self._members) == 1:
            return self._members[0]
        home = self._home.get(rollout_id) if rollout_id is not None else None
        if home is not None and home not in tried and home.health.available(self.clock()):
            return home
        chosen = self._least_loaded(tried)
        if rollout_id is not None:
            self._settle(rollout_id, chosen)
        return chosen

    def untried(self, tried: Collection[Member]) -> bool:
        """Whether a server that deserves a call has not been tried by it."""
        now = self.clock()
        return any(member not in tried and member.health.available(now) for member in self._members)

    def forget(self, rollout_id: str) -> None:
        """The rollout is over."""
        member = self._home.pop(rollout_id, None)
        if member is not None:
            member.rollouts -= 1

    async def attempt(self, member: Member, request: ChatRequest) -> ChatReply:
        """One attempt on a server, counted for the choice of the next one."""
        asked = self.clock()
        member.in_flight += 1
        try:
            await member.limiter.acquire()
            try:
                return await self._placed(member, request, self.clock() - asked)
            finally:
                member.limiter.release()
        finally:
            member.in_flight -= 1

    async def _placed(self, member: Member, request: ChatRequest, queued: float) -> ChatReply:
        member.served += 1
        probe = member.health.began()
        began = self.clock()
        try:
            reply = await member.backend.attempt(request)
            member.limiter.answered(self.clock() - began)
            self._succeeded(member)
        except ContextLengthExceeded:
            self._succeeded(member)
            raise
        except AttemptFailed as failed:
            self._failed(member, failed, probe=probe)
            raise
        finally:
            member.health.ended(probe)
            if probe:
                self._wake()
        if queued < _NOTICED:
            return reply
        return replace(reply, timing=replace(reply.timing, queued=reply.timing.queued + queued))

    def _succeeded(self, member: Member) -> None:
        down_since = member.health.down_since
        member.health.succeeded()
        if down_since is not None:
            self._wake()
        if down_since is not None and member.announced:
            member.announced = False
            self.say(f"the server at {member.place} is back after {self.clock() - down_since:.0f} s; the run goes on")

    def _failed(self, member: Member, failed: AttemptFailed, *, probe: bool) -> None:
        was_down = member.health.down
        member.health.failed(self.clock(), failed.retry_after, unreachable=failed.unreachable)
        if failed.overloaded:
            member.limiter.refused()
        failed.outage = member.health.down and all(other.health.down for other in self._members)
        # The first rest often ends an outage that nobody needs to hear of.
        if probe and was_down and failed.outage and not member.announced:
            member.announced = True
            self.say(f"the server at {member.place} is down ({failed}); calls wait, and go on by themselves")

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _least_loaded(self, tried: Collection[Member]) -> Member:
        now = self.clock()
        available = [member for member in self._members if member.health.available(now)]
        fresh = [member for member in available if member not in tried]
        if fresh or available:
            return min(fresh or available, key=Member.load)
        return min(self._members, key=lambda member: member.health.resting_until)

    def _settle(self, rollout_id: str, member: Member) -> None:
        self.forget(rollout_id)
        if len(self._home) >= _REMEMBERED:
            self.forget(next(iter(self._home)))
        self._home[rollout_id] = member
        member.rollouts += 1
