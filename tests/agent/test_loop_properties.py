"""Whatever a model or its server writes, the loop ends with a result, or with a failure of the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import AgentResult
from hermes_rl.errors import RowFailure, ServerFailure
from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    Malformed,
    ServerConfig,
    Timing,
    chat_body,
    encode,
    read_reply,
)
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.transport import AttemptFailed, RetryPolicy
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.base import Toolkit
from hermes_rl.tools.python_tools import python_tool
from tests.thorough import examples

TURNS = 4

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FINE = st.fixed_dictionaries({"word": st.text(max_size=8)}).map(json.dumps)
ARGUMENTS = FINE | JSON | JSON.map(json.dumps) | st.fixed_dictionaries({"word": JSON}).map(json.dumps)
NAMES = st.sampled_from(["echo", "echo", "nothing", ""]) | JSON
FUNCTIONS = st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS}) | JSON
CALLS = st.fixed_dictionaries({"function": FUNCTIONS}, optional={"id": JSON, "type": JSON}) | JSON
PARTS = st.lists(JSON | st.fixed_dictionaries({}, optional={"type": JSON, "text": JSON}), max_size=3)
ASIDES = {
    "role": JSON,
    "content": JSON | PARTS,
    "reasoning": JSON,
    "reasoning_content": JSON,
    "reasoning_details": PARTS | JSON,
    "function_call": JSON,
}
CALLING = st.fixed_dictionaries({"tool_calls": st.lists(CALLS, min_size=1, max_size=3)}, optional=ASIDES)
TALKING = st.fixed_dictionaries({}, optional={**ASIDES, "tool_calls": JSON, "refusal": JSON})
USAGES = JSON | st.fixed_dictionaries({}, optional={"prompt_tokens": JSON, "completion_tokens": JSON})
REASONS = st.sampled_from(["stop", "tool_calls", "length", "content_filter"]) | JSON
CHOICES = st.fixed_dictionaries({"message": CALLING}) | st.fixed_dictionaries(
    {"message": CALLING | TALKING}, optional={"finish_reason": REASONS, "logprobs": JSON}
)
WELL_FORMED = st.fixed_dictionaries({"choices": st.tuples(CHOICES)}, optional={"usage": USAGES, "model": JSON})
COUNTED = st.fixed_dictionaries({}, optional={"prompt_tokens": st.integers(0, 99), "completion_tokens": JSON})
BY_THE_MODEL = st.fixed_dictionaries({"choices": st.tuples(CHOICES)}, optional={"usage": COUNTED})
"""Answers in which the server itself, which counts the tokens of the prompt, says nothing odd."""


class Writer:
    """A server that answers with what it was given, read as an answer over HTTP is read."""

    config = ServerConfig("openai", "http://127.0.0.1/v1", "m")

    def __init__(self, bodies: list[Any]) -> None:
        self._bodies = list(bodies)

    async def attempt(self, request: ChatRequest) -> ChatReply:
        check_request(json.loads(encode(chat_body(request, self.config))))
        body = self._bodies.pop(0) if self._bodies else {"choices": [{"message": {"content": "done"}}]}
        try:
            return read_reply(json.dumps(body).encode(), self.config, Timing())
        except Malformed as error:
            raise AttemptFailed(str(error)) from error

    async def close(self) -> None:
        """Nothing is open."""


def check_request(body: dict[str, Any]) -> None:
    """The history as servers that parse it want it."""
    unanswered: list[str] = []
    for message in body["messages"][1:]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == unanswered.pop(0)
            assert isinstance(message["content"], str)
            continue
        assert message["role"] == "assistant"
        assert unanswered == []
        assert message["content"] is None or isinstance(message["content"], str | list)
        for call in message["tool_calls"]:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
            assert isinstance(call["function"]["name"], str)
            unanswered.append(call["id"])
        assert len(unanswered) == len(set(unanswered)) > 0
    assert unanswered == []


def echo(word: str) -> str:
    """Say it again."""
    return word


TOOLKIT = Toolkit([python_tool(echo)])


async def play(bodies: list[Any]) -> AgentResult:
    role = ModelClient("policy", [Writer(bodies)], RetryPolicy(attempts=1))
    options = LoopOptions(max_turns=TURNS, max_tokens=100, max_trajectory_tokens=1000)
    return await HermesAgentLoop(role, TOOLKIT.schemas, options=options).run([{"role": "user", "content": "go"}])


@settings(deadline=None, max_examples=examples(200))
@given(st.lists(BY_THE_MODEL, min_size=1, max_size=TURNS))
def test_whatever_the_model_writes_the_loop_does_not_raise(bodies: list[Any]) -> None:
    result = asyncio.run(play(bodies))
    assert result.stop_reason.graded
    assert result.turns_used == len(result.replies) == len(result.reasoning_per_turn) <= TURNS
    assert result.finished_naturally == (result.stop_reason is StopReason.FINISHED)
    assert isinstance(result.final_response, str)
    assert len(result.tool_errors) == sum(call.error is not None for call in result.tool_calls)
    assert all(error.turn <= result.turns_used for error in result.tool_errors)
    json.dumps(result.messages)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(JSON | WELL_FORMED, max_size=TURNS))
@example([{"choices": [{"message": {}}], "usage": {"prompt_tokens": 1000}}])
def test_whatever_the_server_sends_is_a_result_or_a_failure_of_the_server(bodies: list[Any]) -> None:
    try:
        result = asyncio.run(play(bodies))
    except (ServerFailure, RowFailure) as failure:  # by the server's count, the first request may not fit
        result = failure.result
        assert result.stop_reason in (StopReason.SERVER_FAILURE, StopReason.ROW_FAILURE)
    assert result.turns_used == len(result.replies) <= TURNS
