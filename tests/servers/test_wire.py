"""Reading replies: an answer that the server broke off is no answer."""

from __future__ import annotations

import json

import pytest

from hermes_rl.servers.base import Malformed, ServerConfig, Timing, read_reply


def answer(reason: object) -> bytes:
    choice = {"message": {"role": "assistant", "content": "half an answ"}, "finish_reason": reason}
    return json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize("reason", ["error", "abort", "cancelled"])
def test_an_answer_that_the_server_broke_off_is_not_taken(reason: str) -> None:
    with pytest.raises(Malformed, match=f"broke its answer off .{reason}"):
        read_reply(answer(reason), ServerConfig("openai"), Timing())


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "end_turn", None])
def test_an_answer_that_the_model_ended_is(reason: str | None) -> None:
    assert read_reply(answer(reason), ServerConfig("openai"), Timing()).finish_reason == reason


@pytest.mark.parametrize(
    "message",
    [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "t", "arguments": "{}"}}],
        },
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []},
        {"role": "assistant", "content": "a", "reasoning": "hm", "function_call": None, "provider_specific_fields": {}},
        {"role": "assistant"},
    ],
)
@pytest.mark.parametrize("more", [{}, {"usage": None, "model": None}])
def test_missing_or_extra_response_fields_are_accepted(message: dict[str, object], more: dict[str, object]) -> None:
    raw = json.dumps({"choices": [{"message": message}], **more}).encode()
    reply = read_reply(raw, ServerConfig("openai", model="m"), Timing())
    assert (reply.message, reply.usage, reply.model, reply.finish_reason) == (message, {}, "m", None)
