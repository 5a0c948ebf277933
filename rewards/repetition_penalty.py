"""Saying the same again costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hermes_rl.scoring.reward_value import value_range

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import Count, Finite


@value_range(-1, 0)
def repetition_penalty(result: Any, *, words: Count = 4, most: Finite = 1.0) -> float:
    """Return minus `most` times the share of repeated runs of `words` words, from -`most` to 0.

    All messages of the policy count. Words are separated by white space and compared by Unicode case folding. A text
    with fewer words has no penalty.

    Args:
        words: length of a run.
        most: penalty of an endlessly repeated text; above 1 the reward needs a `range` of [-most, 0].
    """
    tokens = "\n".join(result.texts).casefold().split()
    runs = [tuple(tokens[i : i + words]) for i in range(len(tokens) - words + 1)]
    return -most * (1 - len(set(runs)) / len(runs)) if runs else 0.0
