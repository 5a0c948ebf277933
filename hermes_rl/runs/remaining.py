"""Remaining rollouts: one implementation for the store, a dry run, sets of runs and every mode.

It computes the members of a group that are missing, and the rows that are not worth another group now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hermes_rl.rollouts.rollout import Group, RolloutState


def left_to_play(states: Mapping[int, RolloutState], size: int, *, compared: bool) -> list[int]:
    """Return the members of a group that are not run and scored yet, by their index.

    Args:
        states: states of the recorded members, by their index. An earlier start may have requested more than `size` of
            them; members beyond it do not count.
        size: requested members of the group.
        compared: True if a reward compares the members. It never does if a member was excluded, and then nothing is
            left to do.
    """
    members = [states.get(index) for index in range(size)]
    if compared and RolloutState.EXCLUDED in members:
        return []
    return [index for index, state in enumerate(members) if state is None or not state.final]


def group_name(row_key: str, occurrence: int, *, repeat: bool) -> str:
    """Return the id of a row's group: with the pass over the rows if they repeat, else with the position of the row."""
    return f"{row_key}:{occurrence}" if repeat or occurrence else row_key


# Quarantine: rows that fail again and again for infrastructure reasons are excluded and reported, and the others run

STRIKES = 2
"""Consecutive groups of a row, dropped for infrastructure failures after all retries, until it is quarantined."""


class Quarantine:
    """Counts the failures of each row; one complete group resets the count."""

    def __init__(self, set_aside: Iterable[dict[str, Any]] = ()) -> None:
        self.set_aside: dict[str, dict[str, Any]] = {entry["row_key"]: dict(entry) for entry in set_aside}
        """Entry of each quarantined row: row_key, cause, detail."""
        self._strikes: Counter[str] = Counter()

    def __contains__(self, row_key: object) -> bool:
        return row_key in self.set_aside

    def count(self, group: Group) -> bool:
        """Count a finished group; return True if it quarantines its row."""
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
        """Return the `quarantined` entry of run.json."""
        return list(self.set_aside.values())


# Rows that are worth another group: rows whose groups still differ in score, since only these teach. A row whose last n
# groups were uniform is run only in every 2ⁿ-th pass over the rows (16th at most), so that it returns if a better
# policy makes its scores differ. The decision is deterministic: it depends on the recorded groups, which a resumed run
# reads again.

RAREST = 4
"""Consecutive uniform groups beyond which the interval of a row does not grow."""


class Curriculum:
    """Consecutive uniform groups by row, as in `state`; without `prefer_differing` every row is selected."""

    def __init__(self, prefer_differing: bool, uniform: Mapping[str, int] | None = None) -> None:
        self._active = prefer_differing
        self._uniform: Counter[str] = Counter(uniform or {})

    def wants(self, row_key: str, epoch: int) -> bool:
        """Return True if a row must be run in this pass over the rows; passes count from 0."""
        return not self._active or epoch % 2 ** min(self._uniform[row_key], RAREST) == 0

    def count(self, row_key: str, uniform: bool | None) -> None:
        """Record if a finished group is uniform; None, for an incomplete one, changes nothing."""
        if not self._active or uniform is None:
            return
        if uniform:
            self._uniform[row_key] += 1
        else:
            del self._uniform[row_key]

    def state(self) -> dict[str, Any] | None:
        """Return the state as JSON for a file, or None if there is none."""
        return dict(self._uniform) or None
