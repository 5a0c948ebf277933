"""Which rollouts of a group go wrong, and how a script is made wrong.

Owns both choices; they follow from the seed alone, on every machine. A wrong script differs in every text and number
that a reward could look at (tool arguments and the words of a turn), so that its score differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hermes_rl.servers.scripted.script import ScriptedCall, ScriptedTurn

_ADDED = " wrong"
"""Appended where nothing else can be changed: a text without letters and digits."""


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
