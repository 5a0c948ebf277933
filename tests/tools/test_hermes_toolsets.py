"""hermes-agent's own toolsets: its real code, in processes of its own, against services on loopback."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hermes_rl.errors import UserError, install_command
from hermes_rl.sandbox.helper_system import descendants
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.catalogue import DISTRIBUTIONS
from hermes_rl.tools.hermes_toolsets import NAMES, REFUSED, HermesSession, HermesToolsets
from tests.tools.calling import Player
from tests.tools.searxng import Searches, searxng
from tests.waiting import until

pytestmark = pytest.mark.slow

SYMBOLS = """
import inspect, json, sys
import model_tools, toolset_distributions, toolsets
from tools.registry import ToolEntry, registry
from tools.browser_tool import cleanup_all_browsers
print(json.dumps({
    "get_tool_definitions": list(inspect.signature(model_tools.get_tool_definitions).parameters),
    "handle_function_call": list(inspect.signature(model_tools.handle_function_call).parameters)[:3],
    "resolve_toolset": list(inspect.signature(toolsets.resolve_toolset).parameters)[:1],
    "get_entry": list(inspect.signature(registry.get_entry).parameters),
    "requires_env": "requires_env" in ToolEntry.__slots__,
    "cleanup": list(inspect.signature(cleanup_all_browsers).parameters),
    "toolsets": [name for name in json.loads(sys.argv[1]) if not toolsets.validate_toolset(name)],
    "distributions": {
        name: {toolset: chance / 100 for toolset, chance in entry["toolsets"].items()}
        for name, entry in toolset_distributions.DISTRIBUTIONS.items()
    },
}))
"""


def test_every_symbol_that_we_touch_is_as_we_expect(tmp_path: Path) -> None:
    env = {**os.environ, "HERMES_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-c", SYMBOLS, json.dumps(NAMES)]
    ended = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    assert {"enabled_toolsets", "quiet_mode", "skip_tool_search_assembly"} <= set(found["get_tool_definitions"])
    assert found["handle_function_call"] == ["function_name", "function_args", "task_id"]
    assert (found["resolve_toolset"], found["get_entry"], found["cleanup"]) == (["name"], ["name"], [])
    assert found["requires_env"]
    assert found["toolsets"] == [], "toolsets that are not hermes-agent's"
    assert found["distributions"] == DISTRIBUTIONS


@asynccontextmanager
async def playing(toolset: str, **environ: str) -> AsyncIterator[Player]:
    hermes = HermesToolsets({"PATH": os.environ["PATH"], **environ})
    try:
        async with ToolRuntime(toolkit=Toolkit(await asyncio.to_thread(hermes.tools, toolset))) as runtime:
            yield Player(runtime)
    finally:
        await hermes.close()


@pytest.fixture
async def searches() -> AsyncIterator[Searches]:
    async with searxng() as service:
        yield service


async def found(play: Player, query: str) -> Any:
    return (await play("web_search", query=query, limit=3))["data"]["web"][0]


async def test_a_search_reaches_the_service_and_its_answer_the_model(searches: Searches) -> None:
    async with playing("search", SEARXNG_URL=searches.url) as play:
        assert list(play.runtime.toolkit.names) == ["web_search"]
        assert (await found(play, "why"))["description"] == "why"
        assert searches.queries == ["why"]
        assert not play.runtime.started, "no sandbox was needed"


async def test_calls_of_a_turn_run_concurrently_and_a_hanging_service_times_out(searches: Searches) -> None:
    searches.delay = 0.5
    async with playing("search", SEARXNG_URL=searches.url) as play:
        calls = [
            {"id": str(n), "function": {"name": "web_search", "arguments": json.dumps({"query": str(n)})}}
            for n in range(4)
        ]
        outcomes = await play.outcomes(*calls)
        assert [outcome.error for outcome in outcomes] == [None] * 4
        assert searches.most >= 2
        searches.delay = 30
        hanging = await play.outcome("web_search", '{"query": "slow"}', timeout=1)
        assert hanging.error is not None


async def test_what_the_tool_calls_an_error_is_one(searches: Searches) -> None:
    searches.broken = True
    async with playing("search", SEARXNG_URL=searches.url) as play:
        outcome = await play.outcome("web_search", '{"query": "x"}')
        assert outcome.error is not None


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The directory of all temporary ones, with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory() as folder, monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


async def test_rollouts_share_nothing_and_leave_nothing(place: Path) -> None:
    hermes = HermesToolsets({"PATH": os.environ["PATH"]})
    toolkit = Toolkit(await asyncio.to_thread(hermes.tools, "skills"))
    skill = "---\nname: secret\ndescription: mine\n---\n# Secret\nxyzzy\n"
    async with ToolRuntime(toolkit=toolkit) as one, ToolRuntime(toolkit=toolkit) as other:
        make = json.dumps({"action": "create", "name": "secret", "content": skill})
        made = await Player(one).outcome("skill_manage", make)
        assert made.error is None, made
        assert "secret" in json.dumps(await Player(one)("skills_list"))
        assert "secret" not in json.dumps(await Player(other)("skills_list"))
        assert len(list(place.glob("*/rollout-*"))) == 2
    await until(lambda: not list(place.glob("*/rollout-*")))
    await hermes.close()
    assert not list(place.iterdir())


async def test_process_that_ends_during_a_call_is_reported_and_replaced(searches: Searches) -> None:
    searches.delay = 30
    async with playing("search", SEARXNG_URL=searches.url) as play:
        call = asyncio.create_task(play.outcome("web_search", '{"query": "x"}'))
        await until(lambda: searches.queries)
        (process,) = filter(serves_a_rollout, descendants(os.getpid()))
        os.kill(process, signal.SIGKILL)
        assert "ended during the call; the next one finds another" in (await call).content
        searches.delay = 0
        assert "ended during" not in (await play.outcome("web_search", '{"query": "x"}')).content


def serves_a_rollout(pid: int) -> bool:
    return os.getsid(pid) == pid and b"hermes_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


async def test_what_is_missing_is_named() -> None:
    hermes = HermesToolsets({"PATH": os.environ["PATH"]})
    for name in REFUSED:
        with pytest.raises(UserError, match=f"toolset {name} cannot be used in a rollout: it "):
            hermes.tools(name)
    assert "XAI_API_KEY" in (await asyncio.to_thread(hermes.problem, "x_search") or "")
    assert "SEARXNG_URL" in (await asyncio.to_thread(hermes.problem, "web") or "")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert HermesToolsets({}).problem("web") == f"toolset web needs the extra `hermes`: {install_command('hermes')}"


def test_hermes_agent_modules_are_not_imported_by_the_runner() -> None:
    assert "model_tools" not in sys.modules
    assert inspect.getmodule(HermesToolsets) is sys.modules["hermes_rl.tools.hermes_toolsets"]


async def test_a_process_that_ended_between_two_calls_is_not_waited_for() -> None:
    async def answers_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said = json.loads(await reader.readline())
        writer.write(json.dumps({"id": said["id"], "answer": "found"}).encode() + b"\n")
        writer.close()

    server = await asyncio.start_server(answers_once, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]

    class Connected:
        async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            return await asyncio.open_connection(host, port)

    session, before = HermesSession(Connected()), asyncio.all_tasks()  # type: ignore[arg-type]
    assert await session.call("web_search", {"query": "a"}) == "found"
    await asyncio.gather(*asyncio.all_tasks() - before)  # the session has noticed the end of the connection
    async with asyncio.timeout(10):
        assert await session.call("web_search", {"query": "b"}) == "found"
    await session.close()
    server.close()


async def test_call_cancelled_as_its_result_arrives_affects_no_other_call() -> None:
    reader, sent = asyncio.StreamReader(), list[bytes]()

    class Connected:
        async def connect(self) -> tuple[asyncio.StreamReader, Any]:
            return reader, SimpleNamespace(write=sent.append)

    session = HermesSession(Connected())  # type: ignore[arg-type]
    first, second = (asyncio.create_task(session.call("web_search", {"query": query})) for query in "ab")
    while len(sent) < 2:
        await asyncio.sleep(0)
    reader.feed_data(b'{"id": 0, "answer": "found"}\n')
    first.cancel()
    await asyncio.wait([first])
    reader.feed_data(b'{"id": 1, "answer": "found"}\n')
    async with asyncio.timeout(10):
        assert await second == "found"
