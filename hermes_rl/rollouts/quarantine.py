"""Rows that infrastructure fails again and again: set aside, so that the others are played, and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from hermes_rl.rollouts.rollout import Group

STRIKES = 2
"""Groups of a row in succession that were dropped for our reasons, each after all replays, until it is set aside."""


class Quarantine:
    """Counts the failures of each row; one group that is complete clears it."""

    def __init__(self, set_aside: Iterable[dict[str, Any]] = ()) -> None:
        self.set_aside: dict[str, dict[str, Any]] = {entry["row_key"]: dict(entry) for entry in set_aside}
        """What is said of each row that is set aside: row_key, cause, detail."""
        self._strikes: Counter[str] = Counter()

    def __contains__(self, row_key: object) -> bool:
        return row_key in self.set_aside

    def count(self, group: Group) -> bool:
        """Take a finished group into account; True where its row is set aside by it."""
        key = group.row.key
        if group.dropped is None or group.dropped.graded:
            self._strikes.pop(key, None)
            return False
        self._strikes[key] += 1
        if self._strikes[key] < STRIKES or key in self:
            return False
        self.set_aside[key] = {"row_key": key, "cause": str(group.dropped), "detail": group.detail}
        return True

    def record(self) -> list[dict[str, Any]]:
        """The `quarantined` entry of run.json."""
        return list(self.set_aside.values())
