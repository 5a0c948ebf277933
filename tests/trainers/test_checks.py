"""What leaves for a trainer, and what does not."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from hermes_rl.trainers.base import GroupRefused
from hermes_rl.trainers.checks import Checks, TooLong
from tests.env.canned import group

EXACT = {"exact": True, "problems": [], "oldest": 3}


def usable(*lines: dict[str, Any], version: int | None = None, **checks: Any) -> list[dict[str, Any]]:
    return Checks(**{"group_size": 2, **checks}).usable(list(lines), version)


def refused(*lines: dict[str, Any], version: int | None = None, **checks: Any) -> tuple[str, str]:
    with pytest.raises(GroupRefused) as raised:
        usable(*lines, version=version, **checks)
    return raised.value.cause, raised.value.detail


@pytest.mark.parametrize("logprobs", [{}, {"inference_logprobs": None}])
def test_missing_logprobs_become_an_empty_list(logprobs: dict[str, Any]) -> None:
    (line,) = usable(group(0.0, 1.0, **logprobs))
    assert line["inference_logprobs"] == []


@pytest.mark.parametrize("scores", [(1.0,), (0.0, 1.0, 0.5), ()])
def test_a_group_of_the_wrong_size_never_leaves(scores: tuple[float, ...]) -> None:
    cause, detail = refused(group(*scores))
    assert cause == "wrong_size"
    assert "instead of 2 members" in detail
    assert usable(group(0.0, 0.5, 1.0, group_overrides={"group_size": 3}))


def test_unusable_group_does_not_block_the_others() -> None:
    found = usable(group(1.0), group(0.0, 1.0), group(0.5, 1.0))
    assert [line["scores"] for line in found] == [[0.0, 1.0], [0.5, 1.0]]


def test_lines_of_one_group_leave_together_or_not_at_all() -> None:
    first, second = group(0.0, 1.0, layer=0), group(0.0, 1.0, layer=1)
    assert len(usable(first, second)) == 2
    assert refused(first, {**second, "tokens": [[1, 2, 3]]})[0] == "wrong_size"


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_is_not_finite_never_leaves(score: float) -> None:
    assert refused(group(0.0, score))[0] == "not_finite"


def test_every_message_that_is_sent_has_content() -> None:
    (line,) = usable(group(0.0, 1.0, messages=[[{"role": "assistant", "tool_calls": []}]] * 2))
    assert [message["content"] for said in line["messages"] for message in said] == [None] * 2


def test_a_sequence_that_is_too_long_is_said_with_its_length() -> None:
    cause, detail = refused(group(0.0, 1.0), longest=2)
    assert (cause, detail) == ("too_long", "a sequence has 3 tokens, and the trainer takes up to 2")
    assert usable(group(0.0, 1.0), longest=3)


def test_too_long_sequences_are_truncated_or_masked_as_configured() -> None:
    long = group(0.0, 1.0, inference_logprobs=[[1.0, -0.5, -0.25]] * 2)
    long["tokens"] = [[1, 2], [1, 2, 3]]
    long["masks"], long["inference_logprobs"][0] = [[-100, 2], [-100, 2, 3]], [1.0, -0.5]
    counts: Counter[str] = Counter()
    (cut,), (masked,) = (usable(long, longest=2, too_long=TooLong(kind, counts)) for kind in ("truncate", "mask"))
    assert (cut["tokens"], cut["masks"]) == ([[1, 2], [1, 2]], [[-100, 2], [-100, 2]])
    assert cut["inference_logprobs"] == [[1.0, -0.5]] * 2
    assert (masked["tokens"], masked["masks"]) == ([[1, 2], [1]], [[-100, 2], [-100]])
    assert masked["overrides"] == [{}, {"set_advantage_to_zero": True}]
    assert counts == {"truncated": 1, "masked": 1}


def test_teacher_values_are_cut_with_their_sequence() -> None:
    said = {"ref_logprobs": [[1.0, -0.5, -0.25]] * 2, "distill_token_ids": [[[], [2], [3]]] * 2}
    said["distill_logprobs"] = [[[], [-0.5], [-0.25]]] * 2  # type: ignore[list-item]
    long = group(0.0, 1.0, **said)
    (cut,), (masked,) = (usable(long, longest=2, too_long=TooLong(kind, Counter())) for kind in ("truncate", "mask"))
    assert [cut[name] for name in said] == [[[1.0, -0.5]] * 2, [[[], [2]]] * 2, [[[], [-0.5]]] * 2]
    assert [masked[name] for name in said] == [[[1.0]] * 2, [[[]]] * 2, [[[]]] * 2]


def test_a_group_without_tokens_is_refused() -> None:
    cause, detail = refused({**group(0.0, 1.0), "tokens": None, "masks": None})
    assert cause == "no_tokens"
    assert "tokens of its rollouts cannot be known" in detail


def test_a_group_without_a_proof_is_refused_where_exactness_is_asked_for() -> None:
    assert refused(group(0.0, 1.0), exact=True) == ("unproven", "it has no token provenance")
    assert (
        refused(group(0.0, 1.0, provenance={"problems": ["a turn is missing"]}), exact=True)[1] == "a turn is missing"
    )
    assert usable(group(0.0, 1.0, provenance=EXACT), exact=True)


@pytest.mark.parametrize(("version", "fresh"), [(5, True), (6, False), (None, False)])
def test_staleness_is_measured_when_the_group_is_sent(version: int | None, fresh: bool) -> None:
    line = group(0.0, 1.0, provenance=EXACT)
    if fresh:
        assert usable(line, version=version, max_staleness=2)
    else:
        assert refused(line, version=version, max_staleness=2)[0] == "stale"
    checks = Checks(2, max_staleness=2, keep_stale=True)
    assert checks.usable([line], version)
    assert checks.counts == ({} if fresh else {"stale": 1})


def test_uniform_groups_are_refused_if_configured_except_groups_of_one() -> None:
    assert refused(group(1.0, 1.0), uniform=False)[0] == "uniform"
    assert usable(group(1.0), uniform=False, group_size=1)
