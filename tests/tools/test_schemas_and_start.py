"""The tool schemas that a model reads, and to whose time the start of a sandbox counts."""

from __future__ import annotations

from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.catalogue import find_tool, toolkit_of
from hermes_rl.tools.execute import execute_calls

CALL = {"id": "1", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "echo hi"}'}}


async def test_a_slow_start_is_not_the_policys_tool_error() -> None:
    toolkit = Toolkit([find_tool("terminal")])
    async with ToolRuntime(SandboxConfig(setup=("sleep 0.6",)), toolkit=toolkit) as runtime:
        (outcome,) = await execute_calls([CALL], toolkit, runtime, turn=1, tool_timeout=0.5)
    assert outcome.error is None
    assert "hi" in outcome.content


async def test_a_tool_that_needs_no_sandbox_starts_none() -> None:
    toolkit = Toolkit([find_tool("todo"), find_tool("process")])
    calls = [
        {"id": "1", "function": {"name": "todo", "arguments": "{}"}},
        {"id": "2", "function": {"name": "process", "arguments": '{"action": "list"}'}},
    ]
    async with ToolRuntime(toolkit=toolkit) as runtime:
        await execute_calls(calls, toolkit, runtime, turn=1)
        assert not runtime.started


def test_the_callers_own_schema_text_reaches_the_model() -> None:
    mine = {**find_tool("terminal").schema["function"], "description": "Mine."}
    toolkit = toolkit_of([{"type": "function", "function": mine}])
    assert toolkit.schemas[0]["function"]["description"] == "Mine."
    assert toolkit.get("terminal") is find_tool("terminal")


def test_schemas_that_carry_their_toolkit_give_it_back() -> None:
    toolkit = Toolkit([find_tool("terminal"), find_tool("todo")])
    assert toolkit_of(toolkit.schemas) is toolkit
    assert toolkit_of(toolkit.schemas, {"todo"}).names == {"todo"}
