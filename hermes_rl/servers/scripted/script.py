"""The script of a scripted policy: turns that call tools, say something, or both.

Owns the types, which turn is next in a conversation, and deviations: which rollouts of a group go wrong, and how a
script is made wrong. Both follow from the seed alone, on every machine. A wrong script differs in every text and number
that a reward could look at (tool arguments and the words of a turn), so that its score differs. Leaves the rendering of
a spec's `solution` over a row to the caller: the texts are final here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Self

UNSCRIPTED = "This is a scripted server without a model; no solution is written for this conversation."
FINISHED = "That was all."
"""The answer in a conversation that goes on after the last turn of its script."""
_ADDED = " wrong"
"""Appended where nothing else can be changed: a text without letters and digits."""


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


def deviations(n: int, deviate: float, seed: int, group_key: str) -> frozenset[int]:
    """Choose the members of a group of `n` that go wrong: ``clamp(round(deviate × n), 1, n − 1)`` of them.

    No member goes wrong when `deviate` is 0, nor in a group of one, which has no other member to differ from.
    """
    if deviate <= 0 or n < 2:
        return frozenset()
    count = min(max(round(deviate * n), 1), n - 1)
    return frozenset(Random(f"{seed}:{group_key}").sample(range(n), count))


def deviate_script(turns: Sequence[ScriptedTurn], rng: Random) -> tuple[ScriptedTurn, ...]:
    """Return the turns with other arguments and other words; the tools stay the same."""
    by, turned = rng.randint(1, 9), rng.randint(1, 25)

    def wrong(value: Any) -> Any:
        return _wrong(value, by, turned)

    return tuple(
        replace(
            turn,
            say=None if turn.say is None else wrong(turn.say),
            tools=tuple(ScriptedCall(call.name, wrong(call.args)) for call in turn.tools),
        )
        for turn in turns
    )


def _wrong(value: Any, by: int, turned: int) -> Any:
    if isinstance(value, str):
        return _wrong_text(value, by, turned)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + by if value + by != value else -value
    if isinstance(value, Mapping):
        return {key: _wrong(item, by, turned) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_wrong(item, by, turned) for item in value]
    return value


def _wrong_text(text: str, by: int, turned: int) -> str:
    """Shift the digits and turn the letters around the alphabet; shape and punctuation stay.

    A command becomes one that does not exist rather than one that does something else.
    """
    changed = "".join(_wrong_character(character, by, turned) for character in text)
    return changed if changed != text else text + _ADDED


def _wrong_character(character: str, by: int, turned: int) -> str:
    if character.isascii() and character.isdigit():
        return str((int(character) + by) % 10)
    for first in ("a", "A"):
        if character.isascii() and 0 <= ord(character) - ord(first) < 26:
            return chr(ord(first) + (ord(character) - ord(first) + turned) % 26)
    return "x" if character.isalnum() and not character.isascii() else character
