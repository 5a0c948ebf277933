"""Convert assistant messages for the history and for model servers.

Every message of a model server that enters a history passes through `kept_message`, for every role of a model, so no
other code meets values of unexpected types. The history keeps the model's original output. However, a server that
parses the history rejects the whole conversation for one malformed call, so malformed arguments are sent as empty ones;
the tool result tells the model about the error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hermes_rl.agent.result import Message
from hermes_rl.values import read_object


def kept_message(message: Mapping[str, Any], turn: int) -> Message:
    """Return the message for the history: all fields, reasoning included, in the form that servers accept.

    Every call gets a unique id, a type, and its arguments as text. No server may mark its reply as a program's text.
    """
    cleaned_message = {key: value for key, value in message.items() if value is not None and key != "context"}
    cleaned_message["role"] = "assistant"
    content = message.get("content")
    cleaned_message["content"] = (
        content if isinstance(content, str | list | None) else json.dumps(content, ensure_ascii=False)
    )
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        cleaned_message["tool_calls"] = _clean_calls(calls, turn)
    else:
        cleaned_message.pop("tool_calls", None)
    return cleaned_message


def sendable(messages: list[Message]) -> list[Message]:
    """Return the history with empty arguments in every call whose arguments are not a JSON object."""
    return [
        {**message, "tool_calls": [_sendable_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _clean_calls(calls: list[Any], turn: int) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    ids: set[str] = set()
    for index, call in enumerate(calls):
        parsed_call = _clean_call(call if isinstance(call, dict) else {}, f"call_{turn}_{index}", ids)
        ids.add(parsed_call["id"])
        read.append(parsed_call)
    return read


def _clean_call(call: Mapping[str, Any], default_id: str, ids: set[str]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    given_id = str(call.get("id") or "")
    # hermes-rl's own parser adds this to a call that cannot be executed.
    problem = {"error": call["error"]} if isinstance(call.get("error"), str) else {}
    return {
        "id": default_id if not given_id or given_id in ids else given_id,
        "type": "function",
        "function": {
            "name": str(function.get("name") or ""),
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        },
        **problem,
    }


def _sendable_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str) and read_object(arguments) is not None:
        return call
    return {**call, "function": {**function, "arguments": "{}"}}
