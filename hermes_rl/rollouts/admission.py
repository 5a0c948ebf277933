"""How many rollouts are open at a time: as many as the server, the cores and the memory carry, each of them measured.

Nothing has to be tuned: another rollout begins while no call waits for a place at the policy's server, a part of the
cores is idle, and memory is left. Where others keep the cores busy, no more than a few per core are open. A number on
request is kept to exactly, as long as this process may open the descriptors for it and the memory that all sandboxes
may have together is not nearly used up.
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
"""Rollouts per core that may be open before anything is known: with too many the first commands could time out."""
BUSY = 0.9
"""Share of the cores from which this program and its sandboxes are the bottleneck."""
RESERVE = 0.1
"""Share of the memory that stays free."""
LOOK = 0.25
"""Seconds between two measurements."""
GROWTH = 1.5
"""Factor by which the open rollouts may grow from one measurement to the next, so that what it costs is seen."""


DESCRIPTORS = 16
"""File descriptors that a rollout takes: 5 for its sandbox with a waiting shell, one for its call to the policy, and
those that exist for a moment while a sandbox or a command starts."""


CONTROL_GROUP = Path("/sys/fs/cgroup")
"""Where a process finds the bounds of its container."""


UNLIMITED = 1 << 20
"""Descriptors to count with where the system sets no limit."""


@runtime_checkable
class Calls(Protocol):
    """What is asked of the policy: `servers.client.ModelClient` answers it."""

    def fix(self) -> None:
        """Give the servers as many calls at a time as they may have, whatever they say."""

    @property
    def waiting(self) -> int:
        """Calls that wait for a place at a server."""


class DescriptorShare:
    """Whether the file descriptors that this process may open carry another rollout.

    Args:
        limit: how many it may have.
        used: how many it has.
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
        """Rollouts that are carried even if each takes all that it may take."""
        self._looked, self._room, self._open = -LOOK, 0, 0

    def carry(self, open_rollouts: int) -> bool:
        """More than surely can be are carried as long as half of all descriptors are free: then they take fewer."""
        if open_rollouts < max(1, self._surely):
            return True
        if self._clock() - self._looked >= LOOK:
            self._looked, self._open = self._clock(), open_rollouts
            self._room = self._limit - self._used()
        return self._room - (open_rollouts - self._open) > self._limit // 2


NEARLY = 0.7
"""Share of the memory of all sandboxes from which another begins only where all that it may take is left."""


class MemoryShare:
    """Whether the memory that all sandboxes may have together carries another rollout.

    As long as there is plenty, they may be promised more than there is: few use what they may. Where it was used up all
    the same, what begins for a while, such as what is played anew because of it, has what it was promised.
    """

    def __init__(
        self,
        sandboxes: Callable[[], SandboxMemory | None] = together,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sandboxes, self._clock = sandboxes, clock
        self._looked, self._open = -LOOK, 0
        self._seen: SandboxMemory | None = None

    def carry(self, open_rollouts: int) -> bool:
        """Carry the first in any case: where nothing runs, nothing would give memory back."""
        if self._clock() - self._looked >= LOOK:
            self._looked, self._open, self._seen = self._clock(), open_rollouts, self._sandboxes()
        seen = self._seen
        if open_rollouts == 0 or seen is None:
            return True
        if seen.short:
            return (open_rollouts + 1) * seen.each <= seen.limit
        if seen.used < NEARLY * seen.limit:
            return True
        begun = max(0, open_rollouts - self._open)
        return seen.limit - seen.used - begun * seen.each >= max(seen.each, RESERVE * seen.limit)


class Carries(Protocol):
    """Whether the descriptors, or the memory, that there are carry another rollout."""

    def carry(self, open_rollouts: int) -> bool: ...


class Fixed:
    """As many rollouts as were asked for."""

    def __init__(self, concurrency: int, descriptors: Carries | None = None, memory: Carries | None = None) -> None:
        self.concurrency = concurrency
        self.descriptors = descriptors or DescriptorShare()
        self.memory = memory or MemoryShare()

    def admits(self, open_rollouts: int, beside: int = 0) -> bool:
        together = open_rollouts + beside
        carried = self.descriptors.carry(together) and self.memory.carry(together)
        return open_rollouts < self.concurrency and carried


class Used(NamedTuple):
    """Seconds that some cores have been at work, so far."""

    seconds: float
    cores: float


class Adaptive:
    """As many as are carried.

    Args:
        calls: the policy's server; None where it does not tell.
        used: seconds of processor time that this program and its ended children have used.
        free: share of the memory that is free.
        cores: how many there are; machines may come and go.
        machine: what all programs together have used, this one included.
        descriptors: that this process may open.
        memory: that all sandboxes may have together.
    """

    def __init__(
        self,
        calls: Calls | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] | None = None,
        free: Callable[[], float] | None = None,
        cores: Callable[[], int] | None = None,
        machine: Callable[[], Sequence[Used]] | None = None,
        descriptors: Carries | None = None,
        memory: Carries | None = None,
    ) -> None:
        self.descriptors = descriptors or DescriptorShare(clock=clock)
        self.memory = memory or MemoryShare(clock=clock)
        self._calls, self._clock = calls, clock
        self._used, self._free = used or processor_seconds, free or free_memory
        self._cores, self._machine = cores or usable_cores, machine or whole_machine
        self._looked = clock()
        self._before = self._measured()
        self._busy, self._taken = 0.0, 1.0
        """The part of the cores that this program uses, and the part that anybody uses: all, until it is measured."""
        self._memory = self._free()
        self._ceiling = 0

    def admits(self, open_rollouts: int, beside: int = 0) -> bool:
        """Whether another rollout may begin; `beside` so many are open in other runs of this process."""
        self._look(open_rollouts)
        together = open_rollouts + beside
        if not (self.descriptors.carry(together) and self.memory.carry(together)):
            return False
        if together < self._cores():
            return True  # less would leave cores idle, whatever was measured
        waiting = self._calls.waiting if self._calls is not None else 0
        first = FIRST * self._cores()
        # Others would give us a part of the cores that they keep busy, so what is surely carried begins all the same.
        carried = self._busy < BUSY and self._memory > RESERVE and (self._taken < BUSY or together < first)
        return waiting == 0 and carried and open_rollouts < max(first - beside, self._ceiling)

    def _look(self, open_rollouts: int) -> None:
        now = self._clock()
        if now - self._looked < LOOK:
            return
        seconds, self._looked = now - self._looked, now
        before, self._before = self._before, self._measured()
        own, *whole = (
            (after.seconds - earlier.seconds) / seconds / after.cores
            for earlier, after in zip(before, self._before, strict=False)
        )
        self._busy = 0.5 * self._busy + 0.5 * own
        self._taken = 0.5 * self._taken + 0.5 * max(whole, default=0.0)
        self._memory = self._free()
        self._ceiling = int(open_rollouts * GROWTH) + 1

    def _measured(self) -> list[Used]:
        return [Used(self._used(), self._cores()), *self._machine()]


Admission = Fixed | Adaptive


def admission(
    concurrency: int | None,
    policy: object,
    *,
    used: Callable[[], float] | None = None,
    free: Callable[[], float] | None = None,
    cores: Callable[[], int] | None = None,
    machine: Callable[[], Sequence[Used]] | None = None,
    descriptors: Carries | None = None,
) -> Admission:
    """Return a number of rollouts where one is asked for, else as many as are carried; the policy is told which.

    `used`, `free`, `cores`, `machine` and `descriptors` are those of other processes that play, where this one does
    not.
    """
    if concurrency is None:
        calls = policy if isinstance(policy, Calls) else None
        return Adaptive(calls, used=used, free=free, cores=cores, machine=machine, descriptors=descriptors)
    if isinstance(policy, Calls):
        policy.fix()
    return Fixed(max(1, concurrency), descriptors)


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as it may: sandboxes need some each, and the usual limit is 1024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # a system that counts otherwise: admission keeps to what there is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


LEAST_DESCRIPTORS = 128
"""Open files that a run needs: a rollout in a sandbox, and what the process itself has open."""


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
    """How many descriptors this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """How many this process has open."""
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())
    except OSError:
        return descriptor_limit()  # none is left to look with


def processor_seconds() -> float:
    """Of this program, and of its children that have ended: sandboxes among them."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def usable_cores() -> int:
    """How many cores this process may use, also where its control group has a part of them alone."""
    cores = len(os.sched_getaffinity(0))
    quota = core_quota(_text(CONTROL_GROUP / "cpu.max"))
    return cores if quota is None else max(1, min(cores, round(quota)))


def whole_machine() -> list[Used]:
    """Return what all programs have used of the cores that this one may use, and its control group of its part."""
    cores = os.sched_getaffinity(0)
    cores_used = [Used(seconds, len(cores)) for seconds in busy_seconds(_text(Path("/proc/stat")), cores)]
    quota = core_quota(_text(CONTROL_GROUP / "cpu.max"))
    usage = re.search(r"^usage_usec (\d+)$", _text(CONTROL_GROUP / "cpu.stat"), re.MULTILINE)
    return cores_used if quota is None or usage is None else [*cores_used, Used(int(usage[1]) / 1e6, quota)]


def busy_seconds(stat: str, cores: Collection[int]) -> list[float]:
    """Return the seconds that these cores have not been idle, from the text of /proc/stat; nothing where it is not one.

    What a hypervisor gave to others counts as busy, and what waited for a disk as idle.
    """
    lines = [fields for fields in map(str.split, stat.splitlines()) if len(fields) > 8]
    ticks = {name: [int(field) for field in fields] for name, *fields in lines if re.fullmatch(r"cpu\d+", name)}
    mine = [ticks[f"cpu{core}"] for core in cores if f"cpu{core}" in ticks]
    # user, nice, system, idle, iowait, irq, softirq, steal; what follows is a part of these
    return [sum(sum(one[:3]) + sum(one[5:8]) for one in mine) / os.sysconf("SC_CLK_TCK")] if mine else []


def core_quota(text: str) -> float | None:
    """Return how many cores' worth of time a control group gets, from the text of its cpu.max; None: no bound."""
    quota, _, period = text.partition(" ")
    try:
        return int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max", or no such file


def _text(path: Path) -> str:
    """Return what a file of the system says; nothing where there is none."""
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def free_memory() -> float:
    """Share of the memory that is left: of the machine, of a control group around this process, or of its sandboxes."""
    return min(_machine(), free_share(CONTROL_GROUP))


def _machine() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        return sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, KeyError, ValueError):
        return 1.0  # not Linux: the system itself has to say no
