"""Random groups of scores, and the distance of a trainer's advantages from those of `hermes_rl.rollouts.advantages`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from statistics import pstdev, stdev

from hermes_rl.rollouts.advantages import ESTIMATORS, discounted_returns

DISCOUNT = 0.9


def score_groups(size: int | None = None) -> list[list[float]]:
    """Return 60 groups: passed or failed, of any value, close to each other, large, and equal."""
    draw = random.Random(48)
    kinds = (
        lambda: float(draw.random() < 0.5),
        draw.random,
        lambda: 0.5 + draw.random() / 20,
        lambda: draw.gauss(0, 100),
        lambda: 0.5,
    )
    return [[kinds[number % 5]() for _ in range(size or draw.randint(2, 16))] for number in range(60)]


def difference(name: str, theirs: Sequence[float], groups: Sequence[Sequence[float]], epsilon: float = 0.0) -> float:
    """Return the largest distance of a trainer's advantages of these groups, in order, from those of an estimator.

    For "std" trainers divide by the standard deviation of a sample plus a small `epsilon`, in place of that of a
    population. The other distances are relative to the group's largest score.
    """
    ours, units = list[float](), list[float]()
    for group in groups:
        factor = pstdev(group) / (stdev(group) + epsilon) if name == "std" else 1.0
        ours += [advantage * factor for advantage in ESTIMATORS[name](group)]
        units += [1.0 if name == "std" else max(map(abs, group)) or 1.0] * len(group)
    return max(abs(one - other) / unit for one, other, unit in zip(ours, theirs, units, strict=True))


def turn_rewards() -> list[list[float]]:
    """Return the rewards of the turns of 20 rollouts."""
    draw = random.Random(49)
    return [[draw.gauss(0, 1) for _ in range(7)] for _ in range(20)]


def difference_of_returns(theirs: Sequence[Sequence[float]]) -> float:
    """Return the largest distance of a trainer's discounted returns of `turn_rewards`."""
    ours = [discounted_returns(rewards, DISCOUNT) for rewards in turn_rewards()]
    pairs = zip(chain(*ours), chain(*theirs), strict=True)
    return max(abs(one - other) for one, other in pairs)
