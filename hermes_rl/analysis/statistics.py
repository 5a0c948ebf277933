"""Numbers on the page of a run, as JSON: how good it is, the parts of the mean, when it changed, and its cost.

Owns the selection of quantities and the number of bars; means and their errors come from `runs.statistics`, causes from
`analysis.findings`. Every list is bounded, however many rollouts, rewards, tools and rows a run has.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.analysis.findings import Categories, Scoring, groups_of_rows
from hermes_rl.analysis.record import RolloutSummary, by_row, scores_of
from hermes_rl.rollouts.rollout import are_uniform
from hermes_rl.runs.statistics import interval, mean
from hermes_rl.servers.base import POLICY
from hermes_rl.servers.usage import Usage
from hermes_rl.stop_reasons import stop_reason_named

BARS = 20
"""Bars of a distribution."""
MAX_LISTED = 100
"""Maximum number of rewards, tools or causes in a list."""
PARTS = 12
"""Parts of a run of one epoch, in the order in which rollouts ended."""
DOTS, BINS = 1_500, 96
"""Maximum rollouts that are drawn one by one, and steps of the picture of rollouts in flight."""
MAX_BREAKDOWN_COLUMNS = 4
"""Columns of the rows by which the mean score is broken down."""
DRAWN_PHASES = ("queue", "generation", "tools", "sandbox", "rewards")
"""Phases of a rollout that are drawn, in their order."""
SLOWEST = 0.95
"""Quantile of the time from which rollouts count as slow."""

Rollouts = Sequence[RolloutSummary]


@dataclass(frozen=True)
class Interval:
    """A mean and the interval of the true mean, from `hermes_rl.runs.statistics.interval`; None: not known."""

    mean: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def from_rollouts(cls, rollouts: Iterable[RolloutSummary]) -> Interval:
        """Return the mean score of rollouts, with its interval over the rows."""
        rows = [scores for row in by_row(rollouts).values() if (scores := scores_of(row))]
        return cls(mean([score for row in rows for score in row]), *(interval(rows) or ())) if rows else cls(None)


def headline(rollouts: Rollouts, lines: Rollouts, usage: Mapping[str, Usage], success: float) -> dict[str, Any]:
    """Return the numbers of a run in a list of runs.

    Args:
        rollouts: the rollouts that count.
        lines: all records, failed attempts included.
        usage: use of models by role.
        success: score from which a rollout passes.
    """
    score, used = Interval.from_rollouts(rollouts), Usage()
    for each in usage.values():
        used += each
    stopped = Counter(rollout.stop_reason for rollout in rollouts)
    return {
        "rollouts": len(rollouts),
        "groups": len({rollout.group for rollout in rollouts}),
        "rows": len({rollout.row_key for rollout in rollouts}),
        "scored": sum(rollout.score is not None for rollout in rollouts),
        "passed": sum(rollout.passes(success) for rollout in rollouts),
        "finished": sum(count for reason, count in stopped.items() if _stop_meaning(reason)["natural"]),
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


def numbers(rollouts: Rollouts, lines: Rollouts, scoring: Scoring, categories: Categories) -> dict[str, Any]:
    """Return the statistics on the page of a run; the rollouts themselves are not included.

    Args:
        rollouts: the rollouts that count.
        lines: all records, failed attempts included.
        scoring: settings of the run.
        categories: short values of the columns of each row, by its key.
    """
    graded = [rollout for rollout in rollouts if rollout.score is not None]  # as in the metrics of an evaluation
    rewards = _reward_statistics(rollouts)
    return {
        "composition": _score_composition(graded, scoring),
        "solved_rows": sum(any(map(scoring.passes, row)) for row in by_row(graded).values()),
        "uneven": _uneven_groups(rollouts),
        "columns": _means_by_column(graded, categories),
        **_over_time(graded, [reward["name"] for reward in rewards if reward["least"] != reward["most"]]),
        "scores": distribution(scores_of(rollouts)),
        "rewards": rewards,
        "stop_reasons": _stop_reasons(rollouts),
        "failures": _failure_causes(lines),
        "tools": _tool_statistics(rollouts),
        "times": _phase_times(rollouts),
        "spent": _use_per_solution(graded, scoring),
        "flight": _in_flight(lines),
    }


def distribution(values: Sequence[float]) -> dict[str, Any] | None:
    """Return the bars of a distribution, with its mean, median and ends, or None if there are no values.

    If there are few different values, each has a bar, so that scores of 0 and 1 are not smeared over an axis.
    """
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    lowest, highest, different = min(values), max(values), Counter(values)
    if len(different) <= BARS:
        bars = [{"from": value, "to": value, "count": different[value]} for value in sorted(different)]
    else:
        width = (highest - lowest) / BARS
        bar_counts = Counter(min(int((value - lowest) / width), BARS - 1) for value in values)
        bars = [
            {"from": lowest + width * bar, "to": lowest + width * (bar + 1), "count": bar_counts[bar]}
            for bar in range(BARS)
        ]
    return {
        "bars": bars,
        "count": len(values),
        "mean": mean(values),
        "median": statistics.median(values),
        "least": lowest,
        "most": highest,
    }


def _reward_statistics(rollouts: Rollouts) -> list[dict[str, Any]]:
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.rewards.items():
            if value is not None and math.isfinite(value) and (name in values or len(values) < MAX_LISTED):
                values.setdefault(name, []).append(value)
    return [{"name": name, **(distribution(reward_values) or {})} for name, reward_values in values.items()]


def _score_composition(graded: Rollouts, scoring: Scoring) -> dict[str, Any] | None:
    """Return the mean value of each reward with its weight, and the points that gates and clamps take from their sum;
    None if the run does not record its weights.
    """
    if scoring.weights is None or not graded:
        return None
    parts: list[dict[str, Any]] = []
    for name, weight in list(scoring.weights.items())[:MAX_LISTED]:
        values = [value for each in graded if (value := each.rewards.get(name)) is not None]
        if values and weight != 0:
            parts.append({"name": name, "weight": weight, "mean": mean(values)})
    total = math.fsum(part["weight"] * part["mean"] for part in parts if part["weight"] is not None)
    only_gates = all(part["weight"] is None for part in parts)
    return {"parts": parts, "taken": (1.0 if only_gates else total) - mean(scores_of(graded))}


def _uneven_groups(rollouts: Rollouts) -> list[int]:
    """Return the number of groups whose scores differ, from which a trainer learns, and of groups of several scores."""
    groups: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.score is not None:
            groups[rollout.group].append(rollout.score)
    several = [scores for scores in groups.values() if len(scores) > 1]
    return [sum(not are_uniform([scores]) for scores in several), len(several)]


def _means_by_column(graded: Rollouts, categories: Categories) -> list[dict[str, Any]]:
    """Return the mean score by value of each column that groups the rows, the lowest first."""
    rows, columns = by_row(graded), list[dict[str, Any]]()
    groups = groups_of_rows(rows, categories)
    for column in sorted(groups, key=lambda column: len(groups[column]))[:MAX_BREAKDOWN_COLUMNS]:
        values: list[dict[str, Any]] = []
        for value, keys in groups[column].items():
            scores = [score for key in keys for score in scores_of(rows[key])]
            values.append({"value": value, "rollouts": len(scores), "mean": mean(scores)})
        columns.append({"name": column, "values": sorted(values, key=lambda each: each["mean"])})
    return columns


def _over_time(graded: Rollouts, rewards: Sequence[str]) -> dict[str, Any]:
    """Return the mean score and rewards by epoch, or by part of a run of one epoch; and single rollouts as dots."""
    epochs: dict[int, list[RolloutSummary]] = defaultdict(list)
    for rollout in graded:
        epochs[rollout.epoch].append(rollout)
    if len(epochs) > 1:
        parts = [(f"epoch {epoch}", epochs[epoch]) for epoch in sorted(epochs)]
        parts = parts[:: math.ceil(len(parts) / (2 * PARTS))]
    else:
        size = max(math.ceil(len(graded) / PARTS), 1)
        slices = [graded[start : start + size] for start in range(0, len(graded), size)]
        parts = [(f"{start * size + 1}–{start * size + len(part)}", list(part)) for start, part in enumerate(slices)]
    steps, dots = [], []
    every = max(math.ceil(len(graded) / DOTS), 1)
    for part_index, (label, part) in enumerate(parts):
        score = Interval.from_rollouts(part)
        versions = {each.version for each in part} - {None}
        means = {
            name: mean(values)
            for name in rewards
            if (values := [value for each in part if (value := each.rewards.get(name)) is not None])
        }
        step = {"label": label, "count": len(part), "mean": score.mean, "low": score.low, "high": score.high}
        weights = "–".join(map(str, dict.fromkeys((min(versions), max(versions))))) if versions else ""  # type: ignore[type-var]
        steps.append({**step, "weights": weights, "rewards": means})
        dots += [[part_index, round(each.score or 0.0, 4), each.id] for each in part[::every]]
    return {"steps": steps, "dots": dots}


def _stop_meaning(reason: str) -> dict[str, Any]:
    """Return the meaning of a stop reason, its cause (the policy or the infrastructure), and its `natural` flag."""
    stop_reason = stop_reason_named(reason)
    if stop_reason is None:
        return {"what": "", "caused_by_policy": False, "natural": False}
    return {
        "what": stop_reason.rule.events.replace("`", ""),
        "caused_by_policy": stop_reason.rule.caused_by_policy,
        "natural": stop_reason.finished_naturally,
    }


def _stop_reasons(rollouts: Rollouts) -> list[dict[str, Any]]:
    stopped: dict[str, list[RolloutSummary]] = defaultdict(list)
    for rollout in rollouts:
        stopped[rollout.stop_reason].append(rollout)
    reasons = []
    for reason in sorted(stopped, key=lambda reason: -len(stopped[reason]))[:MAX_LISTED]:
        scores = scores_of(stopped[reason])
        score = mean(scores) if scores else None
        reasons.append({"name": reason, "count": len(stopped[reason]), "mean": score, **_stop_meaning(reason)})
    return reasons


def _failure_causes(lines: Rollouts) -> list[dict[str, Any]]:
    """Return the causes of failed attempts, retried ones included, each with its last message."""
    failed = [line for line in lines if line.given_up]
    last = {rollout.stop_reason: rollout for rollout in failed}
    counts = Counter(rollout.stop_reason for rollout in failed)
    return [
        {"name": name, "count": count, "last": last[name].error or "", "rollout": last[name].id, **_stop_meaning(name)}
        for name, count in counts.most_common(MAX_LISTED)
    ]


def _tool_statistics(rollouts: Rollouts) -> list[dict[str, Any]]:
    calls, errors, users = Counter[str](), Counter[str](), Counter[str]()
    for use, count in Counter(rollout.tools for rollout in rollouts).items():
        for name, called, failed in use:
            calls[name] += called * count
            errors[name] += failed * count
            users[name] += count
    tool_names = sorted(users, key=lambda name: (-calls[name], name))[:MAX_LISTED]
    return [
        {"name": name, "calls": calls[name], "errors": errors[name], "rollouts": users[name]} for name in tool_names
    ]


def _phase_times(rollouts: Rollouts) -> list[dict[str, Any]]:
    """Return the seconds by phase: of all rollouts together, of the median one, and means of slow and of cut ones."""
    timed = sorted((each for each in rollouts if each.total_seconds > 0), key=lambda each: each.total_seconds)
    if not timed:
        return []
    slow = timed[int(SLOWEST * len(timed)) :]
    cut: dict[str, list[RolloutSummary]] = defaultdict(list)
    for rollout in timed:
        if not _stop_meaning(rollout.stop_reason)["natural"]:
            cut[rollout.stop_reason].append(rollout)
    kinds = [("all rollouts", timed, 1), ("median", [timed[len(timed) // 2]], 1), ("slowest 5 %", slow, len(slow))]
    kinds += [(reason, each, len(each)) for reason, each in sorted(cut.items(), key=lambda item: -len(item[1]))[:4]]
    return [
        {
            "name": name,
            "count": len(each),
            "total": math.fsum(rollout.total_seconds for rollout in each) / parts,
            "phases": [
                math.fsum(rollout.seconds.get(phase, 0.0) for rollout in each) / parts for phase in DRAWN_PHASES
            ],
        }
        for name, each, parts in kinds
    ]


def _use_per_solution(graded: Rollouts, scoring: Scoring) -> dict[str, Any] | None:
    """Return the token use and the cost of a solved rollout, or None if no tokens were counted."""
    prompt, completion = (
        sum(getattr(each, name) for each in graded) for name in ("prompt_tokens", "completion_tokens")
    )
    if not prompt + completion:
        return None
    generating = math.fsum(each.seconds.get("generation", 0.0) for each in graded)
    unsolved = sum(each.tokens for each in graded if not scoring.passes(each))
    costs = [each.cost for each in graded]
    total_cost = math.fsum(cost for cost in costs if cost is not None) if None not in costs else None
    solved = sum(map(scoring.passes, graded))
    return {
        "prompt": prompt,
        "completion": completion,
        "median": statistics.median(each.tokens for each in graded),
        "per_second": completion / generating if generating else None,
        "unsolved": unsolved / (prompt + completion),
        "cost": total_cost,
        "per_solved": total_cost / solved if total_cost and solved else None,
    }


def _in_flight(lines: Rollouts) -> dict[str, Any] | None:
    """Return the rollouts in flight over the time of a run, by phase; None if their starts were not recorded.

    A rollout counts for each phase by the share of its time that the phase took: only sums are in the index.
    """
    timed = [line for line in lines if line.started_at is not None and line.total_seconds > 0]
    if len(timed) < 2:
        return None
    first = min(line.started_at or 0.0 for line in timed)
    last = max((line.started_at or 0.0) + line.total_seconds for line in timed)
    width = (last - first) / BINS
    bins = [[0.0] * len(DRAWN_PHASES) for _ in range(BINS)]
    for line in timed:
        start = (line.started_at or 0.0) - first
        phases = [line.seconds.get(phase, 0.0) for phase in DRAWN_PHASES]
        shares = (
            [seconds / sum(phases) for seconds in phases] if sum(phases) else [1.0, *[0.0] * (len(DRAWN_PHASES) - 1)]
        )
        for step in range(int(start / width), min(int((start + line.total_seconds) / width) + 1, BINS)):
            overlap = min(start + line.total_seconds, (step + 1) * width) - max(start, step * width)
            for phase, share in enumerate(shares):
                bins[step][phase] += share * max(overlap, 0.0) / width
    failed = [(line.started_at or 0.0) - first + line.total_seconds for line in timed if line.given_up]
    return {
        "seconds": last - first,
        "most": max(map(sum, bins)),
        "bins": [[round(value, 3) for value in each] for each in bins],
        "failed": failed[:MAX_LISTED],
    }
