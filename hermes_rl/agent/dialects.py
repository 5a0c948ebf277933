"""What agent programs write and read when they ask for a model: OpenAI's chat completions.

This module turns a request's body into messages and tools, and an answer of the policy into a body or the events of a
stream. It decides what of a request is refused; whom the messages are sent to, `endpoint` decides. Sources: OpenAI's
API reference (chat completions) and the requests that programs were seen to send.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl.agent.result import Message
from hermes_rl.values import write_message

ROLES = {"system", "developer", "user", "assistant", "tool"}
SAMPLING = (
    "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "presence_penalty",
    "frequency_penalty", "reasoning_effort", "top_k", "min_p",
)  # fmt: skip
"""What programs ask for of sampling. It is written down, and the spec's own is sent."""
MOST_MESSAGES = 5_000


class RefusedRequestError(Exception):
    """A request cannot be answered as it is; the text is what the program is told."""


@dataclass(frozen=True)
class ProgramRequest:
    """One request of a program for an answer of the model."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    stream: bool
    usage_streamed: bool
    sampling: Mapping[str, Any]
    """What it asks for of sampling, by name: numbers and short texts."""


def read_request(body: Any) -> ProgramRequest:
    """Read the body of a request.

    Raises:
        RefusedRequestError: it has another form, or asks for what no answer of ours can hold.
    """
    if not isinstance(body, dict):
        raise RefusedRequestError("the body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or len(messages) > MOST_MESSAGES:
        raise RefusedRequestError(f"`messages` must be a list of 1 to {MOST_MESSAGES} messages")
    if body.get("n") not in (None, 1):
        raise RefusedRequestError("`n` must be 1: a conversation has one answer")
    if body.get("logprobs"):
        raise RefusedRequestError("`logprobs` are not given to programs")
    response = body.get("response_format")
    if response is not None and (not isinstance(response, dict) or response.get("type") != "text"):
        raise RefusedRequestError("`response_format` must be text: the policy is sampled freely")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RefusedRequestError("`tool_choice` must be auto or none: the policy is sampled freely")
    options = body.get("stream_options")
    return ProgramRequest(
        [_message(message) for message in messages],
        [] if choice == "none" else _tools(body.get("tools")),
        bool(body.get("stream")),
        isinstance(options, dict) and bool(options.get("include_usage")),
        {name: value for name in SAMPLING if isinstance(value := body.get(name), int | float | str) and _short(value)},
    )


def _short(value: float | str) -> bool:
    return not isinstance(value, str) or len(value) <= 100


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RefusedRequestError(f"each message must be an object whose role is one of {', '.join(sorted(ROLES))}")
    role = "system" if message["role"] == "developer" else message["role"]
    read: Message = {"role": role, "content": _content(message.get("content"))}
    for name in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = _calls(message["tool_calls"])
    return read


def _content(content: Any) -> str | list[dict[str, Any]]:
    """Return a text where the content is nothing but texts: programs send one text in either form."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RefusedRequestError("`content` must be a text or a list of parts")
    if all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    return content


def _calls(calls: Any) -> list[dict[str, Any]]:
    read = []
    for call in calls if isinstance(calls, list) else [{}]:
        call = call if isinstance(call, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            raise RefusedRequestError("each of `tool_calls` must have a function whose arguments are a text")
        named = {"name": str(function.get("name") or ""), "arguments": function["arguments"]}
        read.append({"id": str(call.get("id") or ""), "type": "function", "function": named})
    return read


def _tools(tools: Any) -> list[dict[str, Any]]:
    tools = tools or []
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict)
        and tool.get("type") == "function"
        and isinstance(tool.get("function"), dict)
        and isinstance(tool["function"].get("name"), str)
        for tool in tools
    ):
        raise RefusedRequestError("each of `tools` must be of type function and have a name")
    return tools


@dataclass(frozen=True)
class ProgramAnswer:
    """An answer of the policy, as programs get it."""

    id: str
    created: int
    model: str
    message: Message
    finish: str
    usage: Mapping[str, int]


def written_answer(answer: ProgramAnswer) -> bytes:
    """Write the body of an answer that is not streamed."""
    choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish, "logprobs": None}
    return write_message({**_head(answer, "chat.completion"), "choices": [choice], "usage": dict(answer.usage)})


def events(answer: ProgramAnswer, *, with_usage: bool) -> Iterator[bytes]:
    """Write the events of a stream: who speaks, the reasoning, the text, each call in two, and the end."""
    head, message = _head(answer, "chat.completion.chunk"), answer.message
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
    for index, call in enumerate(message.get("tool_calls") or ()):
        begun = {**call, "index": index, "function": {**call["function"], "arguments": ""}}
        arguments = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
        deltas += [{"tool_calls": [begun]}, {"tool_calls": [arguments]}]
    for delta in deltas:
        yield _event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": dict(answer.usage)})
    yield b"data: [DONE]\n\n"


def _head(answer: ProgramAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + write_message(content) + b"\n\n"


def written_error(message: str, code: str) -> bytes:
    """Write the body of an error."""
    return write_message({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}})


def written_models(model: str) -> bytes:
    """Write the list of models: there is one."""
    return write_message({"object": "list", "data": [{"id": model, "object": "model", "owned_by": "hermes-rl"}]})
