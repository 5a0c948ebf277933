"""Intervals hold the truth as often as they say, and comparisons find what is there and hardly anything else."""

from __future__ import annotations

import math

import pytest

from scripts.statistics_tables import LEAST_POWER, PAIRS, coverage, found, pass_error, rating_coverage

pytestmark = pytest.mark.slow
DRAWS = 200


def margin(share: float) -> float:
    """What a share of so many draws may be off by chance: four standard errors."""
    return 4 * math.sqrt(share * (1 - share) / DRAWS)


@pytest.mark.parametrize("rate", [0.5, 0.9])
@pytest.mark.parametrize("rollouts", [1, 4, 8])
def test_the_interval_of_a_mean_holds_it(rate: float, rollouts: int) -> None:
    covered = coverage(100, rollouts, rate, DRAWS)
    assert 0.93 - margin(0.93) <= covered <= 0.98 + margin(0.98)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("rows", "rate"), [(5, 0.5), (20, 0.95), (100, 0.7), (100, 0.99)])
def test_a_model_is_not_worse_than_itself(rows: int, rate: float, pair: tuple[int, int]) -> None:
    assert max(found(rows, pair, rate, DRAWS)) <= 0.03 + margin(0.03)


@pytest.mark.parametrize("pair", LEAST_POWER)
def test_a_drop_is_found(pair: tuple[int, int]) -> None:
    least = LEAST_POWER[pair]
    assert found(100, pair, 0.7, DRAWS, 0.1)[0] >= least - margin(least)


@pytest.mark.parametrize("rollouts", [1, 4, 8])
def test_the_interval_of_a_rating_holds_it(rollouts: int) -> None:
    assert rating_coverage(40, rollouts, DRAWS) >= 0.93 - margin(0.93)


@pytest.mark.parametrize("k", [1, 4])
def test_pass_at_k_is_without_bias_where_grades_are_missing(k: int) -> None:
    assert abs(pass_error(50, 8, k, DRAWS)) < 4 * 0.5 / math.sqrt(50 * DRAWS)
