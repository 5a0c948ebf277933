"""The one retry policy of model calls: which failures are repeated, how often, and after which pause.

Owns the reading of a failed answer (status, Retry-After, context length), the backoff, and the final `ServerFailure`
with all its causes. Leaves sending to `transport` and the choice of a server to `pool`. Nothing else in the program
repeats a model call.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from hermes_rl.errors import ServerFailure

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETRIED_4XX = frozenset({408, 409, 425, 429})
_OVERLOADED = frozenset({429, 529})
_GATEWAY = frozenset({502, 503, 504})
_CONTEXT_STATUS = frozenset({400, 413, 422})
_CONTEXT_TEXT = re.compile(
    r"context_length_exceeded|exceed_context_size|string_above_max_length"
    r"|(?:maximum|max|model'?s) context (?:length|window|size)|available context size"
    r"|(?:exceeds?|longer than|beyond|over) [^.]{0,60}(?:context|max_model_len|maximum number of tokens)"
    r"|prompt is too long|too many (?:input )?tokens"
    r"|max(?:_completion)?_tokens must be at least 1, got (?:0|-\d+)",  # the rest beside a prompt that fills it
    re.IGNORECASE,
)
_HOPELESS_TEXT = re.compile(r"insufficient_quota", re.IGNORECASE)


class AttemptFailed(Exception):
    """One attempt of a call failed. The message is already free of secrets."""

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = True,
        timed_out: bool = False,
        retry_after: float | None = None,
        overloaded: bool = False,
        unreachable: bool = False,
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.timed_out = timed_out
        self.retry_after = retry_after
        self.overloaded = overloaded
        """The server refused because of its load: it needs fewer calls at a time."""
        self.unreachable = unreachable or timed_out
        """The server itself did not answer: nobody listens, a gateway reports that, or the connection was lost."""
        self.outage = False
        """Every server is down, so this failure says nothing about the call."""


def is_context_overflow(status: int, text: str) -> bool:
    """Whether the server refused because the conversation does not fit its context."""
    return status in _CONTEXT_STATUS and _CONTEXT_TEXT.search(text) is not None


def failed_status(status: int, headers: Mapping[str, str], text: str, shown: str) -> AttemptFailed:
    """Make the failure for an HTTP status. `text` decides about it; only `shown` is shown."""
    retryable = status >= 500 or status in _RETRIED_4XX
    if status == 429 and _HOPELESS_TEXT.search(text):
        retryable = False
    return AttemptFailed(
        shown,
        retryable=retryable,
        retry_after=retry_after(headers.get("Retry-After")),
        overloaded=status in _OVERLOADED and retryable,
        unreachable=status in _GATEWAY,
    )


def retry_after(value: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds that a Retry-After header asks for (a number or an HTTP date); None where it asks for none."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now()
        except ValueError:
            return None
    return max(0.0, seconds) if seconds < float("inf") else None


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded attempts, exponential backoff with full jitter, Retry-After obeyed."""

    attempts: int = 8
    """Attempts of one call, the first one included."""
    timeouts: int = 3
    """Attempts of one call that may run into the timeout, which each of them costs in full."""
    base: float = 0.5
    """Seconds; the first pause lies between 0 and this, each further one may be twice as long."""
    cap: float = 30.0
    """Seconds; the longest pause that we choose ourselves."""
    longest_wait: float = 300.0
    """Seconds; the longest pause that a server may ask for."""
    outage: float = 1800.0
    """Seconds that a call waits while all servers are down; attempts in this time do not count. 0: the call does not
    wait, and the attempts count."""
    random: Callable[[], float] = random.random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def pause(self, failures: int, failed: AttemptFailed) -> float:
        """Return the seconds to wait after the given number of failures."""
        jitter = self.random() * min(self.cap, self.base * 2.0 ** min(failures - 1, 30))
        if failed.retry_after is None:
            return jitter
        # The jitter comes on top, so that not all calls that got the same answer come back at once.
        return min(failed.retry_after, self.longest_wait) + min(jitter, self.base)

    def gives_up(self, failures: Sequence[AttemptFailed], seconds: float = 0.0) -> bool:
        """Whether no further attempt is made, `seconds` after the first."""
        last = failures[-1]
        if last.retryable and last.outage and self.outage:
            return seconds >= self.outage
        own = [failed for failed in failures if not failed.outage or not self.outage]
        timeouts = sum(failed.timed_out for failed in own)
        return not last.retryable or len(own) >= self.attempts or timeouts >= self.timeouts


async def with_retries(
    policy: RetryPolicy,
    role: str,
    attempt: Callable[[], Awaitable[T]],
    elsewhere: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[T, int]:
    """Attempt a call until it is answered; returns the answer and the number of attempts.

    `elsewhere` returns whether the next attempt reaches a server that has not failed this call: then there is no pause.

    Raises:
        ServerFailure: no attempt brought an answer.
    """
    failures: list[AttemptFailed] = []
    started, paused = clock(), 0.0
    while True:
        try:
            return await attempt(), len(failures) + 1
        except AttemptFailed as failed:
            failures.append(failed)
        log.info("server %r: attempt %d failed: %s", role, len(failures), failures[-1])
        if policy.gives_up(failures, max(clock() - started, paused)):
            raise exhausted(role, failures)
        if not elsewhere():
            pause = policy.pause(len(failures), failures[-1])
            paused += pause
            await policy.sleep(pause)


def exhausted(role: str, failures: Sequence[AttemptFailed]) -> ServerFailure:
    """Make the failure of a call, with the cause of each attempt in its text and in `__cause__`."""
    times = "1 attempt" if len(failures) == 1 else f"{len(failures)} attempts"
    causes = "; ".join(f"[{place}] {failed}" for place, failed in _grouped(failures))
    failure = ServerFailure(f"server {role!r} gave no usable answer in {times}: {causes}")
    failure.__cause__ = failures[0] if len(failures) == 1 else ExceptionGroup("attempts", list(failures))
    return failure


def _grouped(failures: Sequence[AttemptFailed]) -> list[tuple[str, AttemptFailed]]:
    """Join runs of equal causes into one entry each: ``1-7`` instead of seven equal lines."""
    runs: list[tuple[int, int, AttemptFailed]] = []
    for number, failed in enumerate(failures, 1):
        if runs and str(runs[-1][2]) == str(failed):
            runs[-1] = (runs[-1][0], number, failed)
        else:
            runs.append((number, number, failed))
    return [(f"{first}" if first == last else f"{first}-{last}", failed) for first, last, failed in runs]
