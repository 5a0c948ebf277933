"""The final answer is JSON of the right shape, or of the right value."""

from __future__ import annotations

import json
import re
from typing import Any

from jsonschema import Draft202012Validator

from hermes_rl import Score

FENCED = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)


def json_matches(result: Any, *, schema: dict[str, Any] | None = None, equals: Any = None) -> Score:
    """1 if the last thing the policy said is JSON that satisfies `schema` and equals `equals`, as far as given, else 0.

    The JSON is the last fenced code block where there is one, else the whole answer. Objects compare without regard
    to the order of their keys, lists with it, 1 equals 1.0 and not true.

    Args:
        schema: JSON Schema (2020-12).
        equals: the expected value.
    """
    if schema is not None:
        Draft202012Validator.check_schema(schema)
    fenced = FENCED.findall(result.final_response)
    try:
        value = json.loads(fenced[-1] if fenced else result.final_response)
    except (ValueError, RecursionError) as error:
        return Score(0.0, reason=f"no JSON: {error}")
    problem = next(iter(Draft202012Validator(schema).iter_errors(value)), None) if schema is not None else None
    if problem is not None:
        return Score(0.0, reason=f"{problem.json_path}: {problem.message[:200]}")
    if equals is not None and not same(value, equals):
        return Score(0.0, reason="another value than expected")
    return Score(1.0)


def same(value: Any, other: Any) -> bool:
    """Equality of JSON values, for which a boolean is no number."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
