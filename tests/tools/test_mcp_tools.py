"""Tools of MCP servers: in the sandbox, on the host and over HTTP; and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import RunError, ToolServerFailure, UserError
from hermes_rl.sandbox.base import SandboxConfig, SandboxFile
from hermes_rl.tools import mcp_client, mcp_tools
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.mcp_server import McpServer, McpSettings
from hermes_rl.tools.mcp_tools import McpSource
from tests.tools.calling import Player
from tests.tools.http_mcp_server import serve
from tests.waiting import turns, until

SERVER = Path(__file__).with_name("bad_mcp_server.py").read_bytes()
CONFIG = SandboxConfig(timeout=60)


def settings(**changes: Any) -> McpSettings:
    on_host = changes.get("on_host", False)
    python = sys.executable if on_host else "python3"
    values = {"command": (python, "server.py"), "files": (SandboxFile("server.py", SERVER),), "timeout": 60.0}
    return McpSettings("bad", **{**values, **changes})


@asynccontextmanager
async def playing(source: McpSource, taken: Sequence[str] = ()) -> AsyncIterator[Player]:
    tools = await source.list_tools(CONFIG, taken)
    try:
        async with ToolRuntime(CONFIG, toolkit=Toolkit(tools), run=True) as runtime:
            yield Player(runtime)
    finally:
        await source.close()


async def said(play: Player, name: str, **arguments: Any) -> str:
    return (await play.outcome(name, json.dumps(arguments))).content


PLACES = {
    "sandbox": {},
    "host": {"on_host": True},
    "host, shared": {"on_host": True, "shared": True},
}


@pytest.fixture(params=list(PLACES))
async def play(request: pytest.FixtureRequest) -> AsyncIterator[Player]:
    async with playing(McpSource(settings(**PLACES[request.param]))) as player:
        yield player


async def test_calls_and_schemas(play: Player) -> None:
    schemas = {schema["function"]["name"]: schema["function"] for schema in play.runtime.toolkit.schemas}
    assert schemas["add"]["description"] == "Does add."
    assert schemas["add"]["parameters"]["required"] == ["a", "b"]
    assert await said(play, "add", a=2, b=3) == "5"
    assert "must be integers" in await said(play, "add", a=2, b="three"), "the server checks"
    assert "must be integers" in await said(play, "add", a=2)
    assert [await said(play, "count") for _ in range(3)] == ["1", "2", "3"]
    assert await said(play, "image") == "[image: image/png]"


async def test_a_tool_that_says_no_is_an_error_of_the_call(play: Player) -> None:
    outcome = await play.outcome("refuse", "{}")
    assert outcome.error is not None
    assert json.loads(outcome.content) == {"error": "not today"}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("crash", "the next call restarts it"),
        ("flood", "the next call restarts it"),
        ("huge", "the next call restarts it"),
        ("lie", "not what it promised: 'n' must be integer, not string"),
        ("endless", "not what it promised: checking it did not return within 0.2 s"),
    ],
)
async def test_a_server_that_misbehaves_harms_only_its_own_call(
    play: Player, name: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "CHECK_SECONDS", 0.2)
    monkeypatch.setattr(mcp_client, "LINE_LIMIT", 1 << 20)
    monkeypatch.setattr(mcp_client, "FLOOD_LIMIT", 4 << 20)
    before = await said(play, "pid")
    outcome = await play.outcome(name, "{}")
    assert outcome.error is not None
    assert told in outcome.content
    assert await said(play, "add", a=1, b=1) == "2"
    assert (await said(play, "pid") == before) == (name in ("lie", "endless"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", [-32000, -32001, -32603, 7])
async def test_an_error_of_the_server_is_the_models_to_read_whatever_its_number(play: Player, code: int) -> None:
    assert await said(play, "count") == "1"
    outcome = await play.outcome("lock", json.dumps({"a": code}))
    assert "row 7 is locked" in outcome.content
    assert outcome.error is not None
    assert await said(play, "count") == "2", "the server has kept its state"


async def test_endless_schema_pattern_does_not_block_the_event_loop(
    play: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "CHECK_SECONDS", 0.3)
    call = asyncio.create_task(play.outcome("endless", "{}"))
    free = 0
    while not call.done():
        await asyncio.sleep(0.01)
        free += 1
    assert free >= 10


@pytest.mark.parametrize("place", ["sandbox", "host"])
async def test_mcp_server_restarts_after_hang(place: str) -> None:
    async with playing(McpSource(settings(**PLACES[place], timeout=3.0))) as play:
        assert "no answer within 3 s" in (await play.outcome("hang", "{}")).content
        assert await said(play, "add", a=1, b=1) == "2"


async def test_output_that_is_not_a_message_is_skipped(play: Player) -> None:
    assert await said(play, "junk") == "after junk"


async def test_runner_variables_do_not_reach_the_mcp_server(play: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret")
    await said(play, "crash")
    assert "secret" not in await said(play, "environment")


async def test_one_server_per_rollout_or_one_for_all() -> None:
    for shared in (False, True):
        source = McpSource(settings(on_host=True, shared=shared))
        tools = await source.list_tools(CONFIG)
        async with (
            ToolRuntime(CONFIG, toolkit=Toolkit(tools)) as one,
            ToolRuntime(CONFIG, toolkit=Toolkit(tools)) as other,
        ):
            pids = {await said(Player(runtime), "pid") for runtime in (one, other)}
            assert len(pids) == (1 if shared else 2)
            assert not one.started
        await source.close()
        for pid in map(int, pids):
            assert not Path(f"/proc/{pid}").exists()


async def test_server_starts_before_agent_can_break_its_start() -> None:
    async with playing(McpSource(settings())) as play:
        await (await play.runtime.sandbox_for_agent()).run("rm -rf ~/.mcp; echo > ~/.mcp")
        assert await said(play, "count") == "1"


@pytest.mark.parametrize(
    "broken",
    [
        "rm -rf ~/.mcp; echo > ~/.mcp",
        "rm -rf ~/.mcp; ln -s /nowhere ~/.mcp",
        "rm ~/.mcp/bad/server.py; mkdir ~/.mcp/bad/server.py",
        "touch ~/.mcp/bad/fewer",
        "echo 'raise SystemExit(3)' > ~/.mcp/bad/json.py",
    ],
)
async def test_failed_start_is_not_agents_doing_before_it_has_acted(broken: str) -> None:
    async with playing(McpSource(settings())) as play:
        sandbox = await play.runtime.sandbox_for_agent()
        await play.runtime.held["bad"].close()
        await sandbox.run(broken)
        with pytest.raises(ToolServerFailure, match="cannot be started"):
            await said(play, "count")


SLOW = ("sh", "-c", "test -e ~/slow && sleep 1000; exec python3 server.py")


async def test_start_that_takes_too_long_is_never_agents_doing() -> None:
    async with playing(McpSource(settings(command=SLOW))) as play:
        assert await said(play, "count") == "1"
        server = play.runtime.held["bad"]
        assert isinstance(server, McpServer)
        server.settings = replace(server.settings, start_timeout=0.2)
        await (await play.runtime.sandbox_for_agent()).run("touch ~/slow; pkill -9 -f server.py")
        with pytest.raises(ToolServerFailure, match=r"did not start within start_timeout, 0\.2 s"):
            for _ in range(2):
                await said(play, "count")


async def test_few_servers_start_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "STARTS_AT_ONCE", 2)
    waits = f"touch {tmp_path}/$$; until test -e {tmp_path}/go; do sleep 0.05; done; exec {sys.executable} server.py"
    source = McpSource(settings(on_host=True, command=("sh", "-c", waits)))
    (tmp_path / "go").touch()
    tools = await source.list_tools(CONFIG)
    for file in tmp_path.iterdir():
        file.unlink()
    async with AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(ToolRuntime(CONFIG, toolkit=Toolkit(tools))) for _ in range(4)]
        calls = [asyncio.create_task(said(Player(runtime), "count")) for runtime in runtimes]
        await until(lambda: len(list(tmp_path.iterdir())) == 2)
        await turns()
        assert len(list(tmp_path.iterdir())) == 2
        (tmp_path / "go").touch()
        assert await asyncio.gather(*calls) == ["1"] * 4


async def test_server_in_sandbox_outlives_agents_processes() -> None:
    command = ("sh", "-c", "setsid sleep 1001 & exec python3 server.py")
    state = "for pid in $(pgrep -f '[s]leep 100|[s]erver.py'); do ps -o stat= -p $pid; done | cut -c1 | sort | uniq -c"

    async def states() -> list[list[str]]:
        return [line.split() for line in (await sandbox.run(state)).output.splitlines()]

    async with playing(McpSource(settings(command=command))) as play:
        sandbox = await play.runtime.sandbox_for_agent()
        assert await said(play, "count") == "1"
        await sandbox.run("setsid sleep 1002 & sleep 1003 &")
        for expected in ("2", "3"):
            await play.runtime.settle()
            assert await states() == [["2", "T"]], (
                "the agent's processes are gone, the server and its child stand still"
            )
            assert await said(play, "count") == expected
            assert await states() == [["2", "S"]]


async def test_the_agent_shares_the_machine_with_a_server_in_the_sandbox() -> None:
    async with playing(McpSource(settings())) as play:
        sandbox = await play.runtime.sandbox()
        assert await said(play, "count") == "1"
        await sandbox.run("pkill -9 -f server.py")
        assert "the next call restarts it" in await said(play, "count")
        assert await said(play, "count") == "1"
        # Its own files come back with it; what it needs beyond them is the agent's to break.
        await sandbox.run("rm -rf ~/.mcp; pkill -9 -f server.py")
        assert "the next call restarts it" in await said(play, "count")
        assert await said(play, "count") == "1"
        await sandbox.run("pkill -9 -f server.py; sleep 0.1")
        await sandbox.run("touch ~/.mcp/bad/fewer")
        await said(play, "count")
        assert "cannot be started here any more" in await said(play, "count")


async def test_host_server_that_cannot_restart_is_an_infrastructure_failure(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_bytes(SERVER)
    source = McpSource(settings(on_host=True, files=(), folder=tmp_path))
    async with playing(source) as play:
        pid = int(await said(play, "pid"))
        (tmp_path / "server.py").write_text("raise SystemExit('out of order')")
        os.kill(pid, signal.SIGKILL)
        await said(play, "count")
        with pytest.raises(ToolServerFailure, match=r"(?s)MCP server bad cannot be started.*out of order"):
            await said(play, "count")


async def test_a_server_that_lists_other_tools_later_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_bytes(SERVER)
    source = McpSource(settings(on_host=True, files=(), folder=tmp_path))
    async with playing(source) as play:
        (tmp_path / "fewer").touch()
        with pytest.raises(ToolServerFailure, match="other tools than at the start of the run"):
            await said(play, "count")


async def test_names() -> None:
    async with playing(McpSource(settings(allow=("add", "count"), prefix="my.")), ["my_add"]) as play:
        assert play.runtime.toolkit.names == {"bad_my_add", "my_count"}
        assert await said(play, "bad_my_add", a=1, b=2) == "3"
    with pytest.raises(UserError, match="has no tool 'ad'; did you mean `add`"):
        await McpSource(settings(allow=("ad",))).list_tools(CONFIG)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("no-such-program",), "No such file"),
        ((sys.executable, "-c", "raise SystemExit('broken set-up')"), "broken set-up"),
    ],
)
async def test_a_server_that_never_starts_stops_the_run(on_host: bool, command: tuple[str, ...], told: str) -> None:
    if not on_host:
        command = ("python3", *command[1:]) if len(command) > 1 else command
    source = McpSource(settings(command=command, on_host=on_host))
    with pytest.raises(RunError, match=told):
        await source.list_tools(CONFIG)


async def test_over_http(unused_tcp_port: int) -> None:
    async with serve(unused_tcp_port) as (url, stop):
        source = McpSource(
            McpSettings("web", url=url, shared=True, headers={"Authorization": "Bearer sesame"}, timeout=5)
        )
        async with playing(source) as play:
            assert await said(play, "double", n=21) == "42"
            assert await said(play, "knock") == "Bearer sesame"
            together = await play.outcomes(
                *({"id": str(n), "function": {"name": "double", "arguments": f'{{"n": {n}}}'}} for n in range(20))
            )
            assert [outcome.content for outcome in together] == [str(2 * n) for n in range(20)]
            await stop()
            with pytest.raises(ToolServerFailure):
                for _ in range(3):
                    assert (await play.outcome("double", '{"n": 1}')).error is not None


async def test_cancelling_a_rollout_leaves_no_process() -> None:
    source = McpSource(settings(on_host=True))
    tools = await source.list_tools(CONFIG)
    pids: list[int] = []

    async def rollout() -> None:
        async with ToolRuntime(CONFIG, toolkit=Toolkit(tools)) as runtime:
            pids.append(int(await said(Player(runtime), "pid")))
            await said(Player(runtime), "hang")

    task = asyncio.create_task(rollout())
    await until(lambda: pids)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert not Path(f"/proc/{pids[0]}").exists()
