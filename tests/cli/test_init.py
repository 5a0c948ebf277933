"""What `hermes-rl init` makes is valid, plays at once, and its own test passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from hermes_rl.cli.commands import Starter
from hermes_rl.shipped import shipped_dir
from tests.commands import hermes

KINDS = get_args(Starter)


def made(kind: str, folder: Path) -> Path:
    done = hermes("init", "my-own", "--kind", kind, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "my-own"


def test_every_kind_has_its_files() -> None:
    assert sorted(KINDS) == sorted(path.name for path in shipped_dir("starters").iterdir())


@pytest.mark.parametrize(
    "kind", ["game", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "game")]
)
def test_created_environment_validates_runs_and_passes_its_tests(kind: str, tmp_path: Path) -> None:
    # As in a checkout of ours: another project around it, with settings of its own and a package of the same name.
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\npythonpath = ["."]\n'
    )
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "exact.py").touch()
    folder = made(kind, tmp_path)
    checked = hermes("validate", "my-own.yaml", "--deep", "--set", "dataset.limit=8", cwd=folder)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "my-own.yaml: valid" in checked.stdout
    values = [line.split() for line in checked.stdout.splitlines() if line.startswith("  ")]
    scores = {" ".join(words[:-1]): float(words[-1]) for words in values}
    assert scores["gold"] >= 1
    assert scores["empty"] == scores["garbage"] == 0
    played = hermes("run", "./my-own", "process", "--demo", "--out", "out", "--set", "process.groups=2", cwd=tmp_path)
    assert played.returncode == 0, played.stderr
    assert "2 of 2 groups" in played.stdout
    tested = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "-q", "test_rewards.py", "-p", "no:cacheprovider"],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert tested.returncode == 0, tested.stdout


def test_no_file_is_written_over(tmp_path: Path) -> None:
    folder = made("tools", tmp_path)
    (folder / "rewards.py").write_text("mine")
    again = hermes("init", "my-own", cwd=tmp_path)
    assert again.returncode == 2
    assert "already exists; choose another name (nothing was written)" in again.stderr
    assert (folder / "rewards.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "../up", "A", "a b", "-x", "x" * 70])
def test_a_name_is_a_name(name: str, tmp_path: Path) -> None:
    done = hermes("init", "--", name, cwd=tmp_path)
    assert done.returncode == 2
    assert "is not a valid name" in done.stderr
    assert list(tmp_path.iterdir()) == []
