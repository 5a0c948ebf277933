"""Two-player games of TextArena score as in the original package, for both players."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.environments import HERE, ROOT, ports_python

COMPONENT = "reasoning-gym, TextWorld, TextArena, BFCL, AgentDojo, HumanEval, ScienceWorld"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]


def test_both_players_have_the_rewards_of_the_original(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    program = [str(ports_python()), str(HERE / "duel_trajectories.py"), str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=800, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    record_property("figure", f"{seen['games']} games, {seen['trajectories']} trajectories, {seen['differ']}")
    assert seen["differ"] == []
    assert seen["games"] >= 10 and seen["trajectories"] >= 200 and 0 < seen["won"] < seen["trajectories"]
