"""Tests of one group are played by one worker: attacks count on being alone among their kind, engines on the cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(40))
@pytest.mark.xdist_group("one")
def test_it(number, worker_id):
    with open(os.environ["WORKERS"], "a") as file:
        file.write(worker_id + "\\n")
"""


def test_a_group_stays_on_one_worker(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    env = {"PATH": "/usr/bin:/bin", "WORKERS": str(tmp_path / "workers")}
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(set((tmp_path / "workers").read_text().split())) == 1
