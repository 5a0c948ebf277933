"""Containers of runners that were killed: stopped already, and removed by the next run.

Owns the label that says whose a container is. A runner in another PID namespace cannot be told from a dead one, so
what belongs to such a one is left alone.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from hermes_rl.sandbox.docker_engine import Engine

LABEL = "hermes-rl.runner"


@functools.cache
def _mark(pid: int) -> str:
    return f"{_boot()}:{_namespace()}:{pid}:{_began(pid)}"


def own_mark() -> str:
    """This process, told apart from every other of this machine, before and after it."""
    return _mark(os.getpid())


def is_dead(mark: str) -> bool:
    """True where `mark` is of a runner of this machine and PID namespace that is no more."""
    boot, _, rest = mark.partition(":")
    namespace, _, rest = rest.partition(":")
    pid, _, began = rest.partition(":")
    if boot != _boot():
        return False  # another machine's, or of one that was started anew
    return namespace == _namespace() and pid.isdigit() and _began(int(pid)) != began


async def remove_leftovers(engine: Engine) -> None:
    """Remove the containers of runners that are dead."""
    for name, mark in (await engine.containers(LABEL)).items():
        if is_dead(mark):
            await engine.remove(name)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _began(pid: int) -> str:
    """When it was started, in ticks since the machine's start; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
