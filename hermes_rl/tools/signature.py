"""From the signature and docstring of a Python function to the schema of a tool, and from arguments to values.

Owns `Signature`. Types are pydantic's business: whatever pydantic can describe may be annotated, so str,
int, float, bool, list, dict, Optional, Literal, Enum, dataclasses and pydantic models.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hermes_rl.errors import UserError
from hermes_rl.tools.errors import ToolInputError

_SECTION = re.compile(r"^\s*(args|arguments|parameters|returns|raises|yields|examples?|notes?):?\s*$", re.I)
_ARGUMENT = re.compile(r"^\s*(?::param\s+(?:\w+\s+)?)?\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.+)$")


@dataclass(frozen=True)
class Signature:
    """The parameters of a function as a JSON Schema, and how to make values of them."""

    description: str
    parameters: dict[str, Any]
    adapter: TypeAdapter[Any]

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, *, skip_first: bool = False) -> Signature:
        """Read a function; raises `UserError` where a model could not call it. `skip_first` leaves out self."""
        text = inspect.getdoc(function) or ""
        if not text:
            raise UserError(f"tool {name!r} has no docstring; its first paragraph is what the model is told")
        described = _argument_texts(text)
        fields: dict[str, Any] = {}
        for parameter in _parameters(function, name, skip_first=skip_first):
            fields[parameter.name] = _field(parameter, described.get(parameter.name))
        # A TypedDict, since a model class would reserve names such as `schema` and `copy` for itself.
        shape = TypedDict(name, fields)  # type: ignore[misc]
        shape.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
        try:
            adapter: TypeAdapter[Any] = TypeAdapter(shape)
            schema = adapter.json_schema()
        except Exception as error:
            raise UserError(f"tool {name!r}: the types cannot be described to a model: {error}") from error
        return cls(_summary(text), _tidy(schema), adapter)

    def values(self, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments as the annotated types; raises `ToolInputError`."""
        try:
            values: dict[str, Any] = self.adapter.validate_python(args)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ToolInputError("; ".join(problems)) from None
        return values


def _parameters(function: Callable[..., Any], name: str, *, skip_first: bool) -> list[inspect.Parameter]:
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"tool {name!r}: an annotation cannot be resolved: {error}") from error
    found = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
    for parameter in found:
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
            raise UserError(f"tool {name!r}: a model cannot give parameter {parameter}; name it and type it")
        if parameter.name not in hints:
            raise UserError(f"tool {name!r}: parameter {parameter.name!r} has no type")
    return [parameter.replace(annotation=hints[parameter.name]) for parameter in found]


def _field(parameter: inspect.Parameter, description: str | None) -> Any:
    extra: dict[str, Any] = {}
    optional = parameter.default is not parameter.empty
    if optional and isinstance(parameter.default, str | int | float | bool):
        extra["default"] = parameter.default
    field = Field(description=description, json_schema_extra=extra or None)
    typed: Any = Annotated[(parameter.annotation, field)]
    return typing.NotRequired[typed] if optional else typed


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the titles that pydantic makes of names: they cost tokens and tell a model nothing."""
    schema.pop("title", None)
    schema.setdefault("properties", {})
    for part in (schema, *schema.get("$defs", {}).values()):
        part.pop("title", None)
        for inner in part.get("properties", {}).values():
            inner.pop("title", None)
    return schema


def _summary(text: str) -> str:
    """The docstring up to the section that describes the arguments."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if _SECTION.match(line) or line.strip().startswith(":param"):
            return "\n".join(lines[:number]).strip()
    return text.strip()


def _argument_texts(text: str) -> dict[str, str]:
    """What a docstring in Google's or Sphinx' style says about each parameter."""
    found: dict[str, str] = {}
    inside, last = False, ""
    for line in text.split("\n"):
        if _SECTION.match(line):
            inside, last = line.strip().lower().startswith(("arg", "param")), ""
            continue
        match = _ARGUMENT.match(line)
        if match and (inside or line.strip().startswith(":param")):
            last = match.group(1)
            found[last] = match.group(2).strip()
        elif inside and last and line.strip():
            found[last] += " " + line.strip()
    return found
