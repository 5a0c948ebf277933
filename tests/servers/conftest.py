"""Fixtures of the servers' tests; the server that misbehaves on demand is in `loopback_server`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from hermes_rl.servers.transport import RetryPolicy
from tests.servers.loopback_server import Loopback, Naps


@pytest.fixture
async def loopback() -> AsyncIterator[Callable[[], Awaitable[Loopback]]]:
    """Starts as many loopback servers as a test asks for."""
    started: list[Loopback] = []

    async def start() -> Loopback:
        started.append(await Loopback().start())
        return started[-1]

    yield start
    for server in started:
        await server.stop()


@pytest.fixture
def naps() -> Naps:
    return Naps()


@pytest.fixture
def policy(naps: Naps) -> RetryPolicy:
    """The default policy with pauses that take no time and have no jitter; it waits for no server that is down."""
    return RetryPolicy(random=lambda: 1.0, sleep=naps, outage=0.0)
