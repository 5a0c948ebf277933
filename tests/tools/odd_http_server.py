"""An MCP server over HTTP without the SDK, whose HTTP layer does what a test asks for."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.http_servers import listening

PROPERTIES = {"text": {"type": "string"}, "size": {"type": "integer"}, "code": {"type": "integer"}}
TOOLS = ("echo", "count", "fail", "large", "large_event", "values", "wait", "cut", "html")


class OddHttp:
    """`statuses` are answered to the next calls instead of what the tool says, each with its body."""

    def __init__(self, *, by_cookie: bool = False) -> None:
        self.by_cookie = by_cookie
        """Whether it knows a session by a cookie instead of the header."""
        self.sessions: dict[str, int] = {}
        self.statuses: list[tuple[int, dict[str, Any] | None]] = []
        self.called: list[str] = []
        self.waiting, self.go = asyncio.Event(), asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """The URL while it runs."""
        app = web.Application()
        app.router.add_post("/mcp", self._post)
        async with listening(app) as address:
            yield f"{address}/mcp"

    async def _post(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        method, parameters = message.get("method"), message.get("params") or {}
        if "id" not in message:
            return web.Response(status=202)
        answer = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "initialize":
            session = uuid.uuid4().hex
            self.sessions[session] = 0
            information = {"capabilities": {"tools": {}}, "serverInfo": {"name": "odd", "version": "1"}}
            result = {"protocolVersion": parameters["protocolVersion"], **information}
            headers = {"Set-Cookie": f"session={session}"} if self.by_cookie else {"Mcp-Session-Id": session}
            return web.json_response({**answer, "result": result}, headers=headers)
        if method == "server/discover":
            return web.json_response({**answer, "error": {"code": -32601, "message": "no such method"}})
        session = request.cookies.get("session", "") if self.by_cookie else request.headers.get("Mcp-Session-Id", "")
        if session not in self.sessions:
            return web.json_response(
                {"jsonrpc": "2.0", "id": None, "error": {"code": -32001, "message": "Session not found"}}, status=404
            )
        if method == "tools/list":
            schema = {"type": "object", "properties": PROPERTIES}
            return web.json_response(
                {**answer, "result": {"tools": [{"name": name, "inputSchema": schema} for name in TOOLS]}}
            )
        if self.statuses:
            status, error = self.statuses.pop(0)
            body = "bad gateway" if error is None else json.dumps({**answer, "error": error, **error.get("more", {})})
            kind = "text/html" if error is None else "application/json"
            return web.Response(status=status, text=body, content_type=kind)
        return await self._tool(request, parameters["name"], parameters.get("arguments") or {}, session, answer)

    async def _tool(
        self, request: web.Request, name: str, arguments: dict[str, Any], session: str, answer: dict[str, Any]
    ) -> web.StreamResponse:
        self.called.append(name)
        text = arguments.get("text", "")
        if name == "fail":
            return web.json_response({**answer, "error": {"code": arguments["code"], "message": "row 7 is locked"}})
        if name == "count":
            self.sessions[session] += 1
            text = str(self.sessions[session])
        if name == "wait":
            self.waiting.set()
            await self.go.wait()
        if name in ("large", "large_event"):
            text = "x" * arguments["size"]
        result: dict[str, Any] = {"content": [{"type": "text", "text": text}]}
        if name == "values":
            result["structuredContent"] = {"numbers": list(range(arguments["size"]))}
        if name == "html":
            return web.Response(text="<html>log in</html>", content_type="text/html")
        if name in ("large_event", "cut"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            if name == "large_event":
                event = json.dumps({**answer, "result": result})
                await stream.write(f"event: message\ndata: {event}\n\n".encode())
            return stream
        return web.json_response({**answer, "result": result})
