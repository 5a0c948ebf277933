"""How a child's keys change a parent's: mappings merge, lists and scalars replace, null deletes.

A block whose kind changes is replaced whole, so that no key of the old kind is left behind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hermes_rl.spec.nodes import Entry, MappingNode, Node, NodePath, ScalarNode, SequenceNode, is_null, plain

Kind = Callable[[MappingNode, str], str | None]


def _first_of(*names: str) -> Kind:
    def kind(block: MappingNode, name: str) -> str | None:
        return next((key for key in names if block.get(key) is not None and not is_null(block.get(key))), None)

    return kind


def _value_of(key: str, default: str | None = None) -> Kind:
    def kind(block: MappingNode, name: str) -> str | None:
        node = block.get(key)
        return str(plain(node)) if isinstance(node, ScalarNode) else (default or name)

    return kind


def _server(block: MappingNode, name: str) -> str | None:
    node = block.get("type")
    return str(plain(node)) if isinstance(node, ScalarNode) else "openai"


_KINDS: tuple[tuple[tuple[str, ...], str, Kind], ...] = (
    (("dataset",), "path generator items", _first_of("path", "generator", "items")),
    (("dataset", "eval"), "split fraction only", _first_of("split", "fraction", "only")),
    (("dataset", "fallback"), "path items", _first_of("path", "items")),
    (("prompt",), "messages system user", lambda block, _: "messages" if block.get("messages") else "pair"),
    (("toolsets",), "enabled distribution", _first_of("enabled", "distribution")),
    (("sandbox",), "backend", _value_of("backend", "bubblewrap")),
    (("rewards", "*"), "fn", _value_of("fn")),
    (("servers", "*"), "type", _server),
    (("agent", "reasoning"), "effort max_tokens", _first_of("effort", "max_tokens")),
    (("artifacts", "*"), "path command", _first_of("path", "command")),
)
"""Block, the keys that choose its kind, and how the kind is read."""


def merge(parent: MappingNode, child: MappingNode, path: NodePath = ()) -> MappingNode:
    """The parent as the child changes it."""
    entries = dict(parent.entries)
    for name, entry in child.entries.items():
        before = entries.pop(name, None)
        if is_null(entry.value) and before is not None:
            continue
        value = entry.value if before is None else merged(before.value, entry.value, (*path, name))
        entries = _placed(entries, parent, name, Entry(entry.key, value))
    return replace(child, entries=entries)


def _placed(entries: dict[str, Entry], parent: MappingNode, name: str, entry: Entry) -> dict[str, Entry]:
    """A key that the parent has keeps its place in the order: columns and rewards run in order."""
    if name not in parent.entries:
        return {**entries, name: entry}
    names = [key for key in parent.entries if key in entries or key == name]
    names += [key for key in entries if key not in parent.entries]
    return {key: entry if key == name else entries[key] for key in names}


def merged(before: Node, after: Node, path: NodePath) -> Node:
    """One value as the child changes it."""
    if not isinstance(after, MappingNode):
        return after
    before = expand_shorthand(before, path)
    if not isinstance(before, MappingNode) or changes_kind(before, after, path):
        return after
    return merge(before, after, path)


def changes_kind(before: MappingNode, after: MappingNode, path: NodePath) -> bool:
    """True where the child chooses another kind for this block."""
    for pattern, choosers, kind in _KINDS:
        if len(pattern) == len(path) and all(a in ("*", b) for a, b in zip(pattern, path, strict=True)):
            chosen = any(not is_null(after.get(key)) and after.get(key) is not None for key in choosers.split())
            name = str(path[-1])
            return chosen and kind(before, name) is not None and kind(before, name) != kind(after, name)
    return False


def expand_shorthand(node: Node, path: NodePath) -> Node:
    """`wandb: project` and `toolsets: [a]` as the mappings that they stand for."""
    if path == ("wandb",) and isinstance(node, ScalarNode) and isinstance(node.value, str):
        return MappingNode(node.mark, {"project": Entry(node.mark, node)})
    if path == ("toolsets",) and isinstance(node, SequenceNode):
        return MappingNode(node.mark, {"enabled": Entry(node.mark, node)})
    return node
