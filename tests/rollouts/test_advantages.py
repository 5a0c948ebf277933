"""Estimators give the numbers of their papers, worked out by hand."""

from __future__ import annotations

import pytest

from hermes_rl.rollouts.advantages import ESTIMATORS, discounted_returns, dr_grpo, grpo, rloo, score


def test_estimators_give_what_their_papers_say() -> None:
    # Mean 3, deviations -2, -1, 0, 3; variance (4 + 1 + 0 + 9) / 4 = 3.5.
    scores = [1.0, 2.0, 3.0, 6.0]
    assert grpo(scores) == pytest.approx([-2 / 3.5**0.5, -1 / 3.5**0.5, 0.0, 3 / 3.5**0.5])
    assert dr_grpo(scores) == [-2.0, -1.0, 0.0, 3.0]
    # Less the mean of the others: 1 - 11/3, 2 - 10/3, 3 - 9/3, 6 - 6/3.
    assert rloo(scores) == pytest.approx([-8 / 3, -4 / 3, 0.0, 4.0])
    assert score(scores) == scores


@pytest.mark.parametrize("name", ["std", "mean", "rloo"])
@pytest.mark.parametrize("scores", [[], [0.3], [0.1 + 0.2] * 3, [1e300] * 2, [1e-300] * 5])
def test_equal_scores_have_no_advantage(name: str, scores: list[float]) -> None:
    assert ESTIMATORS[name](scores) == [0.0] * len(scores)


def test_grpo_advantages_are_bounded_for_nearly_equal_scores() -> None:
    advantages = grpo([0.5] * 15 + [0.5 + 1e-12])
    assert max(advantages) <= 15**0.5 + 1e-9


def test_returns_are_discounted_from_the_last_turn_backwards() -> None:
    # 4; 2 + 0.5 * 4 = 4; 1 + 0.5 * 4 = 3.
    assert discounted_returns([1.0, 2.0, 4.0], 0.5) == [3.0, 4.0, 4.0]
    assert discounted_returns([1.0, 2.0, 4.0], 1.0) == [7.0, 6.0, 4.0]
    assert discounted_returns([1.0, 2.0], 0.0) == [1.0, 2.0]
    assert discounted_returns([], 0.9) == []
