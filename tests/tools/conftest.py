"""A rollout's runtime with the built-in tools."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.catalogue import resolve_toolsets
from tests.tools.calling import Player


@pytest.fixture
async def runtime() -> AsyncIterator[ToolRuntime]:
    toolkit = Toolkit(resolve_toolsets(["terminal", "file", "todo"]))
    async with ToolRuntime(SandboxConfig(timeout=10), toolkit=toolkit) as made:
        yield made


@pytest.fixture
def play(runtime: ToolRuntime) -> Player:
    return Player(runtime)
