"""Task folders of Terminal-Bench as rows: task.yaml, solution.sh, run-tests.sh, tests/, perhaps an image."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.others_files import list_below, read_file, read_text

OURS = Path(__file__).parents[1] / "data" / "terminal-bench"


def tasks(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield one row per directory of ``$TERMINAL_BENCH_TASKS``, or of the three small included tasks."""
    folder = Path(os.environ.get("TERMINAL_BENCH_TASKS") or OURS)
    for task in sorted(path.parent for path in folder.glob("*/task.yaml")):
        task_config = yaml.safe_load(read_text(task / "task.yaml"))
        yield {
            "task_id": task.name,
            "instruction": task_config["instruction"],
            "image": task_config.get("docker_image"),
            "verifier": [_file_entry(path, task) for path in _task_files(task)],
            "setup": _setup_text(task / "setup.sh"),
            "solution_script": _setup_text(task / "solution.sh"),
        }


def _task_files(task: Path) -> list[Path]:
    tests = list_below(task / "tests", task) if (task / "tests").exists() else {}
    return [task / "run-tests.sh", *(path for path, mode in tests.items() if not stat.S_ISDIR(mode))]


def _file_entry(path: Path, task: Path) -> dict[str, Any]:
    """Return a file as `files` takes it: tasks may be anywhere, and a `from` has to be below the spec."""
    mode = path.lstat().st_mode & 0o777
    return {"to": f"/tmp/task/{path.relative_to(task)}", "content": read_file(path, task), "mode": mode}


def _setup_text(path: Path) -> str:
    return read_text(path) if path.exists() else "true\n"
