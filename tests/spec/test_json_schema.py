"""What a schema allows, which schemas are refused, and that coerced values are what jsonschema calls valid."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from hermes_rl.spec.json_schema import PYTHON_TYPES, CompiledSchema, InvalidSchemaError, is_of
from tests.thorough import THOROUGH

NAMES = "abc"


def drawn_schema(chance: random.Random, depth: int = 3) -> Any:
    """Draw a schema whose references name `#/$defs/d0` to `d2`."""
    kind = chance.randrange(9 if depth else 4)
    inner = [drawn_schema(chance, depth - 1) for _ in range(chance.randrange(1, 3))] if depth and kind > 3 else []
    match kind:
        case 0:
            return {"type": chance.choice([*PYTHON_TYPES, ["integer", "null"], ["string", "array"]])}
        case 1:
            return {"enum": chance.sample([1, "1", None, True, 2.0, "x", [1]], 3)}
        case 2:
            return {"type": "integer", "minimum": chance.randrange(3)}
        case 3:
            return chance.choice([True, {}, {"const": 1}, {"$ref": f"#/$defs/d{chance.randrange(3)}"}])
        case 4 | 5:
            properties = {name: chance.choice(inner) for name in chance.sample(NAMES, 2)}
            more: dict[str, Any] = {"required": chance.sample(list(properties), 1)} if chance.random() < 0.5 else {}
            if chance.random() < 0.3:
                more["additionalProperties"] = chance.choice([False, *inner])
            return {"type": "object", "properties": properties, **more}
        case 6:
            return {"type": "array", "items": inner[0], "maxItems": 3, "uniqueItems": chance.random() < 0.3}
        case _:
            return {chance.choice(["allOf", "anyOf", "oneOf"]): inner}


def drawn_value(chance: random.Random, depth: int = 3) -> Any:
    plain = [None, True, False, 0, 1, 2, 3.0, 2.5, "1", "x", "[1]", '{"a": 1}', "true", ""]
    match chance.randrange(4 if depth else 2):
        case 2:
            return {name: drawn_value(chance, depth - 1) for name in chance.sample(NAMES, chance.randrange(3))}
        case 3:
            return [drawn_value(chance, depth - 1) for _ in range(chance.randrange(3))]
        case _:
            return chance.choice(plain)


def same(value: Any, other: Any) -> bool:
    """Equality of JSON, for which true is not 1 and 3.0 is 3."""
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


@pytest.mark.generated
@pytest.mark.timeout(600)
def test_drawn_schemas_agree_with_jsonschema() -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    chance, valid = random.Random(seed), 0
    for _ in range(2_000 if THOROUGH else 150):
        schema = {"$defs": {f"d{n}": drawn_schema(chance, 1) for n in range(3)}, "allOf": [drawn_schema(chance)]}
        compiled = CompiledSchema(schema)
        try:
            compiled.check()
        except InvalidSchemaError:
            continue  # a definition that refers to itself
        judge = jsonschema.Draft202012Validator(schema)
        for _ in range(20):
            value = drawn_value(chance)
            where = f"seed {seed}: {schema}, {value!r}"
            is_valid = judge.is_valid(value)
            valid += is_valid
            assert (compiled.problems(value) == []) == is_valid, where
            coerced, repaired = compiled.coerce(value)
            assert same(coerced, value), where
            assert repaired == 0, where
            if is_valid:
                assert is_of(value, compiled.types()), where
                assert judge.is_valid(coerced), where
                assert same(compiled.coerce(value, repair=True)[0], value), where
    assert valid > 100


@dataclass
class Point:
    x: int
    tags: list[str]


class Level(IntEnum):
    LOW = 1
    HIGH = 2


@pytest.mark.parametrize(
    ("annotation", "given", "expected"),
    [
        (Point, '{"x": 1, "tags": []}', {"x": 1, "tags": []}),
        (Point | None, {"x": "1", "tags": '["a"]'}, {"x": 1, "tags": ["a"]}),
        (Level, "2", 2),
        (list[Level], '["1", 2]', [1, 2]),
        (dict[str, Level], {"a": "1"}, {"a": 1}),
    ],
)
def test_values_of_schemas_with_references_are_repaired(annotation: Any, given: Any, expected: Any) -> None:
    schema = {
        "properties": {"value": TypeAdapter(annotation).json_schema(ref_template="#/properties/value/$defs/{model}")}
    }
    coerced, repaired = CompiledSchema(schema).coerce({"value": given}, repair=True)
    assert coerced == {"value": expected}
    assert repaired > 0
    assert CompiledSchema(schema).types_of_property("value") != PYTHON_TYPES.keys()


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"$ref": "#"}, "refers to itself without end"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}},
          "properties": {"x": {"$ref": "#/$defs/a"}}}, "refers to itself without end"),
        ({"properties": {"x": {"$ref": "#/$defs/no"}}}, r"`\$ref: #/\$defs/no` refers to nothing within it"),
        ({"properties": {"x": {"$ref": "https://example.com/schema"}}}, "refers to nothing within it"),
        ({"properties": {"x": {"$ref": "#/properties/x/type/0/deep"}}}, "refers to nothing within it"),
        ({"type": "text"}, r"\$.type: 'text' is not valid"),
        ({"required": True}, r"\$.required: "),
    ],
)  # fmt: skip
def test_schemas_that_cannot_be_used_are_refused(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidSchemaError, match=why):
        CompiledSchema(schema).check()


@pytest.mark.parametrize(
    ("schema", "costly"),
    [
        ({"properties": {"x": {"type": "string"}}}, False),
        ({"properties": {"x": {"pattern": "a"}}}, True),
        ({"$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}}}}, "$ref": "#/$defs/node"}, True),
        ({"$defs": {f"d{n}": {"properties": {k: {"$ref": f"#/$defs/d{n + 1}"} for k in "ab"}} for n in range(30)}
          | {"d30": {}}, "$ref": "#/$defs/d0"}, True),
    ],
)  # fmt: skip
def test_costly_schemas(schema: dict[str, Any], costly: bool) -> None:
    compiled = CompiledSchema(schema)
    compiled.check()
    assert compiled.is_costly == costly


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5, "properties": [], "required": 3, "allOf": {}, "anyOf": 1, "enum": "a", "$ref": 4},
        {"properties": {"a": {"$ref": "#/properties/a"}}, "$ref": "#/type/0"},
        {"properties": {"a": {"type": [["x"]], "items": 3, "prefixItems": 1, "patternProperties": None}}},
    ],
)
def test_odd_schemas_of_servers_allow_everything(schema: dict[str, Any]) -> None:
    compiled = CompiledSchema(schema)
    assert compiled.types_of_property("a") == PYTHON_TYPES.keys()
    assert compiled.coerce({"a": [1, {"b": None}]}, repair=True)[0] == {"a": [1, {"b": None}]}


def test_many_alternatives_that_refer_to_the_same_cost_little_to_describe() -> None:
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"$defs": {**definitions, "d40": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/d0"}}}
    began = time.process_time()
    assert CompiledSchema(schema).types_of_property("a") == {"integer"}
    assert time.process_time() - began < 1
