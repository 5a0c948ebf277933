"""Examples and advantages: what a trainer gets of a rollout and of a group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Group, Rollout
from tests.rollouts.test_provenance import ROW, rollout


def group(*rollouts: Rollout) -> Group:
    return Group("row:0", ROW, list(rollouts))


def unscored() -> Rollout:
    one = rollout(1, 0.0)
    one.score = None
    return one


def test_a_sequence_becomes_a_prompt_and_a_response_with_a_mask() -> None:
    [example] = rollout(0, 1.0).examples(one=True)
    assert example.prompt_ids == [1, 2]
    assert example.response_ids == [10, 9, 5, 11, 9]
    assert example.mask == [1, 1, 0, 1, 1]
    assert example.logprobs == [-0.5, -0.25, 0.0, -0.5, -0.25]
    assert example.weights == (3, 4)


def test_several_sequences_are_several_examples_and_never_one() -> None:
    two = rollout(0, 1.0, sequences=2)
    assert [example.prompt_ids for example in two.examples()] == [[1, 2], [1, 7]]
    assert [sum(example.mask) for example in two.examples()] == [2, 2]
    with pytest.raises(UserError, match=r"rollout row:0-0: it has 2 sequences and one example is asked for"):
        two.examples(one=True)


def test_a_masked_rollout_is_not_trained_on() -> None:
    one = rollout(0, 1.0)
    one.masked = True
    [example] = one.examples()
    assert example.mask == [0] * 5
    assert example.logprobs == [0.0] * 5


def test_what_is_not_known_is_not_invented() -> None:
    one = rollout(0, 1.0)
    assert one.result is not None
    assert one.sequences is not None
    one.result.replies = []
    one.sequences = [replace(one.sequences[0], sampled=None)]
    [example] = one.examples()
    assert (example.logprobs, example.weights) == (None, (None, None))
    one.sequences = None
    assert one.examples() == []
    with pytest.raises(UserError, match="its tokens are not known"):
        one.examples(one=True)
    half = rollout(0, 1.0, versions=(3, None))  # type: ignore[arg-type]
    assert half.examples()[0].weights == (None, None)


def test_advantages_compare_only_scored_rollouts() -> None:
    of = group(rollout(0, 1.0), unscored(), rollout(2, 0.0), rollout(3, 0.0))
    assert of.advantages("mean") == pytest.approx([2 / 3, None, -1 / 3, -1 / 3])
    assert of.advantages() == pytest.approx([2**0.5, None, -(0.5**0.5), -(0.5**0.5)])
    assert of.advantages("rloo") == pytest.approx([1.0, None, -0.5, -0.5])
    assert of.advantages("none") == [1.0, None, 0.0, 0.0]
    assert group(rollout(0, 0.5), rollout(1, 0.5)).advantages() == [0.0, 0.0]
    assert group(unscored()).advantages() == [None]
    with pytest.raises(UserError, match="normalise is std, mean, rloo, none, not 'max'"):
        of.advantages("max")  # type: ignore[arg-type]


@pytest.mark.parametrize("score", [0.1 + 0.2, 1e99, 1e-99])
def test_equal_scores_of_any_size_have_no_advantage(score: float) -> None:
    of = group(*(rollout(number, score) for number in range(3)))
    assert of.advantages() == of.advantages("mean") == [0.0] * 3
