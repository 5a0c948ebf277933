"""Assistant messages as the history keeps them and as a server gets them.

Every message of a model server that enters a history is read by `kept_message`, whichever role the model plays, so no
other code meets values of unexpected types. The history keeps what the model wrote. But a server that parses the
history refuses the whole conversation for one malformed call in it, so the messages that are sent have empty arguments
in such a place; the answer to the call tells the model what was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from hermes_rl.agent.result import Message
from hermes_rl.values import read_bounded


def kept_message(message: Mapping[str, Any], turn: int) -> Message:
    """Make the message for the history: everything that came, reasoning included, in the shape that servers take.

    Every call gets an id of its own, a type and arguments as text.
    """
    own = {key: value for key, value in message.items() if value is not None}
    own["role"] = "assistant"
    content = message.get("content")
    own["content"] = content if isinstance(content, str | list | None) else json.dumps(content, ensure_ascii=False)
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        own["tool_calls"] = _calls(calls, turn)
    else:
        own.pop("tool_calls", None)
    return own


def sendable(messages: list[Message]) -> list[Message]:
    """Return the history with empty arguments in every call whose arguments cannot be read as a JSON object."""
    return [
        {**message, "tool_calls": [_sendable_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _calls(calls: list[Any], turn: int) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = []
    ids: set[str] = set()
    for number, call in enumerate(calls):
        own = _call(call if isinstance(call, dict) else {}, f"call_{turn}_{number}", ids)
        ids.add(own["id"])
        read.append(own)
    return read


def _call(call: Mapping[str, Any], default_id: str, ids: set[str]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments", "")
    given_id = str(call.get("id") or "")
    # Our own parser adds this to a call that cannot be executed.
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
    with suppress(ValueError):
        if isinstance(arguments, str) and isinstance(read_bounded(arguments), dict):
            return call
    return {**call, "function": {**function, "arguments": "{}"}}
