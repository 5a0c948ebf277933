"""The conversation: what is asked, what is kept, what reaches the server."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.result import ToolCall
from hermes_rl.servers.base import ReasoningOptions, drawn_seed
from hermes_rl.servers.client import ModelClient
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools import base
from hermes_rl.tools.context import ToolContext
from tests.agent.scripted_chat import ScriptedChat, answer, call, calls, says

MakeLoop = Callable[..., HermesAgentLoop]
GO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def test_a_conversation_from_the_prompt_to_the_answer(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    counted = {"prompt_tokens": 10, "completion_tokens": 3}
    chat.script = [calls(call("add", {"a": 2, "b": 3}), usage=counted), answer({"content": "5"}, usage=counted)]
    result = await make_loop(add).run(GO)
    assert [message["role"] for message in result.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert result.messages[3] == {"role": "tool", "tool_call_id": "id-add", "content": "5"}
    assert (result.stop_reason, result.finished_naturally, result.turns_used) == (StopReason.FINISHED, True, 2)
    assert (result.final_response, result.tool_errors, result.prompt_length) == ("5", [], 2)
    assert result.tool_calls == [
        ToolCall(1, "id-add", "add", {"a": 2, "b": 3}, "5", seconds=result.tool_calls[0].seconds)
    ]
    assert result.usage.record() == {"prompt_tokens": 20, "completion_tokens": 6, "calls": 2, "unpriced": 2}
    assert result.timings.generation > 0
    assert [reply.finish_reason for reply in result.replies] == ["tool_calls", "stop"]
    assert result.tool_schemas[0]["function"]["name"] == "add"


async def test_the_server_sees_the_whole_history_and_the_tools(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("add", {"a": 2, "b": 3}))]
    result = await make_loop(add).run(GO)
    assert [len(request["messages"]) for request in chat.requests] == [2, 4]
    assert chat.sent == result.messages[:-1]
    assert chat.requests[0]["tools"] == result.tool_schemas


async def test_without_tools_none_are_offered(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    await make_loop().run(GO)
    assert "tools" not in chat.requests[0]


async def test_the_messages_of_the_caller_are_left_alone(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("add", "broken")), calls(call("add", {"a": 1, "b": 1}))]
    prompt = copy.deepcopy(GO)
    result = await make_loop(add).run(prompt)
    result.messages[0]["content"] = "changed"
    assert prompt == GO


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning_details": [{"type": "reasoning.text", "text": "h"}, {"summary": "m"}]}, "hm"),
        ({"reasoning_content": "", "reasoning": "hm"}, "hm"),
        ({"reasoning_details": [{"type": "reasoning.encrypted", "data": "xx"}]}, None),
        ({"reasoning": {"odd": 1}, "reasoning_details": "odd"}, None),
        ({"reasoning_details": [{"text": 3}, 4, None]}, None),
        ({}, None),
    ],
)
async def test_reasoning_is_read_from_each_field_and_sent_back_to_the_server(
    chat: ScriptedChat, make_loop: MakeLoop, fields: dict[str, Any], reasoning: str | None
) -> None:
    chat.script = [calls(call("add", {"a": 2, "b": 3}), **fields)]
    result = await make_loop(add).run(GO)
    assert result.reasoning_per_turn == [reasoning, None]
    for kept in (result.messages[2], chat.sent[2]):
        assert {key: kept[key] for key in fields} == fields


async def test_sampling_thinking_extra_body_and_seed_reach_the_server(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    loop = make_loop(
        temperature=0.25,
        top_p=0.5,
        seed=7,
        max_tokens=99,
        reasoning=ReasoningOptions("high"),
        extra_body={"provider": {"order": ["a"]}},
        logprobs=True,
    )
    await loop.run(GO)
    body = chat.requests[0]
    assert {key: body[key] for key in ("temperature", "top_p", "seed", "max_tokens", "logprobs")} == {
        "temperature": 0.25,
        "top_p": 0.5,
        "seed": drawn_seed(7, "turn", 0),
        "max_tokens": 99,
        "logprobs": True,
    }
    assert body["reasoning"] == {"enabled": True, "effort": "high"}
    assert body["provider"] == {"order": ["a"]}


async def test_what_is_not_set_is_not_sent(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    await make_loop(temperature=None).run(GO)
    assert set(chat.requests[0]) == {"model", "messages"}


async def test_arguments_of_the_reference_design_win_over_the_options(chat: ScriptedChat, policy: ModelClient) -> None:
    loop = HermesAgentLoop(
        policy,
        [],
        set(),
        max_turns=3,
        task_id="mine",
        temperature=0.0,
        max_tokens=5,
        extra_body={"x": 1},
    )
    await loop.run(GO)
    await asyncio.to_thread(ToolContext("mine").cleanup)
    body = chat.requests[0]
    assert (body["temperature"], body["max_tokens"], body["x"], loop.options.max_turns) == (0.0, 5, 1, 3)


async def test_plain_lists_of_schemas_stand_for_the_built_in_tools(chat: ScriptedChat, policy: ModelClient) -> None:
    chat.script = [calls(call("todo", {}), call("read_file", {"path": "x"}))]
    schemas = [{"type": "function", "function": {"name": name}} for name in ("todo", "read_file")]
    result = await HermesAgentLoop(policy, schemas, {"todo"}).run(GO)
    assert [error.tool_name for error in result.tool_errors] == ["read_file"]
    assert [tool["function"]["name"] for tool in chat.requests[0]["tools"]] == ["todo"]


async def test_loop_without_a_task_id_removes_its_runtime(chat: ScriptedChat, policy: ModelClient) -> None:
    before = base.own_runtimes()
    chat.script = [calls(call("todo", {}))]
    schemas = [{"type": "function", "function": {"name": "todo"}}]
    await HermesAgentLoop(policy, schemas).run(GO)
    assert base.own_runtimes() == before


async def test_a_task_id_keeps_its_machine_until_it_is_cleaned_up(chat: ScriptedChat, policy: ModelClient) -> None:
    await HermesAgentLoop(policy, [], task_id="kept").run(GO)
    assert base.find_runtime("kept") is not None
    await asyncio.to_thread(ToolContext("kept").cleanup)
    assert base.find_runtime("kept") is None


async def test_one_loop_runs_several_conversations_concurrently(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("add", {"a": n, "b": n})) for n in range(4)]
    results = await asyncio.gather(*(make_loop(add).run(GO) for _ in range(4)))
    assert sorted(result.tool_calls[0].result for result in results) == ["0", "2", "4", "6"]
    assert all(result.turns_used == 2 for result in results)


async def test_reply_that_marks_itself_as_a_programs_is_the_policys(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [says("five", context=True)]
    result = await make_loop().run(GO)
    assert (result.final_response, "context" in result.messages[-1]) == ("five", False)


async def test_content_in_parts_is_text(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [
        says(None, content=[{"type": "text", "text": "fi"}, {"type": "text", "text": "ve"}, {"image": 1}, 3])
    ]
    result = await make_loop().run(GO)
    assert (result.stop_reason, result.final_response) == (StopReason.FINISHED, "five")
