"""Merge a child spec into its parent: mappings merge, lists and scalars replace, null deletes.

A block whose kind changes is replaced completely, so that no key of the old kind remains. `extends` names one parent,
relative to the file that names it; a cycle is an error.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hermes_rl.errors import Problem
from hermes_rl.spec.nodes import (
    Entry,
    MappingNode,
    Mark,
    Node,
    NodePath,
    Pattern,
    ScalarNode,
    SequenceNode,
    SourceText,
    is_in,
    is_null,
    mapping,
    to_builtins,
)
from hermes_rl.spec.reader import read_file, read_text
from hermes_rl.spec.server_types import DEFAULT

_KINDS: Mapping[Pattern, tuple[str, ...]] = {
    ("dataset",): ("path", "generator", "items", "harbor"),
    ("dataset", "eval"): ("split", "fraction", "only"),
    ("dataset", "fallback"): ("path", "items"),
    ("prompt",): ("messages", "system", "user"),
    ("toolsets",): ("enabled", "distribution"),
    ("sandbox",): ("backend",),
    ("rewards", "*"): ("fn",),
    ("servers", "*"): ("type",),
    ("agent", "reasoning"): ("effort", "max_tokens"),
    ("agent", "program"): ("recipe", "command"),
    ("agents", "*", "agent", "program"): ("recipe", "command"),
    ("artifacts", "*"): ("path", "command"),
}
"""The keys that choose the kind of a block: the first that is there, or the value of the only one."""
_GO_WITH_KIND: Mapping[Pattern, tuple[str, ...]] = {
    ("dataset",): ("name", "split", "data_files", "revision", "streaming", "fallback"),
    ("sandbox",): ("image",),
    ("rewards", "*"): ("args",),
    ("agent", "program"): ("env", "files"),
    ("agents", "*", "agent", "program"): ("env", "files"),
}
"""Further keys of such a block that mean something to one kind of it alone."""
_SHORT_FOR: Mapping[Pattern, str] = {
    ("wandb",): "project",
    ("state",): "python",
    ("agent", "program"): "recipe",
    ("agents", "*", "agent", "program"): "recipe",
}
"""Blocks for which a text may stand, and the key that it is the value of."""
_DEFAULTS = {"backend": "bubblewrap", "type": DEFAULT}


def _chosen_kind(block: MappingNode, choosers: tuple[str, ...], name: str) -> str | None:
    if len(choosers) == 1:
        node = block.get(choosers[0])
        return str(to_builtins(node)) if isinstance(node, ScalarNode) else _DEFAULTS.get(choosers[0], name)
    present_key = next((key for key in choosers if block.get(key) is not None and not is_null(block.get(key))), None)
    return "pair" if choosers[0] == "messages" and present_key != "messages" else present_key


def merge(parent: MappingNode, child: MappingNode, path: NodePath = ()) -> MappingNode:
    """Return the parent as the child changes it."""
    entries = dict(parent.entries)
    for name, entry in child.entries.items():
        before = entries.get(name)
        if is_null(entry.value) and before is not None:
            del entries[name]
        else:  # a key of the parent keeps its place, which matters: columns and rewards run in order
            value = entry.value if before is None else merged(before.value, entry.value, (*path, name))
            entries[name] = Entry(entry.key, value)
    return replace(child, entries=entries)


def merged(before: Node, after: Node, path: NodePath) -> Node:
    """Return one value with the child's change applied."""
    if not isinstance(after, MappingNode):
        return after
    before = expand_shorthand(before, path)
    if not isinstance(before, MappingNode) or changes_kind(before, after, path):
        return after
    return merge(before, after, path)


def changes_kind(before: MappingNode, after: MappingNode, path: NodePath) -> bool:
    """Return True where the child chooses another kind for this block."""
    choosers = next((keys for pattern, keys in _KINDS.items() if is_in(path, (pattern,))), ())
    if not any(not is_null(after.get(key)) and after.get(key) is not None for key in choosers):
        return False
    old, new = (_chosen_kind(block, choosers, str(path[-1])) for block in (before, after))
    return old is not None and old != new


def keys_of_kinds(path: NodePath) -> list[str]:
    """Return the keys of a block that belong to one of its kinds; the others stay when its kind changes."""
    tables = (*_KINDS.items(), *_GO_WITH_KIND.items())
    return [key for pattern, keys in tables if is_in(path, (pattern,)) for key in keys]


def expand_shorthand(node: Node, path: NodePath) -> Node:
    """Return the full form of `wandb: project`, `state: file.py:Class`, `program: codex` and `toolsets: [a]`."""
    if isinstance(node, ScalarNode) and isinstance(node.value, str):
        key = next((key for pattern, key in _SHORT_FOR.items() if is_in(path, (pattern,))), None)
    else:
        key = "enabled" if path == ("toolsets",) and isinstance(node, SequenceNode) else None
    return node if key is None else mapping(node.position, **{key: node})


# ---------------------------------------------------------------------- Reading a file together with its parents
# Resolves the chain of parents: one per file, relative to that file, without cycles. `merge` applies the changes.


def read_spec_file(path: Path, name: str, within: Path | None = None) -> tuple[MappingNode | None, list[Problem]]:
    """Return the tree of a file with its parents merged in, and every problem of reading them.

    All parents must be inside the directory `within`. Raises `OSError` if the file itself cannot be read.
    """
    root, problems = read_file(path, name)
    tree = _as_mapping(root, SourceText(name, path.resolve().parent), problems)
    return _with_parent(tree, problems, (path.resolve(),), within)


def read_spec_text(text: str, source: SourceText) -> tuple[MappingNode | None, list[Problem]]:
    """Return the tree of a text, merged and checked like `read_spec_file`."""
    root, problems = read_text(text, source)
    return _with_parent(_as_mapping(root, source, problems), problems, ())


def _as_mapping(root: Node | None, source: SourceText, problems: list[Problem]) -> MappingNode | None:
    if isinstance(root, MappingNode):
        return root
    if not problems:
        position = Mark(source, 1, 1) if root is None else root.position
        problems.append(position.problem("a spec is a mapping" if root is not None else "the file is empty"))
    return None


def _with_parent(
    child: MappingNode | None, problems: list[Problem], visited: tuple[Path, ...], within: Path | None = None
) -> tuple[MappingNode | None, list[Problem]]:
    node = child.get("extends") if child is not None else None
    if child is None or node is None:
        return child, problems
    child = child.without("extends")
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str):
        return child, [*problems, node.position.problem("expected the path of one parent")]
    path = (node.position.source.folder / node.value).resolve()
    if within is not None and not path.is_relative_to(within.resolve()):
        return child, [
            *problems,
            node.position.problem(f"a spec of a repository names files of it alone; this is {path}"),
        ]
    if path in visited:
        return child, [*problems, node.position.problem(f"{node.value} extends this file; that is a cycle")]
    display_path = posixpath.normpath(posixpath.join(posixpath.dirname(node.position.source.name), node.value))
    try:
        root, parents = read_file(path, display_path)
    except OSError as error:
        return child, [*problems, node.position.problem(f"cannot be read: {node.value}: {error.strerror}")]
    parent = _as_mapping(root, SourceText(display_path, path.parent), parents)
    parent, parents = _with_parent(parent, parents, (*visited, path), within)
    if parent is None:
        return child, [*problems, *parents]
    return merge(parent.without("name"), child), [*problems, *parents]
