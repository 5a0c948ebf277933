"""How many generated cases tests play: few in the fast part, all where the variable THOROUGH is set.

A test that plays more cases when THOROUGH is set is marked `generated`, and a test of hypothesis is so by itself. With
THOROUGH these are slow tests: `pytest -m "not slow"` plays few of their cases, `THOROUGH=1 pytest -m slow` plays all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

THOROUGH = os.environ.get("THOROUGH", "") not in ("", "0")

Case = TypeVar("Case")


def spread(cases: Sequence[Case], few: int) -> Sequence[Case]:
    """Return this many of the cases, from all parts of them; all when thorough."""
    if THOROUGH or few >= len(cases):
        return cases
    return [cases[position * len(cases) // few] for position in range(few)]


def examples(most: int) -> int:
    """Return how many examples hypothesis makes: a fifth of the most, all when thorough."""
    return most if THOROUGH else most // 5


# On a machine that is busy, an example may take any time.
SLOW = HealthCheck.too_slow
settings.register_profile("busy", deadline=None, max_examples=examples(100), suppress_health_check=[SLOW])
settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that play all their cases as slow."""
    for item in items if THOROUGH else ():
        if item.get_closest_marker("generated") or is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("slow")
