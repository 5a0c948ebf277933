"""The policy chose the right one of lettered choices."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hermes_rl import Score
from hermes_rl.scoring.phrase_matching import pattern_of
from hermes_rl.scoring.reward_value import requires

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import Letter

# Repetitions are possessive (`*+`): a search never backtracks, so its time is linear in the text.
BOXED = re.compile(r"\\boxed\{\s*+(?:\\text\{\s*+)?+\(?+([A-Za-z])\)?+\s*+\}?\s*+\}")
ANNOUNCED = re.compile(
    r"\b(?:answer|choice|option)\b\s*+(?:(?<=\s)(?:is|would be)\s*+)?+:?+\s*+\**+\s*+\(?+([A-Z])(?![\w'])",
    re.IGNORECASE,
)
ALONE = re.compile(r"\W*([A-Za-z])\W*")
IN_BRACKETS = re.compile(r"\(([A-Z])\)")


@requires(
    "not choices or 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'.find(target.upper()) < choices | length",
    "target is {{ target }}, and there are {{ choices | length }} choices",
)
def multiple_choice(result: Any, *, target: Letter, choices: list[str] | None = None) -> Score:
    """Return 1 if the final response names the letter `target`, else 0; an ambiguous response is wrong.

    The first of these forms that is found decides, at its last occurrence: `\\boxed{B}`; "answer is B", "option: (B)"
    and similar; a response that is only the letter; "(B)"; the text of exactly one of `choices`. Case is ignored.

    Args:
        target: the letter of the right choice, A for the first.
        choices: the texts of the choices in order, for responses that name a choice by its text.
    """
    letter = chosen(result.final_response, choices or [])
    reason = None if letter is not None else "the answer names no choice, or several"
    return Score(letter == target.upper(), reason=reason)


def chosen(answer: str, choices: list[str]) -> str | None:
    """Return the letter that an answer names, in upper case."""
    for pattern in (BOXED, ANNOUNCED):
        if letters := pattern.findall(answer):
            return str(letters[-1]).upper()
    if alone := ALONE.fullmatch(answer):
        return alone[1].upper()
    if letters := IN_BRACKETS.findall(answer):
        return str(letters[-1])
    # The longest first, so that "New York" is not "York" too; each text is a group of the pattern.
    by_length = sorted(
        ((choice, index) for index, choice in enumerate(choices) if choice), key=lambda each: -len(each[0])
    )
    pattern = "|".join(f"({pattern_of(choice)})" for choice, _ in by_length)
    choice_groups = {match.lastindex for match in re.finditer(pattern, answer, re.IGNORECASE)} if pattern else set()
    return chr(ord("A") + by_length[(choice_groups.pop() or 0) - 1][1]) if len(choice_groups) == 1 else None
