"""A chat server on loopback that does what it is told: it writes the greeting through the terminal, then says so.

Run as a program it prints its address and serves until its standard input is closed.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

from aiohttp import web


class WriterModel:
    """Counts its requests, keeps their headers and bodies, and answers each conversation in two turns."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.command: str | None = None
        """What it runs; None: what writes the greeting that it is asked for."""
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: set[str | None] = set()
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> WriterModel:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True)  # nobody waits for what nobody asks for any more
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
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
        return web.json_response(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 0,
                "model": "writer",
                "choices": [choice],
                "usage": usage,
            }
        )

    def _message(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if messages[-1]["role"] == "tool":
            return {"role": "assistant", "content": "Done."}
        found = re.search(r"Write (hello \w+)", messages[-1]["content"])
        command = self.command or f"echo {found[1] if found else ''} > ~/greeting.txt"
        arguments = json.dumps({"command": command})
        call = {"id": "call_1", "type": "function", "function": {"name": "terminal", "arguments": arguments}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


async def _main() -> None:
    model = await WriterModel().start()
    sys.stdout.write(model.url + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await model.stop()


if __name__ == "__main__":
    asyncio.run(_main())
