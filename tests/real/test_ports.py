"""Shipped ports of environments that others made: each scores trajectories as its original does."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.environments import HERE, ROOT, agentdojo_python, bfcl_python, ports_python, version_in

COMPONENT = "reasoning-gym, TextWorld, TextArena, BFCL, AgentDojo"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]

LEAST = 200
"""Trajectories of each."""
PACKAGES = {
    "reasoning-gym": ("reasoning-gym", "Apache-2.0"),
    "textworld": ("textworld", "MIT"),
    "textarena": ("textarena", "MIT"),
    "bfcl": ("bfcl-eval", "Apache-2.0"),
    "agentdojo": ("agentdojo", "MIT"),
}
"""What each plays, and its licence."""


def python(name: str) -> Path:
    """Return the Python of an environment with what a port plays."""
    return {"bfcl": bfcl_python, "agentdojo": agentdojo_python}.get(name, ports_python)()


@pytest.mark.parametrize("name", PACKAGES)
def test_scores_are_those_of_the_original(name: str, record_property: Callable[[str, object], None]) -> None:
    program = [str(python(name)), str(HERE / "port_trajectories.py"), name]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "random"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=800, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1].lstrip("."))
    record_property("figure", f"{name}: gold {said['gold']}, {said['trajectories']} trajectories, {said['differ']}")
    for row in rows_of_page(name, said):
        record_property("ports.md", row)
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


def rows_of_page(name: str, said: dict[str, Any]) -> Iterator[str]:
    """Return the rows of the two tables in docs/ports.md: the figures, and the kinds of trajectories."""
    (package, licence), (right, solved) = PACKAGES[name], said["gold"]
    causes = Counter(kind for _, kind, _, _ in said["differ"])
    equal = said["trajectories"] - len(said["differ"])
    spec, yaml_and_python = f"[{name}](../specs/{name}/{name}.yaml)", " and ".join(map(str, said["lines"]))
    cells = (
        *(spec, f"{package} {version_in(python(name), package)}, {licence}", said["tasks"], f"{right} of {solved}"),
        *(said["trajectories"], equal, ", ".join(f"{n} {kind}" for kind, n in causes.items()) or "none"),
        *(yaml_and_python, said["replaced"] or "–"),
    )
    yield f"| {' | '.join(map(str, cells))} |"
    yield f"| {spec} | {said['rows']} | {', '.join(said['kinds'])} |"
