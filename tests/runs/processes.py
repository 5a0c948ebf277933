"""The worker processes that somebody has started."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

NAME = "hermes-worker"
"""What `ps` shows for a worker."""


def workers_of(starter: int) -> list[int]:
    """Return the ids of the living workers of a process.

    They are children of its fork server. Commands of tests share one, so that theirs are found by the directory in
    which the test has started the command. What a worker starts has its name until it runs another program.
    """
    directory = _directory(starter)
    shared = directory == Path.cwd()
    parents: dict[int, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with suppress(OSError):
            is_worker = (process / "comm").read_text().strip() == NAME and alive(pid)
            if is_worker and (parent_of(parent_of(pid)) == starter or (not shared and _directory(pid) == directory)):
                parents[pid] = parent_of(pid)
    return sorted(pid for pid, parent in parents.items() if parent not in parents)


def alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    with suppress(OSError):
        return _stat(pid)[0] != "Z"
    return False


def parent_of(pid: int) -> int:
    """Return the id of the parent of a process that is not reaped yet."""
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _directory(pid: int) -> Path:
    return Path(f"/proc/{pid}/cwd").readlink()
