"""Messages as chat templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message under the keys that templates read, with arguments of tool calls as a mapping where they are one.

    Servers send a call without words with `content: null`, where templates want a text, and some call thinking
    `reasoning`.
    """
    prepared = dict(message)
    if prepared.get("role") == "assistant":
        if prepared.get("content") is None:
            prepared["content"] = ""
        if prepared.get("reasoning") and not prepared.get("reasoning_content"):
            prepared["reasoning_content"] = prepared["reasoning"]
    if prepared.get("tool_calls"):
        prepared["tool_calls"] = [_call(call) for call in prepared["tool_calls"]]
    return prepared


def named(new: Sequence[Mapping[str, Any]], tools_called: Sequence[str]) -> list[Mapping[str, Any]]:
    """The messages with the name of its tool in each result that has none; calls are answered in order."""
    names = iter(tools_called)
    return [_named(message, next(names, None)) if message.get("role") == "tool" else message for message in new]


def history_named(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same for a whole conversation, by the ids of its calls."""
    names = {
        call.get("id"): (call.get("function") or {}).get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    return [
        _named(message, names.get(message.get("tool_call_id"))) if message.get("role") == "tool" else message
        for message in messages
    ]


def _named(message: Mapping[str, Any], name: Any) -> Mapping[str, Any]:
    return message if message.get("name") or not name else {**message, "name": name}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
