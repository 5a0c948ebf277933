"""Statistics of scores: means with their intervals, pass@k, and the differences of two runs over the same rows.

Rollouts of one row are not independent of each other, and rows of one family (a template, a repository) may not be
either: every error and interval is over clusters. All of it is implemented in the package, so that an interval has the
same meaning wherever it is shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, variance

CONFIDENCE = 0.95
"""Confidence of every interval."""
UNIT = (0.0, 1.0)
"""The scale of most scores."""
POWER = 0.8
"""Power with which the smallest detectable difference would be found."""

mean = fmean
"""The arithmetic mean; raises `ValueError` if there are no values."""
Samples = Mapping[str, Sequence[float]]
"""A quantity of a run: its values by row."""


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
    """Return the interval of the true mean in 95 of 100 cases, clusters (rows) being independent; None with fewer than
    two.

    Scores between 0 and 1 have Wilson's interval of a share, for as many independent values as would have this mean and
    the clustered error (Korn and Graubard, 1998), with Student's quantile: Student's interval covers far less near the
    ends of the scale. If all rows are alike, it reaches as far as the most rows of another kind that may have been
    missed (see `paired`). Scores on another scale have Student's interval, and none if all rows are alike.
    """
    filled = [cluster for cluster in clusters if cluster]
    error, count = clustered_stderr(filled), len(filled)
    if error is None:
        return None
    values = [value for cluster in filled for value in cluster]
    centre, on_scale = mean(values), UNIT[0] <= min(values) and max(values) <= UNIT[1]
    alike = error <= 1e-9 * max(1.0, abs(centre))
    if alike:
        missed = _missed_chance(count)
        return (centre * (1.0 - missed), centre + missed * (1.0 - centre)) if on_scale else None
    t = t_quantile(0.5 + CONFIDENCE / 2, count - 1)
    if on_scale:
        return share_interval(centre, centre * (1.0 - centre) / error**2, t)
    return centre - t * error, centre + t * error


@lru_cache(maxsize=256)
def share_interval(share: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Return the interval of a share of `count` values (more than 0), after Wilson (1927); by default with 95 %."""
    middle = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - width) / (1 + z * z / count), (middle + width) / (1 + z * z / count)


def _missed_chance(count: int, confidence: float = CONFIDENCE) -> float:
    """Return the maximum chance of another kind if none was among `count` (Clopper and Pearson, 1934)."""
    return 1.0 - math.pow((1.0 - confidence) / 2, 1 / count)


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

    It uses its continued fraction (DLMF 8.17.22), evaluated by Lentz's method as in Numerical Recipes 6.4; the symmetry
    I_x(a, b) = 1 - I_(1-x)(b, a) is used if it converges faster.
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
    """Return the chance that at least one of `k` rollouts drawn from `n` succeeds (Chen et al. 2021, unbiased)."""
    _check_counts(n, successes, k)
    return 1.0 - math.comb(n - successes, k) / math.comb(n, k)


def pass_hat_k(n: int, successes: int, k: int) -> float:
    """pass^k: chance that all of `k` rollouts drawn from `n` succeed (tau-bench, unbiased)."""
    _check_counts(n, successes, k)
    return math.comb(successes, k) / math.comb(n, k)


def ks(n: int) -> list[int]:
    """Return the k worth reporting for `n` rollouts a row: powers of two, and n itself."""
    return sorted({2**power for power in range(n.bit_length()) if 2**power <= n} | {n})


def bounds(scores: Sequence[float], missing: int, span: tuple[float, float]) -> tuple[float, float]:
    """Return the lowest and highest mean that are possible if the `missing` rollouts had been graded within `span`."""
    total, count = math.fsum(scores), len(scores) + missing
    low, high = min(span[0], *scores, span[0]), max(span[1], *scores, span[1])
    return (total + missing * low) / count, (total + missing * high) / count


def _check_counts(n: int, successes: int, k: int) -> None:
    if not (0 <= successes <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= successes <= n and 1 <= k <= n, not {successes=}, {n=}, {k=}")


# ------------------------------------------------------------------------------------------ Two runs, row by row


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity in two runs, over the rows that have it in both: its mean in A and in B, and b - a.

    Attributes:
        families: number of families of these rows; equals the number of rows if each row is its own family.
        low: lower end of the 95 % interval of the difference, or None if it is unknown; likewise `high`.
        detectable: the smallest true difference that this many rows would show in four of five comparisons, or None if
            it is unknown.
    """

    name: str
    rows: int
    families: int
    a: float
    b: float
    difference: float
    low: float | None
    high: float | None
    detectable: float | None

    @property
    def beyond_chance(self) -> bool:
        """True if the interval does not contain 0."""
        return self.low is not None and self.high is not None and not self.low <= 0.0 <= self.high


def paired(
    name: str,
    a: Samples,
    b: Samples,
    span: tuple[float, float] | None = None,
    confidence: float = CONFIDENCE,
    family: Mapping[str, str] | None = None,
) -> Difference | None:
    """Return the difference of a quantity, or None if no row has it in both runs.

    The interval covers two intervals. One is over families of rows, by the jackknife: the change of the difference when
    one of them is omitted (Efron and Stein, 1981); with families of one row each its error is the error of the mean of
    the rows' differences. The other one is by permutation: the differences that occur if the rollouts of each row are
    dealt to the two runs at random. It is valid for any numbers of rollouts and any skew of the values, where the first
    one finds differences between two runs of one model: with one rollout against eight, for example.

    If all rows differ by the same amount, as when none differs, neither gives an interval. The interval then comes from
    the most families of another kind that may have been missed: with n alike, another one differs with a chance below 1
    - 0.025^(1/n), at a confidence of 97.5 % (Clopper and Pearson, 1934), and by no more than `span` allows. Values
    between 0 and 1 differ by 1 at most, and their interval reaches no further.

    Args:
        a, b: values by row of the first and the second run.
        span: the lowest and the highest possible value; None if unknown.
        family: the family of each row; None if each row is its own family.
    """
    common = [row for row in a if a[row] and b.get(row)]
    if not common:
        return None
    before, after = [mean(a[row]) for row in common], [mean(b[row]) for row in common]
    differences = [y - x for x, y in zip(before, after, strict=True)]
    families: dict[str, list[float]] = {}
    for row, difference in zip(common, differences, strict=True):
        families.setdefault(row if family is None else family[row], []).append(difference)
    rows, count, centre = len(common), len(families), mean(differences)
    spread = math.fsum((difference - centre) ** 2 for difference in differences)
    low = high = detectable = None
    if spread > 1e-18 * max(1.0, centre**2) * rows and count > 1:
        without = (
            math.fsum(centre - member for member in members) / (rows - len(members)) for members in families.values()
        )
        error, degrees = math.sqrt((count - 1) / count * math.fsum(change**2 for change in without)), count - 1
        half = t_quantile(0.5 + confidence / 2, degrees) * error
        chance_low, chance_high = _by_chance([(a[row], b[row]) for row in common], confidence)
        low, high = min(centre - half, centre - chance_high), max(centre + half, centre - chance_low)
        if span == UNIT:
            low, high = max(low, -1.0), min(high, 1.0)
        detectable = half + t_quantile(POWER, degrees) * error
    elif span is not None and (count > 1 or rows == 1):
        missed, width = _missed_chance(count, confidence), span[1] - span[0]
        low, high = centre - missed * (width + centre), centre + missed * (width - centre)
    return Difference(name, rows, count, mean(before), mean(after), centre, low, high, detectable)


DEALT = 3_999
"""Number of random redistributions of the rollouts of rows."""
MANY, MANY_VARIED = 1_000, 30
"""Rows from which a sum is approximately normally distributed: rows of one kind with two different values, and all rows
with more.
"""


def _by_chance(rows: Sequence[tuple[Sequence[float], Sequence[float]]], confidence: float) -> tuple[float, float]:
    """Return the lowest and highest mean difference of two runs of one model, except in rare cases.

    `rows` are the values of both runs. The values of each row are exchangeable then, so they are dealt to the two at
    random, again and again, always in the same way; a difference equal to the observed one counts half (Lancaster's
    mid-p, 1961).
    """
    import numpy

    kinds = Counter((len(a), len(b), tuple(sorted((*a, *b)))) for a, b in rows)
    varied = sum(count for (_, _, values), count in kinds.items() if len(set(values)) > 2)
    generator, differences = numpy.random.default_rng(0), numpy.zeros(DEALT)
    spread = largest = 0.0
    for (first, second, values), count in kinds.items():
        low, high, two = values[0], values[-1], len(set(values)) == 2
        largest = max(largest, -low, high)
        if low == high:
            continue
        if count > MANY if two else varied > MANY_VARIED:
            spread += count * variance(values) * (1 / first + 1 / second)
            continue
        if two:
            higher = values.count(high)
            dealt = generator.hypergeometric(higher, first + second - higher, second, (count, DEALT)).sum(axis=0)
            sums = dealt * (high - low) + count * second * low
        else:
            deck = numpy.broadcast_to(numpy.array(values), (DEALT, first + second))
            sums = sum(generator.permuted(deck, axis=1)[:, :second].sum(axis=1) for _ in range(count))
        differences += sums / second - (count * math.fsum(values) - sums) / first
    differences += generator.normal(0.0, math.sqrt(spread), DEALT)
    decimals = 12 - math.ceil(math.log10(largest or 1.0))  # beyond that sums differ by the order of their parts
    unique_differences, times = numpy.unique(numpy.round(differences / len(rows), decimals), return_counts=True)
    below, rare = (numpy.cumsum(times) - times / 2) / DEALT, (1.0 - confidence) / 2
    usual = unique_differences[(below > rare) & (below < 1.0 - rare)]
    return float(usual.min()), float(usual.max())


def sign_test(fixed: int, broken: int) -> float:
    """Return the two-sided p-value of the exact sign test, which is McNemar's exact test with one rollout per row.

    The hypothesis: for each row it is as likely that B passes more often than A as that A passes more often than B.
    So it is where both runs are of one model, whatever a row's difficulty, and however its rollouts depend on each
    other. Rows without a difference say nothing about it. Of `n` rows that differ, the smaller of the two counts is
    then binomial(n, 1/2), and the p-value is twice the chance of so small a count or a smaller one, and at most 1.
    """
    count, fewer = fixed + broken, min(fixed, broken)
    total, term = 0, 1
    for k in range(fewer + 1):
        total += term
        term = term * (count - k) // (k + 1)
    chance: float = 2 * total / 2**count  # integers, so that it is exact for any count
    return min(1.0, chance)
