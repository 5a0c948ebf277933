"""Selection of tests on real components: none waits longer than two days or is skipped after its code changed."""

from __future__ import annotations

from datetime import date, timedelta
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.last_passes import Pass, digest
from tests.real import selection
from tests.real.environments import HERE, REQUIREMENTS, ROOT
from tests.real.selection import AREAS, chosen, component_of, describe_skipped, files_of

TODAY = date(2026, 11, 28)
TESTS = [f"tests/real/test_{component}.py::test_{number}" for component in AREAS for number in range(20)]


def test_every_module_has_an_area() -> None:
    modules = {path.stem.removeprefix("test_") for path in HERE.glob("test_*.py")} - {"selection"}
    assert modules == set(AREAS)


@pytest.mark.parametrize("component", AREAS)
def test_patterns_of_areas_name_files_that_exist(component: str) -> None:
    for pattern in AREAS[component]:
        assert list(ROOT.glob(pattern)), pattern


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Write a file of TRL's adapter, one of its requirements, and a file of no component."""
    for name in ("README.md", "hermes_rl/integrations/trl.py", "tests/real/requirements/trl.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def passed_in(checkout: Path, tests: list[str] = TESTS) -> dict[str, Pass]:
    digest.cache_clear()  # which holds for the files of one run
    return {test: Pass("2026-11-27", digest(files_of(component_of(test)), checkout)) for test in tests}


def test_each_test_runs_on_one_of_three_days(checkout: Path) -> None:
    passes = passed_in(checkout)
    days = [chosen(TESTS, passes, TODAY + timedelta(days=day), checkout) for day in range(4)]
    assert sorted(test for tests in days[:3] for test in tests) == sorted(TESTS)
    assert all(len(tests) > len(TESTS) / 4 for tests in days)
    assert days[3] == days[0]


def test_cases_of_one_test_run_on_the_same_day() -> None:
    cases = [f"tests/real/test_ray.py::test_x[{number}]" for number in range(20)]
    turns = [{selection.is_turn(case, TODAY + timedelta(days=day)) for case in cases} for day in range(3)]
    assert sorted(turns, key=str) == [{False}, {False}, {True}]


def test_tests_of_a_component_run_until_they_have_passed_with_its_change(checkout: Path) -> None:
    passes = passed_in(checkout)
    turns = {test for test in TESTS if selection.is_turn(test, TODAY)}
    trl = {test for test in TESTS if component_of(test) == "trl"}
    (checkout / "README.md").write_text("changed")
    assert passed_in(checkout) == passes
    for change in ("hermes_rl/integrations/trl_loop.py", "tests/real/requirements/trl.txt"):
        (checkout / change).write_text("changed")
        now = passed_in(checkout)
        assert chosen(TESTS, passes, TODAY, checkout) == turns | trl
        passes = now
    assert chosen(TESTS, passes, TODAY, checkout) == turns


@pytest.mark.parametrize(
    ("file", "components"),
    [
        ("hermes_rl/integrations/trl_loop.py", {"trl"}),
        ("tests/real/test_ray.py", {"ray"}),
        ("tests/real/requirements/nemo-gym.txt", {"nemo_gym"}),
        ("tests/real/requirements/mcp-sqlite.txt", {"mcp_servers"}),
        ("hermes_rl/sandbox/docker_engine.py", {"docker_daemon", "podman"}),
        ("README.md", set()),
    ],
)
def test_code_requirements_and_tests_belong_to_components(file: str, components: set[str]) -> None:
    assert components_of(file) == components


def components_of(file: str) -> set[str]:
    return {component for component in AREAS if any(fnmatch(file, pattern) for pattern in files_of(component))}


def test_everything_runs_where_neither_passes_nor_changes_are_known(checkout: Path) -> None:
    assert chosen(TESTS, {}, TODAY, checkout) == set(TESTS)


def test_skipped_tests_are_named_with_the_date_of_their_last_pass() -> None:
    (line,) = describe_skipped(TESTS[:2], {TESTS[0]: Pass("2026-11-27", "c0ffee")})
    module = TESTS[0].partition("::")[0]
    assert line == f"not chosen: {module}: test_0 (2026-11-27), test_1 (no run known)"


def test_requirements_of_each_environment_belong_to_an_area() -> None:
    for path in REQUIREMENTS.iterdir():
        name = f"tests/real/requirements/{path.name}" + ("/package.json" if path.is_dir() else "")
        assert components_of(name), path.name
