"""What an evaluation claims is checked against brute force and against the textbook."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.runs.statistics import bounds, clustered_stderr, interval, ks, pass_at_k, pass_hat_k


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_and_pass_hat_k_are_what_drawing_k_of_n_gives(case: tuple[int, int, int]) -> None:
    n, successes, k = case
    rollouts = [True] * successes + [False] * (n - successes)
    draws = list(itertools.combinations(rollouts, k))
    assert pass_at_k(n, successes, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_hat_k(n, successes, k) == pytest.approx(sum(map(all, draws)) / len(draws))


@pytest.mark.parametrize(("n", "successes", "k"), [(3, 4, 1), (3, 1, 4), (3, 1, 0), (3, -1, 1)])
def test_impossible_counts_are_refused(n: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k"):
        pass_at_k(n, successes, k)


def test_the_ks_worth_reporting_are_powers_of_two_and_n() -> None:
    assert ks(1) == [1]
    assert ks(4) == [1, 2, 4]
    assert ks(6) == [1, 2, 4, 6]


def test_clusters_of_one_give_the_usual_standard_error() -> None:
    values = [0.0, 1.0, 1.0, 0.5, 0.25]
    usual = statistics.stdev(values) / math.sqrt(len(values))
    assert clustered_stderr([[value] for value in values]) == pytest.approx(usual)


def test_repeating_each_rollout_of_a_row_does_not_shrink_the_error() -> None:
    once = clustered_stderr([[0.0], [1.0], [1.0], [0.5]])
    assert clustered_stderr([[0.0] * 4, [1.0] * 4, [1.0] * 4, [0.5] * 4]) == pytest.approx(once)


def test_one_row_has_no_standard_error() -> None:
    assert clustered_stderr([[0.0, 1.0]]) is None


def test_bounds_are_the_mean_where_everything_was_graded() -> None:
    assert bounds([0.0, 1.0], 0, (0.0, 1.0)) == (0.5, 0.5)


def test_bounds_take_the_missing_as_worst_and_best() -> None:
    assert bounds([1.0, 1.0], 2, (0.0, 1.0)) == (0.5, 1.0)


def test_bounds_widen_to_scores_outside_of_the_span() -> None:
    assert bounds([-1.0, 2.0], 2, (0.0, 1.0)) == (-0.25, 1.25)


@pytest.mark.parametrize(
    ("rows", "between"),
    [
        ([[0.2], [1.0]], (0.003, 0.999)),
        ([[0.5], [0.6], [0.7]], (0.357, 0.802)),
        ([[-0.2], [1.0]], (-7.224, 8.024)),
        ([[0.2], [1.5]], (-7.409, 9.109)),
        ([[1.0], [1.0]], (0.158, 1.0)),
        ([[1.0]] * 20, (0.832, 1.0)),  # 0.025 ** (1 / 20)
        ([[3.0], [3.0]], None),
        ([[1.0]], None),
        ([], None),
    ],
)
def test_an_interval_stays_within_the_scale_of_the_scores(
    rows: list[list[float]], between: tuple[float, float] | None
) -> None:
    made = interval(rows)
    assert (made if made is None else (round(made[0], 3), round(made[1], 3))) == between
