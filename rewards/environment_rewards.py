"""What the world itself gave for turns, where code answers the agent."""

from __future__ import annotations

from typing import Any

from hermes_rl.scoring.reward_value import value_range


@value_range(-1000, 1000)
def environment_rewards(result: Any) -> list[float]:
    """What the code of `user.state` answered as `reward`, for each turn; its sum is the value."""
    values = [0.0] * result.turns_used
    for turn, reward in result.environment_rewards:
        values[turn - 1] += reward
    return values
