"""Validate and coerce values with JSON Schema (2020-12), and analyse schemas.

`jsonschema` decides if a value is valid. Its time is unbounded if a schema has patterns or refers to itself, so
`CompiledSchema.is_costly` identifies schemas that need a process that can be killed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from itertools import islice
from typing import TYPE_CHECKING, Any

from hermes_rl.values import read_bounded

if TYPE_CHECKING:
    from jsonschema import ValidationError

Schema = Mapping[str, Any]

PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
MOST_PROBLEMS = 20
"""Maximum number of reported problems of a value."""
LARGEST_EXPANSION = 10_000
"""Maximum number of parts of an inexpensive schema. A part counts once for each reference to it."""
SHOWN = 80
PLACE = 200

_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref", "$dynamicRef")
"""Keywords whose subschemas apply to the value itself."""
_PART_OF_VALUE = (
    "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames",
    "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains",
)  # fmt: skip
"""Keywords whose subschemas apply to a part of the value."""
_WITHOUT_BOUND = frozenset({"pattern", "patternProperties", "$dynamicRef", "$recursiveRef"})
"""Keywords whose validation may never end."""
_WORDS = {
    "minimum": "at least", "maximum": "at most", "exclusiveMinimum": "greater than", "exclusiveMaximum": "less than",
    "minLength": "of length at least", "maxLength": "of length at most", "minItems": "of length at least",
    "maxItems": "of length at most", "multipleOf": "a multiple of", "pattern": "text that matches",
}  # fmt: skip


class InvalidSchemaError(ValueError):
    """A schema is not a JSON Schema, has an unresolvable reference, or refers to itself without end."""


class CompiledSchema:
    """A JSON Schema; references within it are resolved, external ones are never fetched."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._targets: dict[str, Any] = {}

    @functools.cached_property
    def validator(self) -> Any:
        """jsonschema's validator of the schema."""
        from referencing import Registry

        return _validator_class(self._draft)(self.schema, registry=Registry())

    @functools.cached_property
    def _draft(self) -> Any:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import validator_for

        return validator_for(self.schema, default=Draft202012Validator)

    def check(self) -> None:
        """Raise `InvalidSchemaError` if the schema cannot be used."""
        from jsonschema import SchemaError

        try:
            self._draft.check_schema(self.schema)
        except SchemaError as error:
            raise InvalidSchemaError(f"{error.json_path}: {error.message[:PLACE]}") from error
        except RecursionError as error:
            raise InvalidSchemaError("it is nested too deeply") from error
        edges = self._edges
        unknown = next((ref for ref in self._targets if self._targets[ref] is None), None)
        if unknown is not None:
            raise InvalidSchemaError(f"`$ref: {unknown[:PLACE]}` refers to nothing within it")
        try:
            TopologicalSorter({part: children[0] for part, children in edges.items()}).prepare()
        except CycleError as error:
            raise InvalidSchemaError("it refers to itself without end, so that no value satisfies it") from error

    @functools.cached_property
    def is_costly(self) -> bool:
        """True if validating a short value may take long, so that it needs a process that can be killed."""
        graph = {part: [*children[0], *children[1]] for part, children in self._edges.items()}
        sizes: dict[int, int] = {}
        try:
            for part in TopologicalSorter(graph).static_order():
                sizes[part] = 1 + sum(sizes[child] for child in graph[part])
        except CycleError:
            return True
        return self._has_costly_keyword or max(sizes.values()) > LARGEST_EXPANSION

    @functools.cached_property
    def _edges(self) -> dict[int, tuple[list[int], list[int]]]:
        """Subschemas of each part that apply to the same value, and to parts of it, by the ids of the parts."""
        edges: dict[int, tuple[list[int], list[int]]] = {}
        self._has_costly_keyword = False
        waiting: list[Any] = [self.schema]
        while waiting:
            part = waiting.pop()
            if id(part) in edges:
                continue
            self._has_costly_keyword |= not _WITHOUT_BOUND.isdisjoint(part)
            same_value_schemas, part_schemas = (
                list(self._subschemas(part, _SAME_VALUE)),
                list(self._subschemas(part, _PART_OF_VALUE)),
            )
            edges[id(part)] = list(map(id, same_value_schemas)), list(map(id, part_schemas))
            waiting += [*same_value_schemas, *part_schemas]
        return edges

    def _subschemas(self, part: Schema, keywords: tuple[str, ...]) -> Iterator[Schema]:
        for keyword in keywords:
            subschemas = part.get(keyword)
            if keyword == "$ref" and isinstance(subschemas, str):
                subschemas = self._target(subschemas)
            if keyword in ("properties", "patternProperties", "dependentSchemas"):
                subschemas = list(_get_mapping(part, keyword).values())
            for each in subschemas if isinstance(subschemas, list) else [subschemas]:
                if isinstance(each, Mapping):
                    yield each

    def _target(self, reference: str) -> Any:
        """Return the part of the schema that a `$ref` names, or None."""
        if reference not in self._targets:
            from referencing import Registry
            from referencing.exceptions import Unresolvable
            from referencing.jsonschema import DRAFT202012

            registry: Registry[Any] = Registry().with_resource("", DRAFT202012.create_resource(self.schema))
            try:
                self._targets[reference] = registry.resolver().lookup(reference).contents
            except Unresolvable:
                self._targets[reference] = None
        return self._targets[reference]

    # -------------------------------------------------------------------------------------------- allowed types

    def types(self, schema: Schema | None = None) -> frozenset[str]:
        """Return the JSON types that a part of the schema allows, by default the whole; all if it names none.

        A value of type `number` may be an integer too.
        """
        return self._types(self.schema if schema is None else schema, {})

    def types_of_property(self, name: str) -> frozenset[str]:
        """Return the JSON types that a property may have."""
        parts = self.conjunction(self.schema)
        return self.types({"allOf": self.schemas_of_property(parts, name, patterns=False)})

    def schemas_of_property(self, parts: Iterable[Schema], name: str, *, patterns: bool = True) -> list[Schema]:
        """Return the schemas of a property in parts of the schema, also by `patterns` of names, which may never end."""
        candidates: list[Any] = []
        for part in parts:
            properties, by_pattern = _get_mapping(part, "properties"), _get_mapping(part, "patternProperties")
            matches = [properties[name]] if name in properties else []
            matches += [schema for pattern, schema in by_pattern.items() if patterns and re.search(pattern, name)]
            candidates += matches or [part.get("additionalProperties")]
        return [schema for schema in candidates if isinstance(schema, Mapping)]

    def _types(self, schema: object, types_by_id: dict[int, frozenset[str]]) -> frozenset[str]:
        allowed = every = frozenset(PYTHON_TYPES)
        if not isinstance(schema, Mapping):
            return every
        if id(schema) in types_by_id:
            return types_by_id[id(schema)]
        types_by_id[id(schema)] = every  # for a schema that refers to itself
        declared_type = schema.get("type")
        if kinds := every.intersection([declared_type] if isinstance(declared_type, str) else _texts_of(declared_type)):
            allowed &= kinds | {"integer"} if "number" in kinds else kinds
        if "const" in schema or isinstance(schema.get("enum"), list):
            choices = [schema["const"]] if "const" in schema else schema["enum"]
            allowed &= {kind for kind in PYTHON_TYPES for choice in choices if is_of(choice, {kind})}
        for part in (*_get_list(schema, "allOf"), *([self._target(schema["$ref"])] if _has_reference(schema) else ())):
            allowed &= self._types(part, types_by_id)
        for keyword in ("anyOf", "oneOf"):
            if branches := _get_list(schema, keyword):
                allowed &= frozenset().union(*(self._types(branch, types_by_id) for branch in branches))
        types_by_id[id(schema)] = allowed
        return allowed

    # ---------------------------------------------------------------------------------------------------- values

    def coerce(self, value: Any, schema: Schema | None = None, *, repair: bool = False) -> tuple[Any, int]:
        """Return the value in the types of a part of the schema, and the number of repaired values in it.

        A whole float is an integer (3.0 → 3). With `repair`, text that is JSON of an allowed type is parsed (``"3"`` →
        3, ``"[1]"`` → [1]), and null is omitted if a property is optional and cannot be null. Other values stay
        unchanged.
        """
        coercion = _Coercion(self, repair)
        return coercion.value(value, self.schema if schema is None else schema), coercion.repaired

    def conjunction(self, schema: Schema) -> Iterator[Schema]:
        """Yield all parts that a value must satisfy: the schema, its references, and their `allOf`."""
        visited_ids: set[int] = set()
        waiting: list[Any] = [schema]
        while waiting:
            part = waiting.pop(0)
            if isinstance(part, Mapping) and id(part) not in visited_ids:
                visited_ids.add(id(part))
                yield part
                waiting += _get_list(part, "allOf")
                if _has_reference(part):
                    waiting.append(self._target(part["$ref"]))

    def unknown_properties(self, value: Mapping[str, Any]) -> list[str]:
        """Return the keys of an object that the schema does not name; none if it describes other keys."""
        declared_keys: set[str] = set()
        patterns: set[str] = set()
        parts: list[Any] = [self.schema]
        visited_ids: set[int] = set()
        while parts:
            part = parts.pop()
            if not isinstance(part, Mapping) or id(part) in visited_ids:
                continue
            visited_ids.add(id(part))
            if part.get("additionalProperties") or part.get("unevaluatedProperties"):
                return []
            declared_keys.update(_get_mapping(part, "properties"))
            patterns.update(_get_mapping(part, "patternProperties"))
            parts += self._subschemas(part, _SAME_VALUE)
        unknown = (key for key in value if key not in declared_keys)
        return [key for key in unknown if not any(re.search(pattern, key) for pattern in patterns)]

    def problems(self, value: Any) -> list[str]:
        """Return the reasons why a value does not satisfy the schema, at most `MOST_PROBLEMS`.

        Raises:
            ValueError: the value cannot be checked, because it is nested too deeply or contains too large numbers.
        """
        try:
            errors = islice(self.validator.iter_errors(value), MOST_PROBLEMS)
            return list(dict.fromkeys(text for error in errors for text in _describe_problems(error)))[:MOST_PROBLEMS]
        except (RecursionError, ArithmeticError) as error:
            raise ValueError(f"cannot be checked against the schema: {type(error).__name__}") from error


class _Coercion:
    """One pass over a value."""

    def __init__(self, compiled: CompiledSchema, repair: bool) -> None:
        self._compiled, self._repair, self.repaired = compiled, repair, 0

    def value(self, value: Any, schema: Schema) -> Any:
        parts = list(self._compiled.conjunction(schema))
        converted = _coerce(value, self._compiled.types(schema), self._repair)
        self.repaired += isinstance(value, str) and converted is not value
        if isinstance(converted, dict):
            converted = self._object(converted, parts)
        elif isinstance(converted, list):
            converted = [self._item(item, index, parts) for index, item in enumerate(converted)]
        for part in parts:
            for keyword in ("anyOf", "oneOf"):
                if branches := _get_list(part, keyword):
                    converted = self._branch(converted, branches)
        return converted

    def _object(self, value: dict[str, Any], parts: list[Schema]) -> dict[str, Any]:
        required = {key for part in parts for key in _texts_of(part.get("required"))}
        coerced: dict[str, Any] = {}
        for key, item in value.items():
            schemas = self._compiled.schemas_of_property(parts, key)
            excluded = schemas and self._repair and item is None and key not in required
            if excluded and "null" not in self._compiled.types({"allOf": schemas}):
                self.repaired += 1
                continue
            coerced[key] = self.value(item, {"allOf": schemas}) if schemas else item
        return coerced

    def _item(self, item: Any, index: int, parts: list[Schema]) -> Any:
        candidates: list[Any] = []
        for part in parts:
            first = _get_list(part, "prefixItems")
            candidates.append(first[index] if index < len(first) else part.get("items"))
        schemas = [schema for schema in candidates if isinstance(schema, Mapping)]
        return self.value(item, {"allOf": schemas}) if schemas else item

    def _branch(self, value: Any, branches: list[Any]) -> Any:
        """Return the value coerced by the first branch that accepts it unrepaired, else by the first at all."""
        for repair in dict.fromkeys((False, self._repair)):
            for branch in branches:
                if branch is True:
                    return value
                coerced, repaired = self._compiled.coerce(value, branch, repair=repair) if branch else (value, 0)
                if self._compiled.validator.evolve(schema=branch).is_valid(coerced):
                    self.repaired += repaired
                    return coerced
        return value


def _coerce(value: Any, types: frozenset[str], repair: bool) -> Any:
    if is_of(value, types):
        return int(value) if isinstance(value, float) and "integer" in types and "number" not in types else value
    if repair and isinstance(value, str):
        try:
            read = read_bounded(value.strip().lower() if "boolean" in types else value)
        except ValueError:
            return value
        if not isinstance(read, str) and read is not None:
            converted = _coerce(read, types, repair)
            return converted if is_of(converted, types) else value
    return value


def is_of(value: Any, types: Collection[str]) -> bool:
    """Return True if a value has one of these JSON types; a whole float is an integer, a boolean not a number."""
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, PYTHON_TYPES.get(name, ())) for name in types)


def type_of(value: Any) -> str:
    """Return the name of a value's JSON type."""
    return next((name for name in ("boolean", *PYTHON_TYPES) if is_of(value, {name})), type(value).__name__)


def _get_list(schema: Schema, keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _get_mapping(schema: Schema, keyword: str) -> Mapping[str, Any]:
    value = schema.get(keyword)
    return value if isinstance(value, Mapping) else {}


def _texts_of(value: object) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def _has_reference(schema: Schema) -> bool:
    return isinstance(schema.get("$ref"), str)


# -------------------------------------------------------------------------------------------------- jsonschema


@functools.cache
def _validator_class(draft: Any) -> Any:
    from jsonschema import validators

    return validators.extend(draft, {"uniqueItems": _check_unique})  # type: ignore[no-untyped-call]


def frozen(value: Any) -> Hashable:
    """Return a hashable key for a value; numbers as texts, since many numbers with one hash can be chosen."""
    if isinstance(value, dict):
        return frozenset((key, frozen(item)) for key, item in value.items())
    if isinstance(value, list):
        return tuple(map(frozen, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float, hex(value) if isinstance(value, int) else hex(int(value)) if value.is_integer() else repr(value)
    return type(value), value


def _check_unique(validator: Any, unique_items: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
    """Check `uniqueItems` in linear time; jsonschema compares each object in the list with each other."""
    from jsonschema import ValidationError

    if unique_items and isinstance(value, list) and len(set(map(frozen, value))) < len(value):
        yield ValidationError("must have no item twice")


def _describe_problems(error: ValidationError, above: tuple[str | int, ...] = ()) -> Iterator[str]:
    """Yield the problems; if no branch fits, the problems of the branch with the fewest."""
    path = (*above, *error.relative_path)
    value: Any = error.instance
    keyword_value: Any = error.validator_value
    name = repr(place_of(path)) if path else "the value"
    match error.validator:
        case "required":
            for key in keyword_value:
                if key not in value:
                    yield f"{place_of((*path, key))!r} is missing"
        case "type":
            kinds = " or ".join([keyword_value] if isinstance(keyword_value, str) else keyword_value)
            yield f"{name} must be {kinds}, not {type_of(value)}"
        case "enum" | "const":
            choices = keyword_value if error.validator == "enum" else [keyword_value]
            choice_text = ", ".join(abbreviate_json(choice) for choice in choices)
            yield f"{name} must be one of {choice_text}, not {abbreviate_json(value)}"
        case "anyOf" | "oneOf" if error.context:
            branches: dict[object, list[ValidationError]] = {}
            for suberror in error.context:
                branches.setdefault(suberror.relative_schema_path[0], []).append(suberror)
            for suberror in min(branches.values(), key=len):
                yield from _describe_problems(suberror, path)
        case str(keyword) if keyword in _WORDS:
            yield f"{name} must be {_WORDS[keyword]} {abbreviate_json(keyword_value)}, not {abbreviate_json(value)}"
        case _:
            yield f"{name}: {error.message[:PLACE]}"


def place_of(path: tuple[str | int, ...]) -> str:
    """Return `a.b[0]` for the location of a value within arguments; a long one is cut."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:PLACE]}" for part in path[:PLACE]).lstrip(".")
    return text if len(text) <= PLACE else text[:PLACE] + "…"


def abbreviate_json(value: Any) -> str:
    """Return the start of a value as JSON."""
    text = ""
    for chunk in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(value):
        text += chunk[: SHOWN + 1]
        if len(text) > SHOWN:
            return text[:SHOWN] + "…"
    return text
