"""Sum the rewards that the environment itself returned for turns, if code replies to the agent."""

from __future__ import annotations

from typing import Any

from hermes_rl.scoring.reward_value import value_range


@value_range(-1000, 1000)
def environment_rewards(result: Any) -> list[float]:
    """Return the `reward` values that the code of `user.state` returned, one per turn; their sum is the value."""
    values = [0.0] * result.turns_used
    for turn, reward in result.environment_rewards:
        values[turn - 1] += reward
    return values
