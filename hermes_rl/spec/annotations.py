"""Annotations that stand in source text, as types and as JSON Schema; those that are not simple are left open."""

from __future__ import annotations

import ast
import typing
from collections.abc import Mapping, Sequence
from typing import Any

_NAMES: dict[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "bytes": bytes,
    "list": list,
    "dict": dict,
    "tuple": tuple,
    "set": set,
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
}


def type_of(annotation: str) -> Any | None:
    """The type that an annotation names; None where it is missing or names something of its own."""
    if not annotation:
        return None
    try:
        return _evaluate(ast.parse(annotation, mode="eval").body)
    except (SyntaxError, KeyError, TypeError, ValueError):
        return None


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return _NAMES[node.id]
    if isinstance(node, ast.Attribute):
        return _NAMES[node.attr]
    if isinstance(node, ast.Constant):
        return None if node.value is None else _text_annotation(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return typing.Union[_evaluate(node.left), _evaluate(node.right)]  # noqa: UP007 - None | X is no type
    if isinstance(node, ast.Subscript):
        return _subscript(node)
    raise ValueError("not a simple annotation")


def _text_annotation(value: object) -> Any:
    if isinstance(value, str):
        return _evaluate(ast.parse(value, mode="eval").body)
    raise ValueError("not a simple annotation")


def _subscript(node: ast.Subscript) -> Any:
    outer = _evaluate(node.value)
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer is typing.Literal:
        return typing.Literal[tuple(ast.literal_eval(part) for part in parts)]
    inner = tuple(... if isinstance(part, ast.Constant) and part.value is ... else _evaluate(part) for part in parts)
    return outer[inner if len(inner) > 1 else inner[0]]
