"""A chat endpoint on loopback that plays the small task of `tests.api.summing`, as a trainer's endpoint would."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.http_servers import listening


class ChatModel:
    """Calls the tool, then says what it answered.

    Args:
        wrong: every so many rollouts one is wrong; 0: none.
        down: it answers with 503.
    """

    def __init__(self, wrong: int = 0, down: bool = False) -> None:
        self.wrong, self.down = wrong, down
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.paths: set[str] = set()
        self._ended = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The base URL while it runs."""
        app = web.Application()
        app.router.add_post("/{before:.*}v1/chat/completions", self._chat)
        async with listening(app) as address:
            yield f"{address}/v1"

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        self.keys.add(request.headers.get("Authorization"))
        self.paths.add(request.path)
        if self.down:
            return web.json_response({"error": {"message": "the engine is down"}}, status=503)
        message = self._answer(body["messages"])
        finish = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
        head = {"id": str(len(self.asked)), "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**head, "choices": [choice], "usage": usage})

    def _answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        last = messages[-1]
        if last["role"] != "tool":
            a, b = re.findall(r"What is (\d+) plus (\d+)", str(last["content"]))[-1]
            function = {"name": "add", "arguments": json.dumps({"a": int(a), "b": int(b)})}
            call = {"id": f"call{len(self.asked)}", "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        self._ended += 1
        if self.wrong and self._ended % self.wrong == 0:
            return {"role": "assistant", "content": "I do not know."}
        return {"role": "assistant", "content": f"The sum is {re.findall(r'[0-9]+', str(last['content']))[-1]}."}
