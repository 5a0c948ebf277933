"""MCP over HTTP: what the HTTP layer answers is not what the tool answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hermes_rl.errors import ToolServerFailure
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.spec.load import parse_spec
from hermes_rl.tools import mcp_server
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.mcp_server import McpSettings
from hermes_rl.tools.mcp_tools import McpSource
from hermes_rl.tools.mcp_wire import ANSWER_LIMIT
from tests.tools.calling import Player
from tests.tools.odd_http_server import OddHttp
from tests.tools.test_mcp_tools import playing, said


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "PAUSES", (0.0, 0.0, 0.0))


@asynccontextmanager
async def asked() -> AsyncIterator[tuple[OddHttp, Player]]:
    server = OddHttp()
    async with (
        server.running() as url,
        playing(McpSource(McpSettings("odd", url=url, shared=True, timeout=20))) as player,
    ):
        yield server, player


async def test_expired_session_is_reopened_and_the_call_is_retried() -> None:
    async with asked() as (server, play):
        assert [await said(play, "count") for _ in range(2)] == ["1", "2"]
        server.sessions.clear()
        together = await asyncio.gather(*(said(play, "count") for _ in range(5)))
        assert sorted(together) == ["1", "2", "3", "4", "5"], "one session for all of them"
        assert len(server.sessions) == 1
        for status, more in ((400, {"id": None}), (404, {"id": None}), (404, {"id": "server-error"}), (404, {})):
            server.statuses = [(status, {"code": -32001, "message": "No valid session ID", "more": more})]
            assert await said(play, "count") == "1", "also where the answer has the call's id"


async def test_answer_404_of_the_new_session_too_is_the_models_to_read() -> None:
    async with asked() as (server, play):
        server.statuses = [(404, {"code": -32002, "message": "row 7 is missing"})] * 2
        outcome = await play.outcome("count", "{}")
        assert "row 7 is missing" in outcome.content and outcome.error is not None
        assert await said(play, "count") == "1"


async def test_an_answer_that_repeats_a_secret_header_has_a_mask_instead() -> None:
    server, token = OddHttp(), "token-of-this-server-1"
    async with server.running() as url:
        settings = McpSettings("odd", url=url, shared=True, headers={"Authorization": f"Bearer {token}"})
        async with playing(McpSource(settings)) as play:
            assert await said(play, "echo", text=f"You sent {token}.") == "You sent ***."


@pytest.mark.parametrize("by_cookie", [False, True])
@pytest.mark.parametrize("shared", [False, True])
async def test_rollouts_have_separate_sessions_unless_shared(shared: bool, by_cookie: bool) -> None:
    server = OddHttp(by_cookie=by_cookie)
    async with server.running() as url:
        source = McpSource(McpSettings("odd", url=url, shared=shared, timeout=20))
        toolkit = Toolkit(await source.list_tools(SandboxConfig()))
        async with ToolRuntime(toolkit=toolkit) as one, ToolRuntime(toolkit=toolkit) as other:
            counts = [await said(Player(runtime), "count") for runtime in (one, other, one)]
            assert counts == (["1", "2", "3"] if shared else ["1", "1", "2"])
            if not by_cookie:  # the session of the first one ends, and is opened anew
                del server.sessions[next(each for each, count in server.sessions.items() if count > 1)]
                again = [await said(Player(runtime), "count") for runtime in (one, other)]
                assert again == ["1", "2"], "one session, or the other rollout's own"
        await source.close()
    parse_spec("prompt: {user: a}\ndataset: {items: [{}]}\ntools: [{mcp: {name: m, url: 'http://h', scope: rollout}}]")


async def test_a_session_that_ends_at_once_is_an_infrastructure_failure() -> None:
    async with asked() as (server, play):
        server.statuses = [(404, None)] * 2
        with pytest.raises(ToolServerFailure, match="HTTP status 404 in answer to a call of echo"):
            await said(play, "echo", text="a")
        assert await said(play, "echo", text="a") == "a"


async def test_a_call_that_waits_is_not_lost_with_its_session() -> None:
    async with asked() as (server, play):
        waiting = asyncio.create_task(said(play, "wait", text="at last"))
        await server.waiting.wait()
        server.sessions.clear()
        assert await said(play, "echo", text="a") == "a"
        server.go.set()
        assert await waiting == "at last"


@pytest.mark.parametrize(("status", "sent"), [(502, 4), (503, 4), (429, 4), (500, 1), (401, 1), (504, 1)])
async def test_an_answer_of_the_http_layer_is_an_infrastructure_failure(status: int, sent: int) -> None:
    async with asked() as (server, play):
        server.statuses = [(status, None)] * 10
        with pytest.raises(ToolServerFailure, match=f"MCP server odd: HTTP status {status} in answer"):
            await said(play, "echo", text="a")
        assert len(server.statuses) == 10 - sent, "only what was not executed is sent again"
        server.statuses = [(status, None)] * (sent - 1)
        assert await said(play, "echo", text="a") == "a"


@pytest.mark.parametrize("name", ["cut", "html"])
async def test_an_answer_that_is_none_is_an_infrastructure_failure(name: str) -> None:
    async with asked() as (server, play):
        with pytest.raises(ToolServerFailure, match=r"its events ended before the answer|content type 'text/html'"):
            await said(play, name)
        assert server.called == [name]


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("code", [-32000, -32001, -32602, 7])
async def test_an_error_of_the_server_is_the_models_to_read(status: int, code: int) -> None:
    async with asked() as (server, play):
        assert await said(play, "count") == "1"
        server.statuses = [(status, {"code": code, "message": "row 7 is locked"})]
        outcome = await play.outcome("count", "{}")
        assert "row 7 is locked" in outcome.content
        assert outcome.error is not None
        assert await said(play, "count") == "2", "the session goes on"


@pytest.mark.parametrize(
    ("name", "size"), [("large", ANSWER_LIMIT + 1), ("large_event", ANSWER_LIMIT + 1), ("values", 200_000)]
)
async def test_an_answer_that_is_too_large_costs_its_call_alone(name: str, size: int) -> None:
    async with asked() as (server, play):
        waiting = asyncio.create_task(said(play, "wait", text="at last"))
        await server.waiting.wait()
        outcome = await play.outcome(name, json.dumps({"size": size}))
        assert "more than 16777216 bytes or 100000 values" in outcome.content
        assert outcome.error is not None
        server.go.set()
        assert await waiting == "at last"
        assert len(server.sessions) == 1


@pytest.mark.parametrize("name", ["large", "large_event"])
async def test_an_answer_below_the_bound_is_read(name: str) -> None:
    async with asked() as (_, play):
        outcome: Any = await play.outcome(name, json.dumps({"size": 4 << 20}))
        assert outcome.error is None


async def test_a_server_that_is_gone_is_an_infrastructure_failure() -> None:
    server = OddHttp()
    async with contextlib.AsyncExitStack() as running:
        url = await running.enter_async_context(server.running())
        async with playing(McpSource(McpSettings("odd", url=url, shared=True, timeout=20))) as play:
            assert await said(play, "echo", text="a") == "a"
            await running.aclose()
            with pytest.raises(ToolServerFailure, match="MCP server odd: "):
                await said(play, "echo", text="a")
