"""The JSON Schema of the spec, for editors: every key with its help, and the arguments of the shipped rewards."""

from __future__ import annotations

import ast
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, Required

from pydantic import TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, JsonSchemaWarningKind
from pydantic_core.core_schema import PlainValidatorFunctionSchema
from typing_extensions import TypedDict

from hermes_rl.shipped import shipped_rewards
from hermes_rl.spec.argument_types import ARGUMENT_TYPES
from hermes_rl.spec.flags import PASSED
from hermes_rl.spec.model import Spec
from hermes_rl.spec.section import EMPTY, LazySection, Section
from hermes_rl.spec.server_types import type_names
from hermes_rl.spec.signatures import CodeError, Parameter, function

# ---------------------------------------------- Annotations of source text, converted to types or left unchecked

_TYPE_NAMES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, str, bool, bytes, list, dict, tuple, set)},
    "Any": Any,
    "object": Any,
    "None": None,
    "Literal": typing.Literal,
    "Optional": typing.Optional,
    "Union": typing.Union,
    "List": list,
    "Dict": dict,
    "Tuple": tuple,
    "Sequence": Sequence,
    "Mapping": Mapping,
    "Required": Required,
    "NotRequired": NotRequired,
    **ARGUMENT_TYPES,
}


def type_of(annotation: str, names: Mapping[str, ast.AST] = EMPTY) -> Any | None:
    """Return the type that an annotation names, or None if it is missing or names a user-defined type.

    `names` are the definitions in the annotation's file: a TypedDict and a type alias are resolved too.
    """
    if not annotation:
        return None
    try:
        return _evaluate_default(ast.parse(annotation, mode="eval").body, names)
    except (SyntaxError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _evaluate_default(node: ast.expr, names: Mapping[str, ast.AST]) -> Any:
    if isinstance(node, ast.Name):
        defined = names.get(node.id)
        if isinstance(defined, ast.ClassDef):
            return _typed_dict(defined, names)
        if isinstance(defined, ast.Assign):
            return _evaluate_default(defined.value, names)
        return _TYPE_NAMES[node.id]
    if isinstance(node, ast.Attribute):
        return _TYPE_NAMES[node.attr]
    if isinstance(node, ast.Constant) and isinstance(node.value, str | None):
        return None if node.value is None else _evaluate_default(ast.parse(node.value, mode="eval").body, names)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left_type, right = _evaluate_default(node.left, names), _evaluate_default(node.right, names)
        return typing.Union[left_type, right]  # noqa: UP007 - None | X is no type
    if not isinstance(node, ast.Subscript):
        raise ValueError("not a simple annotation")
    outer = _evaluate_default(node.value, names)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer is typing.Literal:
        return typing.Literal[tuple(ast.literal_eval(part) for part in parts)]
    arguments = tuple(
        ... if isinstance(part, ast.Constant) and part.value is ... else _evaluate_default(part, names)
        for part in parts
    )
    return outer[arguments if len(arguments) > 1 else arguments[0]]


def _typed_dict(node: ast.ClassDef, names: Mapping[str, ast.AST]) -> Any:
    """Return the TypedDict that a class statement defines; raises ValueError for another class."""
    if [ast.unparse(base).rpartition(".")[2] for base in node.bases] != ["TypedDict"]:
        raise ValueError("not a TypedDict, or one that inherits keys")
    fields = {
        each.target.id: _evaluate_default(each.annotation, names)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    total = not any(each.arg == "total" and ast.unparse(each.value) == "False" for each in node.keywords)
    return TypedDict(node.name, fields, total=total)  # type: ignore[operator]


# ------------------------------------------------------------------------------------------ The schema of a spec

_VARIABLE = {"type": "string", "pattern": r"^\$\{[A-Za-z_][A-Za-z0-9_]*(:-.*)?\}$", "description": "${VAR}"}
_SHORTHANDS: dict[tuple[str, str], dict[str, Any]] = {
    ("Spec", "toolsets"): {"type": "array", "items": {"type": "string"}},
    ("Spec", "wandb"): {"type": "string"},
    ("Spec", "state"): {"type": "string"},
    ("Agent", "program"): {"type": "string"},
    ("Dataset", "eval"): {"const": "only"},
    ("Limits", "memory"): {"type": "string"},
    ("Limits", "disk"): {"type": "string"},
    ("Budget", "deadline"): {"type": "string"},
    ("File", "mode"): {"type": "string"},
    ("Mcp", "command"): {"type": "string"},
}
"""Other ways to write a value, which the typed spec no longer shows."""
_NULLABLE = {"type": "null"}
_TYPED = frozenset({"type", "anyOf", "oneOf", "enum", "const", "$ref"})


class YamlSchema(GenerateJsonSchema):
    """Schema generator that omits empty mappings as defaults, and shows lazily built sections in full."""

    ignored_warning_kinds: set[JsonSchemaWarningKind] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def function_plain_schema(self, schema: PlainValidatorFunctionSchema) -> JsonSchemaValue:
        function = schema["function"]["function"]
        if isinstance(function, LazySection):
            return self.generate_inner(function.section.__pydantic_core_schema__)
        return super().function_plain_schema(schema)


def spec_json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the YAML."""
    for section in Section.__subclasses__():
        section.model_rebuild()  # sections are built when needed; they are about to be shown, with their defaults
    schema = Spec.model_json_schema(by_alias=True, schema_generator=YamlSchema)
    sections: dict[str, Any] = schema.pop("$defs")
    sections["Spec"] = {key: schema[key] for key in ("properties", "required") if key in schema}
    sections["Server"]["properties"]["type"]["enum"] = list(type_names())  # types of locally installed packages too
    for name, section in sections.items():
        _finish_section(name, section)
    top = sections.pop("Spec")
    _spec_specials(top, sections)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://hermes-rl.example/spec.schema.json",
        "title": "hermes-rl spec",
        "description": "An agentic reinforcement-learning environment in one file.",
        "type": "object",
        "additionalProperties": False,
        **top,
        "$defs": {"variable": _VARIABLE, **sections},
    }


def _finish_section(name: str, section: dict[str, Any]) -> None:
    section.pop("title", None)
    for key, field in section.get("properties", {}).items():
        field.pop("title", None)
        if name == "AgentOverrides" or (name, key) == ("Evaluate", "agent"):
            field.pop("default", None)  # absent keys have the values of `agent`
        elif (name, key) == ("Spec", "evaluate"):
            del field["default"]["agent"]
        shorthand = _SHORTHANDS.get((name, key))
        section["properties"][key] = _with_variable(_with_choice(field, shorthand) if shorthand else field)


def _with_choice(field: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    description: dict[str, Any] = {key: field.pop(key) for key in ("description", "default") if key in field}
    return {"anyOf": [*(field.pop("anyOf", None) or [field]), choice], **description}


def _with_variable(field: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `${VAR}` allowed for a number or a choice; a text may be anything already."""
    for key in ("items", "additionalProperties"):
        if isinstance(field.get(key), dict):
            field[key] = _with_variable(field[key])
    if _takes_text(field) or "$ref" in field or field.get("type") in ("array", "object"):
        return field
    return _with_choice(field, {"$ref": "#/$defs/variable"})


def _takes_text(field: dict[str, Any]) -> bool:
    if field.get("type") == "string" and "enum" not in field and "const" not in field:
        return True
    if _TYPED.isdisjoint(field):
        return True
    return any(_takes_text(choice) for choice in field.get("anyOf", []) if "pattern" not in choice)


def _spec_specials(top: dict[str, Any], sections: dict[str, Any]) -> None:
    """Add what a class cannot say: the parent, optional lists, free keys, and the rewards' arguments."""
    properties = top["properties"]
    parent = {"type": "string", "description": "One parent, relative to this file; its keys are merged."}
    top["properties"] = {"extends": parent, **properties}
    # a spec that extends another may omit keys that the parent has
    top.pop("required", None)
    top["anyOf"] = [{"required": ["extends"]}, {"required": ["dataset", "prompt"]}]
    server = {"$ref": "#/$defs/Server"}
    several = {"type": "array", "items": server, "minItems": 1}
    properties["servers"]["additionalProperties"] = {"anyOf": [server, several]}
    properties["atropos"]["properties"] = {
        name: _with_variable(
            {"type": field.type, "description": field.help} | ({"enum": list(field.choices)} if field.choices else {})
        )
        for name, field in PASSED.items()
    }
    properties["atropos"]["additionalProperties"] = False
    reward = sections["Reward"]
    reward.pop("required", None)
    reward["allOf"], reward_schemas = [], {}
    for name, path in shipped_rewards().items():
        try:
            signature = function(path, name)
        except CodeError:
            continue  # a reward under development; its own tests report the fault
        if signature is None:
            continue
        arguments = {"properties": {"args": {"$ref": f"#/$defs/args_{name}"}}}
        chosen = {"properties": {"fn": {"const": name}}, "required": ["fn"]}
        reward["allOf"].append({"if": chosen, "then": arguments})
        # Without `fn`, the reward's own name determines the arguments.
        by_key = {"if": {"not": {"required": ["fn"]}}, "then": arguments}
        reward_schemas[name] = {"allOf": [{"$ref": "#/$defs/Reward"}, by_key]}
        sections[f"args_{name}"] = {
            "type": "object",
            "description": signature.help,
            "properties": {argument.name: _argument_schema(argument) for argument in signature.arguments()},
            "additionalProperties": signature.open,
        }
    properties["rewards"]["properties"] = reward_schemas
    properties["rewards"]["additionalProperties"] = {"$ref": "#/$defs/Reward"}
    _make_nullable(top, sections)


def _make_nullable(top: dict[str, Any], sections: dict[str, Any]) -> None:
    """Allow null for every key: it is the same as an absent key, and deletes a parent's value."""
    for section in (top, *sections.values()):
        for key, field in section.get("properties", {}).items():
            if "$ref" in field and "description" not in field:  # pydantic omits the section's description
                field["description"] = sections[field["$ref"].rpartition("/")[2]]["description"]
            if _NULLABLE not in field.get("anyOf", []) and not _TYPED.isdisjoint(field):
                section["properties"][key] = _with_choice(field, dict(_NULLABLE))


def _argument_schema(parameter: Parameter) -> dict[str, Any]:
    kind = type_of(parameter.annotation)
    schema: dict[str, Any] = {}
    if kind is not None:
        try:
            schema = TypeAdapter(kind).json_schema()
        except PydanticUserError:
            schema = {}
    template = {"type": "string", "pattern": r"\{\{|\{%|^\$\{"}
    argument: dict[str, Any] = {"anyOf": [schema, template]} if schema else {}
    argument["description"] = parameter.help or parameter.annotation or parameter.name
    if not parameter.required and parameter.default is not ...:
        argument["default"] = parameter.default
    return argument
