"""Manage the servers of one client, and select one for each call.

A call goes to the server with the fewest requests in flight, always to the same one for a rollout (which has its prefix
in the cache), and never to one that fails repeatedly. If all servers are down, calls wait, and one probe at a time
detects the end of the outage.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hermes_rl.servers.base import POLICY, Backend, ChatReply, ChatRequest, ContextLengthExceeded
from hermes_rl.servers.transport import AttemptFailed, public_url
from hermes_rl.servers.usage import Meter, Usage, begin_call, cached_tokens_of, end_call, price_of
from hermes_rl.values import is_number

# ------------------------------ How many calls a server gets at a time: a bound that follows how the server does
# Concurrent calls of a server: a limit that adapts to its behaviour. The limit doubles with every round trip while the
# server keeps up. A refusal because of load (429) shows the number of calls that the server has accepted: this number
# becomes the limit, which then grows again, first by one, and by twice as many after each round trip without a refusal,
# so that it soon finds recovered capacity. A server that queues instead of refusing is detected by its throughput: if a
# larger limit yields no more replies per second, the limit is restored, and the larger one is tried again later.

START = 32
"""Limit of concurrent calls before anything is known about the server."""
GAIN = 0.25
"""Throughput must grow by this fraction of the limit's growth to justify a larger limit."""
TELLING = 1.5
"""The limit must grow by this factor for a difference of throughput to exceed noise."""
HOLD = 16
"""Number of round trips after which a useless limit is tried again."""


class Limiter:
    """Slots for calls, at most `cap`, and always exactly that number if `fixed`; used from one event loop."""

    def __init__(
        self, cap: int, *, start: int = START, fixed: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cap = cap
        self.limit = cap if fixed else min(start, cap)
        self.fixed = fixed
        self.in_flight = 0
        self._clock = clock
        self._queue: deque[asyncio.Future[None]] = deque()
        self._step = 0  # 0: the limit still doubles, because the server has refused nothing yet
        self._round = _LimitWindow(clock())
        self._refused_at = -math.inf
        self._trip = 0.0
        """Smoothed duration of a round trip in seconds."""
        self._best: tuple[float, int] = (0.0, 0)
        """Best replies per second, and the limit that yielded them."""
        self._hold = 0

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot."""
        return len(self._queue)

    async def acquire(self) -> None:
        """Wait for a slot."""
        if self.in_flight < self.limit and not self._queue:
            self.in_flight += 1
            return
        slot: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(slot)
        self._round.saturated = True
        try:
            await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled():
                self.release()  # the slot was assigned to this call at the same moment
            raise

    def release(self) -> None:
        """Release a slot."""
        self.in_flight -= 1
        self._admit()

    def fix(self, cap: int | None = None) -> None:
        """Set the limit to the cap permanently; stop adapting."""
        self.cap = min(self.cap, cap or self.cap)
        self.limit, self.fixed = self.cap, True
        self._admit()

    def bound(self, cap: int) -> None:
        """Set another cap; calls in flight beyond a smaller one finish."""
        self.cap = cap
        self.limit = cap if self.fixed else min(self.limit, cap)
        self._admit()

    def answered(self, seconds: float) -> None:
        """Record that a call succeeded after `seconds`."""
        if self.fixed:
            return
        self._trip = seconds if self._trip == 0 else 0.8 * self._trip + 0.2 * seconds
        self._round.answers += 1
        now = self._clock()
        if now - self._round.started_at >= self._trip and self._round.answers >= min(self.limit, self.in_flight):
            self._end_round(now)

    def refused(self) -> None:
        """Record that a call was refused because of load; the server has accepted the others in flight."""
        if self.fixed:
            return
        now = self._clock()
        accepted = max(1, self.in_flight - 1)
        if now - self._refused_at > self._trip or accepted < self.limit:
            self.limit = max(1, min(self.limit, accepted))
        self._refused_at = now
        self._step, self._hold, self._best = 1, 0, (0.0, 0)
        self._round = _LimitWindow(now)

    def _end_round(self, now: float) -> None:
        round_, self._round = self._round, _LimitWindow(now)
        if not round_.saturated:
            return  # a larger limit would not have been used
        rate = round_.answers / (now - round_.started_at)
        if self._hold:
            self._hold -= 1
            return
        best, best_limit = self._best
        if self.limit >= TELLING * best_limit:
            if rate < best * (1 + GAIN * (self.limit / best_limit - 1) if best_limit else 0):
                self.limit, self._hold, self._step, self._best = best_limit, HOLD, 1, (0.0, 0)
                return
            self._best = (rate, self.limit)
        step = self.limit if self._step == 0 else self._step
        self._step *= 2
        self.limit = min(self.cap, self.limit + step)
        self._admit()

    def _admit(self) -> None:
        while self._queue and self.in_flight < self.limit:
            slot = self._queue.popleft()
            if not slot.done():
                self.in_flight += 1
                slot.set_result(None)


class _LimitWindow:
    """Counts of one round trip: number of replies, and True for `saturated` if a call had to wait for a slot."""

    __slots__ = ("answers", "saturated", "started_at")

    def __init__(self, started_at: float) -> None:
        self.started_at, self.answers, self.saturated = started_at, 0, False


# -------------------------------------------------------------------------------- pool

logger = logging.getLogger(__name__)

_THRESHOLD = 3
"""Consecutive failures after which a server is avoided; a busy server fails occasionally."""
_DOWN = 5
"""Consecutive failures without a response after which a server is down; single ones occur in every network."""
_BROKEN = 2.0
"""Seconds after which a server that fails all calls is reported; shorter problems resolve by themselves."""
_FIRST_REST = 1.0
_LONGEST_REST = 30.0
"""Seconds for which a failing server is not called: the first time, and at most."""
_LOOK = 0.05
"""Minimum seconds between two checks if a server may be probed."""
_NOTICED = 1e-4
"""Minimum seconds of waiting for a slot that are accounted for."""
_MAX_REMEMBERED = 65_536
"""Number of rollouts whose server is remembered; the oldest is dropped first, in case its end is not reported."""


class Health:
    """Availability of one server: healthy, resting, or probed by a single call after its rest."""

    __slots__ = ("_failures", "_probing", "_rest", "_unanswered", "down_since", "failing_since", "resting_until")

    def __init__(self) -> None:
        self._failures = 0
        self._rest = _FIRST_REST
        self.resting_until = 0.0
        self._probing = False
        self._unanswered = 0
        self.down_since: float | None = None
        """Start time of the outage; None while the server responds."""
        self.failing_since: float | None = None
        """Time of the first consecutive failure; None while calls succeed."""

    @property
    def healthy(self) -> bool:
        return self._failures < _THRESHOLD

    def available(self, now: float) -> bool:
        return self.healthy or (now >= self.resting_until and not self._probing)

    @property
    def down(self) -> bool:
        return self.down_since is not None

    def record_start(self) -> bool:
        """Record the start of a call; return True if it is the probe of a server that has rested."""
        probe = not self.healthy and not self._probing
        self._probing = self._probing or probe
        return probe

    def ended(self, probe: bool) -> None:
        """Record the end of a call, with any outcome; after a cancelled probe another call may probe."""
        if probe:
            self._probing = False

    def succeeded(self) -> None:
        self._failures = self._unanswered = 0
        self._rest = _FIRST_REST
        self.down_since = self.failing_since = None

    def failed(self, now: float, retry_after: float | None, *, unreachable: bool = False) -> None:
        """Record a failure; failures that arrive while the server already rests belong to the same outage."""
        self._failures += 1
        self.failing_since = now if self.failing_since is None else self.failing_since
        self._unanswered = self._unanswered + 1 if unreachable else 0
        if self._unanswered >= _DOWN and self.down_since is None:
            self.down_since = now
        elif not unreachable:
            self.down_since = None  # a component responds
        if self.healthy or now < self.resting_until:
            return
        self.resting_until = now + max(self._rest, min(retry_after or 0.0, _LONGEST_REST))
        self._rest = min(self._rest * 2, _LONGEST_REST)


@dataclass(eq=False, slots=True)
class PooledServer:
    """One server with the pool's information about it."""

    backend: Backend
    health: Health = field(default_factory=Health)
    in_flight: int = 0
    rollouts: int = 0
    """Number of rollouts assigned to this server."""
    served: int = 0
    limiter: Limiter = field(init=False)
    announced: bool = False
    """True if the user has been notified that this server is down or failing."""

    def __post_init__(self) -> None:
        self.limiter = Limiter(self.backend.config.max_concurrency)

    @property
    def address(self) -> str:
        """The server's address without secrets, for messages."""
        return public_url(self.backend.config.base_url or self.backend.config.type)

    def load(self) -> tuple[int, int, int]:
        return self.in_flight, self.rollouts, self.served


def _add_cost(reply: ChatReply, prices: Mapping[str, float | None] | None) -> ChatReply:
    """Return the reply with its cost, if the server did not report it and its prices are known."""
    usage = reply.usage
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if prices is None or is_number(usage.get("cost")) or not (is_number(prompt) and is_number(completion)):
        return reply
    return replace(reply, usage={**usage, "cost": price_of(prices, prompt, completion, cached_tokens_of(usage))})


class ServerPool:
    """All servers of one client, for the model of a role."""

    def __init__(
        self, backends: Sequence[Backend], role: str = POLICY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._role = role
        self._servers = [PooledServer(backend) for backend in backends]
        self._server_of: OrderedDict[str, PooledServer] = OrderedDict()
        self.clock = clock
        self._changed: asyncio.Event | None = None
        self.say: Callable[[str], None] = logger.warning
        """Receives one message when a server is down or failing, and one when it recovers."""
        self.last_failure = ""
        """Error of the last failed attempt."""
        self.meter: Meter | None = None
        """Counts the calls that no other meter counts, such as those of threads that user code has started."""

    def __iter__(self) -> Iterator[PooledServer]:
        return iter(self._servers)

    async def up(self) -> None:
        """Wait while every server is down; one call at a time does not wait, because it may probe."""
        while all(server.health.down and not server.health.available(self.clock()) for server in self._servers):
            self._changed = self._changed or asyncio.Event()
            changed = self._changed
            soonest = min(server.health.resting_until for server in self._servers) - self.clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(soonest, _LOOK)):
                    await changed.wait()

    def pick(self, rollout_id: str | None, tried: Collection[PooledServer]) -> PooledServer:
        """Return the server for the next attempt of a call that has already `tried` some."""
        if len(self._servers) == 1:
            return self._servers[0]
        pinned_server = self._server_of.get(rollout_id) if rollout_id is not None else None
        if pinned_server is not None and pinned_server not in tried and pinned_server.health.available(self.clock()):
            return pinned_server
        now = self.clock()
        available = [server for server in self._servers if server.health.available(now)]
        fresh = [server for server in available if server not in tried]
        if available:
            chosen = min(fresh or available, key=PooledServer.load)
        else:
            chosen = min(self._servers, key=lambda server: server.health.resting_until)
        if rollout_id is not None:
            self.unpin(rollout_id)
            if len(self._server_of) >= _MAX_REMEMBERED:
                self.unpin(next(iter(self._server_of)))
            self._server_of[rollout_id] = chosen
            chosen.rollouts += 1
        return chosen

    def untried(self, tried: Collection[PooledServer]) -> bool:
        """Return True if there is an available server that the call has not tried."""
        now = self.clock()
        return any(server not in tried and server.health.available(now) for server in self._servers)

    def unpin(self, rollout_id: str) -> None:
        """Forget the server of a finished rollout."""
        server = self._server_of.pop(rollout_id, None)
        if server is not None:
            server.rollouts -= 1

    async def attempt(self, server: PooledServer, request: ChatRequest) -> ChatReply:
        """Make one attempt on a server; it counts as that server's load while it lasts, and as a call of the role."""
        requested_at = self.clock()
        server.in_flight += 1
        try:
            await server.limiter.acquire()
            server.served += 1
            probe, started_at = server.health.record_start(), self.clock()
            try:
                await begin_call(self._role, self.meter)
                reply = _add_cost(await server.backend.attempt(request), server.backend.config.prices)
                usage = Usage()
                usage.add(reply.usage, reply.timing.generating)
                end_call(self._role, usage, self.meter)
                server.limiter.answered(self.clock() - started_at)
                self._note_success(server)
            except ContextLengthExceeded:
                self._note_success(server)
                raise
            except AttemptFailed as failed:
                self._note_failure(server, failed, probe=probe)
                raise
            finally:
                server.health.ended(probe)
                if probe:
                    self._wake_waiters()
                server.limiter.release()
        finally:
            server.in_flight -= 1
        if (queued := started_at - requested_at) < _NOTICED:
            return reply
        return replace(reply, timing=replace(reply.timing, queued=queued))

    def _note_success(self, server: PooledServer) -> None:
        down, failing_since = server.health.down, server.health.failing_since
        server.health.succeeded()
        if down:
            self._wake_waiters()
        if failing_since is not None and server.announced:
            server.announced = False
            seconds = self.clock() - failing_since
            self.say(f"the server at {server.address} is back after {seconds:.0f} s; the run continues")

    def _note_failure(self, server: PooledServer, failed: AttemptFailed, *, probe: bool) -> None:
        was_down = server.health.down
        server.health.failed(self.clock(), failed.retry_after, unreachable=failed.unreachable)
        self.last_failure = str(failed)
        if failed.overloaded:
            server.limiter.refused()
        failed.outage = server.health.down and all(other.health.down for other in self._servers)
        # The first rest often ends a short outage that need not be reported.
        if probe and was_down and failed.outage and not server.announced:
            server.announced = True
            self.say(f"the server at {server.address} is down ({failed}); calls wait, and go on by themselves")
        elif not (failed.unreachable or failed.overloaded or server.announced or server.health.healthy):
            seconds = self.clock() - (server.health.failing_since or 0.0)
            if seconds >= _BROKEN:
                server.announced = True
                self.say(
                    f"the server at {server.address} has failed for {seconds:.0f} s ({failed}); calls are sent again"
                )

    def _wake_waiters(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
