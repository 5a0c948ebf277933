"""`extends`: reading a file together with its parents.

Owns the chain: one parent each, relative to the file that names it, no cycle. `merge` says what a child
changes.
"""

from __future__ import annotations

import posixpath
from pathlib import Path

from hermes_rl.errors import Problem
from hermes_rl.spec.merge import merge
from hermes_rl.spec.nodes import MappingNode, Mark, Node, ScalarNode, SourceText
from hermes_rl.spec.reader import read_bytes, read_text


def read_spec_file(path: Path, name: str) -> tuple[MappingNode | None, list[Problem]]:
    """The tree of a file with its parents merged in, and every problem of reading them.

    Raises:
        OSError: the file itself cannot be read.
    """
    root, problems = read_bytes(path.read_bytes(), SourceText(name, path.resolve().parent))
    tree = _as_mapping(root, SourceText(name, path.resolve().parent), problems)
    return _with_parent(tree, problems, (path.resolve(),))


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
    child: MappingNode | None, problems: list[Problem], seen: tuple[Path, ...]
) -> tuple[MappingNode | None, list[Problem]]:
    node = child.get("extends") if child is not None else None
    if child is None or node is None:
        return child, problems
    child = child.without("extends")
    if not isinstance(node, ScalarNode) or not isinstance(node.value, str):
        return child, [*problems, node.mark.problem("expected the path of one parent")]
    path = (node.mark.source.folder / node.value).resolve()
    if path in seen:
        return child, [*problems, node.mark.problem(f"{node.value} extends this file; that is a cycle")]
    parent, found = _parent(path, node)
    parent, found = _with_parent(parent, found, (*seen, path))
    if parent is None:
        return child, [*problems, *found]
    return merge(parent.without("name"), child), [*problems, *found]


def _parent(path: Path, node: ScalarNode) -> tuple[MappingNode | None, list[Problem]]:
    shown = posixpath.normpath(posixpath.join(posixpath.dirname(node.mark.source.name), str(node.value)))
    source = SourceText(shown, path.parent)
    try:
        root, problems = read_bytes(path.read_bytes(), source)
    except OSError as error:
        return None, [node.mark.problem(f"cannot be read: {node.value}: {error.strerror}")]
    return _as_mapping(root, source, problems), problems
