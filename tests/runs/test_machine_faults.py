"""A full disk, a read-only directory, signals, clock jumps and a changed dataset are reported and lose nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.runs.run import RunBudget
from hermes_rl.sandbox.bubblewrap import find_bwrap
from tests.cli.test_run import lines, listen_to_ctrl_c
from tests.commands import environment, hermes
from tests.rollouts.worlds import Policy, World
from tests.runs.playing import EvaluatePlan, ProcessPlan, play_evaluate, play_process
from tests.waiting import until_blocking

SPEC = """
dataset: DATASET
prompt: {user: "Say {{ word }}"}
rewards: {long: {fn: "rewards.py:long"}}
solution: {turns: [{say: "{{ word }}"}]}
servers: {policy: {type: scripted, error_rate: 0.5}}
process: {groups: GROUPS, group_size: 2, concurrency: 8}
"""
REWARD = """
import time

def long(result):
    time.sleep(PAUSE)
    return float(len(result.final_response))
"""
RUN = ["run", "spec.yaml", "process", "--out", "disk/run", "--quiet"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path)
    (tmp_path / "disk").mkdir()
    return tmp_path


ITEMS = json.dumps({"items": [{"word": "abc" * n} for n in range(1, 5)]})
FILE = "{path: json, data_files: rows.jsonl}"


def write(folder: Path, *, groups: int = 12, pause: float = 0.0, word: str = "abc", dataset: str = ITEMS) -> None:
    (folder / "spec.yaml").write_text(SPEC.replace("GROUPS", str(groups)).replace("DATASET", dataset))
    (folder / "rewards.py").write_text(REWARD.replace("PAUSE", str(pause)))
    (folder / "rows.jsonl").write_text("".join(json.dumps({"word": word * n}) + "\n" for n in range(1, 5)))


def check(run: Path, groups: int) -> None:
    rollouts = lines(run / "rollouts.jsonl")
    assert len({line["id"] for line in rollouts}) == len(rollouts)
    assert len(lines(run / "groups.jsonl")) == groups
    assert [path.name for path in run.iterdir() if path.name.startswith(".") and path.name != ".lock"] == []


def confined(folder: Path, mount: list[str], script: str) -> subprocess.CompletedProcess[str]:
    """A shell for which `disk` is another file system."""
    fence = [find_bwrap().path, "--dev-bind", "/", "/", *mount, "--chdir", str(folder)]
    return subprocess.run(
        [*fence, "bash", "-c", script],
        env=environment(), capture_output=True, text=True, timeout=90, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def command() -> str:
    return " ".join([sys.executable, "-m", "hermes_rl.cli.main", *RUN])


@pytest.mark.slow
def test_full_disk_stops_the_run_and_the_same_command_resumes_it(folder: Path) -> None:
    script = f"""
        head -c 120000 /dev/zero > disk/filler
        {command()}; echo status $?
        cp -r disk/run before; rm disk/filler
        {command()}; echo status $?
        cp -r disk/run after
    """
    done = confined(folder, ["--size", "160000", "--tmpfs", str(folder / "disk")], script)
    assert "cannot be written: No space left on device. Complete results are saved" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("status")] == ["status 1", "status 0"]
    kept = (folder / "before" / "rollouts.jsonl").read_text()
    assert (folder / "after" / "rollouts.jsonl").read_text().startswith(kept), "what was complete is kept"
    check(folder / "after", 12)


def test_read_only_directory_is_reported_before_any_rollout(folder: Path) -> None:
    done = confined(folder, ["--ro-bind", str(folder / "disk"), str(folder / "disk")], command())
    assert done.returncode == 2
    assert "disk/run cannot be written: Read-only file system; choose another --out" in done.stderr


@pytest.mark.slow
def test_a_folder_that_became_read_only_is_said_and_nothing_is_touched(folder: Path) -> None:
    assert hermes(*RUN, cwd=folder).returncode == 0
    before = {path.name: path.read_bytes() for path in (folder / "disk" / "run").iterdir() if path.is_file()}
    done = confined(folder, ["--ro-bind", str(folder / "disk"), str(folder / "disk")], command())
    assert done.returncode == 2
    assert "Read-only file system" in done.stderr
    assert {path.name: path.read_bytes() for path in (folder / "disk" / "run").iterdir()} == before


def started(folder: Path) -> subprocess.Popen[str]:
    """The run, once it has written a few rollouts."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hermes_rl.cli.main", *RUN],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=listen_to_ctrl_c,
    )  # fmt: skip
    rollouts = folder / "disk" / "run" / "rollouts.jsonl"
    until_blocking(
        lambda: process.poll() is not None or (rollouts.exists() and rollouts.read_text().count("\n") > 3), seconds=60
    )
    return process


@pytest.mark.slow
@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGINT], [signal.SIGINT, signal.SIGTERM]])
def test_signals_stop_the_run_with_130_and_the_same_command_resumes_it(
    folder: Path, signals: list[signal.Signals]
) -> None:
    write(folder, groups=400, pause=0.2)
    process = started(folder)
    for one in signals:
        process.send_signal(one)
        time.sleep(0.05)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "complete results are saved" in said
    written = len(lines(folder / "disk" / "run" / "groups.jsonl"))
    write(folder, groups=written + 3, pause=0.2)
    done = hermes(*RUN, cwd=folder)
    assert done.returncode == 0, done.stderr
    check(folder / "disk" / "run", written + 3)


@pytest.fixture
def jumping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wall clock that is set by a day, forth and back, each time that somebody looks."""
    real, looks = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + (86_400 if next(looks) % 2 else -86_400))
    yield


@pytest.mark.usefixtures("jumping")
async def test_a_clock_that_jumps_changes_no_deadline_and_no_duration(tmp_path: Path) -> None:
    world = World(on_grade=lambda key: float(key.index), policy=Policy(delay=0.01))
    budget = RunBudget(deadline=3600.0)
    summary = await play_process(world, tmp_path / "process", ProcessPlan(2, 6), budget=budget)
    assert (summary.written, summary.stopped) == (6, None)
    assert 0 < summary.seconds < 60
    found = await play_evaluate(World(), EvaluatePlan(), folder=tmp_path / "evaluate")
    seconds = float(found.metrics_file()["config_general"]["total_evaluation_time_seconds"])
    assert 0 <= seconds < 60
    timings: dict[str, Any] = next(iter(lines(tmp_path / "process" / "rollouts.jsonl")))["timings"]
    assert all(0 <= value < 60 for value in timings.values())


@pytest.mark.slow
def test_a_file_of_rows_that_has_changed_is_refused_and_said(folder: Path) -> None:
    write(folder, dataset=FILE)
    assert hermes(*RUN, cwd=folder).returncode == 0
    before = (folder / "disk" / "run" / "rollouts.jsonl").read_bytes()
    write(folder, dataset=FILE, word="other")
    done = hermes(*RUN, cwd=folder)
    assert done.returncode == 2
    assert "changed: dataset" in done.stderr
    assert (folder / "disk" / "run" / "rollouts.jsonl").read_bytes() == before


def test_changed_rows_start_a_new_default_directory_and_report_it(folder: Path) -> None:
    default = ["run", "spec.yaml", "process", "--quiet"]
    assert hermes(*default, cwd=folder).returncode == 0
    write(folder, dataset=ITEMS.replace("abc", "xyz"))
    done = hermes(*default, cwd=folder)
    assert done.returncode == 0
    assert "dataset changed since outputs/spec/process-" in done.stderr
    assert len(list((folder / "outputs" / "spec").iterdir())) == 2
