"""Servers that are not ours: OpenAI objects, simple stubs, and what they raise."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import AgentResult
from hermes_rl.errors import JudgeFailure, RowFailure, ServerFailure
from hermes_rl.servers.base import ContextLengthExceeded, ReasoningOptions, drawn_seed
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.base import Toolkit
from hermes_rl.tools.python_tools import python_tool
from tests.agent.scripted_chat import ScriptedChat, call, calls

GO = [{"role": "user", "content": "go"}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLKIT = Toolkit([python_tool(add)])


class Stub:
    """Gives out what it was given, one a call; remembers the arguments. An exception is raised."""

    def __init__(self, *completions: Any) -> None:
        self.completions = list(completions)
        self.asked: list[dict[str, Any]] = []

    async def chat_completion(self, **kwargs: Any) -> Any:
        self.asked.append(copy.deepcopy(kwargs))
        following = self.completions.pop(0)
        if isinstance(following, BaseException):
            raise following
        return following


async def play(server: Any, **options: Any) -> AgentResult:
    return await HermesAgentLoop(server, TOOLKIT.schemas, options=LoopOptions(**options)).run(GO)


def openai_object(message: dict[str, Any], reason: str = "stop") -> ChatCompletion:
    """As the openai client gives it, fields of other servers included."""
    choice = {"index": 0, "message": {"role": "assistant", "content": None, **message}, "finish_reason": reason}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "gpt", "choices": [choice], "usage": usage}
    return ChatCompletion.model_validate(body)


async def test_objects_of_the_openai_client() -> None:
    server = Stub(
        openai_object({"tool_calls": [call("add", {"a": 2, "b": 3})], "reasoning_content": "hm"}, "tool_calls"),
        openai_object({"content": "5"}),
    )
    result = await play(server)
    assert (result.stop_reason, result.final_response, result.tool_calls[0].result) == (StopReason.FINISHED, "5", "5")
    assert (result.reasoning_per_turn, result.usage.prompt_tokens) == (["hm", None], 8)
    assert (result.replies[0].model, result.replies[0].server_type) == ("gpt", "Stub")
    assert server.asked[1]["messages"][1]["reasoning_content"] == "hm"
    assert server.asked[1]["messages"][2]["content"] == "5"


async def test_stubs_of_simple_namespaces() -> None:
    function = SimpleNamespace(name="add", arguments='{"a": 2, "b": 3}')
    message = SimpleNamespace(content=None, tool_calls=[SimpleNamespace(id="1", type="function", function=function)])
    last = SimpleNamespace(content="5", tool_calls=None)
    server = Stub(*(SimpleNamespace(choices=[SimpleNamespace(message=each)]) for each in (message, last)))
    result = await play(server)
    assert (result.stop_reason, result.final_response, result.tool_calls[0].result) == (StopReason.FINISHED, "5", "5")
    assert (result.usage.calls, result.usage.uncounted, result.usage.cost) == (2, 2, None)


async def test_plain_dicts() -> None:
    server = Stub({"choices": [{"message": {"content": "5"}, "finish_reason": "length"}]})
    assert (await play(server)).stop_reason is StopReason.LENGTH


async def test_what_is_set_reaches_it_as_an_openai_client_takes_it() -> None:
    server = Stub(openai_object({"content": "5"}))
    sampling: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7, "seed": 3, "logprobs": True}
    await play(server, **sampling, reasoning=ReasoningOptions("low"), extra_body={"x": 1})
    thinking = {"enabled": True, "effort": "low"}
    sent = {**sampling, "seed": drawn_seed(3, "turn", 0)}
    common = {"messages": GO, "n": 1, "tools": list(TOOLKIT.schemas)}
    assert server.asked == [{**common, **sent, "extra_body": {"x": 1, "reasoning": thinking}}]


async def test_unset_sampling_options_are_omitted_from_the_request() -> None:
    server = Stub(openai_object({"content": "5"}))
    await HermesAgentLoop(server, [], options=LoopOptions(temperature=None)).run(GO)
    assert server.asked == [{"messages": GO, "n": 1}]


@pytest.mark.parametrize(
    "broken",
    [
        ValueError("odd"),
        TimeoutError(),
        None,
        "text",
        {},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"message": None}]},
        SimpleNamespace(),
        SimpleNamespace(choices=None),
    ],
)
async def test_server_error_or_malformed_response_is_a_server_failure(broken: Any) -> None:
    with pytest.raises(ServerFailure) as caught:
        await play(Stub(broken))
    assert (caught.value.result.turns_used, caught.value.__cause__ is not None) == (0, True)


async def test_failure_raised_by_the_server_is_passed_through() -> None:
    failure = JudgeFailure("no verdict")
    with pytest.raises(JudgeFailure) as caught:
        await play(Stub(failure))
    assert caught.value is failure


class TooLong(Exception):
    """As the openai client raises it."""

    status_code = 400


@pytest.mark.parametrize("error", [ContextLengthExceeded("too long"), TooLong("too many tokens")])
async def test_context_overflow_in_a_later_turn_stops_with_token_budget(error: Exception) -> None:
    first = openai_object({"tool_calls": [call("add", {"a": 2, "b": 3})]}, "tool_calls")
    result = await play(Stub(first, error))
    assert (result.stop_reason, result.turns_used) == (StopReason.TOKEN_BUDGET, 1)


async def test_a_first_request_that_does_not_fit_is_not_the_policys_doing() -> None:
    with pytest.raises(RowFailure, match=r"does not fit .*agent\.max_tokens"):
        await play(Stub(ContextLengthExceeded("too long")))


async def test_wrapped_openai_client_works_as_a_server(chat: ScriptedChat) -> None:
    class Client:
        def __init__(self) -> None:
            self.client = AsyncOpenAI(base_url=chat.url, api_key="x", max_retries=0)

        async def chat_completion(self, **kwargs: Any) -> Any:
            return await self.client.chat.completions.create(model="m", **kwargs)

    chat.script = [calls(call("add", {"a": 2, "b": 3}), reasoning="hm")]
    server = Client()
    result = await play(server, seed=3, reasoning=ReasoningOptions(max_tokens=2000))
    await server.client.close()
    assert (result.stop_reason, result.turns_used, result.reasoning_per_turn) == (StopReason.FINISHED, 2, ["hm", None])
    assert chat.requests[1]["reasoning"] == {"enabled": True, "max_tokens": 2000}
    assert chat.sent[1]["reasoning"] == "hm"


@pytest.mark.parametrize("server", [object(), SimpleNamespace(chat="no function"), SimpleNamespace(chat_completion=3)])
def test_object_without_a_chat_method_is_refused_as_a_server(server: Any) -> None:
    with pytest.raises(TypeError, match="neither chat"):
        HermesAgentLoop(server, [])
