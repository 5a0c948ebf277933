"""Long answers cost: nothing up to a soft limit, all from a hard limit on."""

from __future__ import annotations

from typing import Any, Literal

from hermes_rl import Score
from hermes_rl.scoring.reward_value import requires, value_range


@value_range(-1, 0)
@requires("hard_limit > soft_limit", "hard_limit ({{ hard_limit }}) must be larger than soft_limit ({{ soft_limit }})")
def length_penalty(
    result: Any, *, soft_limit: int, hard_limit: int, unit: Literal["tokens", "characters"] = "tokens"
) -> Score:
    """Return 0 up to `soft_limit`, -1 from `hard_limit` on, and a linear penalty in between.

    The length is that of all text the policy wrote in the rollout: completion tokens as the server counted them,
    reasoning included, or characters. Without token counts from the server there is no value; use characters then.

    Args:
        soft_limit: maximum length without a penalty.
        hard_limit: length with the full penalty; larger than `soft_limit`.
        unit: unit of the length.
    """
    length = result.usage.completion_tokens if unit == "tokens" else sum(map(len, result.texts))
    if unit == "tokens" and not length and result.turns_used and not result.usage.prompt_tokens:
        return Score(None, reason="the server counted no tokens; use unit: characters")
    excess = (length - soft_limit) / (hard_limit - soft_limit)
    return Score(-min(1.0, max(0.0, excess)), metrics={"length": length})
