"""How a child spec changes its parent: mappings merge, lists and scalars replace, null deletes.

A block whose kind changes is replaced whole, so that no key of the old kind is left behind. `extends` names one parent,
relative to the file that names it; a cycle is refused.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hermes_rl.errors import Problem
from hermes_rl.server_types import DEFAULT
from hermes_rl.spec.nodes import (
    Entry,
    MappingNode,
    Mark,
    Node,
    NodePath,
    ScalarNode,
    SequenceNode,
    SourceText,
    is_null,
    plain,
)
from hermes_rl.spec.reader import read_bytes, read_text

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


_KINDS: tuple[tuple[tuple[str, ...], str, Kind], ...] = (
    (("dataset",), "path generator items", _first_of("path", "generator", "items")),
    (("dataset", "eval"), "split fraction only", _first_of("split", "fraction", "only")),
    (("dataset", "fallback"), "path items", _first_of("path", "items")),
    (("prompt",), "messages system user", lambda block, _: "messages" if block.get("messages") else "pair"),
    (("toolsets",), "enabled distribution", _first_of("enabled", "distribution")),
    (("sandbox",), "backend", _value_of("backend", "bubblewrap")),
    (("rewards", "*"), "fn", _value_of("fn")),
    (("servers", "*"), "type", _value_of("type", DEFAULT)),
    (("agent", "reasoning"), "effort max_tokens", _first_of("effort", "max_tokens")),
    (("artifacts", "*"), "path command", _first_of("path", "command")),
)
"""Block, the keys that choose its kind, and how the kind is read."""


def merge(parent: MappingNode, child: MappingNode, path: NodePath = ()) -> MappingNode:
    """Return the parent as the child changes it."""
    entries = dict(parent.entries)
    for name, entry in child.entries.items():
        before = entries.pop(name, None)
        if is_null(entry.value) and before is not None:
            continue
        value = entry.value if before is None else merged(before.value, entry.value, (*path, name))
        entries = _placed(entries, parent, name, Entry(entry.key, value))
    return replace(child, entries=entries)


def _placed(entries: dict[str, Entry], parent: MappingNode, name: str, entry: Entry) -> dict[str, Entry]:
    """Return the merged keys in the parent's order, which matters: columns and rewards run in order."""
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
    """Return True where the child chooses another kind for this block."""
    for pattern, choosers, kind in _KINDS:
        if len(pattern) == len(path) and all(a in ("*", b) for a, b in zip(pattern, path, strict=True)):
            chosen = any(not is_null(after.get(key)) and after.get(key) is not None for key in choosers.split())
            name = str(path[-1])
            return chosen and kind(before, name) is not None and kind(before, name) != kind(after, name)
    return False


def expand_shorthand(node: Node, path: NodePath) -> Node:
    """`wandb: project`, `state: file.py:Class` and `toolsets: [a]` as the mappings that they stand for."""
    if path == ("wandb",) and isinstance(node, ScalarNode) and isinstance(node.value, str):
        return MappingNode(node.mark, {"project": Entry(node.mark, node)})
    if path == ("state",) and isinstance(node, ScalarNode) and isinstance(node.value, str):
        return MappingNode(node.mark, {"python": Entry(node.mark, node)})
    if path == ("toolsets",) and isinstance(node, SequenceNode):
        return MappingNode(node.mark, {"enabled": Entry(node.mark, node)})
    return node


# ---------------------------------------------------------------------- Reading a file together with its parents
# Owns the chain: one parent each, relative to the file that names it, no cycle. `merge` says what a child
# changes.


def read_spec_file(path: Path, name: str, within: Path | None = None) -> tuple[MappingNode | None, list[Problem]]:
    """Return the tree of a file with its parents merged in, and every problem of reading them.

    `within` is a folder that all parents have to lie in.

    Raises:
        OSError: the file itself cannot be read.
    """
    root, problems = read_bytes(path.read_bytes(), SourceText(name, path.resolve().parent))
    tree = _as_mapping(root, SourceText(name, path.resolve().parent), problems)
    return _with_parent(tree, problems, (path.resolve(),), within)


def read_spec_text(text: str, source: SourceText) -> tuple[MappingNode | None, list[Problem]]:
    """As `read_spec_file`, from text."""
    root, problems = read_text(text, source)
    return _with_parent(_as_mapping(root, source, problems), problems, ())


def _as_mapping(root: Node | None, source: SourceText, problems: list[Problem]) -> MappingNode | None:
    if isinstance(root, MappingNode):
        return root
    if not problems:
        mark = Mark(source, 1, 1) if root is None else root.mark
        problems.append(mark.problem("a spec is a mapping" if root is not None else "the file is empty"))
    return None


def _with_parent(
    child: MappingNode | None, problems: list[Problem], seen: tuple[Path, ...], within: Path | None = None
) -> tuple[MappingNode | None, list[Problem]]:
    node = child.get("extends") if child is not None else None
    if child is None or node is None:
        return child, problems
    child = child.without("extends")
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str):
        return child, [*problems, node.mark.problem("expected the path of one parent")]
    path = (node.mark.source.folder / node.value).resolve()
    if within is not None and not path.is_relative_to(within.resolve()):
        return child, [*problems, node.mark.problem(f"a spec of a repository names files of it alone; this is {path}")]
    if path in seen:
        return child, [*problems, node.mark.problem(f"{node.value} extends this file; that is a cycle")]
    parent, parents = _parent(path, node)
    parent, parents = _with_parent(parent, parents, (*seen, path), within)
    if parent is None:
        return child, [*problems, *parents]
    return merge(parent.without("name"), child), [*problems, *parents]


def _parent(path: Path, node: ScalarNode) -> tuple[MappingNode | None, list[Problem]]:
    shown = posixpath.normpath(posixpath.join(posixpath.dirname(node.mark.source.name), str(node.value)))
    source = SourceText(shown, path.parent)
    try:
        root, problems = read_bytes(path.read_bytes(), source)
    except OSError as error:
        return None, [node.mark.problem(f"cannot be read: {node.value}: {error.strerror}")]
    return _as_mapping(root, source, problems), problems
