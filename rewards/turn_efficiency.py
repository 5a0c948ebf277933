"""Fewer turns are better."""

from __future__ import annotations

from typing import Any

from hermes_rl.scoring.reward_value import requires


@requires("worst > best", "worst ({{ worst }}) must be larger than best ({{ best }})")
def turn_efficiency(result: Any, *, best: int, worst: int) -> float:
    """1 up to `best` turns, 0 from `worst` turns on, linear in between.

    Args:
        best: number of model calls that deserves 1.
        worst: number of model calls that deserves 0; larger than `best`.
    """
    return float(min(1.0, max(0.0, (worst - result.turns_used) / (worst - best))))
