"""Fewer turns are better."""

from __future__ import annotations

from typing import Any

from hermes_rl.scoring.reward_value import requires


@requires("worst > best", "worst ({{ worst }}) must be larger than best ({{ best }})")
def turn_efficiency(result: Any, *, best: int, worst: int) -> float:
    """Return 1 up to `best` turns, 0 from `worst` turns on, and a linear value in between.

    Args:
        best: maximum number of model calls for a value of 1.
        worst: number of model calls for a value of 0; larger than `best`.
    """
    return float(min(1.0, max(0.0, (worst - result.turns_used) / (worst - best))))
