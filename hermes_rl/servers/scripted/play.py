"""A scripted answer in the form of the chat-completions API.

Owns the JSON of the answer: real token counts, the cut at `max_tokens`, log-probabilities of 0.0 (a
script leaves no choice). Leaves HTTP to `server` and the turns to `script`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.servers.scripted.script import Script
from hermes_rl.tokens.chat import turn_ids
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer


def completion(script: Script, body: Mapping[str, Any], model: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """The answer to a request's body."""
    message = script.next_message(body["messages"])
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(message), "logprobs": None}
    answer = {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
    }
    try:
        prompt, ids = turn_ids(tokenizer, body["messages"], body.get("tools"), message)
    except TemplateRefused:
        # Images, for example: what cannot be counted is not counted.
        return answer
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if isinstance(limit, int) and limit < len(ids):
        ids = ids[:limit]
        choice["message"] = _cut(tokenizer, ids)
        choice["finish_reason"] = "length"
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [_logprob(tokenizer, token) for token in ids]}
    return answer | {"usage": _usage(len(prompt), len(ids))}


def _finish_reason(message: Mapping[str, Any]) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def _cut(tokenizer: Tokenizer, ids: list[int]) -> dict[str, Any]:
    """A cut turn is text: a call that is not complete is no call."""
    return {"role": "assistant", "content": tokenizer.decode(ids).rstrip("\ufffd")}


def _logprob(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    return {"token": tokenizer.decode([token]), "logprob": 0.0, "bytes": None, "top_logprobs": []}


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
