"""Fewer tokens are better."""

from __future__ import annotations

from typing import Any

from hermes_rl import Score
from hermes_rl.scoring.reward_value import requires


@requires("worst > best", "worst ({{ worst }}) must be larger than best ({{ best }})")
def token_efficiency(result: Any, *, best: int, worst: int) -> Score:
    """Return 1 up to `best` tokens, 0 from `worst` tokens on, and a linear value in between.

    The completion tokens of all turns count, as reported by the server; without counts there is no value.

    Args:
        best: maximum number of tokens for a value of 1.
        worst: number of tokens for a value of 0; larger than `best`.
    """
    used = result.usage.completion_tokens
    if not used and result.turns_used and not result.usage.prompt_tokens:
        return Score(None, reason="the server counted no tokens")
    return Score(min(1.0, max(0.0, (worst - used) / (worst - best))), metrics={"tokens": used})
