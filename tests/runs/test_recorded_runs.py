"""Run directories of hermes-rl 0.1.0 stay readable: every command that reads a run accepts them, and a run resumes.

`tests/data/recorded_runs` was written at commit 9de8fa2a, before any record changed its form: a run of each mode, an
episode of several agents, and a run that was killed. Only `report.html`, which is derived, is left out, and the
directories in the stored specs are placeholders.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ROOT, hermes
from tests.view.viewed import Viewed

RECORDED = ROOT / "tests" / "data" / "recorded_runs"
RUNS = ("process", "evaluate", "serve", "seats", "interrupted")


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy whose stored specs name their code where it is now, and whose own spec has the current names."""
    shutil.copytree(RECORDED, tmp_path, dirs_exist_ok=True)
    for spec in tmp_path.glob("*/spec.yaml"):
        text = spec.read_text("utf-8").replace("/recorded/", f"{tmp_path}/").replace("/shipped/", f"{ROOT}/")
        spec.write_text(text, "utf-8")
    succeed(tmp_path, "migrate", "spec.yaml")
    return tmp_path


def succeed(folder: Path, *arguments: str) -> str:
    done = hermes(*arguments, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("run", RUNS)
def test_show_prints_recorded_run_and_each_rollout(folder: Path, run: str) -> None:
    rollouts = records(folder / run / "rollouts.jsonl")
    assert rollouts
    assert "rollout" in succeed(folder, "show", run)
    scored = [rollout for rollout in rollouts if rollout["score"] is not None]
    for rollout in scored[:2]:
        assert f"score {rollout['score']:.3g} " in succeed(folder, "show", run, rollout["id"])
    succeed(folder, "show", run, "--failed")


def test_view_serves_recorded_runs(folder: Path) -> None:
    with Viewed(folder) as viewed:
        served = viewed.names()
        assert len(served) == len(RUNS)
        for name in served:
            run = name.rpartition("-")[0]
            for rollout in records(folder / run / "rollouts.jsonl")[:2]:
                status, _, body = viewed.ask(f"/api/runs/{name}/rollouts/{rollout['id']}")
                assert status == 200, body
                assert rollout["id"] in body.decode()


def test_compare_accepts_recorded_runs(folder: Path) -> None:
    assert "file_matches" in succeed(folder, "compare", "process", "interrupted", "--force")


@pytest.mark.parametrize("run", ["process", "evaluate", "seats"])
def test_regrade_applies_a_new_clamp_to_recorded_run(folder: Path, run: str) -> None:
    before = records(folder / run / "rollouts.jsonl")
    succeed(folder, "regrade", run, "--trust", "--set", "score.clamp=[0,2]")
    after = records(folder / run / "rollouts.jsonl")
    assert [rollout["rewards"] for rollout in after] == [rollout["rewards"] for rollout in before]
    for rollout in after:
        parts = [{"short": 0.1}.get(name, 1) * reward["value"] for name, reward in rollout["rewards"].items()]
        assert rollout["score"] == pytest.approx(sum(parts))


def test_interrupted_recorded_run_resumes_without_repeating_a_rollout(folder: Path) -> None:
    before = records(folder / "interrupted" / "rollouts.jsonl")
    settings = ("--out", "interrupted", "--quiet", "--set", "process.groups=4")
    succeed(folder, "run", "spec.yaml", "process", *settings)
    after = records(folder / "interrupted" / "rollouts.jsonl")
    assert after[: len(before)] == before
    assert len({rollout["id"] for rollout in after}) == len(after) > len(before)
    assert len(records(folder / "interrupted" / "groups.jsonl")) == 4


def test_finished_recorded_runs_are_extended(folder: Path) -> None:
    before = records(folder / "process" / "rollouts.jsonl")
    succeed(folder, "run", "spec.yaml", "process", "--out", "process", "--quiet", "--set", "process.groups=5")
    after = records(folder / "process" / "rollouts.jsonl")
    assert after[: len(before)] == before
    assert len(after) == len(before) + 2


def test_recorded_evaluation_is_not_repeated(folder: Path) -> None:
    before = records(folder / "evaluate" / "rollouts.jsonl")
    succeed(folder, "run", "spec.yaml", "evaluate", "--out", "evaluate", "--quiet")
    assert records(folder / "evaluate" / "rollouts.jsonl") == before


@pytest.mark.slow
def test_recorded_serve_run_resumes_with_its_trainer(folder: Path) -> None:
    before = records(folder / "serve" / "rollouts.jsonl")
    succeed(folder, "run", "spec.yaml", "serve", "--out", "serve", "--quiet", "--set", "serve.total_steps=4")
    after = records(folder / "serve" / "rollouts.jsonl")
    assert after[: len(before)] == before
    assert len(after) > len(before)
