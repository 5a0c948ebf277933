"""What a run asks of its servers before it begins: whether anything listens, and which release of an engine it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from hermes_rl.errors import RunError, UserError
from hermes_rl.runs.setup import RunOptions, open_run
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.exactness import engines, require_address, require_reachable
from hermes_rl.servers.transport import HttpAnswer, Transport, proxy_of, unversioned
from hermes_rl.spec.load import parse_spec

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


async def test_base_url_without_v1_is_refused_if_v1_responds(tmp_path: Path) -> None:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": []})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with TestServer(app) as server:
        root, url = str(server.make_url("/")).rstrip("/"), str(server.make_url("/v1"))
        await require_reachable("policy", [ServerConfig("openai", url)])
        with pytest.raises(UserError) as refused:
            await require_reachable("policy", [ServerConfig("openai", root)])
        with pytest.raises(UserError, match=f"servers.judge.base_url: .* write base_url: {url}$"):
            await require_reachable("judge", [ServerConfig("openai", f"{root}/")])
        await require_reachable("policy", [ServerConfig("vllm", root)])  # which is asked from the root on
        text = (
            "dataset: {items: [{q: a}]}\nprompt: {user: a}\nrewards: {r: {fn: llm_judge, args: {rubric: a}}}\n"
            f"servers: {{policy: {{type: scripted}}, judge: {{type: openai, base_url: '{root}', model: m}}}}\n"
        )
        with pytest.raises(UserError, match=f"servers.judge.base_url: .* write base_url: {url}$"):
            async with open_run(parse_spec(text), RunOptions("process", out=tmp_path)):
                pass
    await require_address("judge", [ServerConfig("openai", root)])  # it may have a fallback
    assert str(refused.value) == (
        f"servers.policy.base_url: {root} has no list of models (status 404), and {url} has one: write base_url: {url}"
    )


def test_status_404_without_v1_in_base_url_gets_a_hint() -> None:
    server = Transport(ServerConfig("openai", "http://user:secret@localhost:1"))
    failed = server.refused("chat/completions", HttpAnswer(404, {}, b"Not Found", 0.0, 0.0))
    assert str(failed) == (
        "http://localhost:1/chat/completions: status 404: Not Found; base_url has no /v1, where most servers answer: "
        "try http://localhost:1/v1"
    )
    assert unversioned("https://openrouter.ai/api/v1") == unversioned("https://a.example/v1beta/openai") == ""


@pytest.mark.parametrize(
    ("excluded", "proxy"),
    [
        ("10.0.0.0/8,.example.org", None),
        ("192.168.0.0/16, 10.1.2.3/32", None),
        ("10.2.0.0/16", "http://proxy:3128"),
        ("nonsense/8,", "http://proxy:3128"),
        ("fd00::/8", "http://proxy:3128"),
    ],
)
def test_range_of_addresses_in_no_proxy_is_asked_directly(
    monkeypatch: pytest.MonkeyPatch, excluded: str, proxy: str | None
) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", excluded)
    assert proxy_of("http://10.1.2.3:8000/v1") == proxy
    assert proxy_of("http://model.internal:8000/v1") == "http://proxy:3128"
    assert (proxy_of("http://[fd12::1]:8000/v1") is None) == ("fd00" in excluded)


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
