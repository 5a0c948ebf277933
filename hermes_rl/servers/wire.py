"""A chat request and its reply as JSON.

Owns the body of `POST /chat/completions` and the reading of its answer, with `Malformed` for an answer that cannot be
used. Leaves sending to `transport` and repeating to `retry`.
"""

from __future__ import annotations

import json
from typing import Any

from hermes_rl.servers.base import ChatReply, ChatRequest, ReasoningOptions, ServerConfig, Timing

_OPTIONAL = ("temperature", "top_p", "max_tokens", "seed", "stop")
_DEFAULT_EFFORT = "medium"
_BROKEN_OFF = frozenset({"abort", "aborted", "cancelled", "canceled", "error", "timeout"})
"""Finish reasons of an answer that the server ended, and not the model: half an answer is none."""


class Malformed(ValueError):
    """A server answered with something that is not a chat completion."""


class ErrorBody(Malformed):
    """An error inside an answer of status 200, as some gateways send it."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


def chat_body(request: ChatRequest, config: ServerConfig) -> dict[str, Any]:
    """Make the JSON body: parameters, over them `extra_body`, over it the thinking fields."""
    body: dict[str, Any] = {"model": config.model} if config.model else {}
    body["messages"] = request.messages
    if request.tools:
        body["tools"] = request.tools
    for name in _OPTIONAL:
        value = getattr(request, name)
        if value is not None:
            body[name] = value
    if request.logprobs:
        body["logprobs"] = True
    if request.extra_body:
        body.update(request.extra_body)
    if request.reasoning is not None:
        _think(body, request.reasoning, config.base_url or "")
    return body


def _think(body: dict[str, Any], reasoning: ReasoningOptions, base_url: str) -> None:
    """Add the thinking fields as Atropos sends them; OpenAI's own API has another form than all others."""
    if "api.openai.com" in base_url:
        body["reasoning_effort"] = reasoning.effort or _DEFAULT_EFFORT
        body["temperature"] = 1.0
        if body.get("max_tokens"):
            body["max_completion_tokens"] = body.pop("max_tokens")
        return
    fields: dict[str, Any] = {"enabled": True}
    if reasoning.effort is not None:
        fields["effort"] = reasoning.effort
    elif reasoning.max_tokens is not None:
        fields["max_tokens"] = reasoning.max_tokens
    body["reasoning"] = fields


def encode(body: dict[str, Any]) -> bytes:
    """Write the body as bytes. Non-ASCII is escaped, so that a lone surrogate in a message cannot fail here."""
    return json.dumps(body, default=dict).encode("ascii")


def read_reply(raw: bytes, config: ServerConfig, timing: Timing) -> ChatReply:
    """Read the reply in an answer of status 200."""
    data = _object(raw)
    choice = _choice(data)
    logprobs, tokens = _logprobs(choice.get("logprobs"))
    usage, model = data.get("usage"), data.get("model")
    return ChatReply(
        message=choice["message"],
        finish_reason=choice.get("finish_reason"),
        usage=usage if isinstance(usage, dict) else {},
        model=model if isinstance(model, str) else config.model,
        server_type=config.type,
        logprobs=logprobs,
        tokens=tokens,
        timing=timing,
    )


def _object(raw: bytes) -> dict[str, Any]:
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the answer is not JSON ({type(error).__name__})") from None
    if not isinstance(data, dict):
        raise Malformed("the answer is not a JSON object")
    return data


def _choice(data: dict[str, Any]) -> dict[str, Any]:
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        _raise_error(data)
        raise Malformed("the answer has no choices")
    choice = choices[0]
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise Malformed("the answer has no message")
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason in _BROKEN_OFF:
        raise Malformed(f"the server broke its answer off ({reason})")
    _raise_error(choice)
    return choice


def _raise_error(data: dict[str, Any]) -> None:
    error = data.get("error")
    if not error:
        return
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    raise ErrorBody("the answer is an error", status)


def _logprobs(logprobs: Any) -> tuple[list[float] | None, list[str] | None]:
    """Read log-probabilities and token texts; None unless every sampled token has both."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content:
        return None, None
    try:
        return [float(entry["logprob"]) for entry in content], [str(entry["token"]) for entry in content]
    except (KeyError, TypeError, ValueError):
        return None, None
