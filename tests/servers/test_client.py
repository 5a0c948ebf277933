"""Several servers behind one role: load, dead servers, rollouts that stay, callers in other threads."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from hermes_rl.errors import ServerFailure
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.pool import Health, ServerPool
from hermes_rl.servers.transport import AttemptFailed, RetryPolicy
from tests.servers.loopback_server import Answer, Loopback, completion, error

Start = Callable[[], Awaitable[Loopback]]
HI = ChatRequest([{"role": "user", "content": "hi"}])
DEAD = "http://127.0.0.1:9/v1"


def over(*urls: str, policy: RetryPolicy | None = None) -> ModelClient:
    return create_client("policy", [ServerConfig("openai", url, "m") for url in urls], policy)


def of(rollout: str) -> ChatRequest:
    return ChatRequest(HI.messages, rollout_id=rollout)


async def test_load_is_spread(loopback: Start) -> None:
    servers = [await loopback() for _ in range(3)]
    for server in servers:
        server.otherwise.delay = 0.05
    async with over(*(server.url for server in servers)) as role:
        await asyncio.gather(*(role.chat(HI) for _ in range(30)))
    assert [len(server.seen) for server in servers] == [10, 10, 10]


async def test_the_slow_server_gets_less(loopback: Start) -> None:
    slow, fast = await loopback(), await loopback()
    slow.otherwise.delay, fast.otherwise.delay = 0.2, 0.01
    places = asyncio.Semaphore(6)

    async def ask() -> None:
        async with places:
            await role.chat(HI)

    async with over(slow.url, fast.url) as role:
        await asyncio.gather(*(ask() for _ in range(60)))
    assert len(fast.seen) > 2 * len(slow.seen)


async def test_a_dead_server_costs_three_calls_nothing_else(loopback: Start, policy: RetryPolicy, naps: Any) -> None:
    one, two = await loopback(), await loopback()
    async with over(DEAD, one.url, two.url, policy=policy) as role:
        replies = [await role.chat(HI) for _ in range(20)]
    assert Counter(reply.attempts for reply in replies) == {1: 17, 2: 3}
    assert naps.seconds == []  # another server was there: no reason to wait
    assert abs(len(one.seen) - len(two.seen)) <= 2


async def test_all_dead_is_a_failure_of_bounded_length(policy: RetryPolicy, naps: Any) -> None:
    async with over(DEAD, DEAD, policy=policy) as role:
        with pytest.raises(ServerFailure, match="8 attempts"):
            await role.chat(HI)
    assert 3 <= len(naps.seconds) <= 7


async def test_a_rollout_stays_with_its_server(loopback: Start) -> None:
    servers = [await loopback() for _ in range(3)]
    async with over(*(server.url for server in servers)) as role:
        for _ in range(4):
            for rollout in "abcdef":
                await role.chat(of(rollout))
    assert [len(server.seen) for server in servers] == [8, 8, 8]


async def test_a_rollout_moves_when_its_server_dies_and_stays_there(loopback: Start, policy: RetryPolicy) -> None:
    one, two = await loopback(), await loopback()
    async with over(one.url, two.url, policy=policy) as role:
        await role.chat(of("a"))
        home, other = (one, two) if one.seen else (two, one)
        home.otherwise = Answer(fault="reset")
        assert (await role.chat(of("a"))).attempts == 2
        home.otherwise = completion()
        await role.chat(of("a"))
    assert (len(home.seen), len(other.seen)) == (2, 2)


async def test_a_server_that_says_429_is_left_for_another_at_once(
    loopback: Start, policy: RetryPolicy, naps: Any
) -> None:
    busy, free = await loopback(), await loopback()
    busy.otherwise = error(429, Retry_After="60")
    async with over(busy.url, free.url, policy=policy) as role:
        for _ in range(10):
            await role.chat(HI)
    assert (len(free.seen), naps.seconds) == (10, [])


class Fake:
    """A backend without a network, for what depends on time."""

    def __init__(self, name: str) -> None:
        self.config = ServerConfig("openai", DEAD, name)
        self.broken = False
        self.calls = 0

    async def attempt(self, request: ChatRequest) -> ChatReply:
        self.calls += 1
        await asyncio.sleep(0)
        if self.broken:
            raise AttemptFailed("broken")
        return ChatReply({}, "stop", {}, self.config.model, "openai")

    async def close(self) -> None:
        return None


async def _ask(pool: ServerPool) -> None:
    server = pool.pick(None, [])
    try:
        await pool.attempt(server, HI)
    except AttemptFailed:
        return


async def test_after_a_rest_one_probe_decides() -> None:
    now = 100.0
    bad, good = Fake("bad"), Fake("good")
    pool = ServerPool([bad, good], clock=lambda: now)
    bad.broken = True
    for _ in range(20):
        await _ask(pool)
    assert bad.calls == 3
    now += 1.5
    await asyncio.gather(*(_ask(pool) for _ in range(10)))
    assert bad.calls == 4  # the probe, while nine others went elsewhere
    now += 1.5
    await asyncio.gather(*(_ask(pool) for _ in range(10)))
    assert bad.calls == 4  # the second rest is longer
    bad.broken = False
    now += 1.5
    await _ask(pool)
    for _ in range(10):
        await _ask(pool)
    assert bad.calls > 8


def test_failures_of_one_outage_count_once() -> None:
    health = Health()
    for _ in range(100):
        health.failed(10.0, None)
    assert health.resting_until == 11.0
    assert not health.available(10.9)
    assert health.available(11.0)
    assert health.record_start()
    assert not health.available(11.0)
    health.ended(True)
    assert health.available(11.0)


async def test_a_cancelled_probe_frees_its_place() -> None:
    now = 0.0
    bad = Fake("bad")
    pool = ServerPool([bad, Fake("good")], clock=lambda: now)
    bad.broken = True
    for _ in range(8):
        await _ask(pool)
    now += 2
    probe = asyncio.create_task(_ask(pool))
    await asyncio.sleep(0)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    bad.broken = False
    for _ in range(6):
        await _ask(pool)
    assert bad.calls > 5


async def test_context_overflow_does_not_make_a_server_ill(loopback: Start, policy: RetryPolicy) -> None:
    one, two = await loopback(), await loopback()
    one.otherwise = error(400, "maximum context length is 10 tokens")
    async with over(one.url, two.url, policy=policy) as role:
        for _ in range(20):
            try:
                await role.chat(HI)
            except ContextLengthExceeded:
                continue
    assert abs(len(one.seen) - len(two.seen)) <= 1


async def test_calls_from_other_threads_use_the_same_connections_and_bound(loopback: Start) -> None:
    server = await loopback()
    server.otherwise.delay = 0.03
    config = ServerConfig("openai", server.url, "m", max_concurrency=2)
    answers: list[str] = []

    def reward() -> None:
        answers.append(asyncio.run(role.chat_text([{"role": "user", "content": "grade"}])))

    async with create_client("judge", [config]) as role:
        threads = [threading.Thread(target=reward) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert answers == ["hello"] * 6
    assert server.peak == 2


async def test_text_helper(loopback: Start) -> None:
    server = await loopback()
    server.answers = [completion("<think>\nhm\n</think>\n\nyes"), completion(message={"content": None})]
    schema = {"type": "object", "properties": {"verdict": {"type": "string"}}}
    async with over(server.url) as role:
        assert await role.chat_text(HI.messages, schema) == "yes"
        assert await role.chat_text(HI.messages) == ""
    sent = server.seen[0].body["response_format"]
    assert (sent["type"], sent["json_schema"]["schema"]) == ("json_schema", schema)
    assert "response_format" not in server.seen[1].body


async def test_forgotten_rollouts_take_no_memory() -> None:
    pool = ServerPool([Fake("a"), Fake("b")])
    for number in range(70_000):
        pool.pick(str(number), [])
    assert sum(server.rollouts for server in pool) == 65_536
    for number in range(70_000):
        pool.unpin(str(number))
    assert [server.rollouts for server in pool] == [0, 0]


async def test_closing_twice_is_fine(loopback: Start) -> None:
    server = await loopback()
    role = over(server.url)
    await role.chat(HI)
    await role.close()
    await role.close()
