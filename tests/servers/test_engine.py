"""The record of a run says which release of an engine answered, where the engine tells it."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.engine import engines


async def told(path: str, answer: Any) -> list[str | None]:
    async def say(_: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_get(path, say)
    async with TestServer(app) as server:
        return await engines([ServerConfig("scripted"), ServerConfig("vllm", f"{server.make_url('/v1')}")])


@pytest.mark.parametrize(
    ("path", "answer", "version"),
    [
        ("/version", {"version": "0.11.0"}, "0.11.0"),
        ("/get_server_info", {"tp_size": 1, "version": "0.5.3"}, "0.5.3"),
        ("/version", {"version": None}, None),
        ("/version", ["0.11.0"], None),
        ("/elsewhere", {}, None),
    ],
)
async def test_what_it_tells(path: str, answer: Any, version: str | None) -> None:
    assert await told(path, answer) == [None, version]


async def test_one_that_is_not_there_tells_nothing() -> None:
    assert await engines([ServerConfig("openai", "http://127.0.0.1:1/v1")]) == [None]
