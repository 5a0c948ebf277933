"""The statistics of a comparison: intervals that hold the truth as often as they say, and a test that is exact."""

from __future__ import annotations

import math
from itertools import permutations, product
from random import Random
from statistics import fmean

import pytest

from hermes_rl.analysis.compare import compare
from hermes_rl.analysis.record import RolloutSummary
from hermes_rl.errors import UserError
from hermes_rl.runs.statistics import incomplete_beta, paired, sign_test, t_quantile


def played(row: str, index: int, score: float | None, **more: object) -> RolloutSummary:
    said: dict[str, object] = {
        "id": f"{row}:0-{index}", "row_key": row, "group": f"{row}:0", "epoch": 0, "index": index, "attempt": 0,
        "state": "scored" if score is not None else "failed", "score": score, "rewards": {"right": score},
        "stop_reason": "finished", "error": None, "turns": 2,
        "prompt_tokens": 100, "completion_tokens": 10, "cost": None,
        "roles": {},
        "calls": 1, "call_errors": 0, "tools": (), "seconds": {"total": 1.0}, "model": None, "row_digest": row,
        "seat": "", "episode": f"{row}:0", "begin": 0, **more,
    }  # fmt: skip
    return RolloutSummary(**said)  # type: ignore[arg-type]


def run(scores: dict[str, list[float | None]]) -> list[RolloutSummary]:
    return [played(row, index, score) for row, found in scores.items() for index, score in enumerate(found)]


@pytest.mark.parametrize(
    ("probability", "degrees", "tabled"),
    [
        (0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 4, 2.77645), (0.975, 19, 2.09302), (0.975, 100, 1.98397),
        (0.975, 1_000_000, 1.95997), (0.8, 19, 0.86095), (0.995, 10, 3.16927), (0.5, 7, 0.0),
    ],
)  # fmt: skip
def test_t_quantile_matches_published_tables(probability: float, degrees: int, tabled: float) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(tabled, rel=3e-6, abs=1e-9)


def test_the_incomplete_beta_function_has_its_known_values() -> None:
    for x in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert incomplete_beta(1, 1, x) == pytest.approx(x)
        assert incomplete_beta(0.5, 0.5, x) == pytest.approx(2 / math.pi * math.asin(math.sqrt(x)))
        assert incomplete_beta(3, 2, x) == pytest.approx(4 * x**3 - 3 * x**4)


@pytest.mark.parametrize(("fixed", "broken"), [(0, 0), (1, 0), (5, 0), (3, 9), (7, 7), (12, 2)])
def test_the_sign_test_counts_every_outcome(fixed: int, broken: int) -> None:
    count = fixed + broken
    as_far = sum(abs(2 * sum(heads) - count) >= abs(fixed - broken) for heads in product((0, 1), repeat=count))
    assert sign_test(fixed, broken) == as_far / 2**count


def test_the_sign_test_holds_for_very_many_rows() -> None:
    assert sign_test(5_000, 5_000) == 1.0
    assert 0 < sign_test(5_300, 4_700) < 1e-8


def test_paired_difference_is_computed_over_rows() -> None:
    found = paired("x", {"r": [1.0], "s": [0.0, 0.0, 0.0], "t": [0.5]}, {"r": [2.0], "s": [0.0, 3.0], "t": [1.5]})
    assert found is not None
    assert (found.rows, found.a, found.b) == (3, 0.5, pytest.approx(5 / 3))
    error = math.sqrt(((1 - 7 / 6) ** 2 * 2 + (1.5 - 7 / 6) ** 2) / 2 / 3)
    assert found.difference == pytest.approx(7 / 6)
    assert found.high > 7 / 6 + 4.30265 * error, "so few rows may differ by chance as much as they do"
    dealt = [
        (one - other) + (fmean(shared[:2]) - fmean(shared[2:])) + (last - before)
        for one, other in permutations((1.0, 2.0))
        for shared in permutations((0.0, 0.0, 0.0, 0.0, 3.0))
        for last, before in permutations((0.5, 1.5))
    ]
    least = min(value for value in dealt if fmean((other < value) + (other == value) / 2 for other in dealt) > 0.025)
    assert found.high == pytest.approx(7 / 6 - least / 3)
    assert found.detectable == pytest.approx((4.30265 + 1.06066) * error, rel=1e-5)


def test_rows_that_do_not_differ_still_leave_room() -> None:
    same = {str(row): [1.0] for row in range(20)}
    found = paired("score", same, same, (0.0, 1.0))
    assert found is not None
    missed = 1 - 0.025 ** (1 / 20)
    assert (found.low, found.high) == (pytest.approx(-missed), pytest.approx(missed))
    assert paired("seconds", same, same) is not None
    assert paired("seconds", same, same).low is None  # type: ignore[union-attr]
    all_won = paired("score", {row: [0.0] for row in same}, same, (0.0, 1.0))
    assert all_won is not None
    assert all_won.high == pytest.approx(1.0)
    assert all_won.low == pytest.approx(1 - 2 * missed)
    assert not paired("score", {"r": [1.0]}, {"r": [0.0]}, (0.0, 1.0)).beyond_chance  # type: ignore[union-attr]


@pytest.mark.slow
def test_intervals_hold_the_difference_where_rows_come_in_families() -> None:
    """A model that is better at a template is so for all of its rows; by rows alone many intervals miss."""
    chance, pairs, held, by_rows = Random(7), 400, 0, 0
    for _ in range(pairs):
        a: dict[str, list[float]] = {}
        b: dict[str, list[float]] = {}
        family: dict[str, str] = {}
        for number in range(30):
            effect = chance.gauss(0.1, 0.3)
            for member in range(chance.choice((1, 2, 4, 8, 12))):
                key = f"{number}-{member}"
                family[key], a[key] = str(number), [chance.gauss(0, 0.1)]
                b[key] = [a[key][0] + effect + chance.gauss(0, 0.1)]
        difference, alone = paired("score", a, b, family=family), paired("score", a, b)
        assert difference is not None and alone is not None and difference.families == 30
        held += difference.low <= 0.1 <= difference.high  # type: ignore[operator]
        by_rows += alone.low <= 0.1 <= alone.high  # type: ignore[operator]
    assert 0.93 <= held / pairs <= 0.97
    assert by_rows / pairs < 0.75


def test_families_of_one_row_each_are_as_no_families() -> None:
    chance = Random(3)
    a, b = ({str(row): [chance.random()] for row in range(20)} for _ in range(2))
    assert paired("score", a, b, family={row: row for row in a}) == paired("score", a, b)


def test_one_family_says_nothing_about_others() -> None:
    a, b = ({str(row): [score * row % 2.0] for row in range(6)} for score in (1.0, 0.5))
    difference = paired("score", a, b, (0.0, 1.0), family=dict.fromkeys(a, "template"))
    assert difference is not None and difference.low is None


def test_ungraded_rollouts_do_not_count_as_zero_in_compare() -> None:
    a = run({"r": [1.0, 1.0], "s": [0.0, 0.0], "t": [1.0, 1.0], "only a": [1.0]})
    b = run({"r": [None, 1.0], "s": [0.0, 1.0], "t": [None, None], "only b": [1.0]})
    found = compare(a, b)
    assert (found.rows, found.only_a, found.only_b, found.excluded) == (3, 1, 1, 1)
    assert (found.score.rows, found.score.a, found.score.b) == (2, 0.5, 0.75)
    assert (found.ungraded_a, found.ungraded_b) == (0, 3)
    assert found.bounds == (pytest.approx((0.5 + 0.5 + 0) / 3 - 2 / 3), pytest.approx(2.5 / 3 - 2 / 3))
    assert found.passes.difference == found.score.difference


def test_excluded_rollouts_are_not_counted_as_ungraded() -> None:
    found = compare(run({"r": [1.0]}), [played("r", 0, 1.0), played("r", 1, None, state="excluded")])
    assert (found.ungraded_b, found.bounds) == (0, None)


def test_fixed_and_broken_rows_name_rollouts_that_show_it() -> None:
    a = run({"r": [0.0, 0.2, 1.0, 0.0], "s": [1.0, 1.0, 1.0, 0.0], "t": [1.0] * 4})
    b = run({"r": [1.0, 1.0, 1.0, 0.4], "s": [0.5, 0.1, 0.9, 1.0], "t": [1.0] * 4})
    found = compare(a, b)
    (fixed,), (broken,) = found.fixed, found.broken
    assert (fixed.row_key, fixed.a, fixed.b, fixed.of) == ("r", 1, 3, 4)
    assert (fixed.shown_a, fixed.shown_b) == ("r:0-0", "r:0-0")
    assert (broken.a, broken.b, broken.shown_a, broken.shown_b) == (3, 1, "s:0-0", "s:0-1")
    assert found.p == 1.0


def test_passes_are_counted_over_as_many_rollouts_of_each_run() -> None:
    found = compare(run({"r": [1.0]}), run({"r": [1.0, 0.0, 0.0, 0.0]}))
    assert (found.fixed, found.broken) == ((), ())
    assert found.score.difference == -0.75


def test_the_rewards_and_tokens_are_compared_too() -> None:
    a = [played(str(row), 0, 1.0, completion_tokens=10 + row) for row in range(5)]
    b = [played(str(row), 0, 1.0, completion_tokens=30 + 2 * row, rewards={"right": 0.5}) for row in range(5)]
    found = {one.name: one for one in compare(a, b).measures}
    assert (found["reward/right"].difference, found["completion_tokens"].difference) == (-0.5, 22.0)
    assert found["completion_tokens"].beyond_chance
    assert found["turns"].difference == 0
    assert "cost" not in found


def test_costs_are_compared_where_servers_tell_them() -> None:
    a = [played(str(row), 0, 1.0, cost=0.01) for row in range(5)]
    b = [played(str(row), 0, 1.0, cost=0.01 + 0.01 * row) for row in range(5)]
    (found,) = [one for one in compare(a, b).measures if one.name == "cost"]
    assert found.difference == pytest.approx(0.02)


def test_runs_without_a_common_row_are_refused() -> None:
    with pytest.raises(UserError, match="no row in common"):
        compare(run({"r": [1.0]}), run({"s": [1.0]}))
    with pytest.raises(UserError, match="none of them has a score in both"):
        compare(run({"r": [1.0]}), run({"r": [None]}))


def test_worse_is_beyond_chance_and_beyond_the_margin() -> None:
    a, b = run({str(row): [1.0] for row in range(30)}), run({str(row): [float(row % 3 == 0)] for row in range(30)})
    found = compare(a, b)
    assert found.score.high is not None
    assert found.is_significantly_worse()
    assert found.is_significantly_worse(-found.score.high - 1e-9)
    assert not found.is_significantly_worse(-found.score.high)
    assert not compare(b, a).is_significantly_worse()


# ------------------------------------------------------------------------------------ Thousands of pairs of runs
# The truth is known: the chances of a row are drawn so that B's are `effect` above A's on average over all rows that
# could have been drawn. Rollouts of a row share its difficulty and, where they are `correlated`, what this run can do
# on this row.

DESIGNS = [
    (rows, rollouts, correlated, effect)
    for rows, rollouts in ((20, 1), (20, 4), (150, 2))
    for correlated in (False, True)
    for effect in (0.0, 0.15)
]


def pair_of_runs(
    random: Random, rows: int, rollouts: int, correlated: bool, effect: float
) -> list[dict[str, list[float]]]:
    pair: list[dict[str, list[float]]] = [{}, {}]
    for row in range(rows):
        difficulty = random.uniform(0.25, 0.6)
        for samples, more in zip(pair, (0.0, effect), strict=True):
            chance = difficulty + more + (random.uniform(-0.25, 0.25) if correlated else 0.0)
            samples[str(row)] = [float(random.random() < chance) for _ in range(rollouts)]
    return pair


def shares(pairs: int, rows: int, rollouts: int, correlated: bool, effect: float, seed: int) -> tuple[float, float]:
    """How often the interval holds the effect, and how often the test says that there is one."""
    random, held, said = Random(seed), 0, 0
    for _ in range(pairs):
        a, b = (run(one) for one in pair_of_runs(random, rows, rollouts, correlated, effect))  # type: ignore[arg-type]
        found = compare(a, b)
        assert found.score.low is not None
        assert found.score.high is not None
        held += found.score.low <= effect <= found.score.high
        said += found.p <= 0.05
    return held / pairs, said / pairs


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "rollouts", "correlated", "effect"), [DESIGNS[0], DESIGNS[7]])
def test_intervals_hold_the_difference(rows: int, rollouts: int, correlated: bool, effect: float) -> None:
    covered, found = shares(300, rows, rollouts, correlated, effect, seed=1)
    assert 0.91 <= covered <= 0.99
    if effect == 0:
        assert found <= 0.07


@pytest.mark.slow
@pytest.mark.by_turns(2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rows", "rollouts", "correlated", "effect"), DESIGNS)
def test_intervals_hold_the_difference_in_95_of_100_pairs(
    rows: int, rollouts: int, correlated: bool, effect: float
) -> None:
    covered, found = shares(1_000, rows, rollouts, correlated, effect, seed=2)
    assert 0.93 <= covered <= 0.97
    if effect == 0:
        assert found <= 0.05


def test_the_interval_of_a_difference_stays_within_the_scale_of_the_scores() -> None:
    few = paired("score", {"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [0.4]}, (0.0, 1.0))
    assert few is not None and few.low is not None
    assert (round(few.low, 2), few.high) == (-1.0, 1.0)
    other = paired("score", {"a": [0.0], "b": [0.0]}, {"a": [1.0], "b": [0.4]}, (0.0, 5.0))
    assert other is not None and other.low is not None and other.low < -1.0
