"""Whether a message of a history is the one that was there before.

What servers, harnesses and templates rewrite without changing what was said does not count: ids of calls, spaces
in the JSON of arguments, None for an empty text, reasoning that is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Call = tuple[str, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A message as it was; later changes to the message itself do not reach it."""

    role: str
    content: Any
    calls: tuple[Call, ...] = ()
    thought: bool = False
    """Whether it has reasoning, which templates may drop later on."""
    seen: tuple[Any, Any, Any] = (None, None, None)
    """The message, its content and its calls as objects: what is the same object has not changed."""

    def same(self, message: Mapping[str, Any]) -> bool:
        """Whether the message says the same."""
        if self.is_seen(message):
            return True
        if message.get("role") != self.role or (message.get("content") or "") != self.content:
            return False
        calls = _calls(message)
        return calls == self.calls or _canonical(calls) == _canonical(self.calls)

    def is_seen(self, message: Mapping[str, Any]) -> bool:
        """Whether it is the very message, with nothing in it replaced."""
        known, content, calls = self.seen
        return known is message and message.get("content") is content and message.get("tool_calls") is calls


def snapshot(message: Mapping[str, Any]) -> Snapshot:
    """What the message is now."""
    thought = bool(message.get("reasoning_content") or message.get("reasoning"))
    seen = (message, message.get("content"), message.get("tool_calls"))
    return Snapshot(str(message.get("role")), message.get("content") or "", _calls(message), thought, seen)


def _calls(message: Mapping[str, Any]) -> tuple[Call, ...]:
    calls = message.get("tool_calls")
    if not calls:
        return ()
    functions = [call.get("function") or {} for call in calls if isinstance(call, Mapping)]
    return tuple((str(function.get("name")), function.get("arguments")) for function in functions)


def _canonical(calls: tuple[Call, ...]) -> list[tuple[str, str]]:
    return [(name, _canonical_arguments(arguments)) for name, arguments in calls]


def _canonical_arguments(arguments: Any) -> str:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(parsed, sort_keys=True, default=str)
    except (ValueError, RecursionError):
        return str(arguments)
