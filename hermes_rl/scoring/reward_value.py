"""Define declarations of rewards, their return values, their records, and the combination of all values into a score.

Reward authors write `Score`, records hold `RewardValue`, `interpret` converts one to the other, and `combine` returns
the score of a rollout. `hermes_rl.scoring.grader` calls the rewards.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

from hermes_rl.errors import RewardFailure
from hermes_rl.user_code.messages import DEEPEST, LONGEST_NAME, LONGEST_TEXT, require_score
from hermes_rl.values import LARGEST_NUMBER, is_number

# ------------------------------------------------------------------------------------- Declarations of a reward

Reward = TypeVar("Reward", bound=Callable[..., Any])


def group_only_for(argument: str) -> Callable[[Reward], Reward]:
    """Mark a reward that takes a group, but needs all of its members only if the spec gives this argument.

    Without the argument it is called for each rollout separately, as a group of one.
    """

    def marked(function: Reward) -> Reward:
        function.group_for = argument  # type: ignore[attr-defined]
        return function

    return marked


def in_runner(function: Reward) -> Reward:
    """Mark a reward that never runs in a separate process, because it shares data with other rollouts."""
    function.in_runner = True  # type: ignore[attr-defined]
    return function


def value_range(low: float, high: float, *, written: bool = False) -> Callable[[Reward], Reward]:
    """Declare the minimum and maximum value of a reward, instead of 0 and 1; `range` of a spec overrides it.

    Args:
        low: value if the policy makes the reward fail.
        high: the same if the weight is negative.
        written: the value is a number that a command writes; a number outside the range is invalid.
    """

    def marked(function: Reward) -> Reward:
        function.range, function.written = (low, high), written  # type: ignore[attr-defined]
        return function

    return marked


def requires(condition: str, problem: str) -> Callable[[Reward], Reward]:
    """Declare a condition on a reward's arguments: `validate` and a run reject a row that violates it.

    Args:
        condition: an expression over the arguments, as in templates.
        problem: error message, which may be a template over the arguments.
    """

    def marked(function: Reward) -> Reward:
        others = getattr(function, "requirements", ())
        function.requirements = ((condition, problem), *others)  # type: ignore[attr-defined]
        return function

    return marked


def takes_at_most(
    limit: float | str, imports: tuple[str, ...] = (), prepare: Callable[[], None] | None = None
) -> Callable[[Reward], Reward]:
    """Declare a reward's time limit for any row: a reply that takes it longer gets the lowest value.

    Args:
        limit: seconds, or the name of the argument that contains them.
        imports: modules that it imports when called; its process imports them in advance.
        prepare: called once before processes of this reward are created, which inherit its effects.
    """

    def marked(function: Reward) -> Reward:
        function.limit, function.imports, function.prepare = limit, imports, prepare  # type: ignore[attr-defined]
        return function

    return marked


# ------------------------------------------------------------------------------------------------ Return values

MOST_METRICS, LONGEST_METRIC = 100, 100
"""Maximum number of metrics of one value, of all steps and of all rollouts, and of characters in a name; the metric
`omitted` counts excess ones of one value."""


@dataclass(frozen=True)
class Score:
    """A reward's value with its reason and additional metrics.

    `value` None means "cannot tell": in a weighted reward that is a failure, in a metric the value is omitted.
    `overrides` is sent to the trainer with the rollout: fields of a ScoredDataGroup for one member, such as
    `{"set_advantage_to_zero": True}`.
    """

    value: float | bool | None
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardValue:
    """One reward of one rollout, as recorded.

    `per_turn` has one value per turn if the reward gave per-turn credit; `value` is then their sum. `seconds` is wall
    time; `started_at` is in seconds since 1970, or None if the call was not timed.
    """

    value: float | None
    reason: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    per_turn: tuple[float, ...] | None = None
    seconds: float = 0.0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    started_at: float | None = field(default=None, compare=False)

    def timed(self, seconds: float) -> RewardValue:
        """Return the value of a call that has just ended and took so long."""
        return replace(self, seconds=seconds, started_at=time.time() - seconds)

    def times(self, factor: float, *, turns: bool) -> RewardValue:
        """Return the value multiplied by `factor`; it keeps per-turn credit only if the seat has these `turns`."""
        value = None if self.value is None else self.value * factor
        per_turn = tuple(turn * factor for turn in self.per_turn) if turns and self.per_turn is not None else None
        return replace(self, value=value, per_turn=per_turn)

    def within(self, low: float, high: float) -> RewardValue:
        """Return the value clamped to the range, with the metric `clamped`; per-turn credit is scaled with it."""
        if self.value is None or low <= self.value <= high:
            return self
        value = min(max(self.value, low), high)
        turns = low <= 0 <= high  # otherwise no factor keeps the signs
        scaled = self.times(value / self.value if turns else 0.0, turns=turns)
        return replace(scaled, value=value, metrics={**self.metrics, "clamped": 1.0})

    def record(self) -> dict[str, Any]:
        """Return the JSON form for a record in `rollouts.jsonl`; empty fields are omitted."""
        record: dict[str, Any] = {"value": self.value}
        if self.reason is not None:
            record["reason"] = self.reason
        if self.metrics:
            record["metrics"] = dict(self.metrics)
        if self.per_turn is not None:
            record["per_turn"] = list(self.per_turn)
        if self.overrides:
            record["overrides"] = dict(self.overrides)
        if self.started_at is not None:
            record |= {"started_at": round(self.started_at, 3), "seconds": round(self.seconds, 6)}
        return record


def reward_of(record: Mapping[str, Any]) -> RewardValue:
    """Return a reward's value from a record."""
    per_turn = record.get("per_turn")
    return RewardValue(
        record["value"],
        record.get("reason"),
        dict(record.get("metrics") or {}),
        None if per_turn is None else tuple(per_turn),
        seconds=record.get("seconds", 0.0),
        overrides=dict(record.get("overrides") or {}),
        started_at=record.get("started_at"),
    )


def to_builtin(returned: object, depth: int = DEEPEST) -> Any:
    """Return a reward's return value as plain values, which `of_plain` reads in the calling process.

    Below `depth` levels a value is replaced by its type name, because no valid reward nests so deeply.
    """
    if isinstance(returned, Score) and depth:
        metrics = returned.metrics
        return {
            "value": to_builtin(returned.value, depth - 1),
            "reason": None if returned.reason is None else str(returned.reason)[:LONGEST_TEXT],
            "metrics": {str(key): to_builtin(each, max(0, depth - 2)) for key, each in metrics.items()}
            if isinstance(metrics, Mapping)
            else type(metrics).__name__[:LONGEST_NAME],
            "overrides": dict(returned.overrides) if isinstance(returned.overrides, Mapping) else returned.overrides,
        }
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes) and depth:
        return [to_builtin(each, depth - 1) for each in returned]
    if returned is None or isinstance(returned, bool | int):
        return returned
    if isinstance(returned, str) or not hasattr(returned, "__float__"):
        return {"type": type(returned).__name__[:LONGEST_NAME]}
    return float(returned)


def of_plain(name: str, value: Any) -> object:
    """Return the return value of reward `name` from its plain form.

    Raises:
        RewardFailure: as in `interpret`.
        WireError: `plain` creates no such value.
    """
    require_score(value)
    return _from_plain(name, value)


def _from_plain(name: str, value: Any) -> object:
    if isinstance(value, list):
        return [_from_plain(name, each) for each in value]
    if not isinstance(value, dict):
        return value
    if "type" in value:
        raise _no_value(name, value["type"])
    metrics = value["metrics"]
    if isinstance(metrics, dict):
        metrics = {key: _from_plain(f"{name}.{key}", each) for key, each in metrics.items()}
    return Score(_from_plain(name, value["value"]), value["reason"], metrics, value["overrides"])  # type: ignore[arg-type]


def interpret(name: str, returned: object, seconds: float, turns: int | None = None) -> RewardValue:
    """Convert the return value of reward `name` for one rollout of `turns` model calls (None: not checked).

    Raises:
        RewardFailure: it is not a number, not finite, or a list without one value per turn.
    """
    if isinstance(returned, Score):
        return _value_of_score(name, returned, seconds)
    if returned is None:
        return RewardValue(None, seconds=seconds)
    if isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        if turns is not None and len(returned) != turns:
            raise RewardFailure(f"reward {name!r} returned {len(returned)} values for {turns} turns")
        per_turn = tuple(_finite_number(name, turn) for turn in returned)
        return RewardValue(_finite_number(name, total(per_turn)), per_turn=per_turn, seconds=seconds)
    return RewardValue(_finite_number(name, returned), seconds=seconds)


def total(values: Iterable[float]) -> float:
    """Return the sum, independent of the order; NaN if it is beyond the range of floats."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _value_of_score(name: str, score: Score, seconds: float) -> RewardValue:
    value = None if score.value is None else _finite_number(name, score.value)
    reason = None if score.reason is None else str(score.reason)
    if not isinstance(score.metrics, Mapping):
        raise RewardFailure(f"reward {name!r}: metrics must be a mapping, not {type(score.metrics).__name__}")
    metric_names = [key for key in islice(score.metrics, MOST_METRICS) if len(str(key)) <= LONGEST_METRIC]
    metrics = {str(key): _finite_number(f"{name}.{key}", score.metrics[key]) for key in metric_names}
    if omitted := len(score.metrics) - len(metric_names):
        metrics["omitted"] = float(omitted)
    return RewardValue(value, reason, metrics, seconds=seconds, overrides=_check_overrides(name, score.overrides))


def _check_overrides(name: str, overrides: object) -> dict[str, Any]:
    if not isinstance(overrides, Mapping):
        raise RewardFailure(f"reward {name!r}: overrides must be a mapping, not {type(overrides).__name__}")
    try:
        return dict(json.loads(json.dumps(dict(overrides), allow_nan=False)))
    except (TypeError, ValueError, RecursionError) as error:
        raise RewardFailure(f"reward {name!r}: its overrides cannot be written as JSON: {error}") from error


def _finite_number(name: str, value: object) -> float:
    # Numpy and torch scalars are numbers too, and convert through __float__.
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise _no_value(name, type(value).__name__)
    try:
        float_value = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        # An array or tensor with more than one element, or an integer beyond the range of floats.
        raise RewardFailure(f"reward {name!r} returned no single number: {error}") from error
    if not is_number(float_value):
        raise RewardFailure(
            f"reward {name!r} returned {float_value}, which is not finite, or beyond {LARGEST_NUMBER:g}"
        )
    return float_value


def _no_value(name: str, kind: str) -> RewardFailure:
    return RewardFailure(
        f"reward {name!r} returned {kind}; "
        "it must return a float, a bool, a Score, None, or a list with one value per turn"
    )


# ------------------------------------------------------ From a reward's values per step to its value for the rollout


def of_steps(how: str, values: Sequence[RewardValue]) -> RewardValue:
    """Return the value of a reward that was called after each step of a rollout.

    It has the metrics of the steps, and `step_1`, `step_2`, … with the value of each.

    Args:
        how: `mean` over the steps, in which a missing metric of a step is 0; or `last`, the last step's.
        values: one for each completed step, in order; at least one.
    """
    if len(values) == 1:
        return values[0]
    step_values = [value.value for value in values if value.value is not None]
    counted = values if how == "mean" else values[-1:]
    names = dict.fromkeys(name for value in counted for name in value.metrics)
    metrics = {
        name: total(value.metrics.get(name, 0.0) for value in counted) / len(counted)
        for name in islice(names, MOST_METRICS)
    }
    metrics |= {f"step_{n}": value.value for n, value in enumerate(values, 1) if value.value is not None}
    reasons = [f"step {n}: {value.reason}" for n, value in enumerate(values, 1) if value.reason is not None]
    has_all_values = len(step_values) == len(values)
    return RewardValue(
        (total(step_values) / len(step_values) if how == "mean" else step_values[-1]) if has_all_values else None,
        "; ".join(reasons) or None,
        metrics,
        seconds=total(value.seconds for value in values),
        overrides=values[-1].overrides,
        started_at=values[-1].started_at,
    )


def is_below(minimum: float | Mapping[str, float], values: Mapping[str, RewardValue]) -> bool:
    """Return True if the rewards of a step are below the minimum of the following user message.

    Args:
        minimum: minimum for each reward; or by names of rewards or of their metrics. A missing one counts as below.
        values: the step's rewards by name.

    Raises:
        RewardFailure: a reward returned no value.
    """
    values_by_name = {name: require_value(Weighting(name), value) for name, value in values.items()}
    if not isinstance(minimum, Mapping):
        return any(value < minimum for value in values_by_name.values())
    for value in values.values():
        values_by_name = {**value.metrics, **values_by_name}
    return any(values_by_name.get(name, -math.inf) < threshold for name, threshold in minimum.items())


# ------------------------------------------------------ From the values of all rewards to the score of a rollout
# score = clamp( Σ weight × value  ×  Π gates ), or the product or the minimum of weight × value instead of the sum. A
# reward of weight 0 is a metric: it is recorded and does not count. A gate multiplies; its value must be in [0, 1].
# With gates alone the sum is 1, with metrics alone 0.


@dataclass(frozen=True)
class Weighting:
    """The weight and role of one reward in the score."""

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
    how: str = "sum",
) -> float:
    """Return the score of a rollout; `how` is a key of `COMBINED`.

    Raises:
        RewardFailure: a reward that counts returned no value, a gate is outside [0, 1], or the result is not finite.
    """
    parts: list[float] = []
    gates = 1.0
    for weighting in weightings:
        if not weighting.counts:
            continue
        value = require_value(weighting, values[weighting.name])
        if weighting.gate:
            if not 0.0 <= value <= 1.0:
                raise RewardFailure(f"gate {weighting.name!r} returned {value}; a gate must lie between 0 and 1")
            gates *= value
        else:
            parts.append(weighting.weight * value)
    only_gates = not parts and any(weighting.gate for weighting in weightings)
    score = COMBINED[how](parts) if parts else float(only_gates)
    if not is_number(score):
        parted = ", ".join(map(str, parts))
        raise RewardFailure(f"the {how} of the weighted rewards is not finite, or beyond {LARGEST_NUMBER:g}: {parted}")
    score *= gates
    score = rounded(score)
    return min(max(score, clamp[0]), clamp[1]) if clamp else score


def rounded(score: float) -> float:
    """Return a score rounded to 12 significant digits, so that 0.1 + 0.2 and 0.3 compare equal."""
    return float(f"{score:.12g}")


COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {"sum": total, "product": math.prod, "minimum": min}
"""Functions by value of `score.combine`."""


def require_value(weighting: Weighting, reward: RewardValue) -> float:
    """Return the value of a reward that counts; raise `RewardFailure` if there is none."""
    if reward.value is None:
        reason_suffix = f": {reward.reason}" if reward.reason else ""
        raise RewardFailure(f"reward {weighting.name!r} could not tell (it returned None){reason_suffix}")
    return reward.value
