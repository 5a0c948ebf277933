"""Whether a server of a role deserves the next call.

Owns the count of failures in a row and the time a failing server is left alone, and whether it is down: then nothing is
sent but one probe after each rest. Leaves the choice among several servers to `pool`.
"""

from __future__ import annotations

_THRESHOLD = 3
"""Failures in a row after which a server is avoided; a busy server fails now and then."""
_DOWN = 5
"""Failures in a row in which nothing answered, after which a server is down; single ones are in every network."""
_FIRST_REST = 1.0
_LONGEST_REST = 30.0


class Health:
    """Healthy, resting, or half-open: after a rest one call probes the server before all others return."""

    __slots__ = ("_failures", "_probing", "_rest", "_resting_until", "_unanswered", "down_since")

    def __init__(self) -> None:
        self._failures = 0
        self._rest = _FIRST_REST
        self._resting_until = 0.0
        self._probing = False
        self._unanswered = 0
        self.down_since: float | None = None
        """When the outage began; None while the server answers."""

    @property
    def resting_until(self) -> float:
        return self._resting_until

    @property
    def healthy(self) -> bool:
        return self._failures < _THRESHOLD

    def available(self, now: float) -> bool:
        return self.healthy or (now >= self._resting_until and not self._probing)

    @property
    def down(self) -> bool:
        return self.down_since is not None

    def began(self) -> bool:
        """A call starts; True when it is the probe of a server that rested."""
        probe = not self.healthy and not self._probing
        self._probing = self._probing or probe
        return probe

    def ended(self, probe: bool) -> None:
        """A call is over, whatever came of it; a cancelled probe frees the place for another."""
        if probe:
            self._probing = False

    def succeeded(self) -> None:
        self._failures = self._unanswered = 0
        self._rest = _FIRST_REST
        self.down_since = None

    def failed(self, now: float, retry_after: float | None, *, unreachable: bool = False) -> None:
        """A failure; those that arrive while the server already rests belong to the same outage."""
        self._failures += 1
        self._unanswered = self._unanswered + 1 if unreachable else 0
        if self._unanswered >= _DOWN and self.down_since is None:
            self.down_since = now
        elif not unreachable:
            self.down_since = None  # something answers
        if self.healthy or now < self._resting_until:
            return
        self._resting_until = now + max(self._rest, min(retry_after or 0.0, _LONGEST_REST))
        self._rest = min(self._rest * 2, _LONGEST_REST)
