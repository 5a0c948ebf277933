"""Compute the metrics of an evaluation, by their reported names.

The error of a mean takes the groups of rollouts into account. pass@k and pass^k are unbiased estimates. Rollouts that
were not graded bound the possible mean; they are never counted as 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log10
from statistics import fmean
from typing import Any

from hermes_rl.rollouts.rollout import RolloutState, cost_of
from hermes_rl.runs.statistics import (
    bounds,
    clustered_stderr,
    interval,
    ks,
    mean,
    pass_at_k,
    pass_hat_k,
    share_interval,
)
from hermes_rl.scoring.reward_value import MOST_METRICS, RewardValue, reward_of
from hermes_rl.servers.usage import Usage
from hermes_rl.stop_reasons import StopReason


@dataclass(frozen=True, slots=True)
class Played:
    """Fields of a rollout that metrics need: its record without the messages.

    A rollout without a score was either `excluded`, because the spec drops its stop reason, or it is ungraded. An
    ungraded rollout has a `cause`: the stop reason that prevented grading, which may be the stop reason of another
    member of its group.
    """

    score: float | None
    stop_reason: StopReason
    error: str | None
    rewards: Mapping[str, RewardValue]
    usage: Usage
    turns: int = 0
    calls: int = 0
    call_errors: int = 0
    repaired: int = 0
    """Calls of which an argument was repaired."""
    model: str | None = None
    cost: float | None = None
    """US dollars of all models, or None if the policy's cost is unknown."""
    excluded: bool = False
    cause: StopReason | None = None

    @classmethod
    def from_record(cls, line: Mapping[str, Any]) -> Played:
        """Return the fields from a record of rollouts.jsonl."""
        return cls(
            score=line["score"],
            stop_reason=StopReason(line["stop_reason"]),
            error=line["error"],
            rewards={name: reward_of(record) for name, record in line["rewards"].items()},
            usage=Usage.from_record(line["usage"]),
            cost=cost_of(line["usage"], line.get("roles") or {}),
            turns=line["turns"],
            calls=len(line["tool_calls"]),
            call_errors=len(line["tool_errors"]),
            repaired=sum("repaired" in call for call in line["tool_calls"]),
            model=(line["policy"] or {}).get("model"),
            excluded=line["state"] == RolloutState.EXCLUDED,
            cause=StopReason(line["stop_reason"])
            if line["score"] is None and line["state"] != RolloutState.EXCLUDED
            else None,
        )


COUNT = "eval/reward_count/"
"""Prefix of the metric with the number of rollouts in a mean, if not all graded rollouts have the value."""
COUNT_PASS = "eval/pass_count/"
"""Prefix of the metric with the number of rows in pass@k and pass^k, if not all have k graded rollouts."""
RowRollouts = Sequence[Played]
"""All rollouts of one row."""


def row_of(lines: Iterable[Mapping[str, Any]]) -> list[Played]:
    """Return the rollouts of one row from their records.

    A reward that compares the members of a group needs all of them: a member that finished is ungraded if another one
    failed, and the stop reason of the failed one is the cause.
    """
    played = [Played.from_record(line) for line in lines]
    failed = next((each.cause for each in played if each.cause is not None and not each.cause.graded), None)
    return [
        replace(each, cause=failed or each.cause) if each.cause is not None and each.cause.graded else each
        for each in played
    ]


def metrics_of(
    rows: Sequence[RowRollouts], rollouts_per_row: int, success: float, span: tuple[float, float]
) -> dict[str, float]:
    """Return all metrics; means are over graded rollouts, and `eval/ungraded` is the number of ungraded ones.

    If some were not graded, `eval/mean_reward_lower` and `_upper` bound the mean that grading them could give. pass@k
    and pass^k are means over the rows with at least k graded rollouts; if some rows have fewer, `COUNT_PASS` gives the
    number of rows.
    """
    played = [rollout for row in rows for rollout in row]
    rollouts = [rollout for rollout in played if not rollout.excluded]
    graded = [rollout for rollout in rollouts if rollout.score is not None]
    clusters = [scores_of(row) for row in rows]
    scores = [score for cluster in clusters for score in cluster]
    low, high = bounds(scores, len(rollouts) - len(graded), span) if rollouts else (None, None)
    metrics: dict[str, float | None] = {
        "eval/mean_reward": mean(scores) if scores else None,
        "eval/mean_reward_stderr": clustered_stderr(clusters),
        "eval/mean_reward_lower": low,
        "eval/mean_reward_upper": high,
        "eval/rows": float(len(rows)),
        "eval/rollouts": float(len(rollouts)),
        "eval/ungraded": float(len(rollouts) - len(graded)),
    }
    metrics |= _pass_metrics(clusters, rollouts_per_row, success)
    metrics |= _reward_metrics(graded)
    stop_reasons = Counter(str(rollout.stop_reason) for rollout in played)
    metrics |= {
        f"eval/stop_reason/{stop_reason}": count / len(played) for stop_reason, count in sorted(stop_reasons.items())
    }
    if len(rollouts) < len(played):
        metrics["eval/dropped"] = float(len(played) - len(rollouts))
    metrics |= _usage_metrics(graded)
    return {name: value for name, value in metrics.items() if value is not None}


BY = "eval/by/"
"""Prefix of the metrics of the rows with one value in a column: `eval/by/<column>/<value>/<metric>`."""
_TOLD_BY = ("eval/mean_reward", "eval/mean_reward_stderr", "eval/rows", "eval/ungraded")


def metrics_by(
    rows: Sequence[RowRollouts], column: str, values: Sequence[str], rollouts_per_row: int, success: float
) -> dict[str, float]:
    """Return the mean score, its error, pass@k and pass^k, and the counts, of the rows of each value of a column.

    `values` are what each of the rows has there.
    """
    metrics: dict[str, float] = {}
    for value in sorted(set(values)):
        chosen = [row for row, row_value in zip(rows, values, strict=True) if row_value == value]
        for name, metric in metrics_of(chosen, rollouts_per_row, success, (0.0, 1.0)).items():
            if name in _TOLD_BY or name.startswith("eval/pass"):
                metrics[f"{BY}{column}/{value}/{name.removeprefix('eval/')}"] = metric
    return metrics


BY_SEAT = "eval/seat/"
"""Prefix of the metrics of one of several seats: `eval/seat/<seat>/<metric>`; all others are the first seat's."""


def metrics_by_seat(
    rows: Sequence[Sequence[Mapping[str, Any]]], rollouts_per_row: int, success: float
) -> dict[str, float]:
    """Return the metrics of `metrics_by` for each seat of episodes with several, from the records of all rows.

    A seat that no reward pays, such as a judge's seat, has no score to report.
    """
    metrics: dict[str, float] = {}
    seats: dict[str, list[list[Mapping[str, Any]]]] = {}
    for row in rows:
        for members in zip(*((line, *line.get("others", ())) for line in row), strict=False):
            if "seat" in members[0]:
                seats.setdefault(members[0]["seat"]["name"], []).append(list(members))
    for seat, lines in seats.items():
        paid = any(line["rewards"] for row_records in lines for line in row_records)
        prefixes = (*_TOLD_BY, "eval/pass", "eval/stop_reason") if paid else ("eval/rows", "eval/stop_reason")
        for name, metric in metrics_of([*map(row_of, lines)], rollouts_per_row, success, (0.0, 1.0)).items():
            if name.startswith(prefixes) and not name.endswith(("_lower", "_upper")):
                metrics[f"{BY_SEAT}{seat}/{name.removeprefix('eval/')}"] = metric
    return metrics


RATING = "eval/rating/"
"""Prefix of the metrics of how much stronger the first seat is than an opponent: `eval/rating/<role>`, in Elo, with the
bounds `/low` and `/high` of its 95 % interval.
"""


def ratings(rows: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return the rating of the first seat against each role that played another seat, if there are several opponents.

    A score, from 0 to 1, is the share of a win. The interval of that share is over rows (`statistics.interval`), and a
    share makes 400 points ten to one; it ends at 1,200, the limit that a sample can show.
    """
    scores: dict[str, list[list[float]]] = {}
    for row in rows:
        shares_by_role: dict[str, list[float]] = {}
        for line in (line for line in row if line["score"] is not None):
            for other in line.get("others", ()):
                if other["seat"]["role"] != line["seat"]["role"]:
                    shares_by_role.setdefault(other["seat"]["role"], []).append(min(max(line["score"], 0.0), 1.0))
        for role, shares in shares_by_role.items():
            scores.setdefault(role, []).append(shares)
    rated: dict[str, float] = {}
    for role, clusters in scores.items() if len(scores) > 1 else ():
        won = fmean(share for cluster in clusters for share in cluster)
        low, high = interval(clusters) or share_interval(won, len(clusters))
        for end, share in (("", won), ("/low", low), ("/high", high)):
            share = min(max(share, 0.001), 0.999)
            rated[f"{RATING}{role}{end}"] = 400 * log10(share / (1 - share))
    return rated


def scores_of(row: RowRollouts) -> list[float]:
    return [rollout.score for rollout in row if rollout.score is not None]


def _pass_metrics(clusters: Sequence[Sequence[float]], size: int, success: float) -> dict[str, float]:
    wins = [(len(scores), sum(score >= success for score in scores)) for scores in clusters]
    metrics = {}
    for k in ks(size):
        enough = [(graded, won) for graded, won in wins if graded >= k]
        if enough:
            metrics[f"eval/pass@{k}"] = mean([pass_at_k(graded, won, k) for graded, won in enough])
            metrics[f"eval/pass^{k}"] = mean([pass_hat_k(graded, won, k) for graded, won in enough])
        if len(enough) < len(wins):
            metrics[f"{COUNT_PASS}{k}"] = float(len(enough))
    return metrics


def _reward_metrics(graded: RowRollouts) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    # An agent may name the metrics of a reward, other ones in each rollout.
    names = {name: Counter[str]() for rollout in graded for name in rollout.rewards}
    for rollout in graded:
        for name, reward in rollout.rewards.items():
            names[name].update(reward.metrics.keys())
    kept = {name: {key for key, _ in counts.most_common(MOST_METRICS)} for name, counts in names.items()}
    for rollout in graded:
        for name, reward in rollout.rewards.items():
            extra_metrics = {f"{name}/{key}": value for key, value in reward.metrics.items() if key in kept[name]}
            for key, value in {name: reward.value, **extra_metrics}.items():
                if value is not None:
                    values.setdefault(key, []).append(value)
    means = {f"eval/reward/{name}": mean(numbers) for name, numbers in values.items()}
    return means | {
        f"{COUNT}{name}": float(len(reward_values))
        for name, reward_values in values.items()
        if len(reward_values) < len(graded)
    }


def _usage_metrics(graded: RowRollouts) -> dict[str, float]:
    if not graded:
        return {}
    calls = sum(rollout.calls for rollout in graded)
    errors = sum(rollout.call_errors for rollout in graded)
    repaired = sum(rollout.repaired for rollout in graded)
    costs = [rollout.cost for rollout in graded if rollout.cost is not None]
    return {
        **({"eval/cost": mean(costs)} if len(costs) == len(graded) else {}),
        "eval/turns": mean([float(rollout.turns) for rollout in graded]),
        "eval/tool_calls": calls / len(graded),
        "eval/tool_error_rate": errors / calls if calls else 0.0,
        **({"eval/repaired_call_rate": repaired / calls} if repaired else {}),
        "eval/prompt_tokens": mean([float(rollout.usage.prompt_tokens) for rollout in graded]),
        "eval/completion_tokens": mean([float(rollout.usage.completion_tokens) for rollout in graded]),
    }
