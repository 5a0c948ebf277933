"""Parse and write Anthropic's messages for agent programs.

Sources: Anthropic's API reference, and requests recorded from programs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.agent.dialects.base import (
    ProgramAnswer,
    ProgramRequest,
    RefusedRequestError,
    add_text,
    arguments_of,
    event,
    function_call,
    function_tool,
    join_texts,
    noted,
    object_of,
    require_list,
    require_object,
    require_text,
    text_in,
)
from hermes_rl.agent.result import Message, text_of
from hermes_rl.values import write_message

SAMPLING = (
    "max_tokens", "temperature", "top_p", "top_k", "thinking", "stop_sequences", "service_tier", "output_config",
    "context_management",
)  # fmt: skip
NOT_THERE = ("mcp_servers", "container")
TEXT = frozenset({"text"})
BILLING = "x-anthropic-billing-header"
"""Prefix of a billing block for the vendor; it differs between requests."""
STOPS = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
ERRORS = {"not_found": "not_found_error", "server_error": "api_error"}


class Messages:
    """Anthropic's messages; see `base.ProgramDialect`."""

    path = "/messages"

    def read(self, body: Any) -> ProgramRequest:
        body = require_object(body, "the body")
        for name in NOT_THERE:
            if body.get(name):
                raise RefusedRequestError(f"`{name}` is not there: the program has to run its tools itself")
        settings = body.get("output_config")
        if body.get("output_format") or (isinstance(settings, dict) and settings.get("format")):
            raise RefusedRequestError("`output_format` must not be there: the policy is sampled freely")
        choice = require_object(body.get("tool_choice") or {"type": "auto"}, "`tool_choice`").get("type")
        if choice not in ("auto", "none"):
            raise RefusedRequestError("`tool_choice` must be auto or none: the policy is sampled freely")
        messages: list[Message] = []
        if system := _system_text(body.get("system")):
            messages.append({"role": "system", "content": system})
        turns = require_list(body.get("messages"), "`messages`")
        if not turns:
            raise RefusedRequestError("`messages` must not be empty")
        for message in turns:
            messages += _read_messages(message)
        tools = [] if choice == "none" else require_list(body.get("tools") or [], "`tools`")
        sampling = noted(body, SAMPLING)
        functions = [_read_tool(tool) for tool in tools]
        return ProgramRequest(join_texts(messages), functions, body.get("stream") is True, sampling)

    def written(self, answer: ProgramAnswer, request: ProgramRequest) -> bytes:
        content = _message_blocks(answer.message)
        usage = _usage_fields(answer.prompt_tokens, answer.completion_tokens)
        return write_message(
            {**_response_head(answer), "content": content, "stop_reason": _stop_reason(answer), "usage": usage}
        )

    def events(self, answer: ProgramAnswer, request: ProgramRequest) -> Iterator[bytes]:
        """Yield the empty message, then each empty block with its content, then the stop reason."""

        def say(kind: str, **content: Any) -> bytes:
            return event({"type": kind, **content}, kind)

        head = {
            **_response_head(answer),
            "content": [],
            "stop_reason": None,
            "usage": _usage_fields(answer.prompt_tokens, 0),
        }
        yield say("message_start", message=head)
        arguments = [call["function"]["arguments"] for call in answer.message.get("tool_calls") or ()]
        for index, block in enumerate(_message_blocks(answer.message)):
            if block["type"] == "thinking":
                empty_block = {**block, "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block["thinking"]},
                    {"type": "signature_delta", "signature": block["signature"]},
                ]
            elif block["type"] == "text":
                empty_block, deltas = {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
            else:
                empty_block, deltas = (
                    {**block, "input": {}},
                    [{"type": "input_json_delta", "partial_json": arguments.pop(0)}],
                )
            yield say("content_block_start", index=index, content_block=empty_block)
            for delta in deltas:
                yield say("content_block_delta", index=index, delta=delta)
            yield say("content_block_stop", index=index)
        usage = _usage_fields(answer.prompt_tokens, answer.completion_tokens)
        yield say("message_delta", delta={"stop_reason": _stop_reason(answer), "stop_sequence": None}, usage=usage)
        yield say("message_stop")

    def error(self, message: str, code: str) -> bytes:
        kind = ERRORS.get(code, "invalid_request_error")
        return write_message({"type": "error", "error": {"type": kind, "message": message}})


def _system_text(system: Any) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    texts = [require_text(block.get("text"), "a block of `system`") for block in require_list(system, "`system`")]
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _read_messages(message: dict[str, Any]) -> list[Message]:
    """Return the messages of one Anthropic message: for a user message with results, one message for each result."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise RefusedRequestError("each message must have a role, one of assistant, system, user")
    if role == "system":
        return [{"role": role, "content": _system_text(content)}]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else require_list(content, "`content`")
    return [_read_assistant(blocks)] if role == "assistant" else _read_user(blocks)


def _read_assistant(blocks: list[dict[str, Any]]) -> Message:
    turn: Message = {"role": "assistant", "content": []}
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            add_text(turn, require_text(block.get("text"), "`text`"))
        elif kind == "thinking":
            add_text(turn, require_text(block.get("thinking"), "`thinking`"), "reasoning_content")
        elif kind == "tool_use":
            call = function_call(block.get("id"), block.get("name"), arguments_of(block.get("input")))
            turn.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":  # hermes-rl never sends it: its reasoning was dropped
            raise RefusedRequestError(f"a block of type {kind!r:.100} cannot be read in an answer of the model")
    return turn


def _read_user(blocks: list[dict[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    for block in blocks:
        if block.get("type") == "tool_result":
            content = text_in(block.get("content"), TEXT, "`content` of a result")
            messages.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": content})
        elif block.get("type") == "text":
            text = require_text(block.get("text"), "`text`")
            if messages and messages[-1]["role"] == "user":
                add_text(messages[-1], "\n" + text)
            else:
                messages.append({"role": "user", "content": [text]})
        else:
            raise RefusedRequestError(
                f"a block of type {block.get('type')!r:.100} cannot be read: texts and results can"
            )
    return messages or [{"role": "user", "content": ""}]


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise RefusedRequestError(
            f"a tool of type {tool['type']!r:.100} cannot be offered: switch it off in the program; its own tools can"
        )
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _message_blocks(message: Message) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": "hermes-rl"})
    if text := text_of(message.get("content")):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], object_of(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


def _response_head(answer: ProgramAnswer) -> dict[str, Any]:
    head = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}
    return {**head, "stop_sequence": None}


def _stop_reason(answer: ProgramAnswer) -> str:
    return STOPS.get(answer.finish, "end_turn")


def _usage_fields(prompt: int, completion: int) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": prompt, "output_tokens": completion, **cached}
