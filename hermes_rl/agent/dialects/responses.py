"""Parse and write OpenAI's Responses for agent programs, without storage between requests.

A model turn consists of several items: its reasoning, its text and each of its calls. Here they form one message.
Sources: OpenAI's API reference, and requests recorded from programs.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from hermes_rl.agent.dialects.base import (
    ProgramAnswer,
    ProgramRequest,
    RefusedRequestError,
    add_text,
    event,
    function_call,
    function_tool,
    join_texts,
    noted,
    openai_error,
    require_list,
    require_object,
    require_text,
    text_in,
)
from hermes_rl.agent.result import Message, text_of
from hermes_rl.values import read_object, write_message

ROLES = {"system", "developer", "user", "assistant"}
SAMPLING = (
    "temperature", "top_p", "max_output_tokens", "reasoning", "text", "parallel_tool_calls", "max_tool_calls", "store",
    "truncation", "service_tier", "context_management",
)  # fmt: skip
NOT_KEPT = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that need data stored before, or stored for later."""
TEXT = frozenset({"input_text", "output_text", "text"})
HANDLE = "hermes-rl:"
"""Prefix of the opaque form of reasoning, which some programs send back instead of the reasoning itself."""
CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Responses:
    """OpenAI's Responses; see `base.ProgramDialect`."""

    path = "/responses"

    def read(self, body: Any) -> ProgramRequest:
        body = require_object(body, "the body")
        for name in NOT_KEPT:
            if body.get(name):
                raise RefusedRequestError(
                    f"`{name}` is not supported: requests share no state; send the complete `input`"
                )
        form = body.get("text") if isinstance(body.get("text"), dict) else {}
        if isinstance(form, dict) and form.get("format") not in (None, {"type": "text"}):
            raise RefusedRequestError("`text.format` must be text: the policy is sampled freely")
        choice = body.get("tool_choice")
        if choice not in (None, "auto", "none"):
            raise RefusedRequestError("`tool_choice` must be auto or none: the policy is sampled freely")
        if body.get("top_logprobs") or "logprobs" in str(body.get("include")):
            raise RefusedRequestError("log-probabilities are not given to programs")
        instructions = body.get("instructions")
        messages: list[Message] = []
        if instructions:
            messages.append({"role": "system", "content": require_text(instructions, "`instructions`")})
        entries = body.get("input")
        items = [{"role": "user", "content": entries}] if isinstance(entries, str) else require_list(entries, "`input`")
        for item in items:
            _add_item(messages, item)
        if not messages:
            raise RefusedRequestError("`input` must not be empty")
        tools = require_list(body.get("tools") or [], "`tools`")
        return ProgramRequest(
            join_texts(messages),
            [] if choice == "none" else [_read_tool(tool) for tool in tools],
            body.get("stream") is True,
            noted(body, SAMPLING),
            custom=frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "custom"),
        )

    def written(self, answer: ProgramAnswer, request: ProgramRequest) -> bytes:
        return write_message(_response(answer, _output_items(answer, request)))

    def events(self, answer: ProgramAnswer, request: ProgramRequest) -> Iterator[bytes]:
        """Yield the empty response, then each item (empty, its content, complete), then the complete response."""
        sequence_numbers, items = count(), _output_items(answer, request)

        def say(kind: str, **content: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(sequence_numbers), **content}, kind)

        empty_response = {**_response(answer, []), "status": "in_progress", "usage": None, "incomplete_details": None}
        yield say("response.created", response=empty_response)
        yield say("response.in_progress", response=empty_response)
        for index, item in enumerate(items):
            item_location = {"item_id": item["id"], "output_index": index}
            yield say("response.output_item.added", output_index=index, item=_emptied_item(item))
            if item["type"] in ("message", "reasoning"):
                part = item["content"][0]
                kind, item_location = part["type"], {**item_location, "content_index": 0}
                more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
                yield say("response.content_part.added", **item_location, part={**part, "text": ""})
                yield say(f"response.{kind}.delta", **item_location, delta=part["text"], **more)
                yield say(f"response.{kind}.done", **item_location, text=part["text"], **more)
                yield say("response.content_part.done", **item_location, part=part)
            elif item["type"] == "function_call":
                yield say("response.function_call_arguments.delta", **item_location, delta=item["arguments"])
                name = {"name": item["name"]}
                yield say("response.function_call_arguments.done", **item_location, **name, arguments=item["arguments"])
            else:
                yield say("response.custom_tool_call_input.delta", **item_location, delta=item["input"])
                yield say("response.custom_tool_call_input.done", **item_location, input=item["input"])
            yield say("response.output_item.done", output_index=index, item=item)
        end = "response.incomplete" if answer.finish in CUT else "response.completed"
        yield say(end, response=_response(answer, items))

    def error(self, message: str, code: str) -> bytes:
        return openai_error(message, code)


def _add_item(messages: list[Message], item: dict[str, Any]) -> None:
    """Add an item to the messages; the items of one model turn form one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise RefusedRequestError(f"a message must have a role, one of {', '.join(sorted(ROLES))}")
        content = text_in(item.get("content"), TEXT, "`content`")
        if role == "assistant":
            add_text(_last_turn(messages), content)
        else:
            messages.append({"role": "system" if role == "developer" else role, "content": content})
    elif kind == "reasoning":
        reasoning = _reasoning_text(item)
        turn = _last_turn(messages)
        if reasoning:
            add_text(turn, reasoning, "reasoning_content")
    elif kind in ("function_call", "custom_tool_call"):
        if kind == "function_call":
            arguments = require_text(item.get("arguments"), "`arguments` of a call")
        else:
            arguments = json.dumps({"input": require_text(item.get("input"), "`input` of a call")})
        _last_turn(messages).setdefault("tool_calls", []).append(
            function_call(item.get("call_id"), item.get("name"), arguments)
        )
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = text_in(item.get("output"), TEXT, "`output` of a call")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": output})
    else:
        raise RefusedRequestError(f"an item of type {kind!r:.100} cannot be read: nothing but texts and calls can")


def _last_turn(messages: list[Message]) -> Message:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _reasoning_text(item: dict[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, list) and content:
        return text_of([part for part in content if isinstance(part, dict)])
    handle = item.get("encrypted_content")
    if isinstance(handle, str) and handle.startswith(HANDLE):
        try:
            return base64.b64decode(handle.removeprefix(HANDLE), validate=True).decode("utf-8", "surrogatepass")
        except (binascii.Error, UnicodeDecodeError):
            return ""  # the value was changed: treated as dropped reasoning
    return ""


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") == "custom":
        text = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
        return function_tool(tool.get("name"), tool.get("description"), text)
    if tool.get("type") != "function":
        raise RefusedRequestError(
            f"a tool of type {tool.get('type')!r:.100} cannot be offered: switch it off in the program; functions and "
            "custom tools can"
        )
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def _output_items(answer: ProgramAnswer, request: ProgramRequest) -> list[dict[str, Any]]:
    message, items = answer.message, list[dict[str, Any]]()
    status = "incomplete" if answer.finish in CUT else "completed"
    if reasoning := message.get("reasoning_content"):
        handle = HANDLE + base64.b64encode(reasoning.encode("utf-8", "surrogatepass")).decode()
        content = [{"type": "reasoning_text", "text": reasoning}]
        head = {"type": "reasoning", "id": f"rs_{answer.id}", "summary": []}
        items.append({**head, "content": content, "encrypted_content": handle})
    text, calls = text_of(message.get("content")), message.get("tool_calls") or []
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        item = {"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "status": status, "content": [part]}
        items.append(item)
    for index, call in enumerate(calls):
        function, head = call["function"], {"status": status, "call_id": call["id"], "name": call["function"]["name"]}
        custom_input = _custom_input(function["arguments"]) if function["name"] in request.custom else None
        if custom_input is not None:
            items.append({"type": "custom_tool_call", "id": f"ctc_{answer.id}-{index}", **head, "input": custom_input})
        else:
            items.append(
                {"type": "function_call", "id": f"fc_{answer.id}-{index}", **head, "arguments": function["arguments"]}
            )
    return items


def _custom_input(arguments: str) -> str | None:
    """Return the text for a custom tool, or None if the model wrote other arguments."""
    value = read_object(arguments) or {}
    text = value.get("input") if len(value) == 1 else None
    return text if isinstance(text, str) else None


def _emptied_item(item: dict[str, Any]) -> dict[str, Any]:
    emptied: dict[str, Any] = {name: "" for name in ("arguments", "input") if name in item}
    emptied |= {"content": []} if "content" in item else {}
    return {**item, **emptied, **({"status": "in_progress"} if "status" in item else {})}


def _response(answer: ProgramAnswer, items: list[dict[str, Any]]) -> dict[str, Any]:
    reason, prompt, completion = CUT.get(answer.finish), answer.prompt_tokens, answer.completion_tokens
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if reason else "completed",
        "error": None,
        "incomplete_details": {"reason": reason} if reason else None,
        "instructions": None,
        "metadata": {},
        "model": answer.model,
        "output": items,
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens or 0},
            "total_tokens": prompt + completion,
        },
    }
