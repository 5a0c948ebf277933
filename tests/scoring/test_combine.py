"""The score: weighted sum, gates, clamp."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import RewardFailure
from hermes_rl.scoring.reward_value import RewardValue, Weighting, combine, rounded

Part = tuple[float, float]
"""weight, value"""

small = st.floats(-1e6, 1e6)
parts = st.lists(st.tuples(small, small), max_size=8)
gates = st.lists(st.floats(0, 1), max_size=4)
clamps = st.tuples(small, small).map(lambda pair: (min(pair), max(pair)))


def counts(weighted: list[Part]) -> bool:
    return any(weight for weight, _ in weighted)


def score(weighted: list[Part], gated: list[float] = [], clamp: tuple[float, float] | None = None) -> float:  # noqa: B006
    weightings, values = declared(weighted, gated)
    return combine(weightings, values, clamp)


def declared(weighted: list[Part], gated: list[float]) -> tuple[list[Weighting], dict[str, RewardValue]]:
    weightings = [Weighting(f"w{i}", weight) for i, (weight, _) in enumerate(weighted)]
    weightings += [Weighting(f"g{i}", gate=True) for i in range(len(gated))]
    numbers = [value for _, value in weighted] + gated
    return weightings, {w.name: RewardValue(number) for w, number in zip(weightings, numbers, strict=True)}


def test_the_sum_is_weighted_and_weights_may_be_negative() -> None:
    assert score([(1, 0.5), (2, 0.25), (-0.5, 1)]) == 0.5


@pytest.mark.parametrize(
    ("how", "weighted", "gated", "expected"),
    [
        ("product", [(1, 0.5), (1, 0.5)], [], 0.25),
        ("product", [(2, 0.5), (0, 7.0), (1, 0.5)], [0.5], 0.25),
        ("product", [(1, 0.0), (1, 1.0)], [], 0.0),
        ("minimum", [(1, 0.5), (1, 0.25)], [], 0.25),
        ("minimum", [(1, 0.5), (0, 0.0)], [0.5], 0.25),
        ("minimum", [(0, 1.0)], [], 0.0),
        ("product", [], [0.5], 0.5),
    ],
)
def test_product_or_minimum_replaces_the_sum(
    how: str, weighted: list[Part], gated: list[float], expected: float
) -> None:
    assert combine(*declared(weighted, gated), None, how) == expected


@pytest.mark.parametrize("how", ["product", "minimum"])
def test_those_need_every_reward_and_a_finite_number(how: str) -> None:
    weightings = [Weighting("a"), Weighting("b")]
    with pytest.raises(RewardFailure, match="could not tell"):
        combine(weightings, {"a": RewardValue(1.0), "b": RewardValue(None)}, None, how)
    with pytest.raises(RewardFailure, match="the product of the weighted rewards is not finite"):
        combine(weightings, {"a": RewardValue(1e200), "b": RewardValue(1e200)}, None, "product")


def test_a_weight_is_1_unless_given() -> None:
    assert combine([Weighting("a")], {"a": RewardValue(0.3)}) == 0.3


def test_gates_multiply_the_sum() -> None:
    assert score([(1, 0.5), (1, 0.5)], [0.5, 0.5]) == 0.25
    assert score([(1, 100.0)], [0.0]) == 0.0


def test_gates_alone_are_the_score() -> None:
    assert score([], [0.5, 1.0]) == 0.5


def test_metrics_without_weighted_rewards_score_zero() -> None:
    assert score([(0, 1.0)]) == 0.0
    assert score([]) == 0.0


def test_the_clamp_is_applied_last() -> None:
    assert score([(1, 5.0)], [0.5], (0.0, 1.0)) == 1.0
    assert score([(-1, 5.0)], [1.0], (0.0, 1.0)) == 0.0


@pytest.mark.parametrize("gate", [-0.01, 1.01])
def test_a_gate_outside_of_0_to_1_is_a_failure(gate: float) -> None:
    with pytest.raises(RewardFailure, match="gate 'g0'"):
        score([(1, 1.0)], [gate])


def test_a_weighted_reward_that_cannot_tell_is_a_failure_with_its_reason() -> None:
    with pytest.raises(RewardFailure, match=r"'a' could not tell.*no file"):
        combine([Weighting("a")], {"a": RewardValue(None, "no file")})


def test_a_gate_that_cannot_tell_is_a_failure_even_where_another_is_0() -> None:
    with pytest.raises(RewardFailure, match="'g'"):
        combine([Weighting("z", gate=True), Weighting("g", gate=True)], {"z": RewardValue(0.0), "g": RewardValue(None)})


def test_a_metric_counts_for_nothing_and_may_be_missing() -> None:
    weightings = [Weighting("a"), Weighting("metric", weight=0)]
    assert combine(weightings, {"a": RewardValue(0.5), "metric": RewardValue(None)}) == 0.5
    assert combine(weightings, {"a": RewardValue(0.5), "metric": RewardValue(1e300)}) == 0.5


@pytest.mark.parametrize("weighted", [[(10, 1e308)], [(1, 1e308), (1, 1e308)], [(10, 1e308), (-10, 1e308)]])
def test_a_sum_beyond_all_floats_is_a_failure(weighted: list[Part]) -> None:
    with pytest.raises(RewardFailure, match="not finite"):
        score(weighted, clamp=(0, 1))


@given(parts, gates, st.none() | clamps, st.integers())
def test_the_order_of_the_rewards_does_not_matter(
    weighted: list[Part], gated: list[float], clamp: tuple[float, float] | None, seed: int
) -> None:
    weightings, values = declared(weighted, gated)
    shuffled = Random(seed).sample(weightings, len(weightings))
    assert combine(shuffled, values, clamp) == pytest.approx(combine(weightings, values, clamp), rel=1e-12, abs=1e-300)


@given(parts, gates, clamps)
def test_a_clamped_score_lies_between_its_bounds(
    weighted: list[Part], gated: list[float], clamp: tuple[float, float]
) -> None:
    assert clamp[0] <= score(weighted, gated, clamp) <= clamp[1]


@given(parts.filter(counts), gates)
def test_gates_never_enlarge_and_the_score_is_what_the_formula_says(weighted: list[Part], gated: list[float]) -> None:
    plain = math.fsum(weight * value for weight, value in weighted)
    assert score(weighted) == rounded(plain)
    assert score(weighted, gated) == pytest.approx(plain * math.prod(gated))
    assert abs(score(weighted, gated)) <= abs(rounded(plain))


@pytest.mark.parametrize(
    ("weighted", "same"),
    [([(0.1, 1.0), (0.2, 1.0)], 0.3), ([(0.7, 1.0), (0.1, 1.0)], 0.8), ([(1e99, 1 / 3)] * 3, 1e99)],
)
def test_scores_that_differ_in_the_last_digits_of_a_float_are_equal(weighted: list[Part], same: float) -> None:
    assert score(weighted) == same
