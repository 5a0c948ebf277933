"""Compare the port of τ²-bench with the original, which no registry has; `TAU2_PYTHON` names an interpreter with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.real.environments import HERE, ROOT

PYTHON = os.environ.get("TAU2_PYTHON")
"""Of Python 3.12, with tau2 1.0.1 and this package; `TAU2_DATA_DIR` names the data."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PYTHON is None, reason="TAU2_PYTHON names no interpreter that has τ²-bench"),
]


@pytest.mark.parametrize("domain", ["retail", "airline", "telecom", "banking_knowledge"])
def test_scores_match_the_original_implementation(domain: str) -> None:
    program = [str(PYTHON), str(HERE / "tau2_trajectories.py"), domain, os.environ.get("TAU2_EVERY", "8")]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=1700, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["differ"] == []
    assert outcome["gold"][0] == outcome["gold"][1]
    assert outcome["trajectories"] >= 80


def test_ports_benchmark_runs_both_implementations() -> None:
    program = [sys.executable, str(ROOT / "benchmarks" / "ports.py"), "--tau2", str(PYTHON), "--repetitions", "1"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("| tau2 | ")
