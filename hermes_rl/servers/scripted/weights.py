"""Weights that a scripted server does not have, for those who have to do with a server whose weights change.

``POST /update_weights {"version": N}``, ``POST /pause?mode=keep`` (requests wait) or ``?mode=abort`` (they come back
half done), ``POST /resume``, ``GET /is_paused``, ``GET /get_weight_version``.
"""

from __future__ import annotations

import asyncio

from aiohttp import web


class ScriptedWeights:
    """A version, and whether generation is stopped."""

    def __init__(self) -> None:
        self.version = 0
        self._mode: str | None = None
        self._going = asyncio.Event()

    def add_routes(self, app: web.Application) -> None:
        """The routes by which a trainer would steer a server."""
        self._going = asyncio.Event()
        self._going.set()
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/update_weights", self._update)
        app.router.add_get("/is_paused", self._paused)
        app.router.add_get("/get_weight_version", self._version)

    async def gate(self) -> bool:
        """Wait until generation goes on; True where the request is to come back half done."""
        if self._mode == "abort":
            return True
        await self._going.wait()
        return False

    async def _pause(self, request: web.Request) -> web.Response:
        self._mode = request.query.get("mode", "abort")
        self._going.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self._mode = None
        self._going.set()
        return web.json_response({"status": "resumed"})

    async def _update(self, request: web.Request) -> web.Response:
        self.version = int((await request.json()).get("version", self.version + 1))
        return web.json_response({"version": self.version})

    async def _paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self._mode is not None})

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": str(self.version)})
