"""An MCP server over HTTP in a process of its own, made with the SDK."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

CODE = """
import sys
from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("web")

@server.tool()
def double(n: int) -> str:
    "Twice as much."
    return str(2 * n)

@server.tool()
def knock(ctx: Context) -> str:
    "What the caller showed at the door."
    return ctx.request_context.request.headers["authorization"]

server.run("streamable-http", port=int(sys.argv[1]), host="127.0.0.1")
"""


@asynccontextmanager
async def serve(port: int) -> AsyncIterator[tuple[str, Callable[[], Awaitable[Any]]]]:
    """Its URL, and how to end it early."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", CODE, str(port))

    async def stop() -> None:
        if process.returncode is None:
            process.kill()
        await process.wait()

    try:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except ConnectionError:
                assert process.returncode is None
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", stop
    finally:
        await stop()
