"""From what a model wrote as arguments to what a tool takes, or to a message that says what is wrong.

Owns reading the JSON, checking it against the tool's JSON Schema, and the few conversions that spare a
model a wasted turn:

- text that is a number or a boolean, where the schema wants that (``"3"`` → 3, ``"true"`` → true);
- a whole float for an integer (3.0 → 3);
- text that is JSON of an array or object, where the schema wants that;
- null for a parameter that is not required and cannot be null: as if it was left out.

Superfluous parameters are errors, also where the schema does not say so. Of JSON Schema it knows what tool
schemas use: type, enum, const, properties, required, additionalProperties, items, anyOf, oneOf, allOf,
$ref within the schema, and bounds on numbers, lengths and patterns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hermes_rl.plugins import did_you_mean
from hermes_rl.tools.errors import ToolInputError

Schema = Mapping[str, Any]

TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


MOST_REFERENCES = 32
"""Steps from one ``$ref`` to the next."""


def read_arguments(raw: object) -> dict[str, Any]:
    """The JSON object that the model wrote; raises `ToolInputError` for anything else."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ToolInputError(f"the arguments are not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ToolInputError(f"the arguments must be a JSON object, not {_kind(raw)}")
    return raw


def check_arguments(arguments: dict[str, Any], schema: Schema) -> dict[str, Any]:
    """The arguments converted to `schema`; raises `ToolInputError` with everything that is wrong."""
    problems: list[str] = []
    try:
        checked = _Check(schema, problems).object(arguments, schema, "")
    except RecursionError:
        raise ToolInputError("the tool's schema refers to itself without end, so nothing can be checked") from None
    if problems:
        raise ToolInputError("; ".join(problems))
    return checked


class _Check:
    """One pass over a value; problems are collected, so that the model can mend them all at once."""

    def __init__(self, root: Schema, problems: list[str]) -> None:
        self.root = root
        self.problems = problems

    def value(self, value: Any, schema: Schema, where: str) -> Any:
        schema = self._resolved(schema)
        if "anyOf" in schema or "oneOf" in schema:
            return self._any(value, schema.get("anyOf") or schema["oneOf"], where)
        for part in schema.get("allOf", ()):
            value = self.value(value, part, where)
        value = _converted(value, _types(schema))
        if not _is_of(value, _types(schema)):
            self._wrong(where, f"must be {' or '.join(_types(schema))}, not {_kind(value)}")
            return value
        self._choices(value, schema, where)
        self._bounds(value, schema, where)
        if isinstance(value, dict) and ("properties" in schema or "additionalProperties" in schema):
            return self.object(value, schema, where)
        if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
            return [self.value(item, schema["items"], f"{where}[{i}]") for i, item in enumerate(value)]
        return value

    def object(self, value: dict[str, Any], schema: Schema, where: str) -> dict[str, Any]:
        properties: Schema = schema.get("properties", {})
        required: Sequence[str] = schema.get("required", ())
        extra = schema.get("additionalProperties", False)
        found: dict[str, Any] = {}
        for key, item in value.items():
            place = f"{where}.{key}" if where else key
            if key not in properties and not isinstance(extra, Mapping) and extra is not True:
                self.problems.append(f"unknown parameter {place!r}{_choices_hint(key, properties)}")
            elif item is None and key not in required and not self._nullable(properties.get(key, {})):
                continue
            else:
                inner = properties.get(key, extra if isinstance(extra, Mapping) else {})
                found[key] = self.value(item, inner, place)
        for key in required:
            if key not in value:
                place = f"{where}.{key}" if where else key
                self.problems.append(f"missing parameter {place!r}")
        return found

    def _any(self, value: Any, branches: Sequence[Schema], where: str) -> Any:
        """The first branch that takes the value as it is, else the first that takes it converted."""
        tried: list[tuple[Any, list[str]]] = []
        for branch in branches:
            problems: list[str] = []
            tried.append((_Check(self.root, problems).value(value, branch, where), problems))
        fitting = [result for result, problems in tried if not problems]
        if not fitting:
            _, fewest = min(tried, key=lambda each: len(each[1]))
            self.problems += fewest
            return value
        return next((result for result in fitting if type(result) is type(value)), fitting[0])

    def _choices(self, value: Any, schema: Schema, where: str) -> None:
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices is not None and not any(_same(value, choice) for choice in choices):
            listed = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            self._wrong(where, f"must be one of {listed}, not {_shown(value)}")

    def _bounds(self, value: Any, schema: Schema, where: str) -> None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        size = len(value) if isinstance(value, str | list) else None
        items = isinstance(value, list)
        rules = (
            (number, "minimum", lambda bound: value >= bound, "at least"),
            (number, "maximum", lambda bound: value <= bound, "at most"),
            (number, "exclusiveMinimum", lambda bound: value > bound, "greater than"),
            (number, "exclusiveMaximum", lambda bound: value < bound, "less than"),
            (size is not None, "minItems" if items else "minLength", lambda n: size >= n, "of length at least"),
            (size is not None, "maxItems" if items else "maxLength", lambda n: size <= n, "of length at most"),
            (isinstance(value, str), "pattern", lambda p: re.search(p, value), "text that matches"),
        )
        for applies, name, holds, words in rules:
            if applies and name in schema and not holds(schema[name]):
                self._wrong(where, f"must be {words} {schema[name]}, not {_shown(value)}")

    def _nullable(self, schema: Schema) -> bool:
        schema = self._resolved(schema)
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches:
            return any(self._nullable(branch) for branch in branches)
        return not _types(schema) or "null" in _types(schema)

    def _resolved(self, schema: Schema) -> Schema:
        for _ in range(MOST_REFERENCES):
            if "$ref" not in schema:
                return schema
            found: Any = self.root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                found = found[part]
            schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
        raise RecursionError

    def _wrong(self, where: str, what: str) -> None:
        self.problems.append(f"parameter {where!r} {what}")


def _types(schema: Schema) -> tuple[str, ...]:
    kind = schema.get("type", ())
    return (kind,) if isinstance(kind, str) else tuple(kind)


def _is_of(value: Any, types: tuple[str, ...]) -> bool:
    if isinstance(value, bool):  # a boolean is an int to Python, but not to JSON
        return not types or "boolean" in types
    return not types or any(isinstance(value, TYPES.get(name, (object,))) for name in types)


def _converted(value: Any, types: tuple[str, ...]) -> Any:
    if _is_of(value, types):
        return value
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    if isinstance(value, str):
        try:
            read = json.loads(value.strip().lower() if "boolean" in types else value)
        except (ValueError, RecursionError):
            return value
        return _converted(read, types) if not isinstance(read, str) and read is not None else value
    return value


def _same(value: Any, choice: Any) -> bool:
    return bool(value == choice) and isinstance(value, bool) == isinstance(choice, bool)


def _choices_hint(key: str, properties: Schema) -> str:
    names = ", ".join(properties) or "none"
    return f"{did_you_mean(key, set(properties))} (there are: {names})"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, kinds in TYPES.items() if isinstance(value, kinds)), type(value).__name__)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:80] + "…"
