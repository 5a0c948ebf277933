"""From the values of all rewards to the score of a rollout.

score = clamp( Σ weight × value  ×  Π gates ). A reward of weight 0 is a metric: it is kept and counts for
nothing. A gate multiplies, its value must lie in [0, 1]. With gates alone the sum is 1, with metrics alone 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hermes_rl.errors import RewardFailure
from hermes_rl.scoring.value import RewardValue, total


@dataclass(frozen=True)
class Weighting:
    """How one reward enters the score."""

    name: str
    weight: float = 1.0
    gate: bool = False

    @property
    def counts(self) -> bool:
        return self.gate or self.weight != 0


def combine(
    weightings: Sequence[Weighting],
    values: Mapping[str, RewardValue],
    clamp: tuple[float, float] | None = None,
) -> float:
    """The score of a rollout.

    Raises:
        RewardFailure: a reward that counts could not tell, a gate lies outside [0, 1], or the sum is not finite.
    """
    parts: list[float] = []
    gates = 1.0
    for weighting in weightings:
        if not weighting.counts:
            continue
        value = _known(weighting, values[weighting.name])
        if weighting.gate:
            gates *= _gate(weighting.name, value)
        else:
            parts.append(weighting.weight * value)
    only_gates = not parts and any(weighting.gate for weighting in weightings)
    score = (1.0 if only_gates else _sum(parts)) * gates
    return min(max(score, clamp[0]), clamp[1]) if clamp else score


def _sum(parts: Sequence[float]) -> float:
    score = total(parts)
    if not math.isfinite(score):
        raise RewardFailure(f"the weighted sum of the rewards is not finite: {' + '.join(map(str, parts))}")
    return score


def _known(weighting: Weighting, reward: RewardValue) -> float:
    if reward.value is None:
        why = f": {reward.reason}" if reward.reason else ""
        raise RewardFailure(f"reward {weighting.name!r} could not tell (it returned None){why}")
    return reward.value


def _gate(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise RewardFailure(f"gate {name!r} returned {value}; a gate must lie between 0 and 1")
    return value
