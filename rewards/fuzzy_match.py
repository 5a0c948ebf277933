"""The final answer is nearly the target."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

LONGEST = 10_000
"""Characters that are compared; the time grows with their square."""


def fuzzy_match(result: Any, *, target: str, threshold: float | None = None) -> float:
    """How alike the final answer and `target` are, from 0 to 1; with `threshold`, 1 from there on, else 0.

    Compared by Unicode case folding, runs of white space as one space, without those at the ends. The measure is
    Ratcliff and Obershelp's (Python's `difflib`): twice the matching characters over all of both. Of longer texts
    the first 10,000 characters count.

    Args:
        target: the expected text.
        threshold: likeness that deserves 1.
    """
    said, wanted = normal(result.final_response), normal(target)
    # Which of two equals comes first changes the ratio a little; the target always does.
    ratio = SequenceMatcher(None, wanted, said, autojunk=False).ratio()
    return ratio if threshold is None else float(ratio >= threshold)


def normal(text: str) -> str:
    """What is compared of a text."""
    return " ".join(text.casefold().split())[:LONGEST]
