"""The final answer is JSON of the right shape, or of the right value."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from hermes_rl import Score
from hermes_rl.spec.json_schema import CompiledSchema

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import JsonSchema

FENCED = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)


def json_matches(result: Any, *, schema: JsonSchema | None = None, equals: Any = None) -> Score:
    """Return 1 if the final response is JSON that satisfies `schema` and equals `equals`, if they are set, else 0.

    The JSON is the last fenced code block if there is one, else the complete response. Objects are equal regardless
    of the order of their keys, lists are not; 1 equals 1.0, but not true.

    Args:
        schema: JSON Schema (2020-12).
        equals: the expected value.
    """
    compiled = None if schema is None else CompiledSchema(schema)
    fenced = FENCED.findall(result.final_response)
    try:
        value = json.loads(
            fenced[-1] if fenced else result.final_response, parse_constant=_no_number, parse_float=_finite_number
        )
    except (ValueError, RecursionError) as error:
        return Score(0.0, reason=f"no JSON: {error}")
    try:
        problems = [] if compiled is None else compiled.problems(value)
    except ValueError as error:
        return Score(0.0, reason=f"the JSON {error}")
    if problems:
        return Score(0.0, reason=problems[0][:200])
    if equals is not None and not same(value, equals):
        return Score(0.0, reason="another value than expected")
    return Score(1.0)


def _no_number(name: str) -> Any:
    """Refuse NaN and infinity, which Python reads although JSON does not have them: they pass any bounds."""
    raise ValueError(f"{name} is not a JSON number")


def _finite_number(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits)


def same(value: Any, other: Any) -> bool:
    """Return True if two JSON values are equal; a boolean never equals a number."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
