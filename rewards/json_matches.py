"""The final answer is JSON of the right shape, or of the right value."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Hashable, Iterator
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators

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
        Validator.check_schema(schema)
    fenced = FENCED.findall(result.final_response)
    try:
        value = json.loads(
            fenced[-1] if fenced else result.final_response, parse_constant=_no_number, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        return Score(0.0, reason=f"no JSON: {error}")
    try:
        problem = next(iter(Validator(schema).iter_errors(value)), None) if schema is not None else None
    except (RecursionError, ArithmeticError) as error:
        return Score(0.0, reason=f"nested too deeply, or of too large numbers, to be checked: {error}")
    if problem is not None:
        return Score(0.0, reason=f"{problem.json_path}: {problem.message[:200]}")
    if equals is not None and not same(value, equals):
        return Score(0.0, reason="another value than expected")
    return Score(1.0)


def _no_number(name: str) -> Any:
    """Refuse NaN and infinity, which Python reads although JSON does not have them: they pass any bounds."""
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _no_number(digits)


def same(value: Any, other: Any) -> bool:
    """Equality of JSON values, for which a boolean is no number."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def frozen(value: Any) -> Hashable:
    """Return what stands for a value in a set; numbers as texts, since many can be chosen that have one hash."""
    if isinstance(value, dict):
        return frozenset((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(frozen, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float, hex(value) if isinstance(value, int) else hex(int(value)) if value.is_integer() else repr(value)
    return type(value), value


def _unique(validator: Any, wanted: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """Check `uniqueItems` in time for the length of a list; jsonschema compares each object in it with each other."""
    if wanted and isinstance(value, list) and len(set(map(frozen, value))) < len(value):
        yield ValidationError("has non-unique items")


Validator = validators.extend(Draft202012Validator, {"uniqueItems": _unique})
