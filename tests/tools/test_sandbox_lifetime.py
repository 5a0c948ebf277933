"""A rollout has one sandbox, which starts at the first use, is found by its id, and is released."""

from __future__ import annotations

import asyncio

import pytest

from hermes_rl.errors import UserError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig
from hermes_rl.tools import base
from hermes_rl.tools.base import Toolkit, ToolRuntime, find_runtime, runtime_for
from hermes_rl.tools.catalogue import resolve_toolsets
from tests.tools.calling import Player


async def test_started_once_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sandbox] = []

    def factory(config: SandboxConfig) -> Sandbox:
        made.append(create_sandbox(config))
        return made[-1]

    monkeypatch.setattr(base, "create_sandbox", factory)
    async with ToolRuntime() as runtime:
        assert (runtime.started, runtime.start_seconds) == (False, 0.0)
        found = await asyncio.gather(*(runtime.sandbox() for _ in range(5)))
        assert len(made) == 1
        assert all(each is made[0] for each in found)
        assert runtime.start_seconds > 0
    assert not made[0].alive
    with pytest.raises(UserError, match="released"):
        await runtime.sandbox()


async def test_nothing_is_started_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory(config: SandboxConfig) -> Sandbox:
        raise AssertionError("nobody asked for a sandbox")

    monkeypatch.setattr(base, "create_sandbox", factory)
    async with ToolRuntime() as runtime:
        await runtime.settle()


async def test_registry() -> None:
    async with ToolRuntime(task_id="mine") as runtime:
        assert find_runtime("mine") is runtime
        assert runtime_for("mine") is runtime
        with pytest.raises(UserError, match="in use"):
            ToolRuntime(task_id="mine")
    assert find_runtime("mine") is None
    made = runtime_for("another")
    assert find_runtime("another") is made
    await made.close()
    await made.close()
    assert find_runtime("another") is None


async def test_closed_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Sandbox] = []

    def factory(config: SandboxConfig) -> Sandbox:
        made.append(create_sandbox(config))
        return made[-1]

    monkeypatch.setattr(base, "create_sandbox", factory)
    runtime = ToolRuntime(SandboxConfig(setup=("sleep 0.2",)))
    starting = asyncio.create_task(runtime.sandbox())
    while not made:
        await asyncio.sleep(0)
    await runtime.close()
    with pytest.raises(UserError, match="released"):
        await starting
    assert not runtime.started


async def test_settling_ends_the_agents_processes() -> None:
    for keep in (False, True):
        toolkit = Toolkit(resolve_toolsets(["terminal"]))
        async with ToolRuntime(SandboxConfig(keep_processes=keep), toolkit=toolkit) as runtime:
            play = Player(runtime)
            session = (await play("terminal", command="sleep 60", background=True))["session_id"]
            await runtime.settle()
            status = (await play("process", action="poll", session_id=session))["status"]
            assert status == ("running" if keep else "exited")


async def test_two_rollouts_see_their_own_files() -> None:
    toolkit = Toolkit(resolve_toolsets(["terminal", "file", "todo"]))
    async with ToolRuntime(toolkit=toolkit) as one, ToolRuntime(toolkit=toolkit) as two:
        first, second = Player(one), Player(two)
        await asyncio.gather(
            first("write_file", path="~/greeting.txt", content="one"),
            second("terminal", command="echo two > ~/greeting.txt; cd /tmp; export WORD=two"),
        )
        assert (await first("read_file", path="~/greeting.txt"))["content"] == "1|one"
        assert (await second("read_file", path="~/greeting.txt"))["content"] == "1|two"
        assert (await first("terminal", command="pwd; echo [$WORD]"))["output"] == "/home/user\n[]"
        await first("todo", todos=[{"id": "1", "content": "x", "status": "pending"}])
        assert (await second("todo"))["todos"] == []
