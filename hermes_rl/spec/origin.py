"""Where each part of a loaded spec was written: the tree behind a `Spec`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hermes_rl.errors import Problem
from hermes_rl.spec.nodes import MappingNode, Mark, Node, NodePath, ScalarNode, SequenceNode, find, locate


@dataclass(frozen=True, eq=False)
class Origin:
    """The merged, substituted tree; two origins never make two specs differ."""

    root: MappingNode

    def problem(self, path: NodePath, message: str, *, at: Literal["key", "value"] = "value") -> Problem:
        """A problem at the key or the value of `path`, or of its nearest parent that was written."""
        return place(self.root, path, at).problem(message)

    def line_problem(self, path: NodePath, line: int, message: str, *, near: str | None = None) -> Problem:
        """A problem in line `line` (from 1) of the text at `path`; `near` is a word of that line."""
        _, _, node = locate(self.root, path)
        return line_mark(node, line, near).problem(message)

    def is_written(self, path: NodePath) -> bool:
        """True where the whole path exists."""
        return len(locate(self.root, path)[0]) == len(path)

    def written_at(self, path: NodePath) -> str | None:
        """The text of the scalar at `path` as it was written."""
        node = find(self.root, path)
        return node.text if isinstance(node, ScalarNode) else None

    def folder_of(self, path: NodePath) -> Path:
        """The folder that a relative path written at `path` starts from."""
        return locate(self.root, path)[2].mark.source.folder

    def resolved(self) -> dict[str, Any]:
        """The tree as plain values, with `${VAR}` as it was written."""
        value = _as_written(self.root)
        assert isinstance(value, dict)
        return value


def place(root: Node, path: NodePath, at: str) -> Mark:
    """The mark of the key or of the value; the root itself is line 1, column 1."""
    found, key, node = locate(root, path)
    if not found:
        return root.mark._replace(line=1, column=1)
    return key if at == "key" or len(found) < len(path) else node.mark


def line_mark(node: Node, line: int, near: str | None = None) -> Mark:
    """The place of one line of a scalar: inside a block where it is one, else the scalar itself."""
    if not isinstance(node, ScalarNode) or node.block is None:
        return node.mark
    index = _folded_line(node, line, near) if node.block.folded else line - 1
    if not 0 <= index < len(node.block.lines):
        return node.mark
    written = node.block.lines[index]
    column = max(written.find("{{"), written.find("{%"), 0) or len(written) - len(written.lstrip())
    return node.mark._replace(line=node.block.line + index, column=column + 1)


def _folded_line(node: ScalarNode, line: int, near: str | None) -> int:
    """The raw line that a line of the folded text begins in, or the first after it that holds `near`."""
    assert node.block is not None
    start = len("\n".join(node.text.split("\n")[: line - 1]))
    position, first = 0, None
    for index, written in enumerate(node.block.lines):
        at = node.text.find(written.strip(), position) if written.strip() else -1
        if at < 0:
            continue
        position = at + len(written.strip())
        if position < start:
            continue
        first = index if first is None else first
        if near is None or near in written:
            return index
    return first or 0


def _as_written(node: Node) -> Any:
    if isinstance(node, ScalarNode):
        return node.value if node.written is None else node.written
    if isinstance(node, SequenceNode):
        return [_as_written(item) for item in node.items]
    return {key: _as_written(entry.value) for key, entry in node.entries.items()}
