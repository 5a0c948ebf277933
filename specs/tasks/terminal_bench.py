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
            "folder": str(task),
            "setup": _text(task / "setup.sh"),
            "solution_script": _text(task / "solution.sh"),
        }


def _text(path: Path) -> str:
    return path.read_text("utf-8") if path.is_file() else "true\n"
