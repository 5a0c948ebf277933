"""Compute advantages from the scores of a group, and from the credit that rewards assign to turns.

Each estimator is a function of the scores of the compared rollouts, in order. docs/statistics.md has the formulas. For
equal scores of any size an advantage is exactly 0, except that of `score`. Gates and `clamp` act on scores and not on
credit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Literal

from hermes_rl.tokens.transcript import SampledSpan

Normalise = Literal["std", "mean", "rloo", "none"]
"""Name of an estimator in the Python API."""


def grpo(scores: Sequence[float]) -> list[float]:
    """Return (score - mean) / population standard deviation: GRPO (Shao et al. 2024); at most √(n - 1)."""
    return _center(scores, _deviation(scores))


def dr_grpo(scores: Sequence[float]) -> list[float]:
    """Return score - mean: Dr. GRPO (Liu et al. 2025)."""
    return _center(scores, 1.0)


def rloo(scores: Sequence[float]) -> list[float]:
    """Return the score minus the mean of the others' scores: RLOO (Ahmadian et al. 2024); 0 for a single score."""
    others = len(scores) - 1
    return _center(scores, others / len(scores)) if others > 0 else [0.0] * len(scores)


def score(scores: Sequence[float]) -> list[float]:
    """Return the scores themselves: REINFORCE without a baseline (Williams 1992)."""
    return list(scores)


ESTIMATORS: Mapping[str, Callable[[Sequence[float]], list[float]]] = {
    "std": grpo, "mean": dr_grpo, "rloo": rloo, "none": score,
}  # fmt: skip
"""Estimators by their name in the Python API."""


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return for each turn its reward plus `discount` times the return of the next turn (Sutton and Barto 2018, 3.8).

    A reward may return them as credit per turn.
    """
    backwards = accumulate(reversed(rewards), lambda later, reward: reward + discount * later)
    return [*backwards][::-1]


def of_turns(scores: Sequence[float], credit: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantage of each turn of each rollout.

    A turn's advantage is its rollout's advantage (`grpo`), plus the difference between the turn's credit and the mean
    credit of its rollout. The unit of this second part is the standard deviation of these differences over the group,
    or the standard deviation of the scores if it is larger. Hence it never exceeds the square root of the number of
    turns, however close the scores are. Its sum over the turns of a rollout is zero: credit moves weight within a
    rollout and never between rollouts.

    Args:
        scores: one score per rollout.
        credit: one value per turn of each rollout; zeros for a rollout without credit.
    """
    differences = [_center(turn_values, 1.0) for turn_values in credit]
    within = max(_deviation([turn for turn_values in differences for turn in turn_values]), _deviation(scores))
    return [
        [between + (turn / within if within else 0.0) for turn in turn_values]
        for between, turn_values in zip(grpo(scores), differences, strict=True)
    ]


def of_tokens(spans: Iterable[SampledSpan], per_turn: Sequence[float], length: int) -> list[float]:
    """Return one value for each of `length` tokens: the value of the turn that sampled it, 0.0 for all others."""
    values = [0.0] * length
    for span in spans:
        values[span.start : span.stop] = [per_turn[span.turn]] * (span.stop - span.start)
    return values


def _deviation(values: Sequence[float]) -> float:
    """Return the population standard deviation; exactly 0 if all values are equal."""
    return pstdev(values) if values and min(values) < max(values) else 0.0


def _center(values: Sequence[float], unit: float) -> list[float]:
    """Return the values minus their mean, in a unit; exactly 0 if all are equal."""
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    mean = fmean(values)
    return [(value - mean) / unit for value in values]
