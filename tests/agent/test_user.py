"""A simulated user: what it hears, what it may do, when it has had enough, and what is its failure."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import AgentResult
from hermes_rl.agent.user import GREETING, SimulatedUser
from hermes_rl.errors import ServerFailure
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.python_tools import python_tool
from tests.agent.scripted_chat import Answer, ScriptedChat, answer, call, calls, refused, says, scripted_chat

SYSTEM = {"role": "system", "content": "Be kind."}


def look(what: str) -> str:
    """Look at something.

    Args:
        what: at what.
    """
    return f"seen: {what}"


customer = pytest.fixture(scripted_chat)
"""The server that plays the user."""


async def converse(
    policy: ModelClient,
    customer: ScriptedChat,
    answers: list[Answer],
    *,
    tools: bool = False,
    prompt: str | None = None,
    options: LoopOptions | None = None,
    **how: Any,
) -> AgentResult:
    customer.script = answers
    toolkit = Toolkit([python_tool(look)] if tools else [])
    messages = [SYSTEM] if prompt is None else [SYSTEM, {"role": "user", "content": prompt}]
    async with create_client("user", [ServerConfig("openai", customer.url, "u")]) as role, ToolRuntime() as runtime:
        user = SimulatedUser(role, "You want a refund.", runtime, toolkit=toolkit, **how)
        loop = HermesAgentLoop(policy, [], task_id=runtime.task_id, user=user, options=options)
        return await loop.run(messages)


def spoken(result: AgentResult) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in result.messages[1:]]


async def test_it_opens_answers_and_ends(chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat) -> None:
    chat.script = [says("What is it?"), says("Done.")]
    answers = [says("Hello"), says("<think>hm</think>A refund."), says("Thanks. ###STOP###")]
    result = await converse(policy, customer, answers, speaks_first=True, stop=["###STOP###"])
    assert spoken(result) == [
        ("user", "Hello"),
        ("assistant", "What is it?"),
        ("user", "A refund."),
        ("assistant", "Done."),
        ("user", "Thanks. ###STOP###"),
    ]
    assert (result.stop_reason, result.turns_used, result.final_response) == (StopReason.USER_STOP, 2, "Done.")
    assert [(m["role"], m["content"]) for m in customer.sent] == [
        ("system", "You want a refund."),
        ("user", GREETING),
        ("assistant", "Hello"),
        ("user", "What is it?"),
        ("assistant", "A refund."),
        ("user", "Done."),
    ]


async def test_a_prompt_of_a_user_is_its_own_words(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat
) -> None:
    chat.script = [says("Yes?")]
    await converse(policy, customer, [says("bye")], prompt="Help!", stop=["bye"])
    assert [m["content"] for m in customer.sent[1:]] == [GREETING, "Help!", "Yes?"]


async def test_it_speaks_so_often_at_most(chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat) -> None:
    chat.script = [says("and?")] * 9
    result = await converse(policy, customer, [says("more")] * 9, speaks_first=True, max_turns=3)
    assert (result.stop_reason, result.finished_naturally) == ("user_turns", False)  # fault 32: it was called a stop
    assert [role for role, _ in spoken(result)] == ["user", "assistant", "user", "assistant", "user"]


async def test_a_stop_phrase_in_its_last_turn_is_a_stop(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat
) -> None:
    chat.script = [says("and?")]
    result = await converse(policy, customer, [says("bye")], prompt="Help!", max_turns=1, stop=["bye"])
    assert (result.stop_reason, result.finished_naturally) == (StopReason.USER_STOP, True)


@pytest.mark.parametrize(
    "message",
    [
        {"content": "bye", "tool_calls": [None]},
        {"content": None, "tool_calls": [5, "x", [], {}, {"function": 5}, {"function": {"name": None}}]},
        {"content": None, "tool_calls": [{"id": {"a": 1}, "function": {"name": ["a"], "arguments": [1]}}]},
        {"content": ["hello", None, 5, {"text": {"a": 1}}], "tool_calls": {"a": 1}},
        {"content": {"a": 1}, "tool_calls": "look"},
        {"content": 5, "refusal": {"a": 1}, "reasoning": [1], "role": ["user"]},
        {},
    ],
)
async def test_a_message_of_its_server_out_of_shape_ends_nothing(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat, message: dict[str, Any]
) -> None:
    chat.script = [says("What is it?")] * 9
    answers = [answer(message), says("A refund. bye")]
    result = await converse(policy, customer, answers, tools=True, prompt="Help!", stop=["bye"])
    assert (result.stop_reason, spoken(result)[-1]) == (StopReason.USER_STOP, ("user", "A refund. bye"))
    for sent in customer.sent:
        assert isinstance(sent["content"], str | list | None)
        for each in sent.get("tool_calls") or ():
            assert (isinstance(each["id"], str), each["function"]["arguments"]) == (True, "{}")


async def test_its_calls_are_its_own(chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat) -> None:
    chat.script = [says("Is the light on?")]
    answers = [says("Hi"), calls(call("look", {"what": "light"})), calls(call("nope")), says("It is. bye")]
    result = await converse(policy, customer, answers, tools=True, speaks_first=True, stop=["bye"])
    assert spoken(result)[-1] == ("user", "It is. bye")
    told = [message["content"] for message in customer.sent if message["role"] == "tool"]
    assert told[0] == "seen: light"
    assert "there is no tool named 'nope'" in told[1]
    assert result.tool_calls == [] and result.tool_errors == [], "nothing of it is the policy's"


@pytest.mark.parametrize(
    "answers",
    [
        [says("")] * 3,
        [says("<think>only thoughts</think>")] * 3,
        [says("cut", "length")],
        [calls(call("look", {"what": "x"}))] * 10,
    ],
)
async def test_failure_of_the_simulated_user_is_not_graded(
    policy: ModelClient, customer: ScriptedChat, answers: list[Answer]
) -> None:
    with pytest.raises(ServerFailure, match="the simulated user") as failure:
        await converse(policy, customer, answers, speaks_first=True, tools=True)
    assert not failure.value.stop_reason.graded


async def test_user_that_stops_in_its_first_message_is_a_server_failure(
    policy: ModelClient, customer: ScriptedChat
) -> None:
    with pytest.raises(ServerFailure, match="before it started"):
        await converse(policy, customer, [says("bye")], speaks_first=True, stop=["bye"])


async def test_empty_policy_reply_to_the_user_stops_with_empty(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat
) -> None:
    chat.script = [says("")]
    result = await converse(policy, customer, [says("Hi")], speaks_first=True)
    assert result.stop_reason is StopReason.EMPTY


@pytest.mark.parametrize("seed", [7, None])
async def test_user_and_policy_calls_have_distinct_seeds_if_the_rollout_has_one(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat, seed: int | None
) -> None:
    chat.script = [says("What is it?"), says("Done.")]
    answers = [says("Hello"), calls(call("look", {"what": "bag"})), says("A bag."), says("Thanks.")]
    options = LoopOptions(seed=seed)
    await converse(policy, customer, answers, tools=True, speaks_first=True, max_turns=3, options=options)
    asked = [*customer.requests, *chat.requests]
    if seed is None:
        assert (len(asked), any("seed" in body for body in asked)) == (6, False)
    else:
        assert len({body["seed"] for body in asked}) == len(asked) == 6


async def test_full_user_context_before_the_first_turn_is_a_server_failure(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat
) -> None:
    chat.script = [says("What is it?")]
    with pytest.raises(ServerFailure, match="does not fit the context of the simulated user"):
        await converse(policy, customer, [says("Hello"), *[FULL] * 2], speaks_first=True)


FULL = refused(400, "context_length_exceeded")


async def test_what_the_agent_says_is_cut_until_it_fits_the_users_context(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat
) -> None:
    chat.script = [says("long " * 2_000)]
    result = await converse(policy, customer, [says("Hello"), FULL, FULL, says("bye")], speaks_first=True, stop=["bye"])
    assert (result.stop_reason, result.final_response) == (StopReason.USER_STOP, "long " * 2_000)
    heard = customer.sent[-1]["content"]
    assert "[... 7500 characters omitted ...]" in heard
    assert len(heard) < 2_600


@pytest.mark.parametrize(
    ("answers", "stop_reason"),
    [
        ([FULL] * 5 + [says("Who are you?")], StopReason.TOKEN_BUDGET),
        ([says("")] * 3 + [says("Who are you?")], StopReason.USER_STOP),
        ([says("cut", "length"), says("Who are you?")], StopReason.USER_STOP),
        ([calls(call("look", {"what": "x"}))] * 10 + [says("Who are you?")], StopReason.USER_STOP),
        ([refused(400, "against our rules"), says("Who are you?"), refused(400, "against")], StopReason.USER_STOP),
    ],
)
async def test_policy_message_that_breaks_the_user_stops_the_rollout(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat, answers: list[Answer], stop_reason: StopReason
) -> None:
    chat.script = [says("Say nothing more. " * 500)]
    result = await converse(policy, customer, [says("Hello"), *answers], speaks_first=True, tools=True)
    assert (result.stop_reason, result.turns_used) == (stop_reason, 1)


async def test_simulated_user_resumes_after_a_short_server_outage(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat
) -> None:
    chat.script = [says("What is it?")]
    answers = [says("Hello"), refused(400, "not now"), says("Who?"), says("A refund. bye")]
    result = await converse(policy, customer, answers, speaks_first=True, stop=["bye"])
    assert spoken(result)[-1] == ("user", "A refund. bye")


@pytest.mark.parametrize("silent", [[says("")] * 4, [refused(400, "the key is refused")] * 2])
async def test_user_that_never_replies_is_a_server_failure(
    chat: ScriptedChat, policy: ModelClient, customer: ScriptedChat, silent: list[Answer]
) -> None:
    chat.script = [says("What is it?")]
    with pytest.raises(ServerFailure):
        await converse(policy, customer, [says("Hello"), *silent], speaks_first=True)
