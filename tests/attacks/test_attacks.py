"""Hostile rollouts, played through the model's tools in a real run, in a world of their own (see `outer`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.cases import CASES

HERE = Path(__file__).parent
TRACING = not Path("/proc/sys/kernel/yama/ptrace_scope").exists()
"""Whether the kernel lets a process change its parent's memory; where it does not, that attack is held already."""
SECRETS = {"API_KEY": "KEY-environment", "AWS_SECRET_ACCESS_KEY": "KEY-cloud"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that the run sees as its own; what is written there is in memory and goes with it."""
    path = Path(tempfile.mkdtemp(prefix="world-"))
    path.chmod(0o755)
    yield path
    path.rmdir()


def play(folder: Path, mode: str) -> dict[str, Any]:
    """Play all cases; what `world` prints."""
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(HERE.parents[1]),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        **SECRETS,
    }
    command = [sys.executable, "-m", "tests.attacks.world", str(folder), mode, "KEY-argument"]
    done = subprocess.run(
        [sys.executable, str(HERE / "outer.py"), str(folder), *command],
        env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def names(found: dict[str, Any]) -> list[str]:
    return [name for name, succeeded in found["succeeded"].items() if succeeded]


def test_there_are_cases_of_every_way() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(Counter(case.way for case in CASES)) == set(range(1, 9))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["system", "image"])
def test_every_attack_is_held(folder: Path, mode: str, request: pytest.FixtureRequest) -> None:
    image = mode if mode == "system" else str(request.getfixturevalue("rootfs"))
    found = play(folder, image)
    assert names(found) == []
    assert found["errors"] == {}
    assert not TRACING or found["unarmed"] == {}


@pytest.mark.slow
def test_without_a_sandbox_most_of_them_succeed(folder: Path) -> None:
    found = play(folder, "none")
    assert len(names(found)) * 2 >= len(CASES), sorted(set(found["succeeded"]) - set(names(found)))
