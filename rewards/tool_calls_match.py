"""The policy made the calls that the task asks for, and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hermes_rl import Score

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import ExpectedCall


def tool_calls_match(
    result: Any,
    *,
    calls: list[ExpectedCall],
    in_order: bool = False,
    allow_extra: bool = False,
    executed_by: Literal["hermes_rl", "program"] = "hermes_rl",
) -> Score:
    """Return 1 if the policy made each of `calls` once, and no other, else 0. An empty list expects no call.

    A call matches if it has the name, and each argument that is listed here with an equal value (1 equals 1.0, white
    space at both ends of texts is ignored). Other arguments may have any value. Calls that ended in a tool error count
    as other calls.

    Args:
        calls: the expected calls, `{name, args}` each; `args` may be called `arguments`, and may be JSON text.
        in_order: the calls must be made in this order.
        allow_extra: other calls are allowed.
        executed_by: hermes_rl: calls of the spec's tools, which hermes-rl executed; program: also calls of an agent
            program's own tools, as the program reports them.
    """
    made_calls = [call for call in result.tool_calls if executed_by == "program" or call.executed_by == executed_by]
    positions = _matched_indexes(calls, made_calls, in_order=in_order)
    missing = [call["name"] for call, position in zip(calls, positions, strict=True) if position is None]
    extra = [call.name for i, call in enumerate(made_calls) if i not in positions]
    problems = [f"not called as asked: {', '.join(missing)}"] if missing else []
    if extra and not allow_extra:
        problems.append(f"called beyond that: {', '.join(extra)}")
    match_count = len(calls) - len(missing)
    return Score(
        not problems, reason="; ".join(problems) or None, metrics={"matched": match_count, "extra": len(extra)}
    )


def _matched_indexes(
    calls: Sequence[Mapping[str, Any]], made_calls: Sequence[Any], *, in_order: bool
) -> list[int | None]:
    """Return, for each expected call, the index of the first unused matching call."""
    positions: list[int | None] = []
    for call in calls:
        after = max((position for position in positions if position is not None), default=-1) if in_order else -1
        free = (i for i in range(after + 1, len(made_calls)) if i not in positions and _call_fits(made_calls[i], call))
        positions.append(next(free, None))
    return positions


def _call_fits(call: Any, expected_call: Mapping[str, Any]) -> bool:
    if call.error is not None or call.name != expected_call["name"] or not isinstance(call.arguments, Mapping):
        return False
    arguments = call.arguments
    return all(
        key in arguments and _same_value(arguments[key], value) for key, value in expected_call.get("args", {}).items()
    )


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(value, str) and isinstance(expected, str):
        return value.strip() == expected.strip()
    return isinstance(value, bool) == isinstance(expected, bool) and bool(value == expected)
