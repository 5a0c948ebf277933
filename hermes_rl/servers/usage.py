"""Count the use of models: calls, tokens, cost and seconds, by role.

A `Meter` counts each call when it is answered, whatever becomes of the rollout that made it. The meter of a run is the
source of every total that is reported and of budgets; the use in a rollout's record is its share of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, Self

from hermes_rl.errors import RunError
from hermes_rl.values import is_number, parse_count

REFUSED = 0.1
"""Seconds from the request to cancel a task until its refused call ends by itself."""


@dataclass(slots=True)
class Usage:
    """Use of one model, or of several, in one or more calls; a count that a server does not report is 0.

    Attributes:
        prompt_tokens: tokens of the prompts, cached ones included.
        completion_tokens: sampled tokens, reasoning included.
        calls: answered calls.
        known_cost: US dollars of the calls whose cost is known.
        cached_tokens: prompt tokens that a server took from its cache.
        unpriced: answered calls whose cost is not known: the server does not report it (`usage.cost`), and there are no
            prices for it.
        uncounted: answered calls of which a server does not report both counts of tokens.
        unanswered: requests that were sent and not answered by a reply that can be used: failed, cancelled, or under
            way. What they cost is not known.
        seconds: time in which servers generated, summed over calls.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    calls: int = 0
    known_cost: float = 0.0
    cached_tokens: int = 0
    unpriced: int = 0
    uncounted: int = 0
    unanswered: int = 0
    seconds: float = 0.0

    @property
    def cost(self) -> float | None:
        """US dollars, or None if the cost of a call is not known."""
        return None if self.unpriced else self.known_cost

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def sent(self) -> int:
        """Requests that were sent."""
        return self.calls + self.unanswered

    def add(self, reported: Mapping[str, Any] | None, seconds: float = 0.0) -> None:
        """Add an answered call, with the `usage` that its server reported."""
        reported = reported or {}
        prompt, completion = reported.get("prompt_tokens"), reported.get("completion_tokens")
        cost = reported.get("cost")
        if is_number(cost) and cost >= 0:
            self.known_cost += cost
        else:
            self.unpriced += 1
        self.calls += 1
        self.prompt_tokens += parse_count(prompt)
        self.completion_tokens += parse_count(completion)
        self.cached_tokens += cached_tokens_of(reported)
        self.uncounted += not (is_number(prompt) and is_number(completion))
        self.seconds += seconds

    def __iadd__(self, other: Usage) -> Self:
        # Once per call and meter: a loop over the names would take three times as long.
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.calls += other.calls
        self.known_cost += other.known_cost
        self.cached_tokens += other.cached_tokens
        self.unpriced += other.unpriced
        self.uncounted += other.uncounted
        self.unanswered += other.unanswered
        self.seconds += other.seconds
        return self

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, name) - getattr(other, name) for name in _COUNTS))

    def record(self) -> dict[str, float]:
        """Return the JSON form: `cost` if the cost of all calls is known, else `known_cost` and `unpriced`.

        It omits `seconds`, so that the records of equal rollouts are equal; rollouts record their times separately.
        """
        always, optional = _COUNTS[:3], ("cached_tokens", "uncounted", "unanswered")
        counts: dict[str, float] = {name: getattr(self, name) for name in always}
        counts |= {name: count for name in optional if (count := getattr(self, name))}
        if self.unpriced:
            counts |= {"unpriced": self.unpriced, **({"known_cost": self.known_cost} if self.known_cost else {})}
        elif self.calls:
            counts["cost"] = self.known_cost
        return counts

    @classmethod
    def from_record(cls, record: Mapping[str, float]) -> Usage:
        """Return the usage of a record; one of an earlier version has no `unpriced`, and may lack `calls`."""
        usage = cls(**{name: record[name] for name in _COUNTS if name in record})  # type: ignore[arg-type]
        if "cost" in record:
            usage.known_cost, usage.unpriced = record["cost"], 0
        elif not usage.unpriced:
            usage.unpriced = usage.calls if "calls" in record else min(len(record), 1)
        return usage


_COUNTS = tuple(each.name for each in fields(Usage))


def cached_tokens_of(reported: Mapping[str, Any]) -> int:
    """Return the cached prompt tokens that a server reports as OpenAI's API does; 0 if it does not."""
    details = reported.get("prompt_tokens_details")
    return parse_count(details.get("cached_tokens")) if isinstance(details, Mapping) else 0


def price_of(prices: Mapping[str, float | None], prompt: float, completion: float, cached: float) -> float:
    """Return the US dollars of tokens, of which `cached` ones of the prompt have a separate price if it is known.

    Args:
        prices: US dollars for a million tokens: `prompt`, `completion`, and perhaps `cached`.
    """
    full, reply = prices["prompt"], prices["completion"]
    assert full is not None and reply is not None
    reduced = full if (cached_price := prices.get("cached")) is None else cached_price
    cached = min(cached, prompt)
    return ((prompt - cached) * full + cached * reduced + completion * reply) / 1e6


_current: ContextVar[Meter | None] = ContextVar("meter", default=None)


class Meter:
    """Use of models by role, of all calls made while it is `counting`.

    Meters nest: a call also counts in the meter that was counting when this one was made. Only the outermost meter
    counts requests without an answer.

    Args:
        task: cancelled when one of these calls is refused; None: the task of the meter that counts them too.
    """

    __slots__ = ("_closed", "_listeners", "_lock", "_outer_meter", "_task", "roles")

    def __init__(self, task: asyncio.Task[Any] | None = None) -> None:
        self.roles: dict[str, Usage] = {}
        self._outer_meter = _current.get()
        self._task = task
        self._closed = False
        self._lock = threading.Lock()  # rewards call models from their own threads
        self._listeners: list[Callable[[], None]] = []

    @contextmanager
    def counting(self) -> Iterator[Self]:
        """Count the calls that are made within, by tasks and threads that are started there too."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)

    def add(self, role: str, usage: Usage) -> None:
        """Add the use of a role's model."""
        with self._lock:
            total = self.roles.setdefault(role, Usage())
            total += usage
        if self._outer_meter is not None:
            self._outer_meter.add(role, usage)
        self._notify()

    async def count_request(self, role: str) -> None:
        """Count a request to a role's model as sent.

        If the meter is closed, this raises CancelledError, or RunError if the call belongs to no rollout or reward.
        """
        if self.closed:
            if self._outer_meter is None and self._task is None:
                raise RunError("no further call to a model starts: the run has ended, or its budget is used up")
            # Only a closed budget ends what the task does; other blocks have been left by their task.
            task = self._cancelled_task if self._outermost._closed else None
            if task is not None:
                task.get_loop().call_soon_threadsafe(task.cancel)
            # This cancellation ends it here. A reward in a thread is not cancelled: its caller has stopped waiting.
            await asyncio.sleep(REFUSED)
            raise asyncio.CancelledError
        self._outermost._sent(role, 1)
        self._outermost._notify()

    def end(self, role: str, usage: Usage) -> None:
        """Count a request that was sent as answered."""
        self._outermost._sent(role, -1)
        self.add(role, usage)

    @property
    def _outermost(self) -> Meter:
        return self if self._outer_meter is None else self._outer_meter._outermost

    @property
    def _cancelled_task(self) -> asyncio.Task[Any] | None:
        return self._task if self._task is not None or self._outer_meter is None else self._outer_meter._cancelled_task

    def _sent(self, role: str, requests: int) -> None:
        with self._lock:
            self.roles.setdefault(role, Usage()).unanswered += requests

    def _notify(self) -> None:
        for listener in tuple(self._listeners):
            listener()

    def close(self) -> None:
        """Let no further call start that it counts; calls that are under way are answered and counted."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """True if no further call may start."""
        return self._closed or (self._outer_meter is not None and self._outer_meter.closed)

    @contextmanager
    def heard_by(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` before each request and after each answer, in the thread that counted it.

        A worker that is killed has reported the requests that it will not see answered.
        """
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    @property
    def unpriced(self) -> list[str]:
        """Roles of which the cost of a call is not known."""
        return [role for role, usage in self.roles.items() if usage.unpriced]

    @property
    def known_cost(self) -> float:
        """US dollars of all calls whose cost is known."""
        return sum(usage.known_cost for usage in self.roles.values())

    def record(self) -> dict[str, dict[str, float]]:
        """Return the JSON form, with seconds to the millisecond."""
        with self._lock:
            return {role: {**usage.record(), "seconds": round(usage.seconds, 3)} for role, usage in self.roles.items()}


@contextmanager
def calls_while_awaited() -> Iterator[None]:
    """Let no further call to a model start in a block that was left by an exception, such as a cancellation.

    A reward in a thread cannot be stopped, and would go on calling judges, with pauses of minutes between attempts.
    """
    meter = Meter()
    with meter.counting():
        try:
            yield
        except BaseException:
            meter.close()
            raise


async def begin_call(role: str, otherwise: Meter | None = None) -> None:
    """Count a request with the meter that counts calls here, or else with another one; see `Meter.count_request`."""
    if (meter := _current.get() or otherwise) is not None:
        await meter.count_request(role)


def end_call(role: str, usage: Usage, otherwise: Meter | None = None) -> None:
    """Count its answer."""
    if (meter := _current.get() or otherwise) is not None:
        meter.end(role, usage)
