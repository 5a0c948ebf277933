"""A search service with SearXNG's JSON interface (GET /search?q=…&format=json), on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from tests.http_servers import listening


class Searches:
    """Queries that came, and whether the service is in order."""

    def __init__(self) -> None:
        self.queries: list[str] = []
        self.url = ""
        self.broken = False
        self.delay = 0.0
        self.most = 0
        self._now = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.queries.append(request.query["q"])
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(self.delay)
        self._now -= 1
        if self.broken:
            return web.Response(status=500)
        number = len(self.queries)
        results = [{"title": f"number {number}", "url": "http://e.example/", "content": request.query["q"], "score": 1}]
        return web.json_response({"query": request.query["q"], "results": results})


@asynccontextmanager
async def searxng() -> AsyncIterator[Searches]:
    searches = Searches()
    app = web.Application()
    app.router.add_get("/search", searches.answer)
    async with listening(app, handler_cancellation=True) as searches.url:
        yield searches
