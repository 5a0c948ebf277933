"""The numbers of an evaluation, by the names under which they are reported, and the statistics behind them.

A mean comes with an error that takes the groups of rollouts into account. pass@k and pass^k are estimated without bias.
Rollouts that were not graded bound what the mean could be; they are never counted as 0.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hermes_rl.agent.result import Usage
from hermes_rl.endings import Ending
from hermes_rl.rollouts.rollout import RolloutState, cost_of
from hermes_rl.runs.store import reward_of
from hermes_rl.scoring.value import RewardValue

# ---------------------------------------------------------------------------------------------------- Statistics

CONFIDENCE = 0.95
"""Of every interval."""
UNIT = (0.0, 1.0)
"""The scale of most scores."""


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the mean of nothing")
    return math.fsum(values) / len(values)


def clustered_stderr(clusters: Sequence[Sequence[float]]) -> float | None:
    """Return the standard error of the mean over all values, where values of one cluster (a row) are not independent.

    The cluster-robust (CR1) estimator: sqrt(G/(G-1) · Σ_g (Σ_i (x_gi - x̄))²) / N. None with fewer than two clusters.
    """
    filled = [cluster for cluster in clusters if cluster]
    if len(filled) < 2:
        return None
    centre = mean([value for cluster in filled for value in cluster])
    total = math.fsum(math.fsum(value - centre for value in cluster) ** 2 for cluster in filled)
    count, size = len(filled), sum(map(len, filled))
    return math.sqrt(count / (count - 1) * total) / size


def interval(clusters: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return where the true mean lies in 95 of 100 cases by Student's t, clusters (rows) being independent.

    Rows that are all alike say nothing about how much others differ: then there is no interval. Scores that all lie
    between 0 and 1 are on that scale, and so is their mean.
    """
    error = clustered_stderr(clusters)
    if error is None:
        return None
    values = [value for cluster in clusters for value in cluster]
    centre = mean(values)
    if error <= 1e-9 * max(1.0, abs(centre)):
        return None
    half = t_quantile(0.5 + CONFIDENCE / 2, sum(map(bool, clusters)) - 1) * error
    low, high = centre - half, centre + half
    on_scale = UNIT[0] <= min(values) and max(values) <= UNIT[1]
    return (max(low, UNIT[0]), min(high, UNIT[1])) if on_scale else (low, high)


@lru_cache(maxsize=256)
def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t distribution for a probability of at least one half, by bisection."""
    if not 0.5 <= probability < 1.0 or degrees < 1:
        raise ValueError(
            f"a quantile needs 0.5 <= probability < 1 and a degree of freedom, not {probability}, {degrees}"
        )
    low, high = 0.0, 1.0
    while _t_upper(high, degrees) > 1.0 - probability:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if _t_upper(middle, degrees) > 1.0 - probability else (low, middle)
    return (low + high) / 2


def _t_upper(t: float, degrees: int) -> float:
    """Return P(T > t) for t >= 0: half of I_x(degrees/2, 1/2) at x = degrees / (degrees + t²); A. & S. 26.7.1."""
    return 0.5 * incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t))


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b).

    By its continued fraction (DLMF 8.17.22), evaluated by Lentz's method as in Numerical Recipes 6.4; the symmetry
    I_x(a, b) = 1 - I_(1-x)(b, a) is used where it converges faster.
    """
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - incomplete_beta(b, a, 1.0 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )  # x^a (1-x)^b / B(a, b)
    tiny = 1e-300
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(10_000):
        m = step // 2
        if step == 0:
            numerator = 1.0
        elif step % 2 == 0:
            numerator = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            numerator = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1.0 / (1.0 + numerator * d or tiny)
        c = 1.0 + numerator / c or tiny
        fraction *= c * d
        if abs(1.0 - c * d) < 1e-15:
            break
    return front * (fraction - 1.0) / a


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Chance that at least one of `k` rollouts drawn from `n` succeeds (Chen et al. 2021, unbiased)."""
    _check(n, successes, k)
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_hat_k(n: int, successes: int, k: int) -> float:
    """pass^k: chance that all of `k` rollouts drawn from `n` succeed (tau-bench, unbiased)."""
    _check(n, successes, k)
    return math.comb(successes, k) / math.comb(n, k)


def ks(n: int) -> list[int]:
    """Return the k worth reporting for `n` rollouts a row: powers of two, and n itself."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def bounds(scores: Sequence[float], missing: int, span: tuple[float, float]) -> tuple[float, float]:
    """Return the lowest and highest mean that are possible if the `missing` rollouts had been graded within `span`."""
    total, count = math.fsum(scores), len(scores) + missing
    low, high = min(span[0], *scores, span[0]), max(span[1], *scores, span[1])
    return (total + missing * low) / count, (total + missing * high) / count


def _check(n: int, successes: int, k: int) -> None:
    if not (0 <= successes <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= successes <= n and 1 <= k <= n, not {successes=}, {n=}, {k=}")


# ------------------------------------------------------------------------------------------------------- Metrics


@dataclass(frozen=True, slots=True)
class Played:
    """What counts of a rollout: its record without what was said.

    A rollout without a score was either `left_out`, because the spec drops an ending, or it is ungraded. An ungraded
    one has a `cause`: the ending that kept it from being graded, which may be that of another member of its group.
    """

    score: float | None
    ending: Ending
    error: str | None
    rewards: Mapping[str, RewardValue]
    usage: Usage
    turns: int = 0
    calls: int = 0
    call_errors: int = 0
    model: str | None = None
    cost: float | None = None
    """US dollars of all models; None where nobody tells the policy's."""
    left_out: bool = False
    cause: Ending | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Played:
        """From a line of rollouts.jsonl."""
        return cls(
            score=line["score"],
            ending=Ending(line["ending"]),
            error=line["error"],
            rewards={name: reward_of(record) for name, record in line["rewards"].items()},
            usage=Usage(**line["usage"]),
            cost=cost_of(line["usage"], line.get("roles") or {}),
            turns=line["turns"],
            calls=len(line["tool_calls"]),
            call_errors=len(line["tool_errors"]),
            model=(line["policy"] or {}).get("model"),
            left_out=line["state"] == RolloutState.LEFT_OUT,
            cause=None
            if line["score"] is not None or line["state"] == RolloutState.LEFT_OUT
            else Ending(line["ending"]),
        )


COUNT = "eval/reward_count/"
"""Begins the metric that says over how many rollouts a mean is, where not all graded ones have the value."""
Row = Sequence[Played]
"""All rollouts of one row."""


def row_of(lines: Iterable[Mapping[str, Any]]) -> list[Played]:
    """Return the rollouts of one row from their lines.

    A reward that compares the members of a group needs all of them: a member that ended well is ungraded where another
    one failed, and that one's ending is the cause.
    """
    played = [Played.of(line) for line in lines]
    failed = next((one.cause for one in played if one.cause is not None and not one.cause.graded), None)
    return [
        replace(one, cause=failed or one.cause) if one.cause is not None and one.cause.graded else one for one in played
    ]


def metrics_of(
    rows: Sequence[Row], rollouts_per_row: int, success: float, span: tuple[float, float]
) -> dict[str, float]:
    """All metrics; means are over graded rollouts, `eval/ungraded` says how many there were not.

    Where some were not graded, `eval/mean_reward_lower` and `_upper` bound the mean that grading them could give.
    pass@k and pass^k are means over the rows all of whose rollouts were graded.
    """
    played = [rollout for row in rows for rollout in row]
    rollouts = [rollout for rollout in played if not rollout.left_out]
    graded = [rollout for rollout in rollouts if rollout.score is not None]
    clusters = [scores_of(row) for row in rows]
    scores = [score for cluster in clusters for score in cluster]
    low, high = bounds(scores, len(rollouts) - len(graded), span)
    found: dict[str, float | None] = {
        "eval/mean_reward": mean(scores),
        "eval/mean_reward_stderr": clustered_stderr(clusters),
        "eval/mean_reward_lower": low,
        "eval/mean_reward_upper": high,
        "eval/rows": float(len(rows)),
        "eval/rollouts": float(len(rollouts)),
        "eval/ungraded": float(len(rollouts) - len(graded)),
    }
    found |= _passes(clusters, rollouts_per_row, success)
    found |= _rewards(graded)
    found |= _endings(played)
    if len(rollouts) < len(played):
        found["eval/dropped"] = float(len(played) - len(rollouts))
    found |= _usage(graded)
    return {name: value for name, value in found.items() if value is not None}


BY = "eval/by/"
"""Begins the metrics of those rows that have a value in a column: `eval/by/<column>/<value>/<metric>`."""
_TOLD_BY = ("eval/mean_reward", "eval/mean_reward_stderr", "eval/rows", "eval/ungraded")


def metrics_by(
    rows: Sequence[Row], column: str, values: Sequence[str], rollouts_per_row: int, success: float
) -> dict[str, float]:
    """Return the mean score, its error, pass@k and pass^k, and the counts, of the rows of each value of a column.

    Args:
        rows: the rollouts by row.
        column: the column's name, for the names of the metrics.
        values: what each of the rows has there.
        rollouts_per_row: as planned.
        success: score from which a rollout counts as solved.
    """
    found: dict[str, float] = {}
    for value in sorted(set(values)):
        chosen = [row for row, own in zip(rows, values, strict=True) if own == value]
        for name, number in metrics_of(chosen, rollouts_per_row, success, (0.0, 1.0)).items():
            if name in _TOLD_BY or name.startswith("eval/pass"):
                found[f"{BY}{column}/{value}/{name.removeprefix('eval/')}"] = number
    return found


def scores_of(row: Row) -> list[float]:
    return [rollout.score for rollout in row if rollout.score is not None]


def _passes(clusters: Sequence[Sequence[float]], size: int, success: float) -> dict[str, float]:
    whole = [scores for scores in clusters if len(scores) == size]
    if not whole:
        return {}
    wins = [sum(score >= success for score in scores) for scores in whole]
    found = {}
    for k in ks(size):
        found[f"eval/pass@{k}"] = mean([pass_at_k(size, won, k) for won in wins])
        found[f"eval/pass^{k}"] = mean([pass_hat_k(size, won, k) for won in wins])
    return found


def _rewards(graded: Row) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for rollout in graded:
        for name, reward in rollout.rewards.items():
            numbers = {
                name: reward.value,
                **{f"{name}/{key}": value for key, value in reward.metrics.items()},
            }
            for key, value in numbers.items():
                if value is not None:
                    values.setdefault(key, []).append(value)
    partial = {name: len(found) for name, found in values.items() if len(found) < len(graded)}
    means = {f"eval/reward/{name}": mean(found) for name, found in values.items()}
    return means | {f"{COUNT}{name}": float(count) for name, count in partial.items()}


def _endings(rollouts: Row) -> dict[str, float]:
    counts = Counter(str(rollout.ending) for rollout in rollouts)
    return {f"eval/ending/{ending}": count / len(rollouts) for ending, count in sorted(counts.items())}


def _usage(graded: Row) -> dict[str, float]:
    if not graded:
        return {}
    calls = sum(rollout.calls for rollout in graded)
    errors = sum(rollout.call_errors for rollout in graded)
    costs = [rollout.cost for rollout in graded if rollout.cost is not None]
    return {
        **({"eval/cost": mean(costs)} if len(costs) == len(graded) else {}),
        "eval/turns": mean([float(rollout.turns) for rollout in graded]),
        "eval/tool_calls": calls / len(graded),
        "eval/tool_error_rate": errors / calls if calls else 0.0,
        "eval/prompt_tokens": mean([float(rollout.usage.prompt_tokens) for rollout in graded]),
        "eval/completion_tokens": mean([float(rollout.usage.completion_tokens) for rollout in graded]),
    }
