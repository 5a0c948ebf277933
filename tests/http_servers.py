"""HTTP servers on loopback for tests: how they are started, and how a handler of http.server answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from aiohttp import web


@asynccontextmanager
async def listening(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """Yield the address of an application while it runs; `options` are those of its runner."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def serving(server: ThreadingHTTPServer | type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Yield the address of a server, or of one with this handler, while a thread serves it."""
    with (
        server if isinstance(server, ThreadingHTTPServer) else ThreadingHTTPServer(("127.0.0.1", 0), server) as running
    ):
        thread = Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


class Handler(BaseHTTPRequestHandler):
    """Handler that prints nothing."""

    def body(self) -> bytes:
        """Return the body of the request."""
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, content: Any, status: int = 200) -> None:
        """Send bytes, or a value as JSON."""
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...
