"""Fast tests that use much processor time are named, and fail the run if it is far too much."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import hermes, used
from tests.small_runs import finish, start

SPINS = """
import os, pytest, time
def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
@pytest.fixture
def torn_down():
    yield
    spin(0.2)
"""
TESTS = (
    SPINS
    + """
def test_own(): spin(0.2)
def test_fixture(torn_down): pass
def test_child():
    if not os.fork():
        spin(0.2)
        os._exit(0)
    os.wait()
@pytest.fixture(scope="module")
def shared(): spin(0.2)
def test_shared(shared): pass
def test_waits(): time.sleep(0.25)
@pytest.mark.slow
def test_slow(): spin(0.2)
"""
)
INI = "[pytest]\nmarkers =\n  slow: not measured\n"


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "most", "status"), [("0", 0.17, 1), ("2", 4.5, 0), ("2", 0.17, 1)])
def test_tests_above_the_budget_are_named(tmp_path: Path, workers: str, most: float, status: int) -> None:
    (tmp_path / "pytest.ini").write_text(INI)
    bounds = f"budget.NAMED, budget.MOST, budget.KNOWN_WORK = 0.17, {most}, 1e9"
    (tmp_path / "conftest.py").write_text(f"from tests import budget\n{bounds}\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    done = finish(start(tmp_path, "-n", workers))
    assert "6 passed" in done.stdout
    assert done.returncode == status
    named = re.findall(r"^ +\d\.\d\d s test_it.py::(\w+)$", done.stdout, re.MULTILINE)
    assert set(named) == {"test_own", "test_fixture", "test_child"}


def test_a_busy_machine_fails_no_test_by_the_budget(tmp_path: Path) -> None:
    bounds = "budget.NAMED, budget.MOST, budget.KNOWN_WORK = 0.17, 0.17, 0.001"  # all takes a hundred times as long
    (tmp_path / "conftest.py").write_text(f"from tests import budget\n{bounds}\n")
    (tmp_path / "test_it.py").write_text(SPINS + "def test_it(): spin(0.3)\n")
    done = finish(start(tmp_path))
    assert done.returncode == 0, done.stdout


def test_a_run_within_the_budget_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SPINS + "def test_it(): spin(0.2)\n")
    done = finish(start(tmp_path))
    assert done.returncode == 0
    assert "fast tests above" not in done.stdout
    assert re.search(r"^processor time of this run, of all its processes: \d+ s$", done.stdout, re.MULTILINE)


def test_commands_count_towards_the_time_budget(tmp_path: Path) -> None:
    before = len(used)
    hermes("--help", cwd=tmp_path)
    (seconds,) = used[before:]
    assert 0.001 < seconds < 60
