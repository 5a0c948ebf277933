"""Rollouts begin while server, cores and memory carry them; the least of the three decides."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.rollouts.admission import DESCRIPTORS as EACH
from hermes_rl.rollouts.admission import FIRST as PER_CORE
from hermes_rl.rollouts.admission import (
    UNLIMITED,
    Adaptive,
    CpuUse,
    DescriptorShare,
    Fixed,
    MemoryShare,
    admission,
    busy_seconds,
    core_quota,
    free_memory,
    open_descriptors,
    processor_seconds,
    raise_descriptor_limit,
    usable_cores,
    whole_machine,
)
from hermes_rl.sandbox.cgroup import SandboxMemory
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.factory import create_client

CORES = 4
FIRST = PER_CORE * CORES


class Machine:
    """What is measured, as a test says it; `rollouts` are open, each takes `work` of a core and `filled` of memory."""

    def __init__(self, **given: Any) -> None:
        self.now = self.used = 0.0
        self.free, self.filled, self.waiting, self.work, self.places = 1.0, 0.0, 0, 0.0, 1_000_000
        self.cores = CORES
        self.others = 0.0
        """Cores that other programs keep busy."""
        self.rollouts = 0
        vars(self).update(given)
        self.admission = Adaptive(
            self,
            clock=lambda: self.now,
            used=lambda: self.used,
            free=lambda: self.free - self.rollouts * self.filled,
            cores=lambda: self.cores,
            machine=lambda: [CpuUse(min(self.now * CORES, self.used + self.others * self.now), CORES)],
        )

    def fix(self) -> None: ...

    def run(self, seconds: float) -> int:
        """Let rollouts begin for a while; returns how many are open at the end."""
        for _ in range(int(seconds * 10)):
            self.waiting = max(0, self.rollouts - self.places)
            while self.admission.admits(self.rollouts):
                self.rollouts += 1
                self.waiting = max(0, self.rollouts - self.places)
            self.now += 0.1
            self.used += 0.1 * min(4.0, self.rollouts * self.work)
        return self.rollouts


@pytest.mark.slow
def test_admission_grows_without_limit_when_unconstrained() -> None:
    assert Machine().run(20) > 5000


def test_it_grows_step_by_step_so_that_what_it_costs_is_seen() -> None:
    assert Machine().run(0.1) == FIRST
    assert Machine().run(1) <= FIRST * 1.5**4 + 10


def test_admission_respects_server_concurrency() -> None:
    assert Machine(places=70).run(20) == 71


def test_admission_respects_cpu_capacity() -> None:
    assert 100 < Machine(work=0.02).run(30) < 600, "200 rollouts are all that four cores carry"


def test_admission_is_cautious_when_other_processes_use_the_cpu() -> None:
    assert Machine(work=0.001, others=4.0).run(30) <= FIRST * 1.5, "this program uses a hundredth of the cores"
    assert Machine(work=0.001, others=4.0).run(30) >= FIRST, "its own part of the cores it gets all the same"
    assert Machine(work=0.001, others=2.0).run(30) > 1000


def test_what_this_program_uses_is_not_counted_twice() -> None:
    assert Machine(work=0.02).run(30) == Machine(work=0.02, others=-4.0).run(30), "nobody else is at work"


STAT = """cpu  900 0 900 900 0 0 0 0 0 0
cpu0 100 20 30 1000 500 4 5 6 50 0
cpu1 200 0 0 5000 0 0 0 0 0 0
cpu7 99999 0 0 0 0 0 0 0 0 0
intr 1 2 3 4 5 6 7 8 9 10
"""


def test_the_cores_that_this_process_may_use_are_looked_at() -> None:
    per_second = os.sysconf("SC_CLK_TCK")
    assert busy_seconds(STAT, {0}) == [165 / per_second]
    assert busy_seconds(STAT, {0, 1}) == [365 / per_second]
    assert busy_seconds("", {0}) == busy_seconds(STAT, {3}) == []


@pytest.mark.parametrize(
    ("text", "cores"), [("150000 100000\n", 1.5), ("max 100000\n", None), ("", None), ("100 0", None)]
)
def test_a_container_may_have_a_part_of_the_cores(text: str, cores: float | None) -> None:
    assert core_quota(text) == cores


def test_the_use_of_a_container_is_measured_by_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermes_rl.rollouts.admission.CONTROL_GROUP", tmp_path)
    assert [used.cores for used in whole_machine()] == [len(os.sched_getaffinity(0))]
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1000000\n")
    assert whole_machine()[1] == CpuUse(2.5, 0.5)
    assert usable_cores() == 1


def test_admission_respects_free_memory() -> None:
    assert 850 < Machine(filled=0.001).run(30) < 1400
    machine = Machine()
    machine.free = 0.05
    assert machine.run(5) <= FIRST


def test_two_runs_of_one_process_open_together_what_the_cores_carry() -> None:
    now, used, rollouts = [0.0], [0.0], [0, 0]
    both = [
        Adaptive(None, clock=lambda: now[0], used=lambda: used[0], cores=lambda: CORES, machine=list) for _ in rollouts
    ]
    for _ in range(300):
        for mine, one in enumerate(both):
            while one.admits(rollouts[mine], rollouts[1 - mine]):
                rollouts[mine] += 1
        now[0] += 0.1
        used[0] += 0.1 * min(4.0, sum(rollouts) * 0.02)
    assert 100 < sum(rollouts) < 600, "as many as one run alone would open"
    alone = Fixed(5, DescriptorShare(UNLIMITED, lambda: 0))
    assert alone.admits(4, other_open=100), "a number on request is for one run"


def test_machines_that_come_and_go_count_from_then_on() -> None:
    machine = Machine(free=0.0, places=0)
    assert machine.run(1) == 4
    machine.cores = 16
    assert machine.run(1) == 16


def test_the_cores_are_never_left_idle() -> None:
    assert Machine(free=0.0, places=0).run(1) == 4


async def test_fixed_concurrency_is_used_and_does_not_limit_server_calls() -> None:
    async with create_client(
        "policy", [ServerConfig("openai", "http://127.0.0.1:9/v1", "m", max_concurrency=300)]
    ) as role:
        assert isinstance(admission(None, role), Adaptive)
        assert role.call_capacity == 32
        fixed = admission(7, role)
        assert isinstance(fixed, Fixed)
        assert [fixed.admits(6), fixed.admits(7), role.call_capacity] == [True, False, 300]


def test_this_machine_can_be_measured() -> None:
    assert processor_seconds() > 0
    assert 0 < free_memory() <= 1


def begun(descriptors: DescriptorShare, each: int, used: list[int]) -> int:
    """How many of 1000 rollouts begin where each takes so many descriptors."""
    fixed, rollouts = Fixed(1000, descriptors), 0
    while fixed.admits(rollouts):
        rollouts += 1
        used[0] = 50 + rollouts * each
    return rollouts


@pytest.mark.parametrize("each", [1, 4, EACH])
def test_admission_respects_the_descriptor_limit(each: int) -> None:
    used, now = [50], [0.0]

    def later() -> float:
        now[0] += 1
        return now[0]

    rollouts = begun(DescriptorShare(1024, lambda: used[0], later), each, used)
    assert used[0] <= 1024
    assert rollouts >= (1024 - 50) // EACH
    assert each != 1 or rollouts > 400, "where they take few, more of them may begin"


def test_admission_always_allows_one_rollout() -> None:
    assert Fixed(5, DescriptorShare(20, lambda: 19)).admits(0)


def test_a_run_may_open_as_much_as_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 200, before[1]))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def carried(limit: int, each: int, used: int, *, short: bool = False) -> int:
    """How many of 1000 rollouts begin before anything more is seen of what they use."""
    memory = MemoryShare(lambda: SandboxMemory(limit, used, each, short), lambda: 0.0)
    fixed, rollouts = Fixed(1000, DescriptorShare(UNLIMITED, lambda: 0), memory), 0
    while fixed.admits(rollouts):
        rollouts += 1
    return rollouts


@pytest.mark.parametrize(
    ("used", "short", "rollouts"),
    [(100, False, 1000), (699, False, 1000), (710, False, 2), (850, False, 1), (950, False, 1), (100, True, 10)],
)
def test_admission_respects_the_memory_shared_by_all_sandboxes(used: int, short: bool, rollouts: int) -> None:
    """The first may always begin; with plenty left, as many as are asked for."""
    assert carried(1000, 100, used, short=short) == rollouts


def test_adaptive_admission_respects_sandbox_memory() -> None:
    now, free = [0.0], [SandboxMemory(1000, 0, 100, False)]
    memory = MemoryShare(lambda: free[0], lambda: now[0])
    adaptive = Adaptive(None, clock=lambda: now[0], used=lambda: 0.0, cores=lambda: 4, machine=list, memory=memory)
    assert adaptive.admits(3)
    now[0], free[0] = 1.0, SandboxMemory(1000, 990, 100, False)
    assert not adaptive.admits(3)
    assert adaptive.admits(0)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))
from hermes_rl.errors import HermesRLError
from hermes_rl.rollouts.admission import require_descriptors
from hermes_rl.sandbox.launcher import pipe
try:
    require_descriptors()
    while True:
        pipe()
except HermesRLError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        (40, "this process may open 40 files at a time (`ulimit -n`), and a run needs 128 or more: raise the limit"),
        (128, "this machine cannot make a pipe: Too many open files (the limit is 128: `ulimit -n`)"),
    ],
)
def test_too_few_descriptors_are_named_as_the_limit(limit: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.startswith(said), done.stdout
