"""A pass is kept with the content that it was made with."""

from __future__ import annotations

import subprocess
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.last_passes import Pass, digest, has_changed, load_passes, recently_changed, record_passes


def test_passes_of_several_runs_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMES_RL_REAL", str(tmp_path))
    assert load_passes() == {}
    record_passes({"a": Pass("2026-11-26", "1"), "b": Pass("2026-11-26", "2")})
    record_passes({"b": Pass("2026-11-27", "3")})
    assert load_passes() == {"a": Pass("2026-11-26", "1"), "b": Pass("2026-11-27", "3")}
    (tmp_path / "last-passes.json").write_text("cut off {")
    assert load_passes() == {}


def test_a_digest_follows_names_and_contents_of_its_files_alone(tmp_path: Path) -> None:
    def now() -> str:
        digest.cache_clear()
        return digest(("package/*.py", "ruff.toml"), tmp_path)

    (tmp_path / "package/inner").mkdir(parents=True)
    before = now()
    (tmp_path / "package/inner/a.py").write_text("1")
    assert (added := now()) != before
    (tmp_path / "package/notes.md").write_text("1")
    (tmp_path / "other.py").write_text("1")
    assert now() == added
    (tmp_path / "package/inner/a.py").rename(tmp_path / "package/b.py")
    assert (renamed := now()) != added
    (tmp_path / "ruff.toml").write_text("1")
    assert now() != renamed


def git(folder: Path, *arguments: str, day: date) -> None:
    stamp = f"{day}T12:00:00"
    environ = {"GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp, "HOME": str(folder), "PATH": "/usr/bin:/bin"}
    named = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
    subprocess.run(named, cwd=folder, env=environ, check=True, capture_output=True)


def test_three_days_of_history_count_as_changed_without_a_pass(tmp_path: Path) -> None:
    assert has_changed("test", ("old.py",), {}, tmp_path)  # as nothing is known
    recently_changed.cache_clear()
    today = date.today()
    git(tmp_path, "init", "-q", day=today)
    for name, day in (("old.py", today - timedelta(days=30)), ("new.py", today - timedelta(days=1))):
        (tmp_path / name).touch()
        git(tmp_path, "add", "-A", day=day)
        git(tmp_path, "commit", "-qm", name, day=day)
    assert not has_changed("test", ("old.py",), {}, tmp_path)
    assert has_changed("test", ("new.py",), {}, tmp_path)
    recently_changed.cache_clear()
    (tmp_path / "old.py").write_text("not committed")
    assert has_changed("test", ("old.py",), {}, tmp_path)
    assert not has_changed("test", ("old.py",), {"test": Pass("2026-01-01", digest(("old.py",), tmp_path))}, tmp_path)
