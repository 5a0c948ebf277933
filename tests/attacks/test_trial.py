"""The attacks of `hermes-rl doctor --security`: the sandbox holds them, and without one they get through."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hermes_rl.cli import doctor
from hermes_rl.sandbox.escape_probes import ATTACKS, START, Trial, trials
from tests.attacks.test_attacks import folder, outside

__all__ = ["folder"]


async def test_the_default_sandbox_holds_all_of_them() -> None:
    began = time.monotonic()
    found = await trials()
    assert [one for one in found if not one.held] == []
    assert len(found) == len(ATTACKS) + 1
    assert time.monotonic() - began < 20


@pytest.mark.slow
def test_without_a_sandbox_they_get_through(folder: Path) -> None:
    found = outside(folder, "bare", timeout=60)
    held = {name for name, held in found.items() if held}
    assert len(held) * 2 < len(found), held
    for name in ("files of this machine", "processes of this machine", "services on loopback", "abstract sockets"):
        assert name not in held


def test_doctor_reports_escape_probes_and_fails_if_one_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def found() -> list[Trial]:
        return [Trial("mounts", True, "held"), Trial("files of this machine", False, "it got through")]

    monkeypatch.setattr("hermes_rl.sandbox.escape_probes.trials", found)
    checks = doctor.examine_security()
    assert doctor.print_checks(checks, as_json=False) == 1
    said = capsys.readouterr().out
    assert "ok    attack on mounts: held" in said
    assert "FAIL  attack on files of this machine: it got through" in said
    assert "docs/security.md" in said


@pytest.mark.slow
def test_the_option_adds_them_to_the_other_checks() -> None:
    program = [sys.executable, "-m", "hermes_rl.cli.main", "doctor", "--security", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    names = [check["name"] for check in json.loads(done.stdout)]
    assert "sandbox bubblewrap" in names
    assert "attack on mounts" in names


@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_is_a_program(name: str) -> None:
    bait = {"secret": "x", "mark": "m", "port": 1, "names": ["A"], "io_setup": 206}
    compile(START + ATTACKS[name].format(**bait), name, "exec")
