"""A resumed run never mixes incompatible records, and an evaluation overwrites no earlier one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.test_run import lines
from tests.commands import hermes

RUN = ["run", "terminal-files", "process", "--out", "run", "--quiet", "--set", "process.groups=1"]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("played")
    done = hermes(*RUN, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def folder(tmp_path: Path, played: Path) -> Path:
    return shutil.copytree(played, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("process.group_size=2", "groups of 4, but process.group_size is 2"),
        (
            "rewards.file_matches.args={path: other, content: x}",
            "file_matches has changed and cannot be computed",
        ),
        ("prompt.user=other", "changed: prompt"),
    ],
)
def test_resume_with_incompatible_changes_is_refused(folder: Path, change: str, said: str) -> None:
    done = hermes(*RUN, "--set", change, cwd=folder)
    assert done.returncode == 2
    assert said in done.stderr
    assert "--fresh" in done.stderr
    if change.startswith("process"):
        assert hermes(*RUN, "--set", change, "--fresh", cwd=folder).returncode == 0


def test_changed_weights_rescore_recorded_rollouts(folder: Path) -> None:
    more = [*RUN[:-1], "process.groups=2", "--set", "rewards.concise.weight=-0.5", "--set", "on_stop.max_turns=mask"]
    done = hermes(*more, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "scoring changed: rescoring 4 recorded rollouts" in done.stderr
    rollouts = {line["id"]: line for line in lines(folder / "run" / "rollouts.jsonl")}
    weights = {"file_matches": 1.0, "concise": -0.5}
    for line in rollouts.values():
        parts = [weights[name] * reward["value"] for name, reward in line["rewards"].items()]
        assert line["score"] == pytest.approx(min(max(sum(parts), 0), 1)), "the spec clamps"
    groups = lines(folder / "run" / "groups.jsonl")
    assert len(groups) == 2
    for group in groups:
        assert group["scores"] == [rollouts[f"{group['group']}-{index}"]["score"] for index in range(4)]
    again = hermes(*more, cwd=folder)
    assert "the scoring has changed" not in again.stderr


def test_a_refused_run_leaves_the_description_of_the_one_that_is_there(folder: Path) -> None:
    before = (folder / "run" / "run.json").read_text()
    assert hermes(*RUN, "--set", "process.group_size=2", cwd=folder).returncode == 2
    assert (folder / "run" / "run.json").read_text() == before


def test_a_shared_file_of_groups_is_not_taken_for_ones_own(folder: Path) -> None:
    other = ["--env.data_path_to_save_groups", "run/groups.jsonl", "--set", "agent.max_turns=5"]
    done = hermes("run", "terminal-files", "process", "--out", "other", *other, cwd=folder)
    assert done.returncode == 2
    assert "groups of another run" in done.stderr


def test_unrelated_record_among_the_rollouts_is_named(folder: Path) -> None:
    (folder / "run" / "rollouts.jsonl").write_text('{"x": 1}\n')
    done = hermes(*RUN, cwd=folder)
    assert done.returncode == 2
    assert "rollouts.jsonl:1: this line has no 'id'" in done.stderr


def test_directory_of_a_run_that_never_started_is_reused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"name": "x", "fingerprint": "00000000"}))
    assert hermes(*RUN, cwd=tmp_path).returncode == 0


def test_complete_evaluation_runs_only_additional_rollouts(tmp_path: Path) -> None:
    arguments = ["run", "terminal-files", "evaluate", "--out", "run", "--quiet", "--set", "agent.temperature=1.0"]
    first = hermes(*arguments, "--set", "evaluate.rollouts=2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    before = lines(tmp_path / "run" / "rollouts.jsonl")
    again = hermes(*arguments, "--set", "evaluate.rollouts=2", cwd=tmp_path)
    assert again.stdout == first.stdout
    assert lines(tmp_path / "run" / "rollouts.jsonl") == before
    assert hermes(*arguments, "--set", "evaluate.rollouts=3", cwd=tmp_path).returncode == 0
    after = lines(tmp_path / "run" / "rollouts.jsonl")
    assert after[: len(before)] == before
    assert len({line["id"] for line in after}) == len(after) == len(before) * 3 // 2
    assert len(lines(tmp_path / "run" / "samples.jsonl")) == len(after)


def test_dropped_stop_reasons_do_not_count_as_failures(tmp_path: Path) -> None:
    small = ["--set", "process.group_size=1", "--set", "toolsets=[todo]"]
    short = ["--set", "agent.max_turns=1", "--set", "on_stop.max_turns=drop", "--quiet", *small]
    done = hermes("run", "terminal-files", "process", "--out", "run", "--set", "process.groups=2", *short, cwd=tmp_path)
    assert done.returncode == 1
    assert "groups were excluded" in done.stderr
    assert "max_failures" not in done.stderr
