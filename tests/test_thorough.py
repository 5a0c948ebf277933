"""The slow part plays all cases of generated tests, and the fast part few of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import thorough
from tests.small_runs import finish, start
from tests.thorough import examples, spread

ROOT = Path(__file__).parents[1]
MODULE = """
import pytest
from hypothesis import given, strategies
from tests.thorough import spread
@pytest.mark.generated
@pytest.mark.parametrize("case", spread(range(100), 10))
def test_generated(case): pass
@given(strategies.integers())
def test_of_hypothesis(number): pass
def test_other(): pass
"""
INI = "[pytest]\nmarkers =\n  slow: in the slow part\n  generated: more cases when thorough\n"


@pytest.mark.parametrize(("is_thorough", "fast", "slow"), [(False, 12, 0), (True, 1, 101)])
def test_generated_tests_are_slow_with_all_their_cases_when_thorough(
    tmp_path: Path, is_thorough: bool, fast: int, slow: int
) -> None:
    (tmp_path / "conftest.py").write_text(f"from tests import thorough\nthorough.THOROUGH = {is_thorough}\n")
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_it.py").write_text(MODULE)
    for part, count in (("not slow", fast), ("slow", slow)):
        done = finish(start(tmp_path, "-m", part))
        assert f"{count} passed" in done.stdout if count else done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


IN_TURN = """
import os, pytest
@pytest.fixture(autouse=True)
def note(request):
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(request.node.name.removeprefix("test_") + " ")
@pytest.mark.by_turns(3)
@pytest.mark.parametrize("case", "abcdef")
def test_case(case): pass
@pytest.mark.by_turns(2, 0)
def test_one(): pass
@pytest.mark.by_turns(2, 1)
def test_other(): pass
@pytest.mark.by_turns(1_000, unless_changed=("judge.py",))
def test_changed(): pass
"""
ALL = "case[a] case[b] case[c] case[d] case[e] case[f] one other changed"


@pytest.mark.parametrize(("choice", "day", "ran"), [
    ("changed", 3, "case[a] case[d] other"),
    ("changed", 4, "case[c] case[f] one"),
    ("all", 4, ALL),
])  # fmt: skip
def test_rotating_tests_run_on_their_days_and_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: str, day: int, ran: str
) -> None:
    conftest = f"""
import datetime, functools, pathlib
from tests import thorough
thorough.CHOICE = {choice!r}
for function in (thorough.digest, thorough.has_changed):
    setattr(thorough, function.__name__, functools.partial(function, root=pathlib.Path(__file__).parent))
class Day(datetime.date):
    today = classmethod(lambda cls: cls.fromordinal({day}))
thorough.date = Day
"""
    monkeypatch.setenv("HERMES_RL_REAL", str(tmp_path / "cache"))
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  by_turns(days, first, unless_changed): in turn\n")
    (tmp_path / "test_it.py").write_text(IN_TURN)
    changes = ("", " changed") if choice == "changed" else ("",)
    for content, more in ((content, more) for content in "ab" for more in reversed(changes)):
        (tmp_path / "judge.py").write_text(content)
        (tmp_path / "notes").unlink(missing_ok=True)
        assert finish(start(tmp_path)).returncode == 0
        assert sorted((tmp_path / "notes").read_text().split()) == sorted((ran + more).split())


def test_spread_cases_come_from_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thorough, "THOROUGH", False)
    assert spread(range(100), 4) == [0, 25, 50, 75]
    assert list(spread("ab", 4)) == ["a", "b"]
    assert examples(300) == 60
    monkeypatch.setattr(thorough, "THOROUGH", True)
    assert list(spread(range(100), 4)) == list(range(100))
    assert examples(300) == 300


@pytest.mark.slow
@pytest.mark.parametrize(("value", "part", "count"), [("1", "slow", 1_128), ("0", "slow", 0), ("", "not slow", 104)])
def test_the_variable_gives_the_slow_part_all_seeds_of_rewritings(value: str, part: str, count: int) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", part, "tests/agent/test_rewritten_histories.py"]
    env = {**os.environ, "THOROUGH": value}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    seeds = re.findall("::(?:test_equivalent_rewritings|test_what_the_policy)", done.stdout)
    assert len(seeds) == count, done.stdout
