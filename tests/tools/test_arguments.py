"""Checking what a model wrote against a schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hermes_rl.spec.json_schema import CompiledSchema
from hermes_rl.tools.base import ToolInputError
from hermes_rl.tools.catalogue import toolsets
from hermes_rl.tools.execute import check_arguments, read_arguments

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    "properties": {
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "name": {"type": "string", "minLength": 2, "pattern": "^[a-z]+$"},
        "flag": {"type": "boolean"},
        "kind": {"enum": ["a", "b", 3]},
        "items": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        "point": {"$ref": "#/$defs/point"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "free": {"type": "object", "additionalProperties": {"type": "integer"}},
        "anything": {},
    },
    "required": [],
}


def check(arguments: dict[str, Any], schema: dict[str, Any], *, repair: bool = False) -> tuple[dict[str, Any], int]:
    return check_arguments(arguments, CompiledSchema(schema), repair=repair)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"count": "3"}, {"count": 3}),
        ({"count": 3.0}, {"count": 3}),
        ({"flag": "True"}, {"flag": True}),
        ({"items": "[1, 2]"}, {"items": [1, 2]}),
        ({"items": ["1"]}, {"items": [1]}),
        ({"point": '{"x": 1}'}, {"point": {"x": 1}}),
        ({"maybe": None}, {"maybe": None}),
        ({"count": None}, {}),
        ({"either": "3"}, {"either": "3"}),
        ({"either": 3}, {"either": 3}),
        ({"maybe": "3"}, {"maybe": 3}),
        ({"free": {"a": 1}}, {"free": {"a": 1}}),
        ({"anything": [None]}, {"anything": [None]}),
    ],
)
def test_taken(given_: dict[str, Any], expected: dict[str, Any]) -> None:
    checked, repaired = check(given_, SCHEMA, repair=True)
    assert checked == expected
    assert repaired == int(given_ != expected), "each of these has one slip, or none"
    assert [type(value) for value in checked.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("given_", "why"),
    [
        ({"count": "3"}, "'count' must be integer, not string"),
        ({"flag": "True"}, "'flag' must be boolean, not string"),
        ({"items": "[1, 2]"}, "'items' must be array, not string"),
        ({"items": ["1"]}, r"'items\[0\]' must be integer, not string"),
        ({"point": '{"x": 1}'}, "'point' must be object, not string"),
        ({"maybe": "3"}, "'maybe' must be integer, not string"),
        ({"count": None}, "'count' must be integer, not null"),
    ],
)
def test_arguments_are_not_repaired_by_default(given_: dict[str, Any], why: str) -> None:
    """Fault 31: what another harness scores 0 was converted without a word."""
    with pytest.raises(ToolInputError, match=why):
        check(given_, SCHEMA)


def test_a_whole_float_is_an_integer_of_json() -> None:
    assert str(check({"count": 3.0}, SCHEMA)) == "({'count': 3}, 0)"


@pytest.mark.parametrize(
    ("given_", "why"),
    [
        ({"count": 0}, "at least 1"),
        ({"count": 10}, "at most 9"),
        ({"name": "x"}, "length at least 2"),
        ({"name": "AB"}, "matches"),
        ({"flag": 1}, "must be boolean"),
        ({"flag": "maybe"}, "must be boolean"),
        ({"kind": "c"}, 'one of "a", "b", 3'),
        ({"items": [1, "x"]}, r"items\[1\]"),
        ({"items": [1, 2, 3, 4]}, "length at most 3"),
        ({"point": {}}, "'point.x' is missing"),
        ({"maybe": []}, "must be"),
        ({"free": {"a": "x"}}, "'free.a' must be integer"),
        ({"cuont": 1}, "did you mean `count`"),
    ],
)
def test_refused(given_: dict[str, Any], why: str) -> None:
    with pytest.raises(ToolInputError, match=why):
        check(given_, SCHEMA)


def test_all_problems_at_once() -> None:
    with pytest.raises(ToolInputError) as caught:
        check({"count": "x", "flag": 3, "no": 1}, SCHEMA)
    assert str(caught.value).count(";") >= 2


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xya"), inner, max_size=2),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*SCHEMA["properties"], "other"]), values, max_size=4))
def test_what_is_taken_is_valid(arguments: dict[str, Any]) -> None:
    try:
        checked, _ = check(arguments, SCHEMA, repair=True)
    except ToolInputError:
        return
    jsonschema.validate(checked, SCHEMA)


@given(st.text(max_size=50))
def test_any_text_is_an_object_or_an_error(text: str) -> None:
    try:
        assert isinstance(read_arguments(text), dict)
    except ToolInputError:
        return


@given(st.dictionaries(st.text(max_size=5), values, max_size=3))
def test_any_argument_object_is_read_unchanged(arguments: dict[str, Any]) -> None:
    assert read_arguments(json.dumps(arguments)) == arguments
    assert read_arguments(arguments) is arguments


@pytest.mark.parametrize("tool", [tool for each in toolsets().values() for tool in each.tools], ids=lambda t: t.name)
def test_schemas_of_the_built_in_tools(tool: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(tool.parameters)
    function = tool.schema["function"]
    assert function["name"] == tool.name
    assert all("description" in parameter for parameter in tool.parameters["properties"].values())


RICH: dict[str, Any] = {
    "$defs": {"named": {"properties": {"name": {"type": "string"}}, "required": ["name"]}},
    "allOf": [
        {"$ref": "#/$defs/named"},
        {"properties": {"age": {"type": "integer", "minimum": 0}}},
        {"properties": {"age": {"maximum": 150}, "more": True}},
    ],
    "patternProperties": {"^x-": {"type": "integer"}},
    "properties": {
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        "set": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "part": {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        "base": {"allOf": [{"type": "object", "properties": {"a": {}}}, {"required": ["a"]}]},
    },
}


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"age": "3"}, {"age": 3}),
        ({"x-y": "3", "more": [1]}, {"x-y": 3, "more": [1]}),
        ({"pair": ["a", "2"]}, {"pair": ["a", 2]}),
        ({"pair": []}, {"pair": []}),
        ({"set": [1, 2, 3]}, {"set": [1, 2, 3]}),
        ({"part": {"a": 1, "c": 2}}, {"part": {"a": 1, "c": 2}}),
        ({"base": {"a": 1}}, {"base": {"a": 1}}),
    ],
)
def test_richer_schemas_are_taken(given_: dict[str, Any], expected: dict[str, Any]) -> None:
    checked, _ = check({"name": "n", **given_}, RICH, repair=True)
    assert checked == {"name": "n", **expected}
    jsonschema.validate(checked, RICH)


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        ({"age": 151}, "'age' must be at most 150"),
        ({"age": -1}, "'age' must be at least 0"),
        ({"x-y": "z"}, "'x-y' must be integer"),
        ({"y": 1}, "unknown parameter 'y'"),
        ({"pair": [1, 2]}, r"'pair\[0\]' must be string"),
        ({"pair": ["a", 2, 3]}, "'pair': Expected at most 2 items"),
        ({"set": [1, 1.0]}, "'set': must have no item twice"),
        ({"part": {"c": 1}}, "'part.a' is missing"),
        ({"base": {}}, "'base.a' is missing"),
    ],
)
def test_richer_schemas_are_checked(given_: dict[str, Any], problem: str) -> None:
    with pytest.raises(ToolInputError, match=problem):
        check({"name": "n", **given_}, RICH)
    with pytest.raises(ToolInputError, match="'name' is missing"):
        check(given_, RICH)
