"""What a reward may return, what is recorded of it, and how the values of all rewards become a score.

`Score` is what reward authors write, `RewardValue` what records hold, `interpret` the way from one to the other, and
`combine` the score of a rollout. Calling rewards is the job of `hermes_rl.scoring.grader`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.errors import RewardFailure


@dataclass(frozen=True)
class Score:
    """A reward's value with the reason for it and further numbers worth keeping.

    `value` None means "cannot tell": in a weighted reward that is a failure, in a metric it is left out.
    `overrides` goes to the trainer with the rollout: what a ScoredDataGroup says of one member, such as
    `{"set_advantage_to_zero": True}`.
    """

    value: float | bool | None
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardValue:
    """One reward of one rollout, as it is recorded.

    `per_turn` has one value per turn where the reward gave per-turn credit; `value` is then their sum.
    `seconds` is wall time.
    """

    value: float | None
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_turn: tuple[float, ...] | None = None
    seconds: float = 0.0
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the JSON form of a line in `rollouts.jsonl`; what is empty is left out."""
        record: dict[str, Any] = {"value": self.value}
        if self.reason is not None:
            record["reason"] = self.reason
        if self.metrics:
            record["metrics"] = dict(self.metrics)
        if self.per_turn is not None:
            record["per_turn"] = list(self.per_turn)
        if self.overrides:
            record["overrides"] = dict(self.overrides)
        return record


def interpret(name: str, returned: object, seconds: float, turns: int | None = None) -> RewardValue:
    """Read what the reward `name` returned for one rollout of `turns` model calls (None: not checked).

    Raises:
        RewardFailure: it is no number, not finite, or a list without one value per turn.
    """
    if isinstance(returned, Score):
        return _of_score(name, returned, seconds)
    if returned is None:
        return RewardValue(None, seconds=seconds)
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        if turns is not None and len(returned) != turns:
            raise RewardFailure(f"reward {name!r} returned {len(returned)} values for {turns} turns")
        per_turn = tuple(_finite(name, turn) for turn in returned)
        return RewardValue(_finite(name, total(per_turn)), per_turn=per_turn, seconds=seconds)
    return RewardValue(_finite(name, returned), seconds=seconds)


def total(values: Iterable[float]) -> float:
    """Return the sum, independent of the order; not a number where it lies beyond the range of floats."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _of_score(name: str, score: Score, seconds: float) -> RewardValue:
    value = None if score.value is None else _finite(name, score.value)
    reason = None if score.reason is None else str(score.reason)
    if not isinstance(score.metrics, Mapping):
        raise RewardFailure(f"reward {name!r}: metrics must be a mapping, not {type(score.metrics).__name__}")
    metrics = {str(key): _finite(f"{name}.{key}", number) for key, number in score.metrics.items()}
    return RewardValue(value, reason, metrics, seconds=seconds, overrides=_overrides(name, score.overrides))


def _overrides(name: str, given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise RewardFailure(f"reward {name!r}: overrides must be a mapping, not {type(given).__name__}")
    try:
        return dict(json.loads(json.dumps(dict(given), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardFailure(f"reward {name!r}: its overrides are no JSON: {error}") from error


def _finite(name: str, value: object) -> float:
    # Numpy and torch scalars are numbers too, and convert through __float__.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise RewardFailure(
            f"reward {name!r} returned {type(value).__name__}; "
            "it must return a float, a bool, a Score, None, or a list with one value per turn"
        )
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        # An array or tensor of more than one element, or an integer beyond all floats.
        raise RewardFailure(f"reward {name!r} returned no single number: {error}") from error
    if not math.isfinite(number):
        raise RewardFailure(f"reward {name!r} returned {number}, which is not finite")
    return number


# ------------------------------------------------------ From the values of all rewards to the score of a rollout
# score = clamp( Σ weight × value  ×  Π gates ). A reward of weight 0 is a metric: it is kept and counts for
# nothing. A gate multiplies, its value must lie in [0, 1]. With gates alone the sum is 1, with metrics alone 0.


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
    """Return the score of a rollout.

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
