"""Parse and write OpenAI's chat completions for agent programs.

Sources: OpenAI's API reference, and requests recorded from programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.agent.dialects.base import (
    ProgramAnswer,
    ProgramRequest,
    RefusedRequestError,
    event,
    function_call,
    function_tool,
    joined,
    noted,
    openai_error,
    require_list,
    require_object,
    require_text,
)
from hermes_rl.agent.result import Message
from hermes_rl.spec.server_types import CHAT_PARTS
from hermes_rl.values import write_message

ROLES = {"system", "developer", "user", "assistant", "tool"}
SAMPLING = (
    "temperature", "top_p", "max_tokens", "max_completion_tokens", "seed", "stop", "presence_penalty",
    "frequency_penalty", "reasoning_effort", "top_k", "min_p", "parallel_tool_calls", "logit_bias",
)  # fmt: skip
TEXT = frozenset({"text"})


class Chat:
    """OpenAI's chat completions; see `base.ProgramDialect`."""

    path = "/chat/completions"

    def read(self, body: Any) -> ProgramRequest:
        body = require_object(body, "the body")
        messages = require_list(body.get("messages"), "`messages`")
        if not messages:
            raise RefusedRequestError("`messages` must not be empty")
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
            [_read_message(message) for message in messages],
            [] if choice == "none" else _read_tools(body.get("tools")),
            body.get("stream") is True,
            noted(body, SAMPLING),
            usage_streamed=isinstance(options, dict) and bool(options.get("include_usage")),
        )

    def written(self, answer: ProgramAnswer, request: ProgramRequest) -> bytes:
        choice = {"index": 0, "message": answer.message, "finish_reason": answer.finish, "logprobs": None}
        return write_message(
            {**_response_head(answer, "chat.completion"), "choices": [choice], "usage": _usage_fields(answer)}
        )

    def events(self, answer: ProgramAnswer, request: ProgramRequest) -> Iterator[bytes]:
        """Yield the role, the reasoning, the text, two events per call, and the end."""
        head, message = _response_head(answer, "chat.completion.chunk"), answer.message
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        for index, call in enumerate(message.get("tool_calls") or ()):
            call_start = {**call, "index": index, "function": {**call["function"], "arguments": ""}}
            arguments = {"index": index, "function": {"arguments": call["function"]["arguments"]}}
            deltas += [{"tool_calls": [call_start]}, {"tool_calls": [arguments]}]
        for delta in deltas:
            yield event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        yield event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
        if request.usage_streamed:
            yield event({**head, "choices": [], "usage": _usage_fields(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, message: str, code: str) -> bytes:
        return openai_error(message, code)


def _read_message(message: dict[str, Any]) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise RefusedRequestError(f"each message must have a role, one of {', '.join(sorted(ROLES))}")
    role = "system" if role == "developer" else role
    content = joined(message.get("content"), TEXT, "`content`")
    read: Message = {
        "role": role,
        "content": content if isinstance(content, str) else [_read_part(part) for part in content],
    }
    for name in ("reasoning_content", "reasoning", "name", "tool_call_id"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = [_read_call(call) for call in require_list(message["tool_calls"], "`tool_calls`")]
    return read


def _read_part(part: dict[str, Any]) -> dict[str, Any]:
    """Parse a content part, which may not be text; other fields could make the model server fetch data."""
    kind = part.get("type")
    if kind not in CHAT_PARTS:
        supported_kinds = ", ".join(sorted(CHAT_PARTS))
        raise RefusedRequestError(f"a part of type {kind!r:.100} cannot be shown to the policy: {supported_kinds} can")
    picture = part.get("image_url")
    if kind == "image_url" and not isinstance(picture.get("url") if isinstance(picture, dict) else picture, str):
        raise RefusedRequestError("`image_url` of a part must have a `url`, which is a text")
    return {"type": kind, kind: part.get(kind)}


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = require_object(call.get("function"), "`function` of a call")
    arguments = require_text(function.get("arguments"), "`arguments` of a call")
    return function_call(call.get("id"), function.get("name"), arguments)


def _read_tools(tools: Any) -> list[dict[str, Any]]:
    read = require_list(tools or [], "`tools`")
    for tool in read:
        if tool.get("type") != "function":
            raise RefusedRequestError(f"a tool of type {tool.get('type')!r:.100} cannot be offered: only functions can")
        function = require_object(tool.get("function"), "`function` of a tool")
        function_tool(function.get("name"), function.get("description"), function.get("parameters"))
    return read


def _response_head(answer: ProgramAnswer, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _usage_fields(answer: ProgramAnswer) -> dict[str, Any]:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if answer.reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": answer.reasoning_tokens}
    return {**usage, "total_tokens": prompt + completion}
