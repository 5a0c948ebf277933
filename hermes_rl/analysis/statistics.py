"""Numbers on the page of a run: distributions, stop reasons, failures, tools, phases and rows, as JSON.

Owns the selection of quantities and the number of bars; means and their errors come from `runs.statistics`. Every list
is bounded, however many rollouts, rewards, tools and rows a run has.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hermes_rl.analysis.record import RolloutSummary, by_row, scores_of
from hermes_rl.rollouts.rollout import are_uniform
from hermes_rl.runs.statistics import interval, mean
from hermes_rl.servers.base import POLICY
from hermes_rl.servers.usage import Usage
from hermes_rl.stop_reasons import stop_reason_named

BARS = 20
"""Bars of a distribution."""
MOST = 100
"""Maximum number of rewards, tools, causes or rows in a list."""
SLICES = 40
"""Parts of a run, in the order in which rollouts ended, whose mean score is shown."""


@dataclass(frozen=True)
class Interval:
    """A mean and the interval of the true mean, from `hermes_rl.runs.statistics.interval`; None: not known."""

    mean: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, rollouts: Iterable[RolloutSummary]) -> Interval:
        """Return the mean score of rollouts, with its interval over the rows."""
        rows = [scores for row in by_row(rollouts).values() if (scores := scores_of(row))]
        return cls(mean([score for row in rows for score in row]), *(interval(rows) or ())) if rows else cls(None)


def headline(
    rollouts: Sequence[RolloutSummary], lines: Sequence[RolloutSummary], usage: Mapping[str, Usage]
) -> dict[str, Any]:
    """Return the numbers of a run in a list of runs, from the rollouts that count, all records, failed attempts
    included, and the use of models by role.
    """
    score, used = Interval.of(rollouts), Usage()
    for each in usage.values():
        used += each
    return {
        "rollouts": len(rollouts),
        "groups": len({rollout.group for rollout in rollouts}),
        "rows": len({rollout.row_key for rollout in rollouts}),
        "scored": sum(rollout.score is not None for rollout in rollouts),
        "failed": sum(rollout.given_up for rollout in rollouts),
        "attempts": len(lines),
        "failed_attempts": sum(line.given_up for line in lines),
        "model": next((rollout.model for rollout in rollouts if rollout.model), None),
        "mean": score.mean,
        "low": score.low,
        "high": score.high,
        "tokens": usage.get(POLICY, Usage()).tokens,
        "cost": used.cost if used.calls else None,
    }


def numbers(rollouts: Sequence[RolloutSummary], lines: Sequence[RolloutSummary]) -> dict[str, Any]:
    """Return the numbers on the page of a run, without its rollouts, from the ones that count and all records."""
    costs = [rollout.cost for rollout in lines if rollout.cost is not None]
    graded = [rollout for rollout in rollouts if rollout.score is not None]  # as in the metrics of an evaluation
    stop_reasons = Counter(rollout.stop_reason for rollout in rollouts)
    return {
        "scores": distribution(scores_of(rollouts)),
        "rewards": _rewards(rollouts),
        "spread": _spread(rollouts),
        "stop_reasons": [
            {"name": name, "count": count, **_meaning(name)} for name, count in stop_reasons.most_common(MOST)
        ],
        "failures": _failures(lines),
        "turns": distribution([rollout.turns for rollout in graded]),
        "prompt_tokens": distribution([rollout.prompt_tokens for rollout in graded]),
        "completion_tokens": distribution([rollout.completion_tokens for rollout in graded]),
        "costs": distribution(costs),
        # A sum of known costs would look like the whole.
        "spending": [{"count": len(part), "cost": part[-1]} for part in _parts(list(accumulate(costs)), so_far=True)]
        if len(costs) == len(lines)
        else [],
        "seconds_spread": distribution([rollout.total_seconds for rollout in graded]),
        "tools": _tools(rollouts),
        "phases": _phases(lines),
        "course": [{"count": len(part), "mean": mean(part)} for part in _parts(scores_of(rollouts))],
        "by_row": _by_row(rollouts),
    }


def _parts(values: Sequence[float], *, so_far: bool = False) -> Iterator[Sequence[float]]:
    """Yield slices of values in the order in which the rollouts ended; `so_far`: each from the start."""
    size = max(math.ceil(len(values) / SLICES), 1)
    for begin in range(0, len(values), size):
        yield values[0 if so_far else begin : begin + size]


def distribution(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the bars of a distribution, with its mean, median and ends, or None if there are no values.

    If there are few different values, each has a bar, so that scores of 0 and 1 are not smeared over an axis.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    least, most, different = min(values), max(values), Counter(values)
    if len(different) <= BARS:
        bars = [{"from": value, "to": value, "count": different[value]} for value in sorted(different)]
    else:
        width = (most - least) / BARS
        places = Counter(min(int((value - least) / width), BARS - 1) for value in values)
        bars = [
            {"from": least + width * place, "to": least + width * (place + 1), "count": places[place]}
            for place in range(BARS)
        ]
    return {
        "bars": bars,
        "count": len(values),
        "mean": mean(values),
        "median": statistics.median(values),
        "least": least,
        "most": most,
    }


def _rewards(rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            if value is not None and (name in values or len(values) < MOST):
                values.setdefault(name, []).append(value)
    return [{"name": name, **(distribution(known) or {})} for name, known in values.items()]


def _spread(rollouts: Sequence[RolloutSummary]) -> dict[str, Any] | None:
    """Return the spread of the scores within groups: if it is 0, a trainer learns nothing from them."""
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.score is not None:
            groups[rollout.group].append(rollout.score)
    several = [(mean(scores), scores) for scores in groups.values() if len(scores) > 1]
    uniform = [scores for _, scores in several if are_uniform([scores])]
    # `statistics.pstdev` is exact, and fifty times slower.
    deviations = [
        math.sqrt(mean([(score - centre) ** 2 for score in scores]))
        for centre, scores in several
        if not are_uniform([scores])
    ]
    bars = distribution([0.0] * len(uniform) + deviations)
    return None if bars is None else {**bars, "uniform": len(uniform), "groups": len(several)}


def _meaning(stop_reason: str) -> dict[str, Any]:
    """Return the meaning of a stop reason and its cause: the policy or the infrastructure."""
    known = stop_reason_named(stop_reason)
    if known is None:
        return {"what": "", "caused_by_policy": False}
    rule = known.rule
    return {"what": rule.events.replace("`", ""), "caused_by_policy": rule.caused_by_policy}


def _failures(lines: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    """Return the causes of failed attempts, retried ones included, each with its last message."""
    failed = [line for line in lines if line.given_up]
    last = {rollout.stop_reason: rollout for rollout in failed}
    counts = Counter(rollout.stop_reason for rollout in failed)
    return [
        {"name": name, "count": count, "last": last[name].error or "", "rollout": last[name].id, **_meaning(name)}
        for name, count in counts.most_common(MOST)
    ]


def _tools(rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    calls, errors, users = Counter[str](), Counter[str](), Counter[str]()
    for use, count in Counter(rollout.tools for rollout in rollouts).items():
        for name, called, failed in use:
            calls[name] += called * count
            errors[name] += failed * count
            users[name] += count
    named = sorted(users, key=lambda name: (-calls[name], name))[:MOST]
    return [{"name": name, "calls": calls[name], "errors": errors[name], "rollouts": users[name]} for name in named]


def _phases(rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    seconds: dict[str, float] = defaultdict(float)
    for rollout in rollouts:
        for name, value in rollout.seconds.items():
            if name != "total":
                seconds[name] += value
    ordered = sorted(seconds, key=lambda name: -seconds[name])[:MOST]
    return [{"name": name, "seconds": seconds[name], "mean": seconds[name] / len(rollouts)} for name in ordered]


def _by_row(rollouts: Sequence[RolloutSummary]) -> dict[str, Any]:
    """Return the rows in ascending mean score, after the rows that could not be graded."""
    rows = []
    for key, played in by_row(rollouts).items():
        scores = scores_of(played)
        rows.append(
            {
                "row_key": key,
                "rollouts": len(played),
                "scored": len(scores),
                "mean": mean(scores) if scores else None,
                "least": min(scores, default=None),
                "most": max(scores, default=None),
            }
        )
    rows.sort(key=lambda row: (row["mean"] is not None, row["mean"] or 0.0))
    return {"rows": rows[:MOST], "count": len(rows)}
