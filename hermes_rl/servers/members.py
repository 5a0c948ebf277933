"""The servers of one role and the choice among them.

Owns which server takes a call: the one with the fewest requests in flight, always the same for one
rollout (its prefix cache is there), none that keeps failing. Leaves sending to the servers.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from hermes_rl.servers.base import Backend, ChatReply, ChatRequest, ContextLengthExceeded
from hermes_rl.servers.health import Health
from hermes_rl.servers.retry import AttemptFailed

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

    def load(self) -> tuple[int, int, int]:
        return self.in_flight, self.rollouts, self.served


class Members:
    """All servers of a role."""

    def __init__(self, backends: Sequence[Backend], clock: Callable[[], float] = time.monotonic) -> None:
        self._members = [Member(backend) for backend in backends]
        self._home: OrderedDict[str, Member] = OrderedDict()
        self._clock = clock

    def pick(self, rollout_id: str | None, tried: Collection[Member]) -> Member:
        """The server for the next attempt of a call that has already `tried` some."""
        if len(self._members) == 1:
            return self._members[0]
        home = self._home.get(rollout_id) if rollout_id is not None else None
        if home is not None and home not in tried and home.health.available(self._clock()):
            return home
        chosen = self._least_loaded(tried)
        if rollout_id is not None:
            self._settle(rollout_id, chosen)
        return chosen

    def untried(self, tried: Collection[Member]) -> bool:
        """Whether a server that deserves a call has not been tried by it."""
        now = self._clock()
        return any(member not in tried and member.health.available(now) for member in self._members)

    def forget(self, rollout_id: str) -> None:
        """The rollout is over."""
        member = self._home.pop(rollout_id, None)
        if member is not None:
            member.rollouts -= 1

    async def attempt(self, member: Member, request: ChatRequest) -> ChatReply:
        """One attempt on a server, counted for the choice of the next one."""
        member.in_flight += 1
        member.served += 1
        probe = member.health.began()
        try:
            reply = await member.backend.attempt(request)
            member.health.succeeded()
            return reply
        except ContextLengthExceeded:
            member.health.succeeded()
            raise
        except AttemptFailed as failed:
            member.health.failed(self._clock(), failed.retry_after)
            raise
        finally:
            member.health.ended(probe)
            member.in_flight -= 1

    def _least_loaded(self, tried: Collection[Member]) -> Member:
        now = self._clock()
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
