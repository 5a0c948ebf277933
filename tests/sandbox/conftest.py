"""A started sandbox of each backend that can run here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hermes_rl.sandbox import Sandbox, SandboxConfig, create_sandbox


@pytest.fixture(params=["bubblewrap", "none"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def sandbox(backend: str) -> AsyncIterator[Sandbox]:
    async with create_sandbox(SandboxConfig(backend=backend)) as started:
        yield started


@pytest.fixture
async def fenced() -> AsyncIterator[Sandbox]:
    """The default sandbox, for what only a fence can promise."""
    async with create_sandbox(SandboxConfig()) as started:
        yield started
