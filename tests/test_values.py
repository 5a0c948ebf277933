"""The border for values of others: what Python can hold and JSON, floats or the system cannot is decided once."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.agent.result import AgentResult
from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey
from hermes_rl.runs.formats import RecordedRollouts, RolloutChoice, write_format
from hermes_rl.runs.reward_check import _keep_rollouts
from hermes_rl.service.app import JsonAnswer
from hermes_rl.spec.section import parse_size
from hermes_rl.spec.templates import FilterArgumentError, fromjson
from hermes_rl.tools.context import _parse_json_text
from hermes_rl.tools.hermes_toolsets import _error_in
from hermes_rl.values import (
    LARGEST_NUMBER,
    MOST_LEVELS,
    deep_copy,
    is_number,
    parse_count,
    read_bounded,
    read_json,
    read_own_json,
    replace_surrogates,
    safe_name,
    system_bytes,
    write_json,
    write_message,
)

HALF = "half \ud83d, whole \U0001f600 \u4e2d"
TEXTS = st.text(st.characters(), max_size=5) | st.sampled_from([HALF, "\ude00", "\0", "\\", '"', "\\ud83d"])
NUMBERS = st.floats() | st.integers() | st.sampled_from([10**400, -(10**4000), 1.7e308, 2**64])
VALUES = st.recursive(
    TEXTS | NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
DEEP = "[" * (MOST_LEVELS + 1) + "]" * (MOST_LEVELS + 1)
ENDLESS = "[" * 100_000


NAMES = st.text(max_size=300) | st.sampled_from(
    ["", ".", "..", "%2E", "a/../b", "k" * 500, "k" * 499 + "j", "\ud83d", "é" * 99]
)


@given(NAMES, NAMES)
def test_safe_names_are_short_plain_and_different(one: str, other: str) -> None:
    name = safe_name(one)
    assert re.fullmatch(r"[A-Za-z0-9_.~:%-]{0,200}", name) and name not in (".", "..")
    assert (name == safe_name(other)) == (one == other)


def as_read(value: Any) -> Any:
    """What is left of a value on the way through JSON: pairs of surrogates are joined, and NaN is none."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    if isinstance(value, dict):
        return {as_read(key): as_read(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_read(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(VALUES)
def test_whatever_is_written_is_json_in_utf_8_and_comes_back(value: Any) -> None:
    for data in (write_json(value), write_json(value, 2), write_message(value)):
        assert read_own_json(data) == read_json(data.decode()) == as_read(value)
        json.loads(data, parse_constant=pytest.fail)


@given(TEXTS | st.text(st.sampled_from('[]{}",:0123456789eE+-.NaInfity\\ud8 '), max_size=30) | st.binary(max_size=20))
def test_no_text_raises_anything_but_a_value_error(text: str | bytes) -> None:
    for read in (read_own_json, read_json, read_bounded):
        with suppress(ValueError):
            write_json(read(text))


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "-1E+4000"])
def test_a_number_that_no_float_holds_is_none(text: str) -> None:
    assert read_json(f'{{"a": [{text}, 1.5]}}') == {"a": [None, 1.5]}


@given(VALUES.map(write_json) | st.text(st.sampled_from('[]{}",:0123456789eE+-.NaInfity\\ud8 ')).map(str.encode))
def test_bytes_are_read_as_their_text_is(data: bytes) -> None:
    outcomes = list[str]()
    for text in (data, data.decode()):
        try:
            outcomes.append(repr(read_own_json(text)))
        except ValueError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_levels_have_an_end() -> None:
    assert read_json(DEEP[1:-1]) == json.loads(DEEP[1:-1])
    assert read_own_json(DEEP) == json.loads(DEEP)
    for text in (DEEP, DEEP.encode(), DEEP.replace("[", '{"a":[').replace("]", "]}"), ENDLESS):
        with pytest.raises(ValueError, match="nested too deeply"):
            read_json(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_own_json(ENDLESS)


@given(NUMBERS | TEXTS | st.none() | st.booleans())
def test_what_is_a_number_can_be_computed_with(value: Any) -> None:
    if is_number(value):
        assert math.isfinite(math.fsum([float(value) ** 2] * 1000))
    assert 0 <= parse_count(value) <= 2**53


def test_is_number_and_parse_count_reject_odd_values() -> None:
    odd = [math.nan, math.inf, 10**400, -1.7e308, True, "1", None, [1]]
    assert [is_number(value) for value in (0, -1.5, LARGEST_NUMBER, *odd)] == [True] * 3 + [False] * len(odd)
    assert [parse_count(value) for value in (7, 7.0, -1, 1e60, *odd)] == [7, 7, 0, 0] + [0] * len(odd)


@given(TEXTS)
def test_text_is_made_whole_and_the_system_gets_only_what_it_takes(text: str) -> None:
    replace_surrogates(text).encode()
    try:
        assert b"\0" not in system_bytes(text)
    except ValueError as error:
        assert "which no program accepts" in str(error)


# ------------------------------------------------------------------------------------- Who goes through the border


def test_a_line_for_others_has_no_other_separator_in_it() -> None:
    assert write_json(f"a\u2028{HALF}", ascii_only=True).decode().isascii()


def test_half_a_character_is_written_by_every_writer(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    assert read_own_json(write_json({"raised": HALF, "score": math.inf})) == {"raised": HALF, "score": None}
    assert read_own_json(JsonAnswer({"text": HALF, "at": path, "mean": math.nan}).body) == {
        "text": HALF, "at": str(path), "mean": None,
    }  # fmt: skip
    messages = [{"role": role, "content": HALF} for role in ("user", "assistant")]
    result = AgentResult(messages=messages, prompt_length=1)
    rollout = Rollout(RolloutKey(Row("r", {"q": HALF}, 0, ""), "r:0", 0, 1), 0, result=result, score=math.nan)
    group = Group("r:0", rollout.key.row, [rollout])
    write_format("sft", path, RecordedRollouts(lambda: iter([group]), lambda: iter([]), [], None, {}), RolloutChoice())
    row = read_own_json(path.read_bytes())
    assert (row["messages"][0]["content"], row["score"]) == (HALF, None)
    kept = _keep_rollouts([Group("r:0", rollout.key.row, [rollout] * 6)], tmp_path, tmp_path / "kept")
    lines = (kept / "rollouts.jsonl").read_bytes().splitlines()
    assert [read_own_json(line)["messages"][0]["content"] for line in lines] == [HALF] * 6


@pytest.mark.parametrize("text", [DEEP, ENDLESS, "9" * 5000, '{"error": ' + ENDLESS, '{"error": ' + DEEP + "}"])
def test_what_agents_and_rows_write_ends_nothing(text: str) -> None:
    assert _error_in(text) is None
    assert _parse_json_text(text) == text
    with pytest.raises(FilterArgumentError, match="this is not JSON"):
        fromjson(text)


def test_a_size_without_end_is_none() -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size("9" * 400 + "GiB")


# ------------------------------------------------------------------------------------------------------------- Copies


class Odd:
    """What no file has: its copy is another one."""

    def __init__(self) -> None:
        self.inner: list[int] = []


@given(VALUES)
def test_a_copy_is_equal_and_shares_nothing(value: Any) -> None:
    whole, odd = {"value": value, "list": [value]}, [value, Odd()]
    copied = deep_copy(whole)
    assert repr(copied) == repr(whole)
    assert copied is not whole and copied["list"] is not whole["list"]
    again = deep_copy(odd)
    assert repr(again[0]) == repr(value)
    assert type(again[1]) is Odd and again[1] is not odd[1] and again[1].inner is not odd[1].inner


def test_deep_copy_handles_deeply_nested_values() -> None:
    deep: list[Any] = []
    for _ in range(MOST_LEVELS):
        deep = [deep]
    assert deep_copy(deep) == deep


def test_a_message_takes_no_more_memory_than_it_has_bytes() -> None:
    value = {"content": "a" * 1000}
    write_message(value)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [write_message(value) for _ in range(100)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2 * sum(map(len, kept))
