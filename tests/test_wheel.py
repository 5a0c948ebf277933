"""The wheel brings specs and rewards along, and plays without the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_from_the_wheel_alone(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=200)
    (wheel,) = tmp_path.glob("hermes_rl-*.whl")
    installed = tmp_path / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=100)
    assert (installed / "hermes_rl_verifiers.py").is_file()
    assert (installed / "hermes_rl/shipped/agents/codex.yaml").is_file()
    done = subprocess.run(
        [sys.executable, "-m", "hermes_rl.cli.main", "run", "terminal-files", "process", "--out", "run",
         "--set", "process.groups=1"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "default-src 'none'" in (tmp_path / "run" / "report.html").read_text(), "the pages come along"
    provenance = json.loads((tmp_path / "run" / "run.json").read_text())
    assert str(installed) in provenance["spec"], "the shipped spec of the wheel was used"
    assert set(provenance["code"]) == {"rewards.file_matches", "rewards.concise"}
