"""What a reward may return, and that nothing else ever becomes a number."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.errors import RewardFailure
from hermes_rl.plugins import Code, load_object
from hermes_rl.scoring.reward_function import RewardFunction, call_reward
from hermes_rl.scoring.reward_value import RewardValue, Score, interpret, of_plain
from hermes_rl.user_code.wire import from_json


def read(returned: object, turns: int | None = None) -> RewardValue:
    return interpret("mine", returned, 0.5, turns)


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (0.25, 0.25),
        (1, 1.0),
        (True, 1.0),
        (False, 0.0),
        (-3, -3.0),
        (Fraction(1, 4), 0.25),
        (Decimal("0.5"), 0.5),
        (np.float32(0.5), 0.5),
        (np.array(0.5), 0.5),
    ],
)
def test_numbers_of_every_kind_are_values(returned: object, value: float) -> None:
    assert read(returned) == RewardValue(value, seconds=0.5)


@pytest.mark.parametrize(
    "returned",
    [
        math.nan,
        math.inf,
        -math.inf,
        1.7e308,
        [1.7e308],
        Score(1.0, metrics={"m": -1e200}),
        Decimal("NaN"),
        10**400,
        "1",
        b"1",
        {},
        object(),
        1j,
        np.array([1.0, 2.0]),
        iter([1]),
    ],
)
def test_reward_that_is_not_a_finite_number_is_a_reward_failure(returned: object) -> None:
    with pytest.raises(RewardFailure, match="'mine"):
        read(returned)


@pytest.mark.parametrize(
    "message",
    [
        *("Infinity", "-Infinity", "NaN", "1e999", "1" + "0" * 400, "[0.0, NaN]", "[1e999, -1e999]"),
        '{"value": Infinity, "reason": null, "metrics": {}, "overrides": {}}',
        '{"value": [NaN], "reason": null, "metrics": {}, "overrides": {}}',
        '{"value": 1.0, "reason": null, "metrics": {"loss": -Infinity}, "overrides": {}}',
        '{"value": 1.0, "reason": null, "metrics": {"loss": [NaN]}, "overrides": {}}',
        '{"value": 1.0, "reason": null, "metrics": {}, "overrides": {"a": [1e999]}}',
    ],
)
def test_a_number_in_a_message_of_a_process_must_be_finite(message: str) -> None:
    with pytest.raises(RewardFailure, match="'mine"):
        read(of_plain("mine", from_json(message.encode())))


NOT_FINITE = """
from hermes_rl import Score
inf = float("inf")

def value(): return inf
def credit(): return [0.0, -inf]
def score(): return Score(inf - inf)
def metric(): return Score(1.0, metrics={"loss": inf})
def overrides(): return Score(1.0, overrides={"a": inf})
"""


@pytest.mark.parametrize("name", ["value", "credit", "score", "metric", "overrides"])
async def test_a_reward_in_a_process_must_return_finite_numbers(tmp_path: Path, name: str) -> None:
    (tmp_path / "code.py").write_text(NOT_FINITE)
    place = f"{tmp_path}/code.py:{name}"
    returned, _ = await call_reward(RewardFunction.from_function("mine", load_object(place), Code.from_ref(place)), {})
    with pytest.raises(RewardFailure, match="'mine"):
        read(returned)


def test_none_means_that_it_cannot_tell() -> None:
    assert read(None) == RewardValue(None, seconds=0.5)
    assert read(Score(None, reason="no file")) == RewardValue(None, "no file", seconds=0.5)


def test_a_score_keeps_reason_and_metrics() -> None:
    value = read(Score(True, reason="all there", metrics={"files": 3, "share": 0.5}))
    assert value.record() == {"value": 1.0, "reason": "all there", "metrics": {"files": 3.0, "share": 0.5}}


def test_a_reason_becomes_text() -> None:
    record = read(Score(0.0, reason=ValueError("odd"))).record()  # type: ignore[arg-type]
    assert json.loads(json.dumps(record)) == {"value": 0.0, "reason": "odd"}


@pytest.mark.parametrize("overrides", [[1], None, {"a": math.nan}, {"a": object()}])
def test_overrides_that_are_not_json_are_a_reward_failure(overrides: Any) -> None:
    with pytest.raises(RewardFailure, match="overrides"):
        read(Score(1.0, overrides=overrides))


@pytest.mark.parametrize("metrics", [{"loss": math.nan}, {"loss": "3"}, {"loss": None}, [1], None])
def test_metrics_that_are_not_numbers_are_a_reward_failure(metrics: Any) -> None:
    with pytest.raises(RewardFailure, match="mine"):
        read(Score(1.0, metrics=metrics))


@pytest.mark.parametrize("value", [math.nan, "1", [1.0]])
def test_the_value_of_a_score_must_be_a_finite_number(value: Any) -> None:
    with pytest.raises(RewardFailure):
        read(Score(value))


def test_a_list_is_one_value_per_turn_and_sums_exactly() -> None:
    value = read([0.1] * 10, turns=10)
    assert (value.value, value.per_turn) == (1.0, (0.1,) * 10)
    assert value.record()["per_turn"] == [0.1] * 10


def test_a_list_without_one_value_per_turn_is_a_failure() -> None:
    with pytest.raises(RewardFailure, match="2 values for 3 turns"):
        read([1.0, 0.0], turns=3)


@pytest.mark.parametrize("returned", [[0.0, math.nan], [1.0, None], ["1"], [[1.0]], [1e308, 1e308]])
def test_a_list_of_anything_but_finite_numbers_is_a_failure(returned: list[Any]) -> None:
    with pytest.raises(RewardFailure):
        read(returned)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.decimals(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.builds(Score, inner, inner, inner),
    max_leaves=6,
)


@given(ANYTHING)
def test_whatever_is_returned_is_a_finite_value_or_none_or_a_failure(returned: object) -> None:
    try:
        value = read(returned)
    except RewardFailure:
        return
    assert value.value is None or math.isfinite(value.value)
    assert isinstance(value.metrics, Mapping)
    json.dumps(value.record(), allow_nan=False)


@pytest.mark.parametrize(
    ("given", "bounds", "value", "per_turn"),
    [
        (2.5, (0.0, 1.0), 1.0, None),
        (-3.0, (-1.0, 0.0), -1.0, None),
        ([2.0, 0.0, 2.0], (0.0, 1.0), 1.0, (0.5, 0.0, 0.5)),
        ([-2.0, 1.0], (0.0, 1.0), 0.0, (0.0, 0.0)),
        ([0.0, 0.25], (0.5, 1.0), 0.5, None),  # no factor gives this sum
    ],
)
def test_a_value_outside_of_the_range_is_clamped_with_its_credit(
    given: Any, bounds: tuple[float, float], value: float, per_turn: tuple[float, ...] | None
) -> None:
    clamped = interpret("mine", given, 0.0).within(*bounds)
    assert (clamped.value, clamped.per_turn, clamped.metrics) == (value, per_turn, {"clamped": 1.0})


def test_value_within_the_range_is_returned_unchanged() -> None:
    value = interpret("mine", [0.5, 0.5], 0.0)
    assert value.within(0.0, 1.0) is value
    unknown = interpret("mine", None, 0.0)
    assert unknown.within(0.0, 1.0) is unknown


def test_metrics_are_few_and_short() -> None:
    many = {f"m{i}": 1.0 for i in range(150)}
    assert len(interpret("mine", Score(1.0, metrics=many), 0.0).metrics) == 101
    value = interpret("mine", Score(1.0, metrics={"a" * 101: 1.0, "b": 2.0}), 0.0)
    assert value.metrics == {"b": 2.0, "omitted": 1.0}
