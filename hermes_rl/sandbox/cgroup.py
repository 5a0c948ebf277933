"""Control groups: limits on a sandbox as a whole, where this user may make them.

This module finds a place for groups (version 2, or the controllers of version 1), makes one group per sandbox, and
removes it. A watchman process removes the groups of a runner that was killed. Without groups there are still the limits
per process; what cannot be promised then, the backend says.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hermes_rl.sandbox.launcher import own_python, system_python

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000
"""Microseconds over which use of the processor is measured."""
REMOVE_SECONDS = 5.0
DELEGATE = "start it with `systemd-run --user --scope -p Delegate=yes hermes-rl …`, or as a user who owns its cgroup"
"""What to do where there is no place for groups."""

WATCHMAN = """
import os, sys, time
if os.fork():
    os._exit(0)
os.read(0, 1)
mark = os.fsencode(sys.argv[1])
end = time.monotonic() + 10
while time.monotonic() < end:
    left = False
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/environ", "rb") as file:
                if mark in file.read().split(b"\\0"):
                    os.kill(int(process), 9)
                    left = True
        except OSError:
            pass
    for top in sys.argv[2:]:
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError:
                left = True
    if not left:
        break
    time.sleep(0.05)
"""
"""Waits until the runner's end of a pipe is closed, which its death does too, then ends what has its mark, and removes
its groups. A bubblewrap that has just begun has the mark, and would wait for ever for another half that dies with the
runner. The watchman is no child of the runner: Ray kills those of a worker that it ends."""

_watchmen: dict[int, subprocess.Popen[bytes]] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Layout:
    """Where groups can be made: the folder above them by controller; in version 2 all lie in one."""

    version: int
    parents: Mapping[str, Path] = field(default_factory=dict)

    def top(self, controller: str) -> Path:
        """Return the folder of this runner's groups."""
        return self.parents[controller] / f"hermes-rl-{_mark(os.getpid())}"

    def tops(self) -> set[Path]:
        return {self.top(controller) for controller in self.parents}


class ControlGroup:
    """The group of one sandbox."""

    def __init__(self, layout: Layout, name: str) -> None:
        self.layout = layout
        self._folders = {controller: layout.top(controller) / name for controller in layout.parents}
        self._lock = threading.Lock()
        self._over = False

    def enter(self, pid: int, memory: int, processes: int, cpu: float | None) -> None:
        """Make it with these limits (bytes, processes and threads, cores) and put a process in.

        What that process starts from now on is in it too. Does nothing once the group has been removed.
        """
        with self._lock:
            if not self._over:
                self._make(memory, processes, cpu)
                self._add(pid)

    def _make(self, memory: int, processes: int, cpu: float | None) -> None:
        _watch(self.layout)
        for folder in set(self._folders.values()):
            folder.mkdir(parents=True)
        modern = self.layout.version == 2
        self._write("memory", "memory.max" if modern else "memory.limit_in_bytes", memory)
        self._write("memory", "memory.swap.max" if modern else "memory.memsw.limit_in_bytes", 0 if modern else memory)
        self._write("pids", "pids.max", processes)
        if cpu is not None and modern:
            self._write("cpu", "cpu.max", f"{int(cpu * PERIOD)} {PERIOD}")
        elif cpu is not None:
            self._write("cpu", "cpu.cfs_quota_us", int(cpu * PERIOD))

    def _add(self, pid: int) -> None:
        for folder in set(self._folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))

    def killed_for_memory(self) -> bool:
        """Whether the kernel has ended a process of the group because its memory was used up."""
        name = "memory.events" if self.layout.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, KeyError):
            lines = (self._folders["memory"] / name).read_text().splitlines()
            return any(line.startswith("oom_kill ") and line.split()[1] != "0" for line in lines)
        return False

    def processes(self) -> list[int]:
        """Ids of the processes in it."""
        try:
            lines = (self._any() / "cgroup.procs").read_text().split()
        except OSError:
            return []  # it was not made yet, or is removed
        # 0 stands for a process that this PID namespace does not see.
        return [int(line) for line in lines if line != "0"]

    def kill(self) -> None:
        """Kill all processes in it, without waiting for their end."""
        at_once = self._any() / "cgroup.kill"
        if at_once.exists():
            with contextlib.suppress(OSError):
                at_once.write_text("1")
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """Remove it; its processes are gone, or about to be."""
        with self._lock:
            self._over = True
        end = time.monotonic() + REMOVE_SECONDS
        for folder in set(self._folders.values()):
            while not _removed(folder) and time.monotonic() < end:
                time.sleep(0.005)

    def _any(self) -> Path:
        """One of its folders; in version 1 all of them hold the same processes."""
        return next(iter(self._folders.values()))

    def _write(self, controller: str, name: str, value: object) -> None:
        folder = self._folders.get(controller)
        # Swap is not everywhere accounted for; the file is then missing.
        if folder is not None and ("sw" not in name or (folder / name).exists()):
            (folder / name).write_text(str(value))


def _removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


@functools.cache
def _mark(pid: int) -> str:
    """Return a name that two runners do not share, even where each is the first of its own PID namespace."""
    return f"{pid}-{os.urandom(4).hex()}"


def runner_mark() -> dict[str, str]:
    """Return a variable for the environment of what is not to outlive this process."""
    return {"HERMES_RL_RUNNER": _mark(os.getpid())}


@functools.cache
def find_layout(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> Layout | None:
    """Return a place for groups with all or some of the controllers; None where this user may not make any."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None
    paths = {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}
    return _version_2(root, paths.get("", "")) or _version_1(root, paths)


def _version_2(root: Path, path: str) -> Layout | None:
    """Our own group or the one above it, whichever hands its controllers down."""
    for parent in (root / path, (root / path).parent):
        if not (parent / "cgroup.subtree_control").exists():
            continue
        with contextlib.suppress(OSError):
            # Refused where processes are in the group itself; then what it hands down already has to do.
            (parent / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        handed = (parent / "cgroup.subtree_control").read_text().split()
        usable = {name: parent for name in CONTROLLERS if name in handed}
        if "memory" in usable and _may_make(parent):
            return Layout(2, usable)
    return None


def _version_1(root: Path, paths: Mapping[str, str]) -> Layout | None:
    usable = {name: root / name / paths[name] for name in CONTROLLERS if name in paths}
    usable = {name: parent for name, parent in usable.items() if _may_make(parent)}
    return Layout(1, usable) if usable else None


def _may_make(parent: Path) -> bool:
    """Whether a group can be made there: asked by making one, permissions do not tell."""
    trial = parent / f"hermes-rl-{os.getpid()}-trial"
    try:
        trial.mkdir()
    except OSError:
        return False
    procs = (trial / "cgroup.procs").exists()
    trial.rmdir()
    return procs


def _watch(layout: Layout) -> None:
    """See to it that this runner's groups go when it ends, however it ends."""
    with _lock:
        if os.getpid() not in _watchmen:
            mark = "=".join(*runner_mark().items())
            _watchmen[os.getpid()] = subprocess.Popen(
                [system_python() or own_python(), "-I", "-S", "-c", WATCHMAN, mark, *map(str, layout.tops())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
            _watchmen[os.getpid()].wait()  # the process that has forked it
