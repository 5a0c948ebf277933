"""Whether a server of a role deserves the next call.

Owns the count of failures in a row and the time a failing server is left alone. Leaves the choice
among several servers to `balance`; a single server is always asked, whatever its health.
"""

from __future__ import annotations

_THRESHOLD = 3
"""Failures in a row after which a server is avoided; a busy server fails now and then."""
_FIRST_REST = 1.0
_LONGEST_REST = 30.0


class Health:
    """Healthy, resting, or half-open: after a rest one call probes the server before all others return."""

    __slots__ = ("_failures", "_probing", "_rest", "_resting_until")

    def __init__(self) -> None:
        self._failures = 0
        self._rest = _FIRST_REST
        self._resting_until = 0.0
        self._probing = False

    @property
    def resting_until(self) -> float:
        return self._resting_until

    @property
    def healthy(self) -> bool:
        return self._failures < _THRESHOLD

    def available(self, now: float) -> bool:
        return self.healthy or (now >= self._resting_until and not self._probing)

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
        self._failures = 0
        self._rest = _FIRST_REST

    def failed(self, now: float, retry_after: float | None) -> None:
        """A failure; those that arrive while the server already rests belong to the same outage."""
        self._failures += 1
        if self.healthy or now < self._resting_until:
            return
        self._resting_until = now + max(self._rest, min(retry_after or 0.0, _LONGEST_REST))
        self._rest = min(self._rest * 2, _LONGEST_REST)
