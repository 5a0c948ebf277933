"""The worker processes that somebody has started."""

from __future__ import annotations

from pathlib import Path


def workers_of(parent: int) -> list[int]:
    """The workers among the children of a process that are alive."""
    found = [int(pid) for one in Path(f"/proc/{parent}/task").glob("*/children") for pid in one.read_text().split()]
    return sorted(pid for pid in found if alive(pid) and "hermes_rl.runs.worker" in _command(pid))


def alive(pid: int) -> bool:
    """Whether it is there, and not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
