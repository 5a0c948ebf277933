"""What an evaluation may claim: means with honest errors, pass@k and pass^k, bounds for what was not graded."""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("the mean of nothing")
    return math.fsum(values) / len(values)


def clustered_stderr(clusters: Sequence[Sequence[float]]) -> float | None:
    """Standard error of the mean over all values, where values of one cluster (a row) are not independent.

    The cluster-robust (CR1) estimator: sqrt(G/(G-1) · Σ_g (Σ_i (x_gi - x̄))²) / N. None with fewer than two clusters.
    """
    filled = [cluster for cluster in clusters if cluster]
    if len(filled) < 2:
        return None
    centre = mean([value for cluster in filled for value in cluster])
    total = math.fsum(math.fsum(value - centre for value in cluster) ** 2 for cluster in filled)
    count, size = len(filled), sum(map(len, filled))
    return math.sqrt(count / (count - 1) * total) / size


def pass_at_k(n: int, successes: int, k: int) -> float:
    """Chance that at least one of `k` rollouts drawn from `n` succeeds (Chen et al. 2021, unbiased)."""
    _check(n, successes, k)
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_hat_k(n: int, successes: int, k: int) -> float:
    """pass^k: chance that all of `k` rollouts drawn from `n` succeed (tau-bench, unbiased)."""
    _check(n, successes, k)
    return math.comb(successes, k) / math.comb(n, k)


def ks(n: int) -> list[int]:
    """The k worth reporting for `n` rollouts a row: powers of two, and n itself."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def bounds(scores: Sequence[float], missing: int, span: tuple[float, float]) -> tuple[float, float]:
    """The lowest and highest mean that are possible if the `missing` rollouts had been graded within `span`."""
    total, count = math.fsum(scores), len(scores) + missing
    low, high = min(span[0], *scores, span[0]), max(span[1], *scores, span[1])
    return (total + missing * low) / count, (total + missing * high) / count


def _check(n: int, successes: int, k: int) -> None:
    if not (0 <= successes <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= successes <= n and 1 <= k <= n, not {successes=}, {n=}, {k=}")
