"""A chat server on loopback that does what it is told: it writes the greeting through the terminal, then says so."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from tests.http_servers import listening


class WriterModel:
    """Counts its requests, keeps their headers and bodies, and answers each conversation in two turns."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.command: str | None = None
        """What it runs; None: what writes the greeting that it is asked for."""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: set[str | None] = set()
        self.url = ""
        self._open = AsyncExitStack()

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if request.method == "GET":
            raise web.HTTPNotFound  # somebody asks what kind of server this is
        self.paths.append(request.path)
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        await asyncio.sleep(self.delay)
        message = self._message(body["messages"])
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": "writer"}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    def _message(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            return {"role": "assistant", "content": "Done."}
        found = re.search(r"Write (hello \w+)", messages[-1]["content"])
        command = self.command or f"echo {found[1] if found else ''} > ~/greeting.txt"
        arguments = json.dumps({"command": command})
        call = {"id": "call_1", "type": "function", "function": {"name": "terminal", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle)
        # A request that nobody waits for any more is cancelled.
        self.url = f"{await self._open.enter_async_context(listening(app, handler_cancellation=True))}/v1"

    async def stop(self) -> None:
        await self._open.aclose()


async def writer_model() -> AsyncIterator[WriterModel]:
    """Yield a server that listens, for a fixture."""
    model = WriterModel()
    await model.start()
    yield model
    await model.stop()
