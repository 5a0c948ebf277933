"""What is left to play: one answer for the store, a dry run, sets of runs and every mode.

That is, the members of a group that are missing, and the rows that are not worth another group now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from hermes_rl.rollouts.rollout import Group, RolloutState


def left_to_play(states: Mapping[int, RolloutState], size: int, *, compared: bool) -> list[int]:
    """Return the members of a group that are not played and scored yet, by their index.

    Args:
        states: of the members that are recorded, by their index. An earlier start may have asked for more than `size`
            of them; those beyond it count for nothing.
        size: members that the group is to have.
        compared: whether a reward compares the members. It never does without one that was left out, and then nothing
            is left to do.
    """
    members = [states.get(index) for index in range(size)]
    if compared and RolloutState.LEFT_OUT in members:
        return []
    return [index for index, state in enumerate(members) if state is None or not state.final]


def group_name(row_key: str, at: int, *, repeat: bool) -> str:
    """Return the id of a row's group: of a pass over the rows where they repeat, else of a place where it stands."""
    return f"{row_key}:{at}" if repeat or at else row_key


# Rows that infrastructure fails again and again: set aside, so that the others are played, and reported

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
        """Return the `quarantined` entry of run.json."""
        return list(self.set_aside.values())


# Which rows are worth another group: those in whose groups the scores still differ, since only these teach. A row
# whose last groups were uniform, n of them in succession, is played in every 2ⁿ-th pass over the rows only (16th at
# most), so that one that a better policy finds interesting again comes back. Nothing is left to chance: what was
# played decides, and is read again when a run goes on.

RAREST = 4
"""Uniform groups in succession beyond which a row becomes no rarer."""


class Curriculum:
    """Uniform groups in succession, by row, as `state` gave them; without `prefer_differing` every row is wanted."""

    def __init__(self, prefer_differing: bool, uniform: Mapping[str, int] | None = None) -> None:
        self._active = prefer_differing
        self._uniform: Counter[str] = Counter(uniform or {})

    def wants(self, row_key: str, epoch: int) -> bool:
        """Whether a row is to be played in this pass over the rows, which count from 0."""
        return not self._active or epoch % 2 ** min(self._uniform[row_key], RAREST) == 0

    def count(self, row_key: str, uniform: bool | None) -> None:
        """Take into account whether a finished group is uniform; None, of an incomplete one, says nothing."""
        if not self._active or uniform is None:
            return
        if uniform:
            self._uniform[row_key] += 1
        else:
            del self._uniform[row_key]

    def state(self) -> dict[str, Any] | None:
        """For a file, as JSON; None where there is nothing to keep."""
        return dict(self._uniform) or None
