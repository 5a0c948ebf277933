"""Which tests on real components run: none is left out for longer than two days, and none whose code has changed."""

from __future__ import annotations

import subprocess
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.real import selection
from tests.real.environments import HERE, REQUIREMENTS, ROOT
from tests.real.selection import (
    AREAS,
    Pass,
    changed_components,
    changed_files,
    chosen,
    component_of,
    describe_skipped,
    head,
    load_passes,
    save_passes,
)

TODAY = date(2026, 11, 28)
TESTS = [f"tests/real/test_{component}.py::test_{number}" for component in AREAS for number in range(20)]


def test_every_module_has_an_area() -> None:
    modules = {path.stem.removeprefix("test_") for path in HERE.glob("test_*.py")} - {"selection"}
    assert modules == set(AREAS)


@pytest.mark.parametrize("component", AREAS)
def test_patterns_of_areas_name_files_that_exist(component: str) -> None:
    for pattern in AREAS[component]:
        assert list(ROOT.glob(pattern)), pattern


def git(folder: Path, *arguments: str, day: str = "2026-01-01") -> str:
    stamp = f"{day}T12:00:00"
    environ = {"GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp, "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    named = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
    return subprocess.run(named, cwd=folder, env=environ, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits: one long ago, one of yesterday that changes TRL's adapter, and one that changes no component."""
    git(tmp_path, "init", "-q")
    yesterday = (date.today() - timedelta(days=1)).isoformat()
    commits = ("README.md", "2026-01-01"), ("hermes_rl/integrations/trl.py", yesterday), ("LICENSE", yesterday)
    for name, day in commits:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", name, day=day)
    return tmp_path


def test_each_test_runs_on_one_of_three_days(repository: Path) -> None:
    passes = dict.fromkeys(TESTS, Pass("2026-11-27", str(head(repository))))
    days = [chosen(TESTS, passes, TODAY + timedelta(days=day), repository) for day in range(4)]
    assert sorted(test for tests in days[:3] for test in tests) == sorted(TESTS)
    assert all(len(tests) > len(TESTS) / 4 for tests in days)
    assert days[3] == days[0]


def test_cases_of_one_test_run_on_the_same_day() -> None:
    cases = [f"tests/real/test_ray.py::test_x[{number}]" for number in range(20)]
    turns = [{selection.is_turn(case, TODAY + timedelta(days=day)) for case in cases} for day in range(3)]
    assert sorted(turns, key=str) == [{False}, {False}, {True}]


def test_tests_of_a_component_run_until_they_have_passed_with_its_change(repository: Path) -> None:
    old, change, last = git(repository, "rev-list", "--reverse", "HEAD").split()
    trl = {test for test in TESTS if component_of(test) == "trl"}
    for commit, runs in ((old, True), (change, False), (last, False)):
        passes = dict.fromkeys(TESTS, Pass("2026-11-27", commit))
        assert (trl <= chosen(TESTS, passes, TODAY, repository)) == runs
    passed_all_but_one = dict.fromkeys(sorted(trl)[1:], Pass("2026-11-27", last))
    assert sorted(trl)[0] in chosen(TESTS, passed_all_but_one, TODAY, repository)


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
    assert changed_components(frozenset({file})) == components


def test_everything_runs_where_changes_are_not_known(tmp_path: Path) -> None:
    assert chosen(TESTS, {}, TODAY, tmp_path) == set(TESTS)


def test_changes_are_counted_from_a_commit_and_include_the_working_tree(repository: Path) -> None:
    old, change, last = git(repository, "rev-list", "--reverse", "HEAD").split()
    assert changed_files(old, repository) == {"hermes_rl/integrations/trl.py", "LICENSE"}
    assert changed_files(last, repository) == set()
    (repository / "README.md").write_text("changed, not committed")
    assert changed_files(change, repository) == {"LICENSE", "README.md"}


@pytest.mark.parametrize("commit", [None, "0" * 40])
def test_three_days_of_history_count_as_changed_without_a_known_pass(repository: Path, commit: str | None) -> None:
    assert changed_files(commit, repository) == {"hermes_rl/integrations/trl.py", "LICENSE"}


def test_skipped_tests_are_named_with_the_date_of_their_last_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "cache", lambda: tmp_path)
    assert load_passes() == {}
    save_passes({TESTS[0]: Pass("2026-11-27", "c0ffee")})
    assert load_passes() == {TESTS[0]: Pass("2026-11-27", "c0ffee")}
    (line,) = describe_skipped(TESTS[:2], load_passes())
    module = TESTS[0].partition("::")[0]
    assert line == f"not chosen: {module}: test_0 (2026-11-27), test_1 (no run known)"
    (tmp_path / "last-passes.json").write_text("cut off {")
    assert load_passes() == {}


def test_requirements_of_each_environment_belong_to_an_area() -> None:
    for path in REQUIREMENTS.iterdir():
        name = f"tests/real/requirements/{path.name}" + ("/package.json" if path.is_dir() else "")
        assert changed_components(frozenset({name})), path.name
