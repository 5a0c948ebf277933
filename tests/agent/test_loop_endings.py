"""Every ending by its name, and what is left of the conversation then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.recorder import ROUNDS, LoopOptions
from hermes_rl.errors import RowFailure, SandboxFailure, ServerFailure
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.servers.base import ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tokens.tokenizer import small_tokenizer
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.catalogue import resolve_toolsets
from hermes_rl.tools.context import ToolContext
from tests.agent.scripted_chat import Answer, ScriptedChat, answer, call, calls, refused, says

MakeLoop = Callable[..., HermesAgentLoop]
GO = [{"role": "user", "content": "go"}]
NOOP = calls(call("noop"))
TOO_LONG = refused(400, "This model's maximum context length is 8 tokens.")


def noop() -> str:
    """Do nothing."""
    return "ok"


async def slow() -> str:
    """Take longer than there is."""
    await asyncio.sleep(30)
    return "ok"


def used(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


@pytest.mark.parametrize(
    ("last", "options", "stop_reason", "turns"),
    [
        (says("done"), {}, StopReason.FINISHED, 2),
        (says("done", None), {}, StopReason.FINISHED, 2),
        (NOOP, {"max_turns": 2}, StopReason.MAX_TURNS, 2),
        (NOOP, {"max_turns": 1}, StopReason.MAX_TURNS, 1),
        (TOO_LONG, {}, StopReason.TOKEN_BUDGET, 1),
        (says("cut o", "length"), {}, StopReason.LENGTH, 2),
        (calls(call("noop", '{"a'), finish_reason="length"), {}, StopReason.FINISHED, 3),
        (says(""), {}, StopReason.EMPTY, 2),
        (says(" \n"), {}, StopReason.EMPTY, 2),
        (says(None), {}, StopReason.EMPTY, 2),
        (says(None, reasoning="hm"), {}, StopReason.EMPTY, 2),
        (says(None, content=[]), {}, StopReason.EMPTY, 2),
        (says(None, tool_calls=[]), {}, StopReason.EMPTY, 2),
        (says("I can't", "content_filter"), {}, StopReason.REFUSED, 2),
        (says(None, refusal="I can't"), {}, StopReason.REFUSED, 2),
        (says("fine", refusal=None), {}, StopReason.FINISHED, 2),
    ],
)
async def test_last_reply_determines_the_stop_reason(
    chat: ScriptedChat, make_loop: MakeLoop, last: Answer, options: dict[str, Any], stop_reason: StopReason, turns: int
) -> None:
    chat.script = [NOOP, last]
    result = await make_loop(noop, **options).run(GO)
    assert (result.stop_reason, result.turns_used) == (stop_reason, turns)
    assert result.finished_naturally == (stop_reason is StopReason.FINISHED)
    assert len(result.replies) == len(result.reasoning_per_turn) == turns


async def test_calls_of_a_turn_that_was_cut_are_not_made(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [call("noop")]}
    chat.script = [answer(message, "length")]
    result = await make_loop(noop).run(GO)
    assert (result.stop_reason, result.tool_calls) == (StopReason.LENGTH, [])


async def test_the_working_time_ends_by_slow_tools(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("slow")), calls(call("noop"))]
    result = await make_loop(slow, noop, timeout=1).run(GO)
    assert (result.stop_reason, result.turns_used, result.tool_errors[0].error) == (StopReason.TIMEOUT, 1, "timeout")
    assert 1 <= result.timings.working < 20


async def test_the_working_time_ends_by_slow_generation(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [answer({"tool_calls": [call("noop")]}, delay=0.15)]
    result = await make_loop(noop, timeout=0.1).run(GO)
    assert (result.stop_reason, result.turns_used, len(result.tool_calls)) == (StopReason.TIMEOUT, 1, 1)


async def test_the_deadline_ends_a_rollout_whose_policy_has_answered(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("slow"))]
    result = await make_loop(slow, deadline=1.0).run(GO)
    assert (result.stop_reason, result.turns_used) == (StopReason.TIMEOUT, 1)


async def test_deadline_with_an_unanswered_server_call_is_a_server_failure(
    chat: ScriptedChat, make_loop: MakeLoop
) -> None:
    chat.script = [answer({"content": "late"}, delay=20)]
    with pytest.raises(
        ServerFailure, match=r"the policy's server had not answered when agent.deadline \(0.5 s\) was over"
    ):
        await make_loop(noop, deadline=0.5).run(GO)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [({}, 86_400), ({"timeout": 60}, 3_600), ({"timeout": 3_600}, 14_400), ({"timeout": 60, "deadline": 7}, 7)],
)
def test_the_deadline_follows_from_the_timeout(options: dict[str, Any], seconds: float) -> None:
    assert LoopOptions(**options).most_seconds == seconds


async def test_failed_attempts_count_as_queue_time_not_generation_time(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [Answer(b"busy", 503, delay=1.2), says("done")]
    result = await make_loop(noop, timeout=1).run(GO)
    assert result.stop_reason is StopReason.FINISHED
    assert result.timings.generation < 1 < result.timings.queue


# ------------------------------------------------------------------ the budget of tokens


async def test_loop_starts_no_turn_after_the_token_budget_is_spent(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("noop"), usage=used(60, 20)), calls(call("noop"), usage=used(90, 20))]
    result = await make_loop(noop, max_trajectory_tokens=100).run(GO)
    assert (result.stop_reason, result.turns_used) == (StopReason.TOKEN_BUDGET, 2)
    assert result.messages[-1]["role"] == "tool"


async def test_turn_cut_at_the_remaining_budget_stops_with_token_budget(
    chat: ScriptedChat, make_loop: MakeLoop
) -> None:
    chat.script = [calls(call("noop"), usage=used(60, 20)), says("cut o", "length")]
    result = await make_loop(noop, max_trajectory_tokens=100, max_tokens=30).run(GO)
    assert [request["max_tokens"] for request in chat.requests] == [30, 20]
    assert (result.stop_reason, result.turns_used) == (StopReason.TOKEN_BUDGET, 2)


async def test_turn_cut_at_max_tokens_stops_with_length(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("noop"), usage=used(30, 20)), says("cut o", "length")]
    result = await make_loop(noop, max_trajectory_tokens=100, max_tokens=30).run(GO)
    assert [request["max_tokens"] for request in chat.requests] == [30, 30]
    assert result.stop_reason is StopReason.LENGTH


async def test_the_budget_alone_is_not_sent_as_a_limit_of_a_turn(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    await make_loop(noop, max_trajectory_tokens=100).run(GO)
    assert "max_tokens" not in chat.requests[0]


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": "many"}, {"prompt_tokens": None}, [], "odd", 3])
async def test_a_server_that_does_not_count_uses_up_no_budget(
    chat: ScriptedChat, make_loop: MakeLoop, usage: object
) -> None:
    chat.script = [calls(call("noop"), usage=usage)]
    result = await make_loop(noop, max_trajectory_tokens=1).run(GO)
    assert (result.stop_reason, result.usage.prompt_tokens) == (StopReason.FINISHED, 0)


async def test_prompt_over_the_token_budget_is_a_row_failure(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    question = [{"role": "user", "content": "word " * 300}]
    with pytest.raises(RowFailure, match=r"prompt has about 3\d\d tokens, and agent.max_trajectory_tokens is 100"):
        await make_loop(max_trajectory_tokens=100, tokenizer=small_tokenizer()).run(question)
    assert chat.requests == []
    # Where no tokenizer is known the server's own count tells it, with the first answer.
    chat.script = [answer({"content": "done"}, usage=used(310, 2))]
    with pytest.raises(RowFailure, match=r"prompt has 310 tokens, and agent.max_trajectory_tokens is 100"):
        await make_loop(max_trajectory_tokens=100).run(question)


def long_result() -> str:
    """Answer with many tokens."""
    return "word " * 300


@pytest.mark.parametrize("counting", [True, False])
async def test_a_result_that_goes_beyond_the_bound_ends_the_conversation(
    chat: ScriptedChat, make_loop: MakeLoop, counting: bool
) -> None:
    chat.script = [calls(call("long_result"), usage=used(60, 20) if counting else None), says("done")]
    result = await make_loop(long_result, max_trajectory_tokens=300, tokenizer=small_tokenizer()).run(GO)
    assert (result.stop_reason, result.turns_used, len(chat.requests)) == (StopReason.TOKEN_BUDGET, 1, 1)


async def test_a_limit_of_a_turn_leaves_room_for_new_results(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("noop"), usage=used(200, 20)), says("done")]
    await make_loop(noop, max_trajectory_tokens=300, max_tokens=100, tokenizer=small_tokenizer()).run(GO)
    assert chat.requests[-1]["max_tokens"] == 300 - 220 - len(small_tokenizer().encode("ok"))


async def test_an_answer_beyond_the_bound_has_not_finished(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [calls(call("noop"), usage=used(60, 20)), answer({"content": "done"}, usage=used(90, 20))]
    result = await make_loop(noop, max_trajectory_tokens=100).run(GO)
    assert (result.stop_reason, result.finished_naturally) == (StopReason.TOKEN_BUDGET, False)


# ------------------------------------------------------------------ failures of ours


async def test_failure_of_the_first_call_returns_an_empty_rollout(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [refused(500, "broken"), refused(503, "busy")]
    with pytest.raises(ServerFailure) as caught:
        await make_loop(noop).run(GO)
    played = caught.value.result
    assert (played.stop_reason, played.turns_used, played.finished_naturally) == (StopReason.SERVER_FAILURE, 0, False)
    assert played.messages == GO


async def test_failure_of_a_later_call_keeps_the_earlier_turns(chat: ScriptedChat, make_loop: MakeLoop) -> None:
    chat.script = [NOOP, Answer(b"no json"), refused(401, "no key"), refused(401, "no key")]
    with pytest.raises(ServerFailure) as caught:
        await make_loop(noop).run(GO)
    played = caught.value.result
    assert (played.turns_used, len(played.tool_calls)) == (1, 1)
    assert [message["role"] for message in played.messages] == ["user", "assistant", "tool"]


async def test_sandbox_start_failure_keeps_the_earlier_turns(chat: ScriptedChat, policy: ModelClient) -> None:
    toolkit = Toolkit(resolve_toolsets(["terminal"]))
    chat.script = [calls(call("terminal", {"command": "true"}))]
    async with ToolRuntime(SandboxConfig(setup=("exit 3",)), task_id="broken", toolkit=toolkit):
        with pytest.raises(SandboxFailure) as caught:
            await HermesAgentLoop(policy, toolkit.schemas, task_id="broken").run(GO)
    assert (caught.value.stop_reason, caught.value.result.turns_used) == (StopReason.SANDBOX_FAILURE, 1)


async def test_sandbox_killed_by_the_agent_is_a_stop_reason_not_a_failure(
    chat: ScriptedChat, policy: ModelClient
) -> None:
    toolkit = Toolkit(resolve_toolsets(["terminal"]))
    chat.script = [calls(call("terminal", {"command": "sleep 30"}))]
    async with ToolRuntime(SandboxConfig(lifetime=0.5), task_id="killed", toolkit=toolkit):
        loop = HermesAgentLoop(policy, toolkit.schemas, task_id="killed", options=LoopOptions(tool_timeout=20))
        result = await loop.run(GO)
    assert (result.stop_reason, result.turns_used, result.finished_naturally) == (StopReason.SANDBOX_KILLED, 1, False)


@pytest.mark.parametrize("refuses_all", [False, True])
async def test_refused_prompt_is_a_row_failure_if_another_prompt_is_accepted(
    chat: ScriptedChat, make_loop: MakeLoop, refuses_all: bool
) -> None:
    last = refused(401, "no key") if refuses_all else says("x")
    chat.script = [refused(400, "Conversation roles must alternate"), last]
    with pytest.raises(ServerFailure if refuses_all else RowFailure, match="roles must alternate") as caught:
        await make_loop(noop).run([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    assert caught.value.stop_reason is (StopReason.SERVER_FAILURE if refuses_all else StopReason.ROW_FAILURE)
    assert chat.requests[-1]["messages"] == [{"role": "user", "content": "Hello."}]
    assert chat.requests[-1]["tools"] == chat.requests[0]["tools"]


@pytest.mark.parametrize("refuses_all", [False, True])
async def test_refused_history_stops_the_rollout_if_the_prompt_is_accepted(
    chat: ScriptedChat, make_loop: MakeLoop, refuses_all: bool
) -> None:
    last = refused(401, "the key is no longer valid") if refuses_all else says("x")
    chat.script = [NOOP, refused(400, "this text breaks our rules"), last]
    if refuses_all:
        with pytest.raises(ServerFailure, match="breaks our rules"):
            await make_loop(noop).run(GO)
    else:
        result = await make_loop(noop).run(GO)
        assert (result.stop_reason, result.turns_used) == (StopReason.REFUSED, 1)
    assert chat.requests[-1]["messages"] == GO


@pytest.mark.parametrize(
    ("others", "stop_reason"),
    [
        (
            [says("x"), refused(500, "broken"), refused(500, "broken")] * ROUNDS,
            StopReason.REFUSED,
        ),  # over what the policy said alone
        ([says("x"), *[refused(500, "broken")] * 2, says("x"), says("fine")], StopReason.FINISHED),  # now and then
        ([says("x"), says("fine")], StopReason.FINISHED),  # it was down for a while
        ([refused(500, "broken"), refused(500, "broken")], None),  # over everything
        ([refused(401, "no key")], None),
    ],
)
async def test_server_error_caused_by_a_policy_message_stops_the_rollout(
    chat: ScriptedChat, make_loop: MakeLoop, others: list[Answer], stop_reason: StopReason | None
) -> None:
    """Servers answer calls whose arguments they cannot read with status 500: no policy may choose a failure by that."""
    chat.script = [NOOP, refused(500, "broken"), refused(500, "broken"), *others]
    if stop_reason is None:
        with pytest.raises(ServerFailure, match="broken"):
            await make_loop(noop).run(GO)
    else:
        result = await make_loop(noop).run(GO)
        assert result.stop_reason is stop_reason
    assert chat.script == []


@pytest.mark.parametrize("waits", [False, True])
async def test_sandbox_lifetime_blames_the_agent_for_generation_not_for_queues(chat: ScriptedChat, waits: bool) -> None:
    toolkit = Toolkit(resolve_toolsets(["terminal"]))
    look = calls(call("terminal", {"command": "true"}))
    chat.script = [look, refused(503, "later"), look] if waits else [look, replace(look, delay=0.5)]
    pauses = RetryPolicy(base=1, random=lambda: 0.5)
    async with (
        create_client("policy", [ServerConfig("openai", chat.url, "m")], pauses) as policy,
        ToolRuntime(SandboxConfig(lifetime=0.3), task_id="slow", toolkit=toolkit) as runtime,
    ):
        loop = HermesAgentLoop(policy, toolkit.schemas, task_id="slow")
        if waits:
            with pytest.raises(SandboxFailure, match="lifetime"):
                await loop.run(GO)
        else:
            assert (await loop.run(GO)).stop_reason is StopReason.SANDBOX_KILLED
        assert runtime.killed_by_agent is not waits


async def test_a_lifetime_that_ends_with_the_last_answer_is_seen_by_rewards(
    chat: ScriptedChat, policy: ModelClient
) -> None:
    toolkit = Toolkit(resolve_toolsets(["terminal"]))
    chat.script = [calls(call("terminal", {"command": "true"})), says("done", delay=2.0)]
    async with ToolRuntime(SandboxConfig(lifetime=1.5), task_id="last", toolkit=toolkit):
        result = await HermesAgentLoop(policy, toolkit.schemas, task_id="last").run(GO)
        assert result.stop_reason is StopReason.FINISHED
        answer = await asyncio.to_thread(ToolContext("last").terminal, "true")
        assert "the agent's own commands ended its sandbox" in answer["output"]


async def test_sandbox_start_does_not_count_as_tool_time(chat: ScriptedChat, policy: ModelClient) -> None:
    toolkit = Toolkit(resolve_toolsets(["terminal"]))
    chat.script = [calls(call("terminal", {"command": "true"}))]
    async with ToolRuntime(SandboxConfig(setup=("sleep 0.5",)), task_id="late", toolkit=toolkit) as runtime:
        result = await HermesAgentLoop(policy, toolkit.schemas, task_id="late").run(GO)
        assert runtime.start_seconds > 0.5
    assert result.tool_errors == []
    assert result.timings.tools < runtime.start_seconds
    assert sum(call.seconds for call in result.tool_calls) < runtime.start_seconds
