"""A server that is down pauses its callers, is said once, and costs no rollout; single failures are no outage."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from hermes_rl.errors import ServerFailure
from hermes_rl.servers import client
from hermes_rl.servers import pool as pool_module
from hermes_rl.servers.base import ChatReply, ChatRequest, ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.pool import ServerPool
from hermes_rl.servers.transport import AttemptFailed, RetryPolicy
from tests.servers.virtual_time import VirtualLoop, simulated

HI = ChatRequest([{"role": "user", "content": "hi"}])


class Flaky:
    """Answers after a tenth of a second; not at all while it is down."""

    def __init__(self, name: str = "m") -> None:
        self.config = ServerConfig("openai", f"http://user:secret@{name}/v1", name)
        self.down: tuple[float, float] = (0.0, 0.0)
        self.calls_while_down = 0
        self.fault = ""

    async def attempt(self, request: ChatRequest) -> ChatReply:
        await asyncio.sleep(0.1)
        now = asyncio.get_running_loop().time()
        if self.down[0] <= now < self.down[1]:
            self.calls_while_down += 1
            raise AttemptFailed("connection refused", unreachable=True)
        if self.fault:
            raise AttemptFailed(self.fault)
        return ChatReply({}, "stop", {}, self.config.model, "openai")

    async def close(self) -> None:
        return None


def role_over(loop: VirtualLoop, *backends: Flaky, policy: RetryPolicy | None = None) -> tuple[ModelClient, list[str]]:
    role, said = timed(loop, "policy", list(backends), policy), []
    role.tell(said.append)
    return role, said


def timed(loop: VirtualLoop, *given: Any) -> ModelClient:
    """Make a client whose servers rest by the loop's clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "ServerPool", partial(ServerPool, clock=loop.time))
        return ModelClient(*given)


async def lanes(role: ModelClient, count: int, until: float) -> int:
    """Calls that were answered by then; a call that fails for good raises."""

    async def lane() -> int:
        answered = 0
        while asyncio.get_running_loop().time() < until:
            await role.chat(HI)
            answered += 1
        return answered

    return sum(await asyncio.gather(*(lane() for _ in range(count))))


def test_ten_minute_outage_fails_no_call_and_is_reported_once() -> None:
    loop, server = VirtualLoop(), Flaky("host")
    server.down = (10.0, 610.0)
    role, said = role_over(loop, server)
    answered = simulated(lanes(role, 30, 700.0), loop)
    assert answered > 30 * 900, "ten seconds before and nearly ninety after it"
    assert server.calls_while_down < 30 * 8, "one probe now and then, not every caller"
    assert len(said) == 2
    assert said[0].startswith("policy: the server at http://host/v1 is down (connection refused)")
    assert "is back after 6" in said[1]
    assert "secret" not in "".join(said)


def test_an_outage_that_does_not_end_is_a_failure_of_the_server() -> None:
    loop, server = VirtualLoop(), Flaky()
    server.down = (0.0, 1e9)
    role, _ = role_over(loop, server, policy=RetryPolicy(outage=120.0))
    with pytest.raises(ServerFailure, match="connection refused"):
        simulated(lanes(role, 1, 1e6), loop)


def test_server_that_is_down_is_bypassed_without_delay() -> None:
    loop, bad, good = VirtualLoop(), Flaky("bad"), Flaky("good")
    bad.down = (0.0, 1e9)
    role, said = role_over(loop, bad, good)
    assert simulated(lanes(role, 10, 60.0), loop) > 10 * 540
    assert said == []


def test_unusable_responses_are_reported_once_and_are_not_an_outage() -> None:
    loop, server = VirtualLoop(), Flaky()
    server.fault = "the answer is not JSON"
    role, said = role_over(loop, server)
    with pytest.raises(ServerFailure, match="8 attempts"):
        simulated(lanes(role, 1, 60.0), loop)
    (notice,) = said
    assert "has failed for" in notice and "(the answer is not JSON); calls are sent again" in notice


def test_outage_without_a_listener_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    loop, server = VirtualLoop(), Flaky()
    server.down = (0.0, 30.0)
    role = timed(loop, "judge", [server])
    simulated(lanes(role, 8, 60.0), loop)
    assert [record.name for record in caplog.records] == [pool_module.__name__] * 2
