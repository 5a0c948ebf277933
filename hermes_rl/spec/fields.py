"""Which keys a place of the spec knows, found from the types of the model."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel

from hermes_rl.spec.nodes import NodePath


def key_of(name: str, model: type[BaseModel]) -> str:
    """The key of a field in YAML."""
    return model.model_fields[name].alias or name


def keys(model: type[BaseModel]) -> list[str]:
    """All keys of a section, in order."""
    return [key_of(name, model) for name in model.model_fields]


def keys_at(model: type[BaseModel], path: NodePath) -> list[str]:
    """The keys that the mapping at a path may have; none where it is free."""
    found: list[str] = []
    places = types_at(model, path)
    # a server may be written without its list
    places += [inner for place in places if get_origin(place) is tuple for inner in members(get_args(place)[0])]
    for place in places:
        if isinstance(place, type) and issubclass(place, BaseModel):
            found.extend(keys(place))
    if not path:
        found.append("extends")
    return found


def types_at(model: type[BaseModel], path: NodePath) -> list[Any]:
    """The types that the value at a path may have."""
    possible: list[Any] = [model]
    for step in path:
        possible = [inner for outer in possible for inner in _step(outer, step)]
    return possible


def _step(outer: Any, step: str | int) -> list[Any]:
    if isinstance(outer, type) and issubclass(outer, BaseModel):
        for name, field in outer.model_fields.items():
            if step in (name, field.alias):
                return members(field.annotation)
        return []
    container, args = get_origin(outer), get_args(outer)
    if container is tuple and args:
        inner = members(args[0])
        # one server may be written without its list
        return inner if isinstance(step, int) else [part for one in inner for part in _step(one, step)]
    if container is not None and isinstance(container, type) and issubclass(container, Mapping):
        return members(args[1])
    return []


def members(annotation: Any) -> list[Any]:
    """The alternatives of a type, without Annotated, None and unions."""
    if isinstance(annotation, TypeVar):
        return []
    container = get_origin(annotation)
    if container is Annotated:
        return members(get_args(annotation)[0])
    if container in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in members(part)]
    return [] if annotation is type(None) else [annotation]
