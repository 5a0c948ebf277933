"""The spec's tools offered to a program over the Model Context Protocol: by the makers' client, and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import Rollout, StopReason, open_env
from hermes_rl.errors import SpecError
from hermes_rl.runs.store import rollout_of, rollout_record
from hermes_rl.spec.load import parse_spec
from tests.api.summing import CODE, Sampler

CLIENT = """
import json, urllib.request
from mcp import Client

def post(endpoint, messages, tools):
    body = json.dumps({"model": "m", "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(endpoint + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]

async def solve(endpoint, prompt, ctx):
    async with Client(endpoint + "/mcp") as client:
        offered = (await client.list_tools()).tools
        tools = [{"type": "function", "function": {"name": tool.name, "description": tool.description,
                  "parameters": tool.input_schema}} for tool in offered]
        messages = [{"role": "user", "content": prompt}]
        wrong = await client.call_tool("add", {"a": "x"})
        assert wrong.is_error, wrong
        while True:
            message = post(endpoint, messages, tools)
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                done = await client.call_tool(call["function"]["name"], json.loads(call["function"]["arguments"]))
                text = done.content[0].text
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return [tool.name for tool in offered]
"""
BY_HAND = """
import json, os, sys, urllib.request, urllib.error

def post(path, body):
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["BASE"] + path, data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, None

def rpc(method, **more):
    return post("/mcp", {"jsonrpc": "2.0", "id": 7, "method": method, **more})

assert rpc("initialize", params={"protocolVersion": "2024-11-05"})[1]["result"]["protocolVersion"] == "2024-11-05"
assert rpc("initialize", params={"protocolVersion": [1]})[1]["result"]["protocolVersion"] == "2025-06-18"
assert post("/mcp", {"jsonrpc": "2.0", "method": "notifications/initialized"}) == (202, None)
assert rpc("ping") == (200, {"jsonrpc": "2.0", "id": 7, "result": {}})
assert [tool["name"] for tool in rpc("tools/list")[1]["result"]["tools"]] == ["add"]
assert rpc("resources/list")[1]["error"]["code"] == -32601
for wrong in ({"name": 5}, {"name": "add", "arguments": [1]}, None, 5):
    assert rpc("tools/call", params=wrong)[1]["error"]["code"] == -32602, wrong
for wrong in (5, [], {"id": 1}, {"method": 5, "id": 1}):
    assert post("/mcp", wrong)[1]["error"]["code"] == -32600, wrong
assert rpc("tools/call", params={"name": "nothing"})[1]["result"]["isError"]
if len(sys.argv) > 2:
    large = {"name": "nothing", "arguments": {"a": "x" * 15_000_000}}
    said = [rpc("tools/call", params=large)[1] for _ in range(5)]
    assert ["result" in each for each in said] == [True] * 3 + [False] * 2, [str(each)[:200] for each in said]
    assert "no more are run" in said[-1]["error"]["message"]
    sys.exit(0)
try:
    urllib.request.urlopen(os.environ["BASE"] + "/mcp")
except urllib.error.HTTPError as error:
    assert error.code == 405
tool = {"type": "function", "function": {"name": "mcp__ours__add", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    message = post("/v1/chat/completions", {"messages": messages, "tools": [tool]})[1]["choices"][0]["message"]
    messages.append(message)
    for call in message.get("tool_calls", ()):
        given = {"name": "add", "arguments": json.loads(call["function"]["arguments"])}
        text = rpc("tools/call", params=given)[1]["result"]["content"][0]["text"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text + " is said"})
"""
TEXT = """
name: sums
dataset: {{items: [{{a: 1, b: 2}}]}}
prompt: {{user: "What is {{{{ a }}}} plus {{{{ b }}}}?"}}
tools: [{{python: "code.py:add"}}]
{sandbox}
agent:
  program: {{{program}, tools: mcp}}
  max_turns: 8
  max_tokens: 200
rewards: {{tool_usage: {{args: {{all_of: [add]}}}}}}
"""


async def played(folder: Path, program: str, sandbox: str = "") -> Rollout:
    (folder / "code.py").write_text(CODE)
    async with open_env(parse_spec(TEXT.format(program=program, sandbox=sandbox), folder=folder)) as env:
        return await env.run(env.rows()[0], Sampler().policy())


def called(rollout: Rollout) -> list[tuple[Any, ...]]:
    assert rollout.result is not None
    return [(call.turn, call.name, call.result, bool(call.error)) for call in rollout.result.tool_calls]


async def test_the_makers_client_finds_the_tools_and_rewards_see_the_calls(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(CLIENT)
    rollout = await played(tmp_path, 'python: "agent.py:solve"')
    assert rollout.result is not None
    assert rollout.result.program is not None
    assert (rollout.stop_reason, rollout.score) == (StopReason.FINISHED, 1.0), rollout.result.program
    assert rollout.result.program.output == "['add']"
    assert called(rollout) == [(1, "add", "3", False)], "and not the call that no answer of the policy has asked for"
    assert len(rollout.result.tool_errors) == 1


@pytest.mark.slow
async def test_recorded_program_calls_have_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(BY_HAND)
    program = 'command: [python3, agent.py, "{{ prompt }}", large], env: {BASE: "{{ endpoint }}"}'
    rollout = await played(tmp_path, program, "sandbox: {files: [{to: agent.py, from: agent.py}]}")
    assert rollout.result is not None and rollout.result.program is not None
    assert (rollout.result.program.exit_code, rollout.stop_reason) == (0, StopReason.PROGRAM_ABORTED), (
        rollout.result.program
    )
    assert sum(len(str(call.arguments)) for call in rollout.result.tool_calls) < 64 << 20


async def test_a_program_in_the_sandbox_speaks_it_by_hand(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(BY_HAND)
    program = 'command: [python3, agent.py, "{{ prompt }}"], env: {BASE: "{{ endpoint }}"}'
    rollout = await played(tmp_path, program, "sandbox: {files: [{to: agent.py, from: agent.py}]}")
    assert rollout.result is not None
    assert rollout.result.program is not None
    assert (rollout.result.program.exit_code, rollout.score) == (0, 1.0), (rollout.error, rollout.result.program)
    assert called(rollout)[0] == (1, "add", "3", False)  # what the tool has said, and not the program of it
    line = json.loads(json.dumps(rollout_record(rollout)))
    again = rollout_of(line, rollout.key)
    assert called(again) == called(rollout)


def test_tools_in_an_mcp_program_require_tools_mcp(tmp_path: Path) -> None:
    text = TEXT.format(program="command: [agent]", sandbox="").replace(", tools: mcp", "")
    with pytest.raises(SpecError, match="tools: mcp` offers them to it"):
        parse_spec(text, folder=tmp_path)
