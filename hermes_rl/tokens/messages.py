"""Messages as chat templates want them.

Owns the keys and values that templates read. Leaves rendering to the renderers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the keys that templates read, and with the arguments of its calls as mappings.

    Servers send a call without words with `content: null`, where templates want a text, and some name the thinking
    `reasoning`. Arguments that are no JSON object stay as they are.
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
    """Add the name of its tool to each result that has none; results follow the order of the calls."""
    names = iter(tools_called)
    return [_named(message, next(names, None)) if message.get("role") == "tool" else message for message in new]


def history_named(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Do the same in a whole conversation, by the ids of its calls."""
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
