"""The scripted chat server, and a loop that asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tools.base import Toolkit
from hermes_rl.tools.python_tools import python_tool
from tests.agent.scripted_chat import ScriptedChat, scripted_chat

MakeLoop = Callable[..., HermesAgentLoop]


async def _at_once(seconds: float) -> None:
    """A pause that takes no time."""


chat = pytest.fixture(scripted_chat)


@pytest.fixture
async def policy(chat: ScriptedChat) -> AsyncIterator[ModelClient]:
    """The role that asks the scripted server, trying twice."""
    config = ServerConfig("openai", chat.url, "m", timeout=20)
    async with create_client("policy", [config], RetryPolicy(attempts=2, sleep=_at_once)) as role:
        yield role


@pytest.fixture
def make_loop(policy: ModelClient) -> MakeLoop:
    """A loop with these Python functions as tools."""

    def make(*tools: Callable[..., Any], tokenizer: Tokenizer | None = None, **options: Any) -> HermesAgentLoop:
        toolkit = Toolkit(python_tool(tool) for tool in tools)
        return HermesAgentLoop(policy, toolkit.schemas, options=LoopOptions(**options), tokenizer=tokenizer)

    return make
