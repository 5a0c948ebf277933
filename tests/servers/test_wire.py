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
