"""Rollouts begin while server, cores and memory carry them; the least of the three decides."""

from __future__ import annotations

import resource
from typing import Any

import pytest

from hermes_rl.rollouts.admission import DESCRIPTORS as EACH
from hermes_rl.rollouts.admission import FIRST as PER_CORE
from hermes_rl.rollouts.admission import (
    Adaptive,
    DescriptorShare,
    Fixed,
    admission,
    free_memory,
    open_descriptors,
    processor_seconds,
    raise_descriptor_limit,
)
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.factory import create_client

CORES = 4
FIRST = PER_CORE * CORES


class Machine:
    """What is measured, as a test says it; `rollouts` are open, and each takes `work` of a core."""

    def __init__(self, **given: Any) -> None:
        self.now = self.used = 0.0
        self.free, self.waiting, self.work, self.places = 1.0, 0, 0.0, 1_000_000
        self.rollouts = 0
        vars(self).update(given)
        self.admission = Adaptive(
            self, clock=lambda: self.now, used=lambda: self.used, free=lambda: self.free, cores=lambda: CORES
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


def test_it_grows_without_end_where_nothing_says_no() -> None:
    assert Machine().run(20) > 5000


def test_it_grows_step_by_step_so_that_what_it_costs_is_seen() -> None:
    assert Machine().run(0.1) == FIRST
    assert Machine().run(1) <= FIRST * 1.5**4 + 10


def test_no_more_begin_than_the_server_takes_calls() -> None:
    assert Machine(places=70).run(20) == 71


def test_no_more_begin_than_the_cores_carry() -> None:
    assert 100 < Machine(work=0.02).run(30) < 600, "200 rollouts are all that four cores carry"


def test_no_more_begin_than_the_memory_carries() -> None:
    machine = Machine()

    class Filling(Machine):
        pass

    filling = Filling()
    filling.admission._free = lambda: 1 - filling.rollouts / 1000
    assert 850 < filling.run(30) < 1400
    machine.free = 0.05
    assert machine.run(5) <= FIRST


def test_the_cores_are_never_left_idle() -> None:
    assert Machine(free=0.0, places=0).run(1) == 4


async def test_a_number_on_request_is_kept_and_the_servers_calls_are_not_bounded_by_less() -> None:
    async with create_client(
        "policy", [ServerConfig("openai", "http://127.0.0.1:9/v1", "m", max_concurrency=300)]
    ) as role:
        assert isinstance(admission(None, role), Adaptive)
        assert role.places == 32
        fixed = admission(7, role)
        assert isinstance(fixed, Fixed)
        assert [fixed.admits(6), fixed.admits(7), role.places] == [True, False, 300]


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
def test_no_more_begin_than_this_process_may_open_descriptors_for(each: int) -> None:
    used, now = [50], [0.0]

    def later() -> float:
        now[0] += 1
        return now[0]

    rollouts = begun(DescriptorShare(1024, lambda: used[0], later), each, used)
    assert used[0] <= 1024
    assert rollouts >= (1024 - 50) // EACH
    assert each != 1 or rollouts > 400, "where they take few, more of them may begin"


def test_the_last_one_is_never_kept_from_beginning() -> None:
    assert Fixed(5, DescriptorShare(20, lambda: 19)).admits(0)


def test_a_run_may_open_as_much_as_the_system_lets_it() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 200, before[1]))
    try:
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
