"""The final answer is nearly the target."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import Match, SequenceMatcher
from itertools import accumulate
from typing import Any

LONGEST = 10_000
"""Characters that are compared."""
MOST_PAIRS, MOST_PAIRS_OF_WORDS = 3_000_000, 1_000_000
"""Pairs of equal characters, then of equal words, that are looked at: half a second for both."""


def fuzzy_match(result: Any, *, target: str, threshold: float | None = None) -> float:
    """Return the similarity of the final response and `target`, from 0 to 1; with `threshold`, 1 from there on, else 0.

    Both are compared by Unicode case folding, with each run of white space as one space, and none at the ends. The
    measure is Ratcliff and Obershelp's (Python's `difflib`): twice the matching characters over the length of both.
    Only the first 10,000 characters count; if comparing characters takes too long, from about 4,000 on, words are
    compared instead.

    Args:
        target: the expected text.
        threshold: similarity from which the value is 1.
    """
    reply, normal_target = normal(result.final_response), normal(target)
    # Which of two equals comes first changes the ratio a little; the target always does.
    ratio = _likeness(normal_target, reply)
    return ratio if threshold is None else float(ratio >= threshold)


def _likeness(target: str, reply: str) -> float:
    for parts, max_pairs in (((target, reply), MOST_PAIRS), ((target.split(), reply.split()), MOST_PAIRS_OF_WORDS)):
        comparison = _Comparison(*parts, max_pairs)
        try:
            return comparison.ratio()
        except _TooMuchWorkError:
            continue
    return comparison.quick_ratio()  # the same words over and over


class _TooMuchWorkError(Exception):
    """Comparing takes too long."""


class _Comparison(SequenceMatcher[str]):
    """Python's comparison with a limit on its time: each match compares all pairs of equal parts."""

    def __init__(self, target_parts: Sequence[str], reply_parts: Sequence[str], max_pairs: int) -> None:
        super().__init__(None, target_parts, reply_parts, autojunk=False)
        positions: dict[str, list[int]] = self.b2j  # type: ignore[attr-defined]
        self._pairs = list(accumulate((1 + len(positions.get(part, ())) for part in target_parts), initial=0))
        self._left = max_pairs

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Match:
        self._left -= self._pairs[ahi if ahi is not None else -1] - self._pairs[alo]
        if self._left < 0:
            raise _TooMuchWorkError
        return super().find_longest_match(alo, ahi, blo, bhi)


def normal(text: str) -> str:
    """Return the normalized text that is compared."""
    return " ".join(text.casefold().split())[:LONGEST]
