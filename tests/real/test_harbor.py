"""A task written by Terminal-Bench 2's own tool, with its own verifier script, runs in the shipped spec."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from hermes_rl.analysis.external_trajectories import read_atif
from hermes_rl.errors import UserError
from tests.analysis.test_atif import exported
from tests.analysis.test_grade_atif import REFUSED, trajectory, write
from tests.real.conftest import hermes
from tests.real.environments import harbor_files

COMPONENT = "harbor's template of a task"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(600)]
TEST = '''
from pathlib import Path

def test_outputs():
    """Test that the outputs are correct."""
    assert Path("answer.txt").read_text().strip() == "42"
'''
PACKAGES = "[pytest==8.4.1, pytest-json-ctrf==0.3.5]"
"""Those that the template's Dockerfile for tests installs."""


def packed(**files: str) -> str:
    """Return an archive in base64, as in the dataset's rows."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"{name}.py")
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return base64.b64encode(made.getvalue()).decode()


def row(name: str, solution: str, test: str) -> dict[str, str | None]:
    template = harbor_files() / "harbor/cli/template-task"
    return {
        "task_name": name,
        "category": "template",
        "instruction": name,  # the template's own is empty
        "docker_image": None,
        "environment_tar": "",
        "tests_tar": packed(test_outputs=test),
        "test_sh": (template / "pytest-tests/test.sh").read_text("utf-8"),
        "solution_sh": (template / "solution/solve.sh").read_text("utf-8") + f"\n{solution}\n",
    }


def test_the_templates_own_script_and_tests_score_a_task(tmp_path: Path) -> None:
    own = (harbor_files() / "harbor/cli/template-task/pytest-tests/test_outputs.py").read_text("utf-8")
    rows = [
        row("as it comes", "true", own),
        row("right", "echo 42 > answer.txt", TEST),
        row("wrong", "echo 41 > answer.txt", TEST),
        row("forged", "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt", TEST),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    data = json.dumps({"path": "json", "data_files": str(tmp_path / "rows.jsonl"), "split": "train", "eval": "only"})
    policy = json.dumps({"type": "scripted"})
    sets = [
        f"dataset={data}",
        f"servers.policy={policy}",
        "sandbox.network=false",
        "sandbox.image=null",
        f"sandbox.python={PACKAGES}",
    ]
    given = [word for one in sets for word in ("--set", one)]
    hermes("run", "terminal-bench-2", "evaluate", *given, "--out", "run", folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").read_text("utf-8").splitlines()]
    assert {one["messages"][0]["content"]: one["score"] for one in lines} == {
        "as it comes": 1.0, "right": 1.0, "wrong": 0.0, "forged": 0.0,
    }  # fmt: skip


VALIDATE = """
import sys
from pathlib import Path

from harbor.models.trajectories import Trajectory

for path in sorted(Path(sys.argv[1]).iterdir()):
    print(path.name, len(Trajectory.model_validate_json(path.read_text("utf-8")).steps))
"""


def test_exported_trajectories_are_what_its_models_take(tmp_path: Path) -> None:
    exported(tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(harbor_files())}
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, str(tmp_path / "atif")],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["odd%2Fone:0-0.json 5", "plain:0-0.json 3"]


JUDGE = """
import sys
from pathlib import Path

from harbor.models.trajectories import Trajectory
from pydantic import ValidationError

for path in sorted(Path(sys.argv[1]).glob("*.json")):
    try:
        Trajectory.model_validate_json(path.read_text("utf-8"))
        print(path.stem, "taken")
    except ValidationError:
        print(path.stem, "refused")
"""


def test_what_is_graded_is_what_its_models_take(tmp_path: Path) -> None:
    write(tmp_path, plain=trajectory(), older=trajectory(schema_version="ATIF-v1.0"), noted=trajectory(notes="n"))
    write(tmp_path, **{name.replace(" ", "-"): trajectory(**changes) for name, (changes, _) in REFUSED.items()})
    environ = {**os.environ, "PYTHONPATH": str(harbor_files())}
    program = [sys.executable, "-c", JUDGE, str(tmp_path)]
    theirs = subprocess.run(program, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(theirs) == 3 + len(REFUSED)
    for line in theirs:
        name, verdict = line.split()
        try:
            read_atif(tmp_path / f"{name}.json")
            ours = "taken"
        except UserError:
            ours = "refused"
        assert ours == verdict, name
