"""How many generated cases tests run, and which of the longest tests: what CI has time for.

A test that runs more cases when the variable THOROUGH is set is marked `generated`, and a test of hypothesis is so by
itself. With THOROUGH these are slow tests: `pytest -m "not slow"` runs few of their cases, `THOROUGH=1 pytest -m slow`
runs all.

A test marked `by_turns(N, first)` runs on one of N days where the variable TEST_CHOICE is `changed`, which CI sets; the
cases of a parametrised test take turns. With `unless_changed`, patterns of paths, a case also runs until it has passed
with the files that match as they are. Without the variable, or with `all`, all run always.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import date
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

from tests.last_passes import Pass, digest, has_changed, load_passes, record_passes

THOROUGH = os.environ.get("THOROUGH", "") not in ("", "0")
CHOICE = os.environ.get("TEST_CHOICE", "all")
"""`changed` or `all`; what it means for tests on real components, `tests.real.selection` says."""

Case = TypeVar("Case")
_digests: dict[str, str] = {}
"""Id of each test that runs until it has passed with its files as they are → their digest."""
_passed: dict[str, Pass] = {}


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
    """Mark tests that run all their cases as slow, and skip tests whose turn is on another day."""
    for item in items if THOROUGH else ():
        if item.get_closest_marker("generated") or is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("slow")
    if CHOICE == "changed":
        skip_those_of_other_days(items, date.today())


def skip_those_of_other_days(items: Sequence[pytest.Item], day: date) -> None:
    """Mark the tests that run `by_turns` to be skipped where this is not their day."""
    positions: Counter[str] = Counter()
    passes = load_passes()
    for item in items:
        if mark := item.get_closest_marker("by_turns"):
            days, first = (*mark.args, 0)[:2]
            test = item.nodeid.partition("[")[0]
            is_turn = (day.toordinal() + first + positions[test]) % days == 0
            positions[test] += 1
            if patterns := mark.kwargs.get("unless_changed"):
                _digests[item.nodeid] = digest(patterns)
                is_turn |= has_changed(item.nodeid, patterns, passes)
            if not is_turn:
                item.add_marker(pytest.mark.skip(reason=f"runs on one of {days} days; TEST_CHOICE=all runs it"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed and report.nodeid in _digests:
        _passed[report.nodeid] = Pass(date.today().isoformat(), _digests[report.nodeid])


def pytest_sessionfinish() -> None:
    if _passed:
        record_passes(_passed)
