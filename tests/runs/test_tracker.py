"""wandb where it was asked for: offline it needs no network and no account, and absent it is not even imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hermes_rl.errors import UserError
from hermes_rl.runs.progress import Tracker
from hermes_rl.runs.wandb_text import readable
from tests.runs.offline_wandb import history, table

ROOT = Path(__file__).parents[2]
KEY = "sk-never-shown-2342"


@pytest.fixture(autouse=True)
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without an account, and addresses of wandb at which nobody listens."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)


def hermes(folder: Path, *arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own; `code` runs after it."""
    program = (
        "import sys\nfrom hermes_rl.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    status = ended.code\n"
        f"{code}\nsys.exit(status)"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.slow
def test_offline_tracker_writes_logged_values_to_its_directory(tmp_path: Path) -> None:
    tracker = Tracker("project", "name", mode="offline", folder=tmp_path, config={"seed": 1})
    tracker.log({"train/mean_reward": 0.5, "train/tool_error_details": "[turn 1] …"}, step=1)
    tracker.log({"train/rollouts": tracker.table([("[USER]\nhi", 1.0)])}, step=2)
    tracker.close()
    first, second = history(tmp_path)
    assert first == {"train/mean_reward": 0.5, "train/tool_error_details": "[turn 1] …"}
    assert set(second) == {"train/rollouts"}
    assert table(tmp_path, "train/rollouts") == [["[USER]\nhi", 1.0]]


def test_two_environments_of_one_process_have_a_run_each(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    trackers = [Tracker("project", folder.name, mode="offline", folder=folder) for folder in folders]
    for number, tracker in enumerate(trackers):
        tracker.log({"number": number})
    for tracker in trackers:
        tracker.close()
    assert [history(folder) for folder in folders] == [[{"number": 0}], [{"number": 1}]]


def test_failing_wandb_client_is_reported_once_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker("project", "name", mode="offline", folder=tmp_path)
    tracker.log({"number": 1})
    tracker.run.finish()  # its process is gone, as after a crash
    for _ in range(3):
        tracker.log({"number": 2})
    tracker.close()
    assert len([record for record in caplog.records if "stopped logging to wandb" in record.message]) == 1
    assert history(tmp_path) == [{"number": 1}]


def test_online_tracker_without_an_account_explains_the_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"wandb: .*wandb login.*offline"):
        Tracker("project", "name", mode="online", folder=tmp_path)


@pytest.mark.slow
def test_process_logs_a_step_per_written_group_and_the_rollouts_as_text(tmp_path: Path) -> None:
    done = hermes(
        tmp_path, "run", "terminal-files", "process", "--out", "run", "--set", "process.groups=3",
        "--set", "wandb={project: p, mode: offline}", "--openai.api_key", KEY,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = history(tmp_path / "run")
    assert ["train/rollouts" in step for step in steps] == [False, False, True]
    for step in steps:
        assert step["train/tool_errors_count"] == 0
        assert 0 < step["train/mean_reward"] < 1
        assert {"train/reward/file_matches", "train/reward/concise"} <= set(step)
    rows = table(tmp_path / "run", "train/rollouts")
    assert len(rows) == 3
    assert all("[TOOL CALL] write_file(" in text for text, _ in rows)
    assert not (tmp_path / "wandb").exists(), "it belongs to the run directory"
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert all(KEY.encode() not in content for content in [done.stdout.encode(), done.stderr.encode(), *written])


@pytest.mark.slow
def test_evaluate_logs_its_metrics_once(tmp_path: Path) -> None:
    done = hermes(
        tmp_path, "run", "terminal-files", "evaluate", "--out", "run", "--set", "wandb={project: p, mode: offline}"
    )
    assert done.returncode == 0, done.stderr
    (step,) = history(tmp_path / "run")
    assert {"eval/mean_reward", "eval/pass@1", "eval/ungraded", "eval/stop_reason/finished"} <= set(step)
    assert not [name for name in step if name.startswith("train/")]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["process", "evaluate"])
def test_wandb_is_not_imported_unless_requested(mode: str, tmp_path: Path) -> None:
    code = "print('wandb' in sys.modules, file=sys.stderr)"
    done = hermes(
        tmp_path, "run", "terminal-files", mode, "--out", "run", "--set", "process.groups=1", "--quiet", code=code
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "False")
    assert not list(tmp_path.rglob("wandb"))


@pytest.mark.slow
def test_disabled_leaves_nothing(tmp_path: Path) -> None:
    done = hermes(
        tmp_path, "run", "terminal-files", "evaluate", "--out", "run", "--set", "wandb={project: p, mode: disabled}",
        code="print('wandb' in sys.modules, file=sys.stderr)",
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "False")


def test_a_rollout_reads_as_text_within_the_limits_that_people_know() -> None:
    call = {"type": "function", "function": {"name": "terminal", "arguments": "a" * 201}}
    text = readable(
        [
            {"role": "user", "content": "u" * 1000},
            {"role": "assistant", "content": None, "reasoning": "r" * 301, "tool_calls": [call]},
            {"role": "tool", "content": "t" * 501},
            {"role": "assistant", "content": "done"},
        ]
    )
    assert text.split("\n") == [
        "[USER]", "u" * 1000,
        "[ASSISTANT thinking] " + "r" * 300 + "...",
        "[TOOL CALL] terminal(" + "a" * 200 + "...)",
        "[TOOL RESULT] " + "t" * 500 + "...",
        "[ASSISTANT]", "done",
    ]  # fmt: skip
