"""Control groups: limit a sandbox as a whole and all sandboxes together, if this user may make groups.

This module finds a location for groups (version 2, or the controllers of version 1), makes one group per sandbox below
one that all sandboxes of all runners there share, and removes them. A watchdog process removes the groups of a runner
that was killed. Without groups there are still the limits per process; the backend reports the limits that cannot be
enforced then.

::

    the runner's own place ─► hermes-rl ─► hermes-rl-<runner> ─► <sandbox>
                              the sum      one for each runner    its own limits
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hermes_rl.sandbox.launcher import own_python, system_python

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
PERIOD = 100_000
"""Microseconds over which use of the processor is measured."""
REMOVE_SECONDS = 5.0
SHARED = "hermes-rl"
"""Name of the group of all sandboxes of a location."""
MIB = 1 << 20
CLOSE = 1 << 20
"""Bytes below its limit at which a group may be when the kernel finds no more memory for it."""
SHORT_SECONDS = 60.0
"""Seconds after all sandboxes' memory was used up in which new sandboxes start only if their limits fit."""
UNLIMITED = 1 << 62
"""Bytes from which version 1 means that there is no limit."""
RESERVE = 512 * MIB
"""Minimum bytes of memory that sandboxes together leave to the runner, beyond its memory when it starts one; on a
machine with more memory, a tenth of all of it.
"""
PAGE = os.sysconf("SC_PAGE_SIZE")
SOCKETS = 64 * MIB
"""Bytes for the buffers of a sandbox's TCP and UDP sockets in version 1, which counts them separately."""
DELEGATE = "start it with `systemd-run --user --scope -p Delegate=yes hermes-rl …`, or as a user who owns its cgroup"
"""Fix for a machine without a location for groups."""

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
        try:
            os.rmdir(os.path.dirname(top))
        except OSError:
            pass
    if not left:
        break
    time.sleep(0.05)
"""
"""Waits until the runner's end of a pipe is closed, which its death does too, then kills processes with its mark, and
removes its groups. A bubblewrap that has just started has the mark, and would wait forever for a partner that dies with
the runner. The watchdog is not a child of the runner: Ray kills the children of a worker that it ends.
"""

_watchmen: dict[int, subprocess.Popen[bytes]] = {}
_lock = threading.Lock()
_largest = 0
"""See `SandboxMemory.each`."""
_short_at = -math.inf
"""Time at which the memory of all sandboxes was last seen used up."""


@dataclass(frozen=True)
class Layout:
    """Locations of groups: the parent directory by controller; in version 2 all are in one."""

    version: int
    parents: Mapping[str, Path] = field(default_factory=dict)

    def shared(self, controller: str) -> Path:
        """Return the directory of the groups of all runners here."""
        return self.parents[controller] / SHARED

    def top(self, controller: str) -> Path:
        """Return the directory of this runner's groups."""
        return self.shared(controller) / f"hermes-rl-{_make_runner_id(os.getpid())}"

    def tops(self) -> set[Path]:
        return {self.top(controller) for controller in self.parents}


class ControlGroup:
    """Control group of one sandbox."""

    def __init__(self, layout: Layout, name: str) -> None:
        self.layout = layout
        self._folders = {controller: layout.top(controller) / name for controller in layout.parents}
        self._lock = threading.Lock()
        self._is_removed = False

    def enter(self, pid: int, memory: int, processes: int, cpu: float | None) -> None:
        """Make it with these limits (bytes, processes and threads, cores) and add a process.

        Processes that it starts from now on are in it too. Does nothing once the group has been removed.
        """
        with self._lock:
            if not self._is_removed:
                self._make(memory, processes, cpu)
                for folder in self._each():
                    (folder / "cgroup.procs").write_text(str(pid))

    def _make(self, memory: int, processes: int, cpu: float | None) -> None:
        global _largest
        _watch_groups(self.layout)
        make_sum(self.layout)
        for folder in self._each():
            folder.mkdir()
        if "memory" in self._folders:
            folder, version_2 = self._folders["memory"], self.layout.version == 2
            _limit_memory(self.layout, folder, memory, min(memory, SOCKETS))
            swap = folder / ("memory.swap.max" if version_2 else "memory.memsw.limit_in_bytes")
            if swap.exists():  # swap is not accounted for everywhere
                swap.write_text("0" if version_2 else str(memory))
            _largest = max(_largest, memory)
        if "pids" in self._folders:
            (self._folders["pids"] / "pids.max").write_text(str(processes))
        if cpu is not None and "cpu" in self._folders:
            quota = f"{int(cpu * PERIOD)}"
            if self.layout.version == 2:
                (self._folders["cpu"] / "cpu.max").write_text(f"{quota} {PERIOD}")
            else:
                (self._folders["cpu"] / "cpu.cfs_quota_us").write_text(quota)

    def killed_for_memory(self) -> bool:
        """Return True if the kernel killed a process of the group because memory was used up: the group's, or all
        memory.
        """
        name = "memory.events" if self.layout.version == 2 else "memory.oom_control"
        return self._counted(name, "oom_kill") > 0

    def killed_by_others(self) -> bool:
        """Return True if the kernel killed a process of the group although the group never reached its limit.

        Then the sandboxes together were at their limit, or the machine was. A group that has reached its limit even
        once counts as the cause: an agent that fills its sandbox to get a retry gains nothing.
        """
        global _short_at
        if not self.killed_for_memory():
            return False
        if self.layout.version == 2:
            others = self._counted("memory.events", "oom") == 0
        else:
            # Not by its count of refusals: Linux 6.18 has that file and no longer counts.
            folder = self._folders["memory"]
            peak, limit = (_read_number(folder / f"memory.{name}_in_bytes") or 0 for name in ("max_usage", "limit"))
            others = peak < limit - CLOSE
        if others:
            _short_at = time.monotonic()
        return others

    def _counted(self, file: str, name: str) -> int:
        return _read_counts(self._folders["memory"] / file).get(name, 0) if "memory" in self._folders else 0

    def processes(self) -> list[int]:
        """Return the ids of the processes in it."""
        try:
            lines = (self._each()[0] / "cgroup.procs").read_text().split()
        except OSError:
            return []  # it does not exist yet, or is removed
        # 0 stands for a process that this PID namespace does not see.
        return [int(line) for line in lines if line != "0"]

    def kill(self) -> None:
        """Kill all processes in it, without waiting for their end."""
        at_once = self._each()[0] / "cgroup.kill"
        if at_once.exists():
            with contextlib.suppress(OSError):
                at_once.write_text("1")
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """Remove it; its processes are gone, or about to be."""
        with self._lock:
            self._is_removed = True
        end = time.monotonic() + REMOVE_SECONDS
        for folder in self._each():
            while not _remove_group(folder) and time.monotonic() < end:
                time.sleep(0.005)

    def _each(self) -> list[Path]:
        """Return its directories, one in version 2; in version 1 all of them hold the same processes."""
        return sorted(set(self._folders.values()))


def _limit_memory(layout: Layout, folder: Path, memory: int, sockets: int) -> None:
    """Limit the memory of a group, including its sockets: version 2 counts these as memory, version 1 separately."""
    if layout.version == 2:
        (folder / "memory.max").write_text(str(memory))
        return
    (folder / "memory.limit_in_bytes").write_text(str(memory))
    counter = folder / "memory.kmem.tcp.limit_in_bytes"  # of UDP too, in spite of its name; some kernels have none
    if counter.exists():
        counter.write_text(str(sockets))


def limit_sockets(pid: int, memory: int, root: Path = ROOT) -> None:
    """Limit the sockets of a container's process, which version 1 does not count as memory, if this user may.

    Does nothing unless its group has this limit of memory: some engines leave containers in a group of others.
    """
    folder = root / "memory" / _own_paths(Path(f"/proc/{pid}/cgroup")).get("memory", "")
    if (_read_number(folder / "memory.limit_in_bytes") or 0) // PAGE == memory // PAGE:
        with contextlib.suppress(OSError):
            (folder / "memory.kmem.tcp.limit_in_bytes").write_text(str(min(memory, SOCKETS)))


# -------------------------------------------------------------------------------- the sum


def make_sum(layout: Layout) -> None:
    """Make the group of all sandboxes of this machine, and below it the group of this runner.

    The first runner sets the limit, so that memory remains for runners. It is not changed later: with a limit below the
    current use the kernel would kill processes.
    """
    for controller in layout.parents:
        shared, top = layout.shared(controller), layout.top(controller)
        while not top.is_dir():
            shared.mkdir(exist_ok=True)
            if controller == "memory":
                _limit_sum(layout, shared)
            if layout.version == 2:
                _hand_down(shared, layout)
            # The last sandbox of another runner may end at this moment, and the group with it.
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                top.mkdir()
            if layout.version == 2 and top.is_dir():
                _hand_down(top, layout)


def _limit_sum(layout: Layout, shared: Path) -> None:
    if _memory_limit(shared) is not None:
        return
    total = total_memory()
    hierarchy = shared / "memory.use_hierarchy"  # of kernels before 5.11: 1 if a group counts the groups below it
    if layout.version == 1 and hierarchy.exists() and hierarchy.read_text().strip() == "0":
        hierarchy.write_text("1")
    sandboxes = for_sandboxes(total, own_memory())
    _limit_memory(layout, shared, sandboxes, (total - sandboxes) // 4)


def _hand_down(folder: Path, layout: Layout) -> None:
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in layout.parents))


def for_sandboxes(total: int, runner: int) -> int:
    """Return the memory for all sandboxes together, next to a runner that uses `runner` bytes already."""
    return max(total // 2, total - runner - max(RESERVE, total // 10))


def own_memory() -> int:
    """Return the bytes of memory that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def total_memory(root: Path = ROOT, cgroup_file: Path = Path("/proc/self/cgroup")) -> int:
    """Return the maximum bytes of memory for this process: the machine's, or the smallest limit of the groups around
    it.
    """
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (_memory_limit(folder) for folder in _parents(root, cgroup_file))
    return min((pages, *(limit for limit in limits if limit is not None)))


def _parents(root: Path, cgroup_file: Path) -> list[Path]:
    """Return the directories of the memory group of this process, and of its parents."""
    paths = _own_paths(cgroup_file)
    groups = []
    for top, path in ((root / "memory", paths.get("memory")), (root, paths.get(""))):
        if path is not None:
            # A container may see a path of its machine, of which only the top exists.
            groups += [folder for folder in (top / path, *(top / path).parents) if folder.is_relative_to(top)]
    return groups


def _memory_limit(folder: Path) -> int | None:
    """Return the memory limit of a group, or None if it has none."""
    limits = (_read_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes"))
    return next((limit for limit in limits if limit is not None and limit < UNLIMITED), None)


def _read_number(file: Path) -> int | None:
    """Return the number in a file, or None if the file does not exist, or contains "max"."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _read_counts(file: Path) -> dict[str, int]:
    """Return the named numbers in a file with one per line, or an empty mapping if the file does not exist."""
    with contextlib.suppress(OSError, ValueError):
        return {name: int(count) for name, count in map(str.split, file.read_text().splitlines())}
    return {}


class SandboxMemory(NamedTuple):
    """Memory of all sandboxes of this machine, or container, in bytes."""

    limit: int
    used: int
    """Used bytes without memory that the kernel would free at once, which is read-ahead of files."""
    each: int
    """Memory limit of a sandbox of this process; 0 before the first."""
    short: bool
    """True if it was used up a short time ago."""

    @property
    def free(self) -> float:
        """Fraction that is left for more sandboxes."""
        return 0.0 if self.short else max(0.0, 1.0 - self.used / self.limit) if self.limit else 1.0


def together(root: Path = ROOT, cgroup_file: Path = Path("/proc/self/cgroup")) -> SandboxMemory | None:
    """Return the memory of all sandboxes together, or None if it is unlimited, or no sandbox has started.

    This only reads, so a process without sandboxes may call it.
    """
    for limit, used in _limited(folder for folder in _sandbox_groups(root, cgroup_file) if folder.is_dir()):
        return SandboxMemory(limit, used, _largest, time.monotonic() - _short_at < SHORT_SECONDS)
    return None


@functools.cache  # admission calls it repeatedly
def _sandbox_groups(root: Path, cgroup_file: Path) -> list[Path]:
    """Return the directories that may be the group of all sandboxes."""
    return [folder / SHARED for folder in _parents(root, cgroup_file)]


def free_share(root: Path = ROOT, cgroup_file: Path = Path("/proc/self/cgroup")) -> float:
    """Return the fraction of free memory in the groups around this process, and in the group of all sandboxes."""
    sandboxes = together(root, cgroup_file)
    shares = [1.0 if sandboxes is None else sandboxes.free]
    shares += [max(0.0, 1.0 - used / limit) if limit else 1.0 for limit, used in _limited(_parents(root, cgroup_file))]
    return min(shares)


def _limited(groups: Iterable[Path]) -> Iterator[tuple[int, int]]:
    """Yield the memory limit and the used memory of the groups that have a limit."""
    for folder in groups:
        limit, used = _memory_limit(folder), _used_memory(folder)
        if limit is not None and used is not None:
            yield limit, used


def _used_memory(folder: Path) -> int | None:
    """Return the used memory of a group, without the files that the kernel would drop first; None: unknown."""
    for usage, forgotten in (("memory.current", "inactive_file"), ("memory.usage_in_bytes", "total_inactive_file")):
        if (used := _read_number(folder / usage)) is not None:
            return max(0, used - _read_counts(folder / "memory.stat").get(forgotten, 0))
    return None


def _remove_group(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@functools.cache
def _make_runner_id(pid: int) -> str:
    """Return a name that two runners do not share, even if each is the first of a separate PID namespace."""
    return f"{pid}-{os.urandom(4).hex()}"


def runner_mark() -> dict[str, str]:
    """Return an environment variable for processes that must not outlive this process."""
    return {"HERMES_RL_RUNNER": _make_runner_id(os.getpid())}


@functools.cache
def find_layout(root: Path = ROOT, cgroup_file: Path = Path("/proc/self/cgroup")) -> Layout | None:
    """Return a location for groups with all or some of the controllers, or None if this user may not make any."""
    paths = _own_paths(cgroup_file)
    if not paths:
        return None
    if (layout := _version_2(root, paths.get("", ""))) is not None:
        return layout
    usable = {name: root / name / paths[name] for name in CONTROLLERS if name in paths}
    usable = {name: parent for name, parent in usable.items() if _may_make(parent)}
    return Layout(1, usable) if usable else None


def _own_paths(cgroup_file: Path) -> dict[str, str]:
    """Return the group of this process, by controller; the group of version 2 has an empty name."""
    try:
        lines = [line.split(":", 2) for line in cgroup_file.read_text().splitlines()]
    except OSError:
        return {}
    return {name: path.lstrip("/") for _, names, path in lines for name in names.split(",")}


def _version_2(root: Path, path: str) -> Layout | None:
    """Return the layout of the process's group or of its parent, whichever delegates its controllers."""
    for parent in (root / path, (root / path).parent):
        if not (parent / "cgroup.subtree_control").exists():
            continue
        with contextlib.suppress(OSError):
            # Refused if the group itself has processes; then the controllers that it delegates already must suffice.
            (parent / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        handed = (parent / "cgroup.subtree_control").read_text().split()
        usable = {name: parent for name in CONTROLLERS if name in handed}
        if "memory" in usable and _may_make(parent):
            return Layout(2, usable)
    return None


def _may_make(parent: Path) -> bool:
    """Return True if a group can be made there: tried by making one, since permissions do not show it."""
    trial = parent / f"hermes-rl-{os.getpid()}-trial"
    try:
        trial.mkdir()
    except OSError:
        return False
    procs = (trial / "cgroup.procs").exists()
    trial.rmdir()
    return procs


def _watch_groups(layout: Layout) -> None:
    """Ensure that this runner's groups are removed when it ends, for any reason."""
    with _lock:
        if os.getpid() not in _watchmen:
            marker = "=".join(*runner_mark().items())
            _watchmen[os.getpid()] = subprocess.Popen(
                [system_python() or own_python(), "-I", "-S", "-c", WATCHMAN, marker, *map(str, layout.tops())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
            _watchmen[os.getpid()].wait()  # the process that has forked it
