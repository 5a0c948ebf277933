"""Task folders of Terminal-Bench as rows: task.yaml, solution.sh, run-tests.sh, tests/, perhaps an image."""

from collections.abc import Iterator
from os import environ
from pathlib import Path
from typing import Any

import yaml

OURS = Path(__file__).parents[1] / "data" / "terminal-bench"


def tasks(*, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """One row per folder of ``$TERMINAL_BENCH_TASKS``, or of the three small ones that come along."""
    folder = Path(environ.get("TERMINAL_BENCH_TASKS") or OURS)
    for task in sorted(path.parent for path in folder.glob("*/task.yaml")):
        described = yaml.safe_load((task / "task.yaml").read_text("utf-8"))
        yield {
            "task_id": task.name,
            "instruction": described["instruction"],
            "image": described.get("docker_image"),
            "verifier": [_laid(path, task) for path in _files(task)],
            "setup": _text(task / "setup.sh"),
            "solution_script": _text(task / "solution.sh"),
        }


def _files(task: Path) -> list[Path]:
    return [task / "run-tests.sh", *sorted(path for path in task.glob("tests/**/*") if path.is_file())]


def _laid(path: Path, task: Path) -> dict[str, Any]:
    """Return a file as `files` takes it: tasks may be anywhere, and a `from` has to be below the spec."""
    mode = path.stat().st_mode & 0o777
    return {"to": f"/tmp/task/{path.relative_to(task)}", "content": path.read_bytes(), "mode": mode}


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else "true\n"
