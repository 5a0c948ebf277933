"""Assistant messages as the history keeps them, and as they go back to the server.

Owns the difference between the two. The history keeps what the model wrote. But a server that parses the history
refuses the whole conversation for one malformed call in it, so the messages that are sent have empty arguments in such
a place; the answer to the call tells the model what was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hermes_rl.agent.result import Message


def kept_message(message: Mapping[str, Any], turn: int) -> Message:
    """Make the message for the history: everything that came, reasoning included, in the shape that servers take.

    Every call gets an id of its own, a type and arguments as text.
    """
    kept = {key: value for key, value in message.items() if value is not None}
    kept["role"] = "assistant"
    kept["content"] = _content(message.get("content"))
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        kept["tool_calls"] = _calls(calls, turn)
    else:
        kept.pop("tool_calls", None)
    return kept


def sendable(messages: list[Message]) -> list[Message]:
    """Return the history with empty arguments in every call whose arguments are no JSON object."""
    return [
        {**message, "tool_calls": [_sendable_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _content(content: object) -> object:
    if content is None or isinstance(content, str | list):
        return content
    return json.dumps(content, ensure_ascii=False)


def _calls(calls: list[Any], turn: int) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    taken: set[str] = set()
    for number, call in enumerate(calls):
        one = _call(call if isinstance(call, dict) else {}, f"call_{turn}_{number}", taken)
        taken.add(one["id"])
        kept.append(one)
    return kept


def _call(call: Mapping[str, Any], default_id: str, taken: set[str]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    given_id = str(call.get("id") or "")
    # Our own parser adds this to a call that cannot be executed.
    problem = {"error": call["error"]} if isinstance(call.get("error"), str) else {}
    return {
        "id": default_id if not given_id or given_id in taken else given_id,
        "type": "function",
        "function": {
            "name": str(function.get("name") or ""),
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False),
        },
        **problem,
    }


def _sendable_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or _is_object(function.get("arguments")):
        return call
    return {**call, "function": {**function, "arguments": "{}"}}


def _is_object(arguments: object) -> bool:
    try:
        return isinstance(arguments, str) and isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False
