"""Translate the keys and values of a spec that have a new name, by the table of `hermes_rl.spec.new_names`.

The loader refuses an old name with the new one, the specs stored in run directories are translated, `hermes-rl migrate`
rewrites files, and the fingerprint of a run is computed with the old names, so that runs of earlier versions resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from hermes_rl.errors import Problem
from hermes_rl.spec.new_names import KEYS, VALUES
from hermes_rl.spec.nodes import (
    Entry,
    MappingNode,
    Mark,
    Node,
    NodePath,
    Pattern,
    ScalarNode,
    SequenceNode,
    is_in,
    is_row,
    walk,
)


class _ByPath:
    """Values by the path of a key, found by its last name first."""

    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._by_name: dict[str | int, list[tuple[Pattern, Any]]] = {}
        for key, value in entries.items():
            pattern = tuple(key.split("."))
            self._by_name.setdefault(pattern[-1], []).append((pattern, value))

    def get(self, path: NodePath) -> Any:
        """Return the value for a path, or None."""
        entries = self._by_name.get(path[-1], ()) if path else ()
        return next((value for pattern, value in entries if is_in(path, (pattern,))), None)


def _sibling_key(key: str, name: str) -> str:
    return ".".join([*key.split(".")[:-1], name])


_NEW_NAMES = _ByPath(KEYS)
_OLD_NAMES = _ByPath({_sibling_key(key, name): key.split(".")[-1] for key, name in KEYS.items()})
_NEW_VALUES = _ByPath(VALUES)
_OLD_VALUES = _ByPath({key: {new: old for old, new in values.items()} for key, values in VALUES.items()})


class OldName(NamedTuple):
    """A key in a spec that has an old name."""

    old: NodePath
    new: NodePath
    key: Mark
    old_value: Node
    new_value: Node
    is_double: bool
    """True if the new key is there too."""

    @property
    def message(self) -> str:
        """The old and the new name."""
        old, new = (".".join(map(str, path)) for path in (self.old, self.new))
        for _, old_value, new_value in self._value_edits:
            old, new = f"{old}: {old_value}", f"{new}: {new_value}"
        return f"`{old}` is now `{new}`"

    @property
    def problem(self) -> Problem:
        """The error for a spec that has the old name."""
        remedy = f"`hermes-rl migrate {self.key.source.name}` rewrites the file"
        return self.key.problem(f"{self.message}; {'both are here: remove one' if self.is_double else remedy}")

    @property
    def edits(self) -> Iterator[tuple[Mark, str, str]]:
        """Yield the position of each text to replace, its old text, and its new text."""
        yield self.key, str(self.old[-1]), str(self.new[-1])
        yield from self._value_edits

    @property
    def _value_edits(self) -> Iterator[tuple[Mark, str, str]]:
        old, new = self.old_value, self.new_value
        if isinstance(old, ScalarNode) and isinstance(new, ScalarNode) and old.value != new.value:
            yield old.position, old.text, new.text


def renamed(node: Node, path: NodePath = ()) -> tuple[Node, list[OldName]]:
    """Return the tree with the new names, and its changes; of a key that is there under both names the new one stays.

    `path` has the new names.
    """
    changes: list[OldName] = []
    if isinstance(node, SequenceNode) and not is_row(path):
        items = []
        for index, item in enumerate(node.items):
            item, below = renamed(item, (*path, index))
            items.append(item)
            changes += below
        return (replace(node, items=tuple(items)) if changes else node), changes
    if not isinstance(node, MappingNode) or is_row(path):
        return node, changes
    entries: dict[str, Entry] = {}
    for key, entry in node.entries.items():
        new_path = current((*path, key))
        value, below = renamed(entry.value, new_path)
        changes += below
        name = str(new_path[-1])
        if name != key:
            old_value, value = value, _with_new_value(value, new_path)
            changes.append(OldName((*path, key), new_path, entry.key, old_value, value, name in node.entries))
            if changes[-1].is_double:
                continue
        entries[name] = Entry(entry.key, value)
    return (replace(node, entries=entries) if changes else node), changes


def renamed_in_set(root: Node) -> list[OldName]:
    """Return the old names in a set of specs, whose changes of a spec have keys with dots."""
    names: list[OldName] = []
    for path, key, value in walk(root):
        if len(path) == 5 and path[0] == path[3] == "set":
            old = tuple(int(step) if step.isdigit() else step for step in str(path[4]).split("."))
            new = current(old)
            if new != old:
                dotted = ".".join(map(str, new))
                names.append(OldName(path[4:], (dotted,), key, value, _with_new_value(value, new), is_double=False))
            names += renamed(value, new)[1]
    return names


def current(path: NodePath) -> NodePath:
    """Return the path with the new name of each of its keys."""
    new: NodePath = ()
    for step in path:
        name = _NEW_NAMES.get((*new, step))
        new = (*new, step if name is None else name)
    return new


def with_old_names(value: Any, path: NodePath = ()) -> Any:
    """Return plain data of a spec under the names of its keys and values before they were renamed."""
    if isinstance(value, list):
        return [with_old_names(item, (*path, index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {_OLD_NAMES.get((*path, key)) or key: with_old_names(item, (*path, key)) for key, item in value.items()}
    old = _OLD_VALUES.get(path)
    return old.get(value, value) if old else value


def _with_new_value(node: Node, path: NodePath) -> Node:
    values = _NEW_VALUES.get(path)
    if not values or not isinstance(node, ScalarNode) or node.value not in values:
        return node
    return replace(node, value=values[node.value], text=values[node.value], is_plain=True)
