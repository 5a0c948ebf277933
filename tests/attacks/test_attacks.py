"""Hostile rollouts, played through the model's tools in a real run, in a world of their own (see `outer`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.cases import CASES
from tests.attacks.hostile import PRIMITIVES

HERE = Path(__file__).parent
TRACING = not Path("/proc/sys/kernel/yama/ptrace_scope").exists()
"""Whether the kernel lets a process change its parent's memory; where it does not, that attack is held already."""
# One after the other: worlds that are there at the same time have the same users, for whom the kernel counts.
pytestmark = pytest.mark.one_worker("attacks")
ORDINARY = 1234
GUARD = 500
"""Seconds that guard against hanging: attacks use all processors, and other tests do too."""
SECRETS = {"API_KEY": "KEY-environment", "AWS_SECRET_ACCESS_KEY": "KEY-cloud"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that the run sees as its own; what is written there is in memory and goes with it."""
    path = Path(tempfile.mkdtemp(prefix="world-"))
    path.chmod(0o755)
    yield path
    path.rmdir()


def outside(folder: Path, module: str, *words: str, timeout: float, user: int | None = None) -> dict[str, Any]:
    """Run a module of this folder in a world of its own, and of this user's; what it prints, as JSON."""
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(HERE.parents[1]),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        **{name: os.environ[name] for name in ("LENT",) if name in os.environ},
        **SECRETS,
    }
    command = [sys.executable, "-m", f"tests.attacks.{module}", str(folder), *words]
    done = subprocess.run(
        [sys.executable, str(HERE / "outer.py"), str(folder), str(os.geteuid() if user is None else user), *command],
        env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def play(folder: Path, mode: str, user: int | None = None) -> dict[str, Any]:
    """Play all cases; what `world` prints."""
    return outside(folder, "world", mode, "KEY-argument", timeout=GUARD, user=user)


def harmful(found: dict[str, Any]) -> dict[str, str]:
    """Attacks that got through, with what became of their rollouts."""
    return {name: harm for name, harm in found["succeeded"].items() if harm}


def names(found: dict[str, Any]) -> list[str]:
    return list(harmful(found))


def test_there_are_cases_of_every_way() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)
    assert set(Counter(case.way for case in CASES)) == set(range(1, 9))


@pytest.mark.slow
@pytest.mark.by_turns(2)
@pytest.mark.timeout(GUARD + 20)
@pytest.mark.parametrize(
    ("mode", "user", "lent"),
    [
        ("system", None, 0),
        ("image", None, 0),
        ("system", ORDINARY, 0),
        ("image", ORDINARY, 0),
        ("system", ORDINARY, 500),
    ],
)
def test_every_attack_is_held(
    folder: Path,
    mode: str,
    user: int | None,
    lent: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As whoever tests, as an ordinary user, and as one with subordinate users."""
    if user is not None and os.geteuid() != 0:
        pytest.skip("who tests is an ordinary user already")
    if lent:
        if shutil.which("newuidmap") is None:
            pytest.skip("subordinate users take the package uidmap")
        monkeypatch.setenv("LENT", str(lent))
    image = mode if mode == "system" else str(request.getfixturevalue("packed_rootfs"))
    found = play(folder, image, user)
    assert harmful(found) == {}
    assert found["errors"] == {}
    assert found["hurt"] == {}
    assert not TRACING or found["unarmed"] == {}


@pytest.mark.slow
@pytest.mark.by_turns(2)
@pytest.mark.timeout(GUARD + 20)
def test_without_a_sandbox_most_of_them_succeed(folder: Path) -> None:
    found = play(folder, "none")
    assert len(names(found)) * 2 >= len(CASES), sorted(set(found["succeeded"]) - set(names(found)))


FUZZED = int(os.environ.get("FUZZED_SANDBOXES", "100"))
"""Sandboxes of the fuzzer: 100 in the slow suite, 2,000 in a full run."""


@pytest.mark.slow
@pytest.mark.timeout(GUARD + 20 + 2 * FUZZED)
def test_random_hostile_actions_have_no_effect_outside_the_sandbox(folder: Path) -> None:
    seed = int(os.environ.get("FUZZED_SEED", "1"))
    found = outside(folder, "fuzz", str(FUZZED), str(seed), timeout=GUARD + 2 * FUZZED)
    sys.stdout.write(json.dumps(found, indent=1))
    assert found["played"] == FUZZED
    assert found["slow"] == []
    assert found["ours"] == []
    assert found["innocent"] > 0
    assert found["changed"] == []
    assert found["left"] == {}


def test_the_fuzzer_has_many_primitives() -> None:
    assert len(PRIMITIVES) >= 60
