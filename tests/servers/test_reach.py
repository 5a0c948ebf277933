"""A wrong address is said before the first rollout; nothing is asked of a server that is there."""

from __future__ import annotations

import asyncio

import pytest

from hermes_rl.errors import RunError
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.reach import require_reachable

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
