"""A bound on the processor time of each fast test, so that all of them stay quick to run.

A test's time is what its process, its commands and the children that it has waited for have used, with its fixtures
but those that other tests use too. A child of an earlier test that ends later adds nothing to the test that is running
then: the smaller counts of two measures, with and without the children that still run.
Tests above `NAMED` are named at the end; they should be made cheaper or be marked `slow`. Those above `MOST` fail the
run. A busy machine makes the same work dearer: a test above `MOST` is measured by how long a known piece of work takes
at that moment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests import commands

NAMED, MOST = 1.5, 4.5
"""Seconds of processor time."""
KNOWN_WORK = 0.078
"""Seconds of processor time of `known_work` on a quiet machine."""
FEW = 0.05
"""Seconds below which nothing is reported."""
TICKS = os.sysconf("SC_CLK_TCK")
_used: dict[str, float] = {}
_began = [0.0, 0.0]


def waited_for() -> float:
    """Return the seconds that this process, its commands and the children that it waited for have used."""
    return sum(os.times()[:4]) + sum(commands.used)


def processor_times() -> tuple[float, float]:
    """Return those seconds, and the same with the children that still run."""
    seconds = waited_for()
    return seconds, seconds + sum(map(used_by, descendants(os.getpid())))


def descendants(pid: int) -> list[int]:
    """Return the processes that run below one."""
    found: list[int] = []
    with suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - for every test
            for child in map(int, content(f"/proc/{pid}/task/{thread}/children").split()):
                found += [child, *descendants(child)]
    return found


def used_by(pid: int) -> float:
    """Return the seconds that a process and the children that it waited for have used; 0 where it has ended."""
    try:
        fields = content(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def content(path: str) -> bytes:
    """Return the content of a file of the kernel, at less than what a file object costs."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, 1 << 16)
    finally:
        os.close(descriptor)


def known_work() -> float:
    """Return the seconds of processor time that a fixed piece of work takes now."""
    before, value = time.process_time(), 0
    for number in range(1_000_000):
        value = (value * 31 + number) % 1_000_003
    return time.process_time() - before


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart() -> None:
    _began[:] = processor_times()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    before = processor_times()
    try:
        return (yield)
    finally:
        _began[:] = [began + now - then for began, now, then in zip(_began, processor_times(), before, strict=True)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    # Most tests use next to nothing, and to look at all children that still run would be the most of that.
    if call.when != "teardown" or item.get_closest_marker("slow") or waited_for() - _began[0] <= FEW:
        return report
    used = min(now - began for now, began in zip(processor_times(), _began, strict=True))
    if used > MOST:
        used /= max(1.0, known_work() / KNOWN_WORK)
    if used > FEW:
        report.user_properties.append(("processor", round(used, 2)))  # goes from a worker to its parent
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown" and (used := dict(report.user_properties).get("processor")):
        _used[report.nodeid] = float(used)  # type: ignore[arg-type]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run with a test that takes far too much."""
    if session.exitstatus == pytest.ExitCode.OK and any(used > MOST for used in _used.values()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _used:
        terminalreporter.write_line(f"processor time of this run, of all its processes: {sum(os.times()[:4]):.0f} s")
    above = sorted(((used, test) for test, used in _used.items() if used > NAMED), reverse=True)
    if above:
        terminalreporter.section(f"fast tests above {NAMED} s of processor time (above {MOST} s they fail the run)")
    for used, test in above:
        terminalreporter.write_line(f"{used:6.2f} s {test}")
