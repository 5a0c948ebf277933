"""The rewards that look at what was said and done: the right thing scores 1, a near miss does not."""

from __future__ import annotations

from typing import Any

import pytest

from hermes_rl.agent.result import AgentResult
from hermes_rl.errors import UserError
from tests.rewards.played import graded, said


async def value(name: str, result: AgentResult, **args: Any) -> float | None:
    return (await graded(name, result=result, **args)).value


@pytest.mark.parametrize(
    ("answer", "args", "expected"),
    [
        ("Paris", {"target": "Paris"}, 1),
        (" Paris\n", {"target": "Paris "}, 1),
        ("PARIS", {"target": "paris", "ignore_case": True}, 1),
        ("STRASSE", {"target": "straße", "ignore_case": True}, 1),
        ("42", {"target": 42}, 1),
        ("", {"target": ""}, 1),
        ("paris", {"target": "Paris"}, 0),
        ("Paris.", {"target": "Paris"}, 0),
        ("The answer is Paris", {"target": "Paris"}, 0),
        ("New  York", {"target": "New York"}, 0),
        (" Paris", {"target": "Paris", "strip": False}, 0),
        ("42.0", {"target": 42}, 0),
        (None, {"target": "Paris"}, 0),
    ],
)
async def test_exact_match(answer: str | None, args: dict[str, Any], expected: float) -> None:
    assert await value("exact_match", said(answer), **args) == expected


@pytest.mark.parametrize(
    ("answer", "args", "expected"),
    [
        ("it is 42, surely", {"pattern": r"\b42\b"}, 1),
        ("Yes", {"pattern": "^yes$", "ignore_case": True}, 1),
        ("a\nb", {"pattern": "(?s)a.b"}, 1),
        ("ab", {"pattern": "a.?b", "full": True}, 1),
        ("it is 420", {"pattern": r"\b42\b"}, 0),
        ("Yes", {"pattern": "^yes$"}, 0),
        ("a\nb", {"pattern": "a.b"}, 0),
        ("ab!", {"pattern": "a.?b", "full": True}, 0),
        ("ab\n", {"pattern": "ab", "full": True}, 0),
        (None, {"pattern": "x"}, 0),
    ],
)
async def test_regex_match(answer: str | None, args: dict[str, Any], expected: float) -> None:
    assert await value("regex_match", said(answer), **args) == expected


@pytest.mark.parametrize(
    ("answer", "target", "expected"),
    [
        (r"so \boxed{\frac12}", "0.5", 1),
        (r"so \boxed{0.5}", "1/2", 1),
        (r"\boxed{1/2}", 0.5, 1),
        ("It is 18 in all.", "18", 1),
        (r"\boxed{12\text{ cm}}", "12", 1),
        (r"\boxed{0.51}", "1/2", 0),
        (r"\boxed{-0.5}", "1/2", 0),
        (r"\boxed{0.5}, or rather \boxed{0.6}", "1/2", 0),
        ("It is 19 in all.", "18", 0),
        (None, "18", 0),
    ],
)
async def test_math_equal(answer: str | None, target: object, expected: float) -> None:
    graded_value = await graded("math_equal", result=said(answer), target=target, timeout=60)
    assert graded_value.value == expected
    assert (graded_value.reason is None) == bool(expected)


CALLED = said("done", calls=("terminal", "terminal", "read_file"), failed=("write_file",))


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, 1),
        ({"at_least": 3}, 1),
        ({"any_of": ["terminal"], "at_least": 2}, 1),
        ({"any_of": ["terminal", "read_file"], "at_least": 3}, 1),
        ({"all_of": ["terminal", "read_file"]}, 1),
        ({"none_of": ["patch"]}, 1),
        ({"any_of": ["terminal"], "none_of": ["patch"]}, 1),
        ({"at_least": 4}, 0),
        ({"any_of": ["terminal"], "at_least": 3}, 0),
        ({"any_of": ["write_file"]}, 0),
        ({"all_of": ["terminal", "write_file"]}, 0),
        ({"all_of": ["terminal", "read_file"], "at_least": 2}, 0),
        ({"none_of": ["read_file"]}, 0),
        ({"any_of": ["terminal"], "none_of": ["read_file"]}, 0),
    ],
)
async def test_tool_usage(args: dict[str, Any], expected: float) -> None:
    graded_value = await graded("tool_usage", result=CALLED, **args)
    assert (graded_value.value, graded_value.metrics["calls"]) == (expected, 3)
    assert (graded_value.reason is None) == bool(expected)


async def test_without_any_call_tools_were_not_used() -> None:
    assert await value("tool_usage", said("done")) == 0


@pytest.mark.parametrize(("turns", "expected"), [(1, 1), (2, 1), (3, 0.75), (4, 0.5), (6, 0), (9, 0)])
async def test_turn_efficiency(turns: int, expected: float) -> None:
    assert await value("turn_efficiency", said("done", turns=turns), best=2, worst=6) == expected


async def test_turn_efficiency_needs_a_best_below_the_worst() -> None:
    with pytest.raises(UserError, match=r"worst \(2\) must be larger than best \(2\)"):
        await value("turn_efficiency", said("done"), best=2, worst=2)
