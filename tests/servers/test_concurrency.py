"""How many calls a server is given is found without being told, and stays near the best fixed number.

The server is simulated and time is virtual, so that every figure is the same on every machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import pytest

from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.pool import Limiter
from tests.servers.virtual_time import VirtualLoop, simulated

LANES, LATENCY, SECONDS = 700, 2.0, 240.0


class Server:
    """Answers within about `LATENCY`; takes `capacity` calls and refuses the rest, or becomes slower with each more."""

    def __init__(self, random: Random, *, queues: bool = False) -> None:
        self.capacity, self.queues, self.random = 0, queues, random
        self.in_flight = self.answers = self.most = 0

    async def answers_call(self) -> bool:
        if self.in_flight >= self.capacity and not self.queues:
            return False
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        slower = max(1.0, self.in_flight / self.capacity) if self.queues else 1.0
        await asyncio.sleep(LATENCY * self.random.uniform(0.5, 1.5) * slower)
        self.in_flight -= 1
        self.answers += 1
        return True


async def lane(limiter: Limiter, server: Server) -> None:
    """A rollout after the other, with the pauses of the retry policy."""
    failures = 0
    while True:
        await limiter.acquire()
        began = asyncio.get_running_loop().time()
        answered = await server.answers_call()
        failures = 0 if answered else failures + 1
        if answered:
            limiter.answered(asyncio.get_running_loop().time() - began)
        else:
            limiter.refused()
        limiter.release()
        if failures:
            await asyncio.sleep(server.random.random() * min(30.0, 0.5 * 2.0 ** (failures - 1)))


async def phases(limiter: Limiter, server: Server, capacities: list[int]) -> list[int]:
    """Answers in each phase."""
    lanes = [asyncio.create_task(lane(limiter, server)) for _ in range(LANES)]
    found = []
    for capacity in capacities:
        server.capacity, before = capacity, server.answers
        await asyncio.sleep(SECONDS)
        found.append(server.answers - before)
    for task in lanes:
        task.cancel()
    await asyncio.gather(*lanes, return_exceptions=True)
    return found


def play(
    capacities: list[int], make: Callable[[VirtualLoop], Limiter], *, queues: bool = False
) -> tuple[list[int], Limiter, Server]:
    loop = VirtualLoop()
    limiter, server = make(loop), Server(Random(7), queues=queues)
    return simulated(phases(limiter, server, capacities), loop), limiter, server


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("capacity", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_it_stays_above_nine_tenths_of_the_best_fixed_number_in_each_phase(capacity: int, queues: bool) -> None:
    capacities = [capacity, capacity // 2, capacity]
    found, _, _ = play(capacities, lambda loop: Limiter(1024, clock=loop.time), queues=queues)
    best = [
        max(
            play([one], lambda loop, n=n: Limiter(n, fixed=True, clock=loop.time), queues=queues)[0][0]  # type: ignore[misc]
            for n in (one, one + one // 8)
        )
        for one in capacities
    ]
    shares = [round(answers / most, 3) for answers, most in zip(found, best, strict=True)]
    assert min(shares) > 0.9, shares


def test_a_server_that_queues_is_not_given_all_there_is() -> None:
    _, limiter, _ = play([40], lambda loop: Limiter(1024, clock=loop.time), queues=True)
    assert 40 <= limiter.limit <= 120


def test_it_never_exceeds_its_cap_and_a_fixed_one_never_moves() -> None:
    _, limiter, server = play([400], lambda loop: Limiter(50, clock=loop.time))
    assert (limiter.limit, server.most) == (50, 50)
    _, limiter, _ = play([10], lambda loop: Limiter(50, fixed=True, clock=loop.time))
    assert limiter.limit == 50


async def test_another_cap_holds_at_once_and_calls_beyond_it_are_finished() -> None:
    limiter = Limiter(4, fixed=True)
    for _ in range(4):
        await limiter.acquire()
    limiter.bound(2)
    waits = asyncio.create_task(limiter.acquire())
    await asyncio.sleep(0)
    limiter.release()
    limiter.release()
    await asyncio.sleep(0)
    assert (limiter.in_flight, limiter.waiting) == (2, 1), "two are what it may have"
    limiter.bound(3)
    await asyncio.wait_for(waits, 1)
    assert (limiter.in_flight, limiter.limit) == (3, 3)


async def test_the_parts_of_several_workers_are_the_whole() -> None:
    config = ServerConfig("openai", "http://127.0.0.1:9/v1", "m", max_concurrency=10)
    async with create_client("policy", [config]) as role:
        role.fix()
        parts = []
        for number in range(3):
            role.share(number, 3)
            parts.append(role.call_capacity)
        assert sorted(parts) == [3, 3, 4]
        role.share(0, 1)
        assert role.call_capacity == 10


async def test_a_cancelled_call_gives_its_place_back() -> None:
    limiter = Limiter(1, fixed=True)
    await limiter.acquire()
    waiting = [asyncio.create_task(limiter.acquire()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    limiter.release()
    waiting[1].cancel()  # in the moment in which it has been given the place
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    await asyncio.wait_for(waiting[2], 1)
    assert (limiter.in_flight, limiter.waiting) == (1, 0)
