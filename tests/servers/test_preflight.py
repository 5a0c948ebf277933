"""What a run asks of its servers before it begins: whether anything listens, and which release of an engine it is."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hermes_rl.errors import RunError
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.exactness import engines, require_reachable

DEAD = "http://user:sk-secret@127.0.0.1:1/v1"


async def listening() -> tuple[asyncio.Server, str, list[bytes]]:
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", heard


async def test_a_server_that_listens_is_enough_and_hears_nothing() -> None:
    server, url, heard = await listening()
    await require_reachable("policy", [ServerConfig("openai", DEAD), ServerConfig("openai", url)])
    server.close()
    await server.wait_closed()
    assert heard in ([], [b""])


async def test_servers_that_are_not_there_are_named_without_credentials() -> None:
    with pytest.raises(RunError, match=r"127\.0\.0\.1:1") as raised:
        await require_reachable("policy", [ServerConfig("openai", DEAD)])
    assert "sk-secret" not in str(raised.value)


async def test_a_scripted_server_needs_no_address() -> None:
    await require_reachable("policy", [ServerConfig("scripted")])


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
