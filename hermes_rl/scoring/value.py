"""What a reward may return, and what is kept of it.

Owns `Score` (what reward authors write) and `RewardValue` (what records hold), and the rules that turn one
into the other. Calling rewards is `hermes_rl.scoring.call`; combining them is `hermes_rl.scoring.combine`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.errors import RewardFailure


@dataclass(frozen=True)
class Score:
    """A reward's value with the reason for it and further numbers worth keeping.

    `value` None means "cannot tell": in a weighted reward that is a failure, in a metric it is left out.
    """

    value: float | bool | None
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


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

    def record(self) -> dict[str, Any]:
        """The JSON form of a line in `rollouts.jsonl`; what is empty is left out."""
        record: dict[str, Any] = {"value": self.value}
        if self.reason is not None:
            record["reason"] = self.reason
        if self.metrics:
            record["metrics"] = dict(self.metrics)
        if self.per_turn is not None:
            record["per_turn"] = list(self.per_turn)
        return record


def interpret(name: str, returned: object, seconds: float) -> RewardValue:
    """Read what the reward `name` returned for one rollout.

    Raises:
        RewardFailure: it is no number, or not finite.
    """
    if isinstance(returned, Score):
        value = None if returned.value is None else _finite(name, returned.value)
        metrics = {key: _finite(f"{name}.{key}", number) for key, number in returned.metrics.items()}
        return RewardValue(value, returned.reason, metrics, seconds=seconds)
    if returned is None:
        return RewardValue(None, seconds=seconds)
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        turns = tuple(_finite(name, turn) for turn in returned)
        return RewardValue(math.fsum(turns), per_turn=turns, seconds=seconds)
    return RewardValue(_finite(name, returned), seconds=seconds)


def _finite(name: str, value: object) -> float:
    # Numpy and torch scalars are numbers too, and convert through __float__.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise RewardFailure(
            f"reward {name!r} returned {type(value).__name__}; "
            "it must return a float, a bool, a Score, None, or a list with one value per turn"
        )
    number = float(value)
    if not math.isfinite(number):
        raise RewardFailure(f"reward {name!r} returned {number}, which is not finite")
    return number
