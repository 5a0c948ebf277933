"""Whether a message of a history is the one that was there before.

What servers, harnesses and templates rewrite without changing what was said does not count: ids of calls, spaces
in the JSON of arguments, None for an empty text, reasoning that is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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

    def same(self, message: Mapping[str, Any]) -> bool:
        """Whether the message says the same."""
        if message.get("role") != self.role or (message.get("content") or "") != self.content:
            return False
        calls = _calls(message)
        return calls == self.calls or _canonical(calls) == _canonical(self.calls)


def snapshot(message: Mapping[str, Any]) -> Snapshot:
    """What the message is now."""
    thought = bool(message.get("reasoning_content") or message.get("reasoning"))
    return Snapshot(str(message.get("role")), message.get("content") or "", _calls(message), thought)


class History:
    """The messages that a sequence holds. Those that are there already cost next to nothing to recognise.

    Messages are known by the objects that they are, with the same content and calls in them; others are compared by
    what they say.
    """

    __slots__ = ("_calls", "_contents", "_messages", "snapshots")

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self._messages: list[Any] = []
        self._contents: list[Any] = []
        self._calls: list[Any] = []

    def __len__(self) -> int:
        return len(self.snapshots)

    def begins(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a conversation begins with these messages."""
        head = list(messages[: len(self)])
        contents = [message.get("content") for message in head]
        calls = [message.get("tool_calls") for message in head]
        # Lists are equal at once where they hold the same objects.
        if head == self._messages and contents == self._contents and calls == self._calls:
            return True
        if len(head) < len(self) or not all(map(Snapshot.same, self.snapshots, head)):
            return False
        self._messages, self._contents, self._calls = head, contents, calls
        return True

    def follow(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Become this conversation: put behind what is new in it, or begin anew where it is another."""
        if not self.begins(messages):
            for column in (self.snapshots, self._messages, self._contents, self._calls):
                column.clear()
        self.extend(messages)

    def extend(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Put behind what is new in a conversation that is known to begin with these messages."""
        for message in messages[len(self) :]:
            self.snapshots.append(snapshot(message))
            self._messages.append(message)
            self._contents.append(message.get("content"))
            self._calls.append(message.get("tool_calls"))


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
