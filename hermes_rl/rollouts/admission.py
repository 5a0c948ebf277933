"""How many rollouts are open at a time: as many as the server, the cores and the memory carry, each of them measured.

Nothing has to be tuned: another rollout begins while no call waits for a place at the policy's server, this program
leaves a part of the cores idle, and memory is left. A number on request is kept to exactly, as long as this process may
open the descriptors for it."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hermes_rl.rollouts.rollout import Group

# Rows that infrastructure fails again and again: set aside, so that the others are played, and reported

STRIKES = 2
"""Groups of a row in succession that were dropped for our reasons, each after all replays, until it is set aside."""


class Quarantine:
    """Counts the failures of each row; one group that is complete clears it."""

    def __init__(self, set_aside: Iterable[dict[str, Any]] = ()) -> None:
        self.set_aside: dict[str, dict[str, Any]] = {entry["row_key"]: dict(entry) for entry in set_aside}
        """What is said of each row that is set aside: row_key, cause, detail."""
        self._strikes: Counter[str] = Counter()

    def __contains__(self, row_key: object) -> bool:
        return row_key in self.set_aside

    def count(self, group: Group) -> bool:
        """Take a finished group into account; True where its row is set aside by it."""
        key = group.row.key
        if group.dropped is None or group.dropped.graded:
            self._strikes.pop(key, None)
            return False
        self._strikes[key] += 1
        if self._strikes[key] < STRIKES or key in self:
            return False
        self.set_aside[key] = {"row_key": key, "cause": str(group.dropped), "detail": group.detail}
        return True

    def record(self) -> list[dict[str, Any]]:
        """Return the `quarantined` entry of run.json."""
        return list(self.set_aside.values())


# Which rows are worth another group: those in whose groups the scores still differ, since only these teach. A row
# whose last groups were uniform, n of them in succession, is played in every 2ⁿ-th pass over the rows only (16th at
# most), so that one that a better policy finds interesting again comes back. Nothing is left to chance: what was
# played decides, and is read again when a run goes on.

RAREST = 4
"""Uniform groups in succession beyond which a row becomes no rarer."""


class Curriculum:
    """Uniform groups in succession, by row.

    Args:
        prefer_differing: False wants every row in every pass.
        uniform: what `state` gave.
    """

    def __init__(self, prefer_differing: bool, uniform: Mapping[str, int] | None = None) -> None:
        self._active = prefer_differing
        self._uniform: Counter[str] = Counter(uniform or {})

    def wants(self, row_key: str, epoch: int) -> bool:
        """Whether a row is to be played in this pass over the rows, which count from 0."""
        return not self._active or epoch % 2 ** min(self._uniform[row_key], RAREST) == 0

    def count(self, row_key: str, scores: Sequence[float | None]) -> None:
        """Take the scores of a finished group into account; those of one that is incomplete say nothing."""
        if not self._active or len(scores) < 2 or None in scores:
            return
        if len(set(scores)) > 1:
            del self._uniform[row_key]
        else:
            self._uniform[row_key] += 1

    def state(self) -> dict[str, Any] | None:
        """For a file, as JSON; None where there is nothing to keep."""
        return dict(self._uniform) or None


# -------------------------------------------------------------------------------- admission

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


UNLIMITED = 1 << 20
"""Descriptors to count with where the system sets no limit."""


@runtime_checkable
class Calls(Protocol):
    """What is asked of the policy: `servers.client.ModelClient` answers it."""

    def fix(self) -> None:
        """Give the servers as many calls at a time as they may have, whatever they say."""
        ...

    @property
    def waiting(self) -> int:
        """Calls that wait for a place at a server."""
        ...


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
        self._looked, self._left, self._open = -LOOK, 0, 0

    def carry(self, open_rollouts: int) -> bool:
        """More than surely can be are carried as long as half of all descriptors are free: then they take fewer."""
        if open_rollouts < max(1, self._surely):
            return True
        if self._clock() - self._looked >= LOOK:
            self._looked, self._open = self._clock(), open_rollouts
            self._left = self._limit - self._used()
        return self._left - (open_rollouts - self._open) > self._limit // 2


class Carries(Protocol):
    """Whether the file descriptors that there are carry another rollout."""

    def carry(self, open_rollouts: int) -> bool: ...


class Fixed:
    """As many rollouts as were asked for."""

    def __init__(self, concurrency: int, descriptors: Carries | None = None) -> None:
        self.concurrency = concurrency
        self.descriptors = descriptors or DescriptorShare()

    def admits(self, open_rollouts: int, beside: int = 0) -> bool:
        return open_rollouts < self.concurrency and self.descriptors.carry(open_rollouts + beside)


class Adaptive:
    """As many as are carried.

    Args:
        calls: the policy's server; None where it does not tell.
        used: seconds of processor time that this program and its ended children have used.
        free: share of the memory that is free.
        cores: how many there are; machines may come and go.
        descriptors: that this process may open.
    """

    def __init__(
        self,
        calls: Calls | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] | None = None,
        free: Callable[[], float] | None = None,
        cores: Callable[[], int] | None = None,
        descriptors: Carries | None = None,
    ) -> None:
        self.descriptors = descriptors or DescriptorShare(clock=clock)
        self._calls, self._clock = calls, clock
        self._used, self._free = used or processor_seconds, free or free_memory
        self._cores = cores or usable_cores
        self._looked = clock()
        self._before = self._used()
        self._busy = 0.0
        self._memory = self._free()
        self._ceiling = FIRST * self._cores()

    def admits(self, open_rollouts: int, beside: int = 0) -> bool:
        """Whether another rollout may begin; `beside` so many are open in other runs of this process."""
        open_rollouts += beside
        self._look(open_rollouts)
        if not self.descriptors.carry(open_rollouts):
            return False
        if open_rollouts < self._cores():
            return True  # less would leave cores idle, whatever was measured
        waiting = self._calls.waiting if self._calls is not None else 0
        carried = self._busy < BUSY and self._memory > RESERVE
        return waiting == 0 and carried and open_rollouts < self._ceiling

    def _look(self, open_rollouts: int) -> None:
        now = self._clock()
        if now - self._looked < LOOK:
            return
        used = self._used()
        self._busy = 0.5 * self._busy + 0.5 * (used - self._before) / (now - self._looked) / self._cores()
        self._looked, self._before = now, used
        self._memory = self._free()
        self._ceiling = max(FIRST * self._cores(), int(open_rollouts * GROWTH) + 1)


Admission = Fixed | Adaptive


def admission(
    concurrency: int | None,
    policy: object,
    *,
    used: Callable[[], float] | None = None,
    free: Callable[[], float] | None = None,
    cores: Callable[[], int] | None = None,
    descriptors: Carries | None = None,
) -> Admission:
    """Return a number of rollouts where one is asked for, else as many as are carried; the policy is told which.

    `used`, `free`, `cores` and `descriptors` are those of other processes that play, where this one does not.
    """
    if concurrency is None:
        calls = policy if isinstance(policy, Calls) else None
        return Adaptive(calls, used=used, free=free, cores=cores, descriptors=descriptors)
    if isinstance(policy, Calls):
        policy.fix()
    return Fixed(max(1, concurrency), descriptors)


def raise_descriptor_limit() -> None:
    """Let this process open as many descriptors as it may: sandboxes need some each, and the usual limit is 1024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # a system that counts otherwise: admission keeps to what there is
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def free_memory() -> float:
    """Share of the memory that is left: of the machine, or of the control group where that has less."""
    return min(_machine(), _control_group())


def _machine() -> float:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        sizes = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
        return sizes["MemAvailable"] / sizes["MemTotal"]
    except (OSError, KeyError, ValueError):
        return 1.0  # not Linux: the system itself has to say no


def _control_group() -> float:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text(encoding="ascii"))
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 1.0  # no bound, or none that can be read
    return max(0.0, 1.0 - used / limit) if limit else 1.0
