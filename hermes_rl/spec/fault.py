"""What a rule finds: a path, what is wrong there, and the small readers that rules share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.secrets import holds_secret


class Fault(NamedTuple):
    """Something impossible at a path, to be shown at its key or its value."""

    path: NodePath
    message: str
    at: Literal["key", "value"] = "value"


def section(data: Any, *path: str) -> dict[str, Any]:
    """The mapping at a path, empty where there is none."""
    for step in path:
        if not isinstance(data, dict):
            return {}
        data = data.get(step)
    return data if isinstance(data, dict) else {}


def entries(data: Any, *path: str) -> Iterator[tuple[NodePath, Any]]:
    """The items of the list, or the values of the mapping, at a path, each with its own path."""
    for step in path:
        data = data.get(step) if isinstance(data, dict) else None
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key), value


def address(path: NodePath, url: Any, instead: str) -> Iterator[Fault]:
    """A fault where it is no address of HTTP, or holds a secret; `instead` are the keys for that."""
    if isinstance(url, str) and not url.startswith(("http://", "https://")):
        yield Fault(path, "expected an address that starts with http:// or https://")
    elif isinstance(url, str) and holds_secret(url):
        yield Fault(path, f"an address must not hold a password, key or token; use {instead}")


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
