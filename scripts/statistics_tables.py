"""The tables of docs/statistics.md, from simulated runs of which the truth is known.

    python -m scripts.statistics_tables [DRAWS]

Rows differ in how often they are passed: the rate of a row is drawn from a beta distribution with the mean that a table
names, and a sum of its parameters of 2, so that some rows are nearly always passed and some nearly never.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from random import Random
from statistics import fmean

from hermes_rl.runs.metrics import RATING, ratings
from hermes_rl.runs.statistics import interval, paired, pass_at_k

SPREAD = 2.0
"""Sum of the parameters of the beta distribution."""
RATES = (0.5, 0.7, 0.9, 0.99)
ROWS = (5, 20, 100, 200)
ROLLOUTS = (1, 4, 8)
PAIRS = ((1, 1), (1, 8), (8, 1), (4, 4))
LEAST_POWER = {(4, 4): 0.85, (1, 8): 0.50, (1, 1): 0.33}
"""Share of comparisons that find a drop of 0.10 at a pass rate of 0.7 with 100 rows, by the rollouts of each run."""


def rates(random: Random, rows: int, mean: float) -> list[float]:
    """Return the pass rate of each row."""
    return [random.betavariate(mean * SPREAD, (1 - mean) * SPREAD) for _ in range(rows)]


def scores(random: Random, rate: float, rollouts: int) -> list[float]:
    """Return the scores of one row, 0 or 1."""
    return [float(random.random() < rate) for _ in range(rollouts)]


def coverage(rows: int, rollouts: int, mean: float, draws: int, seed: int = 0) -> float:
    """Return the share of runs whose interval holds the true mean score."""
    random, held = Random(seed), 0
    for _ in range(draws):
        low, high = interval([scores(random, rate, rollouts) for rate in rates(random, rows, mean)]) or (math.nan,) * 2
        held += low <= mean <= high
    return held / draws


def found(
    rows: int, rollouts: tuple[int, int], mean: float, draws: int, drop: float = 0.0, seed: int = 0
) -> tuple[float, float]:
    """Return the shares of comparisons that find B worse, and better, than A; in truth it is worse by `drop`."""
    random, worse, better = Random(seed), 0, 0
    for _ in range(draws):
        of_rows = {str(row): rate for row, rate in enumerate(rates(random, rows, mean))}
        a = {row: scores(random, rate, rollouts[0]) for row, rate in of_rows.items()}
        b = {row: scores(random, rate * (1 - drop / mean), rollouts[1]) for row, rate in of_rows.items()}
        difference = paired("score", a, b, (0.0, 1.0))
        if difference is not None and difference.low is not None and difference.high is not None:
            worse, better = worse + (difference.high < 0), better + (difference.low > 0)
    return worse / draws, better / draws


def rating_coverage(rows: int, rollouts: int, draws: int, seed: int = 0) -> float:
    """Return the share of runs whose Elo interval against a rival of equal strength holds 0."""
    random, held, interval_count = Random(seed), 0, 0
    for _ in range(draws):
        lines = [
            [
                {"score": score, "seat": {"role": "policy"}, "others": [{"seat": {"role": f"rival {row % 2}"}}]}
                for score in scores(random, rate, rollouts)
            ]
            for row, rate in enumerate(rates(random, rows, 0.5))
        ]
        rated = ratings(lines)
        for rival in (0, 1):
            low, high = (rated[f"{RATING}rival {rival}/{end}"] for end in ("low", "high"))
            held, interval_count = held + (low <= 0 <= high), interval_count + 1
    return held / interval_count


def pass_error(rows: int, rollouts: int, k: int, draws: int, seed: int = 0) -> float:
    """Return the mean of pass@k less the truth where every tenth rollout has no grade."""
    random, errors = Random(seed), []
    for _ in range(draws):
        of_rows = rates(random, rows, 0.5)
        graded = [[score for score in scores(random, rate, rollouts) if random.random() < 0.9] for rate in of_rows]
        estimates = [pass_at_k(len(row), int(sum(row)), k) for row in graded if len(row) >= k]
        truth = [1 - (1 - rate) ** k for rate, row in zip(of_rows, graded, strict=True) if len(row) >= k]
        errors.append(fmean(estimates) - fmean(truth))
    return fmean(errors)


def tables(draws: int) -> Iterator[str]:
    """Yield the lines of all tables."""
    yield f"Coverage of the interval of a mean, {draws} runs each:\n"
    yield "| rows | rollouts | " + " | ".join(f"pass rate {rate:g}" for rate in RATES) + " |"
    yield "|---" * (2 + len(RATES)) + "|"
    for rows in ROWS:
        for rollouts in ROLLOUTS:
            covered = " | ".join(f"{coverage(rows, rollouts, rate, draws):.3f}" for rate in RATES)
            yield f"| {rows} | {rollouts} | {covered} |"
    yield f"\nShare of comparisons of a model with itself that find B worse / better, {draws} pairs each:\n"
    yield "| rows | rollouts of A and B | " + " | ".join(f"pass rate {rate:g}" for rate in RATES) + " |"
    yield "|---" * (2 + len(RATES)) + "|"
    for rows in ROWS:
        for pair in PAIRS:
            shares = " | ".join("{:.3f} / {:.3f}".format(*found(rows, pair, rate, draws)) for rate in RATES)
            yield f"| {rows} | {pair[0]} and {pair[1]} | {shares} |"
    yield f"\nShare of comparisons that find a drop from 0.7 to 0.6 with 100 rows, {draws} pairs each:\n"
    yield "| rollouts of A and B | found |\n|---|---|"
    for pair in LEAST_POWER:
        yield f"| {pair[0]} and {pair[1]} | {found(100, pair, 0.7, draws, 0.1)[0]:.3f} |"
    yield f"\nCoverage of the Elo interval with 40 rows, {draws} runs each:\n"
    yield "| rollouts | coverage |\n|---|---|"
    for rollouts in ROLLOUTS:
        yield f"| {rollouts} | {rating_coverage(40, rollouts, draws):.3f} |"
    yield f"\nMean error of pass@k with 100 rows of 8 rollouts, {draws} runs each:\n"
    yield "| k | mean error |\n|---|---|"
    for k in (1, 2, 4, 8):
        yield f"| {k} | {pass_error(100, 8, k, draws):+.4f} |"


if __name__ == "__main__":
    for line in tables(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
