"""A chat server on loopback that answers with what a test wrote down, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.http_servers import listening

Message = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One answer of the server; `body` is sent as it is."""

    body: bytes
    status: int = 200
    delay: float = 0.0


def answer(
    message: object, finish_reason: str | None = "stop", usage: object = None, *, delay: float = 0.0, **fields: Any
) -> Answer:
    """A chat completion with this message, well formed or not."""
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    body = {"model": "served", "choices": [choice], "usage": usage, **fields}
    return Answer(json.dumps(body).encode(), delay=delay)


def says(text: str | None, finish_reason: str | None = "stop", *, delay: float = 0.0, **fields: Any) -> Answer:
    """A message without tool calls."""
    return answer({"role": "assistant", "content": text, **fields}, finish_reason, delay=delay)


def call(name: object, arguments: object = "{}", **fields: Any) -> Message:
    """A tool call as the API has it; what is no text is written as JSON, as servers do."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": text}, **fields}


def calls(*tool_calls: object, usage: object = None, **fields: Any) -> Answer:
    """A message with tool calls."""
    return answer({"role": "assistant", "content": None, "tool_calls": list(tool_calls), **fields}, "tool_calls", usage)


def refused(status: int, text: str) -> Answer:
    """An error of the server."""
    return Answer(json.dumps({"error": {"message": text}}).encode(), status)


@dataclass
class ScriptedChat:
    """Answers come from `script` in order, then it says that it is done."""

    script: list[Answer] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @property
    def sent(self) -> list[Message]:
        """The messages of the last request."""
        messages: list[Message] = self.requests[-1]["messages"]
        return messages

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        following = self.script.pop(0) if self.script else says("done")
        await asyncio.sleep(following.delay)
        return web.Response(body=following.body, status=following.status, content_type="application/json")

    async def start(self) -> Callable[[], Awaitable[None]]:
        """Listen; return what ends it."""
        app, stack = web.Application(), AsyncExitStack()
        app.router.add_post("/v1/chat/completions", self.answer)
        self.url = f"{await stack.enter_async_context(listening(app))}/v1"
        return stack.aclose


async def scripted_chat() -> AsyncIterator[ScriptedChat]:
    """Yield a server that listens, for a fixture."""
    chat = ScriptedChat()
    stop = await chat.start()
    yield chat
    await stop()
