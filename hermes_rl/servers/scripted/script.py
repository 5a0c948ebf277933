"""The script of a scripted policy: turns that call tools, say something, or both.

Owns the types and which turn is next in a conversation. Leaves the rendering of a spec's `solution` over a row to the
caller: the texts are final here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

UNSCRIPTED = "This is a scripted server without a model; no solution is written for this conversation."
FINISHED = "That was all."
"""The answer in a conversation that goes on after the last turn of its script."""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """A tool call. `args` is normally a mapping; anything else is sent as the JSON that it is."""

    name: str
    args: Any


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One assistant message."""

    say: str | None = None
    tools: tuple[ScriptedCall, ...] = ()

    @classmethod
    def of(cls, turn: Mapping[str, Any]) -> Self:
        """Make a turn from the form that a spec has: ``{tools: [{name, args}]}``, ``{say: text}``, or both."""
        say = turn.get("say")
        calls = (ScriptedCall(str(call["name"]), call.get("args") or {}) for call in turn.get("tools") or ())
        return cls(None if say is None else str(say), tuple(calls))

    def message(self, number: int) -> dict[str, Any]:
        """Return the assistant message. The ids of its calls are unique in a conversation and the same in every run."""
        message: dict[str, Any] = {"role": "assistant", "content": self.say}
        if self.tools:
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{place}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.args, ensure_ascii=False, default=str),
                    },
                }
                for place, call in enumerate(self.tools)
            ]
        return message


@dataclass(frozen=True, slots=True)
class Script:
    """The turns of one rollout."""

    turns: tuple[ScriptedTurn, ...] = ()
    prior: int = 0
    """Assistant messages that the prompt itself holds (examples); they are not turns."""

    @classmethod
    def of(cls, turns: Iterable[Mapping[str, Any]], prior: int = 0) -> Self:
        """Make a script from turns in the form that a spec has, already rendered over a row."""
        return cls(tuple(ScriptedTurn.of(turn) for turn in turns), prior)

    def next_message(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the assistant message that follows the history."""
        spoken = sum(message.get("role") == "assistant" for message in history)
        number = max(0, spoken - self.prior)
        if not self.turns:
            return ScriptedTurn(UNSCRIPTED).message(number)
        turn = self.turns[number] if number < len(self.turns) else ScriptedTurn(FINISHED)
        return turn.message(number)
