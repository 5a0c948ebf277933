"""A started sandbox of each backend that can run here."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hermes_rl.sandbox import Sandbox, SandboxConfig, create_sandbox


@pytest.fixture(params=["bubblewrap", "none"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["bubblewrap", "image", "none"])
def config(request: pytest.FixtureRequest) -> SandboxConfig:
    """What every sandbox has to do alike is asked of each of these."""
    if request.param == "image":
        return SandboxConfig(image=str(request.getfixturevalue("rootfs")))
    return SandboxConfig(backend=request.param)


@pytest.fixture
async def sandbox(config: SandboxConfig) -> AsyncIterator[Sandbox]:
    async with create_sandbox(config) as started:
        yield started


@pytest.fixture
async def fenced() -> AsyncIterator[Sandbox]:
    """The default sandbox, for what only a fence can promise."""
    async with create_sandbox(SandboxConfig()) as started:
        yield started
