"""Limit the number of concurrent rollouts by measuring the model server, the cores and the memory.

No tuning is needed: another rollout starts if no call waits for a slot at the policy's server, part of the cores is
idle, and memory is available. If other programs keep the cores busy, at most a few rollouts per core are open. An
explicit number is applied exactly, provided that this process may open enough file descriptors and the memory limit of
all sandboxes together is not nearly reached.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from hermes_rl.errors import UserError
from hermes_rl.sandbox.cgroup import SandboxMemory, free_share, together

FIRST = 8
"""Rollouts per core that may be open before the first measurement: with too many, the first commands could time out."""
BUSY = 0.9
"""Fraction of busy cores from which this program and its sandboxes are the bottleneck."""
RESERVE = 0.1
"""Fraction of the memory that stays free."""
POLL_INTERVAL = 0.25
"""Seconds between two measurements."""
GROWTH = 1.5
"""Maximum growth factor of open rollouts between two measurements, so that their cost is measured."""


DESCRIPTORS = 16
"""File descriptors of a rollout: 5 for its sandbox with a waiting shell, one for its policy call, and temporary ones
during the start of a sandbox or a command.
"""


CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Directory with the limits of the process's container."""


UNLIMITED = 1 << 20
"""Assumed number of descriptors if the system sets no limit."""


@runtime_checkable
class ModelCallLoad(Protocol):
    """Interface of the policy for admission, implemented by `servers.client.ModelClient`."""

    def fix(self) -> None:
        """Allow the servers their maximum number of concurrent calls, regardless of their feedback."""

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot at a server."""


class DescriptorShare:
    """Check that the file descriptors of this process suffice for another rollout.

    Args:
        limit: maximum number of descriptors.
        used: returns the number of open descriptors.
    """

    def __init__(
        self,
        limit: int | None = None,
        used: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit if limit is not None else descriptor_limit()
        self._used, self._clock = used or open_descriptors, clock
        self._surely = (self._limit - self._used()) // DESCRIPTORS
        """Number of rollouts that are possible even if each uses the maximum."""
        self._looked, self._room, self._open = -POLL_INTERVAL, 0, 0

    def carry(self, open_rollouts: int) -> bool:
        """Return True if a rollout may start: above the guaranteed number, half of all descriptors must stay free."""
        if open_rollouts < max(1, self._surely):
            return True
        if self._clock() - self._looked >= POLL_INTERVAL:
            self._looked, self._open = self._clock(), open_rollouts
            self._room = self._limit - self._used()
        return self._room - (open_rollouts - self._open) > self._limit // 2


NEARLY = 0.7
"""Fraction of the memory of all sandboxes above which a rollout starts only if its full limit is available."""


class MemoryShare:
    """Check that the common memory limit of all sandboxes allows another rollout.

    While memory is plentiful, it may be overcommitted, because few sandboxes use their full limit. If it runs out
    nevertheless, rollouts that start for a while, such as retries, get their full limit reserved.
    """

    def __init__(
        self,
        sandboxes: Callable[[], SandboxMemory | None] = together,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sandboxes, self._clock = sandboxes, clock
        self._looked, self._open = -POLL_INTERVAL, 0
        self._usage: SandboxMemory | None = None

    def carry(self, open_rollouts: int) -> bool:
        """Return True if another rollout may start; always for the first one, because nothing else would release
        memory.
        """
        if self._clock() - self._looked >= POLL_INTERVAL:
            self._looked, self._open, self._usage = self._clock(), open_rollouts, self._sandboxes()
        usage = self._usage
        if open_rollouts == 0 or usage is None:
            return True
        if usage.short:
            return (open_rollouts + 1) * usage.each <= usage.limit
        if usage.used < NEARLY * usage.limit:
            return True
        new_rollouts = max(0, open_rollouts - self._open)
        return usage.limit - usage.used - new_rollouts * usage.each >= max(usage.each, RESERVE * usage.limit)


class CapacityCheck(Protocol):
    """Check that descriptors or memory suffice for another rollout."""

    def carry(self, open_rollouts: int) -> bool: ...


class Fixed:
    """Admit a fixed number of concurrent rollouts."""

    def __init__(
        self, concurrency: int, descriptors: CapacityCheck | None = None, memory: CapacityCheck | None = None
    ) -> None:
        self.concurrency = concurrency
        self.descriptors = descriptors or DescriptorShare()
        self.memory = memory or MemoryShare()

    def admits(self, open_rollouts: int, other_open: int = 0) -> bool:
        together = open_rollouts + other_open
        carried = self.descriptors.carry(together) and self.memory.carry(together)
        return open_rollouts < self.concurrency and carried


class CpuUse(NamedTuple):
    """CPU seconds used so far, and the number of cores that provided them."""

    seconds: float
    cores: float


class Adaptive:
    """Admit as many rollouts as the measured resources allow.

    Args:
        calls: the policy's server, or None if it reports no waiting calls.
        used: returns the CPU seconds of this program and its ended children.
        free: returns the fraction of free memory.
        cores: returns the number of cores, which may change as hosts join and leave.
        machine: returns the use of all programs together, including this one.
        descriptors: descriptors that this process may open.
        memory: common memory of all sandboxes.
    """

    def __init__(
        self,
        calls: ModelCallLoad | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] | None = None,
        free: Callable[[], float] | None = None,
        cores: Callable[[], int] | None = None,
        machine: Callable[[], Sequence[CpuUse]] | None = None,
        descriptors: CapacityCheck | None = None,
        memory: CapacityCheck | None = None,
    ) -> None:
        self.descriptors = descriptors or DescriptorShare(clock=clock)
        self.memory = memory or MemoryShare(clock=clock)
        self._calls, self._clock = calls, clock
        self._used, self._free = used or processor_seconds, free or free_memory
        self._cores, self._machine = cores or usable_cores, machine or whole_machine
        self._looked = clock()
        self._before = self._measure()
        self._busy, self._total_load = 0.0, 1.0
        """Fraction of the cores used by this program, and by all programs: assumed full until measured."""
        self._memory = self._free()
        self._ceiling = 0

    def admits(self, open_rollouts: int, other_open: int = 0) -> bool:
        """Return True if another rollout may start; `other_open` rollouts are open in other runs of this process."""
        self._adapt(open_rollouts)
        together = open_rollouts + other_open
        if not (self.descriptors.carry(together) and self.memory.carry(together)):
            return False
        if together < self._cores():
            return True  # fewer would leave cores idle, whatever was measured
        waiting = self._calls.waiting if self._calls is not None else 0
        first = FIRST * self._cores()
        # Other programs share the cores that they keep busy, so the guaranteed number starts anyway.
        carried = self._busy < BUSY and self._memory > RESERVE and (self._total_load < BUSY or together < first)
        return waiting == 0 and carried and open_rollouts < max(first - other_open, self._ceiling)

    def _adapt(self, open_rollouts: int) -> None:
        now = self._clock()
        if now - self._looked < POLL_INTERVAL:
            return
        seconds, self._looked = now - self._looked, now
        before, self._before = self._before, self._measure()
        program_load, *machine_loads = (
            (after.seconds - earlier.seconds) / seconds / after.cores
            for earlier, after in zip(before, self._before, strict=False)
        )
        self._busy = 0.5 * self._busy + 0.5 * program_load
        self._total_load = 0.5 * self._total_load + 0.5 * max(machine_loads, default=0.0)
        self._memory = self._free()
        self._ceiling = int(open_rollouts * GROWTH) + 1

    def _measure(self) -> list[CpuUse]:
        return [CpuUse(self._used(), self._cores()), *self._machine()]


Admission = Fixed | Adaptive


def admission(
    concurrency: int | None,
    policy: object,
    *,
    used: Callable[[], float] | None = None,
    free: Callable[[], float] | None = None,
    cores: Callable[[], int] | None = None,
    machine: Callable[[], Sequence[CpuUse]] | None = None,
    descriptors: CapacityCheck | None = None,
) -> Admission:
    """Return a fixed admission if `concurrency` is set, otherwise an adaptive one; the policy is configured
    accordingly.

    `used`, `free`, `cores`, `machine` and `descriptors` measure other processes if these run the rollouts.
    """
    if concurrency is None:
        calls = policy if isinstance(policy, ModelCallLoad) else None
        return Adaptive(calls, used=used, free=free, cores=cores, machine=machine, descriptors=descriptors)
    if isinstance(policy, ModelCallLoad):
        policy.fix()
    return Fixed(max(1, concurrency), descriptors)


def raise_descriptor_limit() -> None:
    """Raise the limit of open descriptors to the maximum: each sandbox needs some, and the usual limit is 1024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # on other systems, admission respects the current limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


LEAST_DESCRIPTORS = 128
"""Minimum number of open files for a run: one rollout in a sandbox, and the process itself."""


def require_descriptors() -> None:
    """Raise UserError if this process may open too few files for one rollout."""
    raise_descriptor_limit()
    limit = descriptor_limit()
    if limit < LEAST_DESCRIPTORS:
        raise UserError(
            f"this process may open {limit} files at a time (`ulimit -n`), and a run needs {LEAST_DESCRIPTORS} or "
            "more: raise the limit, such as by `ulimit -n 4096`, or by LimitNOFILE= of a systemd unit"
        )


def descriptor_limit() -> int:
    """Return the maximum number of open descriptors of this process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Return the number of open descriptors of this process."""
    try:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - thousands of paths would be made for nothing
    except OSError:
        return descriptor_limit()  # no descriptor is left for reading the directory


def processor_seconds() -> float:
    """Return the CPU seconds of this program and its ended children, sandboxes included."""
    program_usage, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return program_usage.ru_utime + program_usage.ru_stime + children.ru_utime + children.ru_stime


def usable_cores() -> int:
    """Return the number of cores that this process may use, within the quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    quota = core_quota(_read_text(CONTROL_GROUP / "cpu.max"))
    return cores if quota is None else max(1, min(cores, round(quota)))


def whole_machine() -> list[CpuUse]:
    """Return the CPU use of all programs on this process's cores, and of its control group if it has a quota."""
    cores = os.sched_getaffinity(0)
    cores_used = [CpuUse(seconds, len(cores)) for seconds in busy_seconds(_read_text(Path("/proc/stat")), cores)]
    quota = core_quota(_read_text(CONTROL_GROUP / "cpu.max"))
    usage = re.search(r"^usage_usec (\d+)$", _read_text(CONTROL_GROUP / "cpu.stat"), re.MULTILINE)
    return cores_used if quota is None or usage is None else [*cores_used, CpuUse(int(usage[1]) / 1e6, quota)]


def busy_seconds(stat: str, cores: Collection[int]) -> list[float]:
    """Return the busy seconds of these cores from the text of /proc/stat; empty if the text has another form.

    Time given to other virtual machines counts as busy, and waiting for a disk as idle.
    """
    lines = [fields for fields in map(str.split, stat.splitlines()) if len(fields) > 8]
    ticks = {name: [int(field) for field in fields] for name, *fields in lines if re.fullmatch(r"cpu\d+", name)}
    mine = [ticks[f"cpu{core}"] for core in cores if f"cpu{core}" in ticks]
    # user, nice, system, idle, iowait, irq, softirq, steal; later fields are included in these
    return [sum(sum(one[:3]) + sum(one[5:8]) for one in mine) / os.sysconf("SC_CLK_TCK")] if mine else []


def core_quota(text: str) -> float | None:
    """Return the number of cores allowed by the text of a control group's cpu.max, or None if unlimited."""
    quota, _, period = text.partition(" ")
    try:
        return int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or the file does not exist


def _read_text(path: Path) -> str:
    """Return the text of a system file; empty if it does not exist."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def free_memory() -> float:
    """Return the smallest fraction of free memory: of the host, of a surrounding control group, or of the sandboxes."""
    return min(_available_memory(), free_share(CONTROL_GROUP))


def _available_memory() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        return sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, KeyError, ValueError):
        return 1.0  # not Linux: the system itself must refuse
