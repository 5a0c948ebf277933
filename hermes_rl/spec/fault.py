"""What a rule finds: a path, what is wrong there, and the small readers that rules share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hermes_rl.spec.nodes import NodePath


@dataclass(frozen=True)
class Fault:
    """Something impossible at a path, to be shown at its key or its value."""

    path: NodePath
    message: str
    at: Literal["key", "value"] = "value"


def section(data: Any, *path: str | int) -> dict[str, Any]:
    """The mapping at a path, empty where there is none."""
    for step in path:
        if isinstance(data, dict) or (isinstance(data, list) and isinstance(step, int) and step < len(data)):
            data = data.get(step) if isinstance(data, dict) else data[step]
        else:
            return {}
    return data if isinstance(data, dict) else {}


def entries(data: Any, *path: str | int) -> Iterator[tuple[NodePath, Any]]:
    """The items of the list, or the values of the mapping, at a path, each with its own path."""
    for step in path:
        data = data.get(step) if isinstance(data, dict) else None
    if isinstance(data, dict):
        yield from (((*path, key), value) for key, value in data.items())
    elif isinstance(data, list):
        yield from (((*path, index), value) for index, value in enumerate(data))


def exactly_one(value: Any, path: NodePath, names: tuple[str, ...], what: str) -> Iterator[Fault]:
    """A fault where none or several of the keys are there."""
    if not isinstance(value, dict):
        return
    given = [name for name in value if name in names]
    wanted = f"{', '.join(names[:-1])} or {names[-1]}"
    if not given:
        yield Fault(path, f"{what} needs one of {wanted}", at="key")
    for name in given[1:]:
        yield Fault((*path, name), f"{what} takes one of {wanted}; `{given[0]}` is there already", at="key")
