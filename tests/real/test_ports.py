"""Shipped ports of environments that others made: each scores trajectories as its original does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.environments import HERE, ROOT, bfcl_python, ports_python, version_in

COMPONENT = "reasoning-gym, TextWorld, TextArena, BFCL"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]

LEAST = 200
"""Trajectories of each."""
PACKAGES = {"reasoning-gym": "reasoning-gym", "textworld": "textworld", "textarena": "textarena", "bfcl": "bfcl-eval"}


def python(name: str) -> Path:
    """Return the Python of an environment with what a port plays."""
    return bfcl_python() if name == "bfcl" else ports_python()


@pytest.fixture(scope="module")
def version() -> str:
    return ", ".join(f"{package} {version_in(python(name), package)}" for name, package in PACKAGES.items())


@pytest.mark.parametrize("name", PACKAGES)
def test_scores_are_those_of_the_original(
    name: str, version: str, record_property: Callable[[str, object], None]
) -> None:
    program = [str(python(name)), str(HERE / "port_trajectories.py"), name]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=800, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1].lstrip("."))
    record_property("figure", f"{name}: gold {said['gold']}, {said['trajectories']} trajectories, {said['differ']}")
    assert said["differ"] == []
    assert said["trajectories"] >= LEAST
    assert said["gold"][0] == said["gold"][1]


@pytest.mark.parametrize("name", PACKAGES)
def test_it_plays_and_goes_on(name: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(mode: str, *options: str) -> None:
        command = [str(python(name)), "-m", "hermes_rl.cli.main", "run", name, mode, "--demo", "--out", "run"]
        subprocess.run([*command, "--quiet", *options], cwd=tmp_path, timeout=400, env=environ, check=True)

    run("evaluate", "--set", "evaluate.limit=2")
    run("evaluate", "--set", "evaluate.limit=6")
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 6
    assert {json.loads(line)["error"] for line in lines} == {None}
