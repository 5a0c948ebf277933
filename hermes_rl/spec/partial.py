"""Remove the faulty parts of a spec, so that the other parts can be checked too.

A faulty part is removed completely, together with the parts that would look wrong without it: a problem reported later
is better than a false one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import Entry, MappingNode, Node, NodePath, SequenceNode, mapping, scalar
from hermes_rl.spec.validate import Validated, parse_tree

_BY_ENTRY = ("rewards", "tools", "artifacts", "servers")
"""Sections whose entries stand alone; of the others the whole section goes."""


_OF_A_SERVER = frozenset({"type", "base_url", "model"})


class Draft(NamedTuple):
    """A spec that may lack some parts; without `has_rows`, its rows are placeholders instead of the user's."""

    spec: Spec
    has_rows: bool


def salvage(validated: Validated) -> Draft | None:
    """Return the valid parts as a spec, or None if they do not form one."""
    wrong = [path[:2] if path[:1] and path[0] in _BY_ENTRY else path[:1] for path in validated.wrong]
    if () in wrong:
        return None
    tree = validated.tree
    for section in dict.fromkeys(str(path[0]) for path in wrong):
        names = [path[1] for path in wrong if path[0] == section and len(path) > 1]
        is_unusable = (section,) in wrong or tree.get(section) is None
        tree = tree.without(section) if is_unusable else tree.having(**{section: _drop_entries(tree, section, names)})
    if _roles_are_unknown(validated.tree, wrong):
        tree = tree.without("rewards")
    spec = parse_tree(_add_placeholders(tree))
    return None if spec is None else Draft(spec, ("dataset",) not in wrong)


def _drop_entries(tree: MappingNode, section: str, names: Iterable[str | int]) -> Node:
    """Return a section without these entries; a server is replaced, since rewards name its role."""
    node = tree.get(section)
    assert node is not None
    if isinstance(node, SequenceNode):
        return replace(node, items=tuple(item for index, item in enumerate(node.items) if index not in names))
    if not isinstance(node, MappingNode):
        return node
    if section == "servers":
        stand_in = Entry(node.position, mapping(node.position, type=scalar(node.position, "scripted")))
        return replace(node, entries={**node.entries, **{str(name): stand_in for name in names}})
    return node.without(*map(str, names))


def _roles_are_unknown(tree: MappingNode, wrong: list[NodePath]) -> bool:
    """Return True if servers are unreadable or under a misspelt key, so that any server role may exist."""
    unknown = [tree.get(str(path[0])) for path in wrong if len(path) == 1 and path[0] not in Spec.model_fields]
    entries = [entry.value for node in unknown if isinstance(node, MappingNode) for entry in node.entries.values()]
    models = [node for node in entries if isinstance(node, MappingNode) and not _OF_A_SERVER.isdisjoint(node.entries)]
    return ("servers",) in wrong or (tree.get("servers") is None and bool(models))


def _add_placeholders(tree: MappingNode) -> MappingNode:
    """Return the spec with placeholders for missing sections that every spec requires."""
    position = tree.position
    if tree.get("dataset") is None:
        row = SequenceNode(position, (MappingNode(position),))
        tree = tree.having(dataset=mapping(position, items=row))
    return tree if tree.get("prompt") is not None else tree.having(prompt=mapping(position, user=scalar(position, "-")))
