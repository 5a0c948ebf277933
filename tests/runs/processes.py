"""Worker processes of a run, found by their parents."""

from __future__ import annotations

from pathlib import Path


def workers_of(run: int) -> list[int]:
    """Return the workers of a run that are alive, whether it has started them itself or has a process that forks them.

    A fork has the command line of its parent, so that the only such child of a run starts its workers if it has
    children with the same command line.
    """
    started = [pid for pid in children(run) if "hermes_rl.runs.worker" in command_of(pid)]
    if len(started) == 1:
        forks = [pid for pid in children(started[0]) if command_of(pid) == command_of(started[0])]
        return forks or started
    return started


def children(parent: int) -> list[int]:
    """Return the children of a process that are alive."""
    found = [int(pid) for one in Path(f"/proc/{parent}/task").glob("*/children") for pid in _read(one).split()]
    return sorted(pid for pid in found if alive(pid))


def alive(pid: int) -> bool:
    """Whether it is there, and not only waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def command_of(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    return _read(Path(f"/proc/{pid}/cmdline"))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
