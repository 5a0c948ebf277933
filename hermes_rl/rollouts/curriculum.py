"""Which rows are worth another group: those in whose groups the scores still differ, since only these teach.

A row whose last groups were uniform, n of them in succession, is played in every 2ⁿ-th pass over the rows only (16th at
most), so that one that a better policy finds interesting again comes back. Nothing is left to chance: what was
played decides, and is read again when a run goes on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

RAREST = 4
"""Uniform groups in succession beyond which a row becomes no rarer."""


class Curriculum:
    """Uniform groups in succession, by row.

    Args:
        prefer_differing: False wants every row in every pass.
        uniform: what `state` gave.
    """

    def __init__(self, prefer_differing: bool, uniform: Mapping[str, int] | None = None) -> None:
        self._active = prefer_differing
        self._uniform: Counter[str] = Counter(uniform or {})

    def wants(self, row_key: str, epoch: int) -> bool:
        """Whether a row is to be played in this pass over the rows, which count from 0."""
        return not self._active or epoch % 2 ** min(self._uniform[row_key], RAREST) == 0

    def count(self, row_key: str, scores: Sequence[float | None]) -> None:
        """Take the scores of a finished group into account; those of one that is incomplete say nothing."""
        if not self._active or len(scores) < 2 or None in scores:
            return
        if len(set(scores)) > 1:
            del self._uniform[row_key]
        else:
            self._uniform[row_key] += 1

    def state(self) -> dict[str, Any] | None:
        """For a file, as JSON; None where there is nothing to keep."""
        return dict(self._uniform) or None
