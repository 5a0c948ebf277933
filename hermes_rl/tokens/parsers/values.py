"""Argument values of XML-style formats, which have no types of their own: the tool's schema tells them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hermes_rl.tokens.parsers.base import Tools, loads

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def typed(tools: Tools | None, tool: str, name: str, text: str) -> Any:
    """The value of an argument as its schema wants it; the text itself where that is not possible or not known."""
    allowed = _allowed(_schema(tools, tool, name))
    if not allowed or allowed == {"string"}:
        return text
    try:
        value = loads(text.lower() if text in ("True", "False", "None") else text)
    except ValueError:
        return text
    if isinstance(value, str):
        return text
    return value if "string" not in allowed or any(_is(value, kind) for kind in allowed) else text


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))


def _schema(tools: Tools | None, tool: str, name: str) -> Mapping[str, Any]:
    for entry in tools or ():
        function = entry.get("function", entry)
        if isinstance(function, Mapping) and function.get("name") == tool:
            properties = (function.get("parameters") or {}).get("properties") or {}
            found = properties.get(name)
            return found if isinstance(found, Mapping) else {}
    return {}


def _allowed(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty where it does not say."""
    given = schema.get("type")
    found = {given} if isinstance(given, str) else set(given) if isinstance(given, list | tuple) else set()
    for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        found |= _allowed(branch) if isinstance(branch, Mapping) else set()
    if not found and schema.get("enum"):
        found = {kind for kind in _TYPES for value in schema["enum"] if _is(value, kind)}
    return found
