"""The numbers of a run that its page shows: distributions, endings, failures, tools, phases and rows, as JSON.

Owns what is counted and in how many bars; means and their errors are those of `runs.statistics`. Every
list is bounded, however many rollouts, rewards, tools and rows a run has.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hermes_rl.endings import Ending
from hermes_rl.reading.compare import by_row
from hermes_rl.reading.record import RolloutSummary
from hermes_rl.rollouts.rollout import RolloutState
from hermes_rl.runs.statistics import interval, mean

BARS = 20
"""Bars of a distribution."""
MOST = 100
"""Rewards, tools, causes or rows that are listed."""
SLICES = 40
"""Parts of a run, in the order in which rollouts ended, whose mean score is shown."""


@dataclass(frozen=True)
class Interval:
    """A mean and where the true one lies, as `hermes_rl.runs.statistics.interval` has it; None: not known."""

    mean: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, rollouts: Iterable[RolloutSummary]) -> Interval:
        """Return the mean score of rollouts, with Student's interval over the rows."""
        rows = by_row([rollout for rollout in rollouts if rollout.score is not None])
        scores = [[one.score for one in row if one.score is not None] for row in rows.values()]
        if not scores:
            return cls(None)
        return cls(mean([score for row in scores for score in row]), *(interval(scores) or ()))


def headline(rollouts: Sequence[RolloutSummary], lines: Sequence[RolloutSummary]) -> dict[str, Any]:
    """Return what a list of runs says of one.

    Args:
        rollouts: those that count.
        lines: all of them, failed attempts included.
    """
    score = Interval.of(rollouts)
    return {
        "rollouts": len(rollouts),
        "groups": len({rollout.group for rollout in rollouts}),
        "rows": len({rollout.row_key for rollout in rollouts}),
        "scored": sum(rollout.score is not None for rollout in rollouts),
        "failed": sum(RolloutState(rollout.state).given_up for rollout in rollouts),
        "attempts": len(lines),
        "failed_attempts": sum(RolloutState(line.state).given_up for line in lines),
        "model": next((rollout.model for rollout in rollouts if rollout.model), None),
        "mean": score.mean,
        "low": score.low,
        "high": score.high,
        "tokens": sum(rollout.prompt_tokens + rollout.completion_tokens for rollout in rollouts),
        "cost": math.fsum(costs) if (costs := _costs(rollouts)) else None,
    }


def numbers(rollouts: Sequence[RolloutSummary], lines: Sequence[RolloutSummary]) -> dict[str, Any]:
    """Return all that the page of a run shows beside its rollouts.

    Args:
        rollouts: those that count.
        lines: all of them, failed attempts included.
    """
    return {
        "scores": distribution([rollout.score for rollout in rollouts if rollout.score is not None]),
        "rewards": _rewards(rollouts),
        "spread": _spread(rollouts),
        "endings": _endings(rollouts),
        "failures": _failures(lines),
        "turns": distribution([rollout.turns for rollout in rollouts]),
        "prompt_tokens": distribution([rollout.prompt_tokens for rollout in rollouts]),
        "completion_tokens": distribution([rollout.completion_tokens for rollout in rollouts]),
        "costs": distribution(_costs(rollouts)),
        "spending": _spending(_costs(rollouts)),
        "seconds_spread": distribution([rollout.seconds.get("total", 0.0) for rollout in rollouts]),
        "tools": _tools(rollouts),
        "phases": _phases(rollouts),
        "course": _course(rollouts),
        "by_row": _by_row(rollouts),
    }


def distribution(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the bars of a distribution, with its mean, median and ends; None where there are no values.

    Few different values have a bar each, so that scores of 0 and 1 are not smeared over an axis.
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
    return [{"name": name, **(distribution(found) or {})} for name, found in values.items()]


def _spread(rollouts: Sequence[RolloutSummary]) -> dict[str, Any] | None:
    """Return how much the scores within a group differ: where they do not, a trainer learns nothing from them."""
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.score is not None:
            groups[rollout.group].append(rollout.score)
    several = [scores for scores in groups.values() if len(scores) > 1]
    if not several:
        return None
    bars = distribution([_deviation(scores) for scores in several])
    return {**(bars or {}), "uniform": sum(len(set(scores)) == 1 for scores in several), "groups": len(several)}


def _deviation(scores: Sequence[float]) -> float:
    """Return the standard deviation; that of `statistics` is exact, and fifty times slower."""
    if len(set(scores)) == 1:
        return 0.0
    centre = mean(scores)
    return math.sqrt(math.fsum((score - centre) ** 2 for score in scores) / len(scores))


def _endings(rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    counts = Counter(rollout.ending for rollout in rollouts)
    return [{"name": name, "count": count, **_told(name)} for name, count in counts.most_common(MOST)]


def _told(ending: str) -> dict[str, Any]:
    """Return what an ending means and whose doing it was."""
    try:
        rule = Ending(ending).rule
    except ValueError:
        return {"what": "", "policys": False}
    return {"what": rule.what.replace("`", ""), "policys": rule.policys}


def _failures(lines: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    """Return the causes of failed attempts, replayed ones included, each with its last message."""
    failed = [line for line in lines if RolloutState(line.state).given_up]
    last = {rollout.ending: rollout for rollout in failed}
    counts = Counter(rollout.ending for rollout in failed)
    return [
        {"name": name, "count": count, "last": last[name].error or "", "rollout": last[name].id, **_told(name)}
        for name, count in counts.most_common(MOST)
    ]


def _tools(rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    calls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    users: Counter[str] = Counter()
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


def _course(rollouts: Sequence[RolloutSummary]) -> list[dict[str, Any]]:
    """Return the mean score of parts of the run, in the order in which its rollouts ended."""
    scores = [rollout.score for rollout in rollouts if rollout.score is not None]
    size = max(math.ceil(len(scores) / SLICES), 1)
    parts = [scores[begin : begin + size] for begin in range(0, len(scores), size)]
    return [{"count": len(part), "mean": mean(part)} for part in parts]


def _costs(rollouts: Sequence[RolloutSummary]) -> list[float]:
    """Return what each rollout has cost, in US dollars, as far as it is known."""
    return [rollout.cost for rollout in rollouts if rollout.cost is not None]


def _spending(costs: Sequence[float]) -> list[dict[str, Any]]:
    """Return the cost so far after parts of the run, in the order in which its rollouts ended."""
    size = max(math.ceil(len(costs) / SLICES), 1)
    so_far = list(accumulate(costs))
    return [{"count": end, "cost": so_far[end - 1]} for end in (*range(size, len(costs), size), len(costs)) if end]


def _by_row(rollouts: Sequence[RolloutSummary]) -> dict[str, Any]:
    """Return the rows, those with the lowest mean first, and those that could not be graded before them."""
    rows: dict[str, list[RolloutSummary]] = defaultdict(list)
    for rollout in rollouts:
        rows[rollout.row_key].append(rollout)
    told = []
    for key, played in rows.items():
        scores = [one.score for one in played if one.score is not None]
        told.append(
            {
                "row_key": key,
                "rollouts": len(played),
                "scored": len(scores),
                "mean": mean(scores) if scores else None,
                "least": min(scores, default=None),
                "most": max(scores, default=None),
            }
        )
    told.sort(key=lambda row: (row["mean"] is not None, row["mean"] or 0.0))
    return {"rows": told[:MOST], "count": len(told)}
