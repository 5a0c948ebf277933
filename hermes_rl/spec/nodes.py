"""Define the tree of a spec: values with the file, line and column at which they were written.

This module also has the table of special paths in a spec (templates, commands, rows, code, paths). Every pass over the
tree uses it, so that all passes agree. Parsing YAML belongs to `hermes_rl.spec.reader`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from hermes_rl.errors import Problem

NodePath: TypeAlias = tuple[str | int, ...]


class SourceText(NamedTuple):
    """The source of a value: a file, or an option of the command line (which has no lines)."""

    name: str
    folder: Path
    has_lines: bool = True


class Mark(NamedTuple):
    """A place; `line` and `column` count from 1."""

    source: SourceText
    line: int
    column: int

    def problem(self, message: str) -> Problem:
        """Return the problem with this place in front."""
        if not self.source.has_lines:
            return Problem(self.source.name, None, None, message)
        return Problem(self.source.name, self.line, self.column, message)


class Block(NamedTuple):
    """The content of a block scalar in its file: its first line, and the raw lines as written."""

    line: int
    lines: tuple[str, ...]
    folded: bool


@dataclass(frozen=True)
class ScalarNode:
    """A single value. `written` is the original text before `${VAR}` was substituted."""

    position: Mark
    value: Any
    text: str
    is_plain: bool
    raw: bool = False
    written: str | None = None
    block: Block | None = None
    broken: bool = False


@dataclass(frozen=True)
class SequenceNode:
    """A list."""

    position: Mark
    items: tuple[Node, ...]


class Entry(NamedTuple):
    """One key of a mapping with its value."""

    key: Mark
    value: Node


@dataclass(frozen=True)
class MappingNode:
    """A mapping, in the order of the file."""

    position: Mark
    entries: dict[str, Entry] = field(default_factory=dict)

    def get(self, key: str) -> Node | None:
        """Return the value under a key, or None."""
        entry = self.entries.get(key)
        return None if entry is None else entry.value

    def having(self, /, **values: Node) -> MappingNode:
        """Return a copy in which these keys have these values."""
        entries = dict(self.entries)
        for key, value in values.items():
            entries[key] = Entry(entries[key].key if key in entries else value.position, value)
        return replace(self, entries=entries)

    def without(self, *keys: str) -> MappingNode:
        """Return a copy that lacks these keys."""
        return replace(self, entries={key: entry for key, entry in self.entries.items() if key not in keys})


Node: TypeAlias = ScalarNode | SequenceNode | MappingNode


def scalar(position: Mark, value: Any) -> ScalarNode:
    """Return a generated value, positioned at the text that caused it."""
    return ScalarNode(position, value, "" if value is None else str(value), is_plain=False)


def mapping(position: Mark, /, **values: Node) -> MappingNode:
    """Return a generated mapping, positioned at the text that caused it."""
    return MappingNode(position, {name: Entry(position, value) for name, value in values.items()})


def is_null(node: Node | None) -> bool:
    """Return True for an explicit null."""
    return isinstance(node, ScalarNode) and node.value is None and not node.broken


def children(node: Node) -> Iterator[tuple[str | int, Mark, Node]]:
    """Yield the key or index, the position of the key (of the item itself in a list), and the value of each child."""
    if isinstance(node, MappingNode):
        for key, entry in node.entries.items():
            yield key, entry.key, entry.value
    elif isinstance(node, SequenceNode):
        for index, item in enumerate(node.items):
            yield index, item.position, item


def walk(node: Node, path: NodePath = ()) -> Iterator[tuple[NodePath, Mark, Node]]:
    """Yield every node below `node` with its path and the position of its key, parents first."""
    for step, position, child in children(node):
        yield (*path, step), position, child
        yield from walk(child, (*path, step))


def rewrite(node: Node, change: Callable[[NodePath, ScalarNode], ScalarNode], path: NodePath = ()) -> Node:
    """Return the tree with `change` applied to every scalar."""
    if isinstance(node, ScalarNode):
        return change(path, node)
    if isinstance(node, SequenceNode):
        items = tuple(rewrite(item, change, (*path, index)) for index, item in enumerate(node.items))
        return replace(node, items=items)
    entries = {key: Entry(entry.key, rewrite(entry.value, change, (*path, key))) for key, entry in node.entries.items()}
    return replace(node, entries=entries)


def find(root: Node, path: NodePath) -> Node | None:
    """Return the node at a path, or None."""
    node: Node | None = root
    for step in path:
        node = next((child for key, _, child in children(node) if key == step), None) if node else None
    return node


def locate(root: Node, path: NodePath) -> tuple[NodePath, Mark, Node]:
    """Return the part of `path` that exists, the place of its last key, and its node.

    Steps that the tree lacks are passed over: a validator names more steps than were written.
    """
    written: list[str | int] = []
    key, node = root.position, root
    for step in path:
        for name, position, child in children(node):
            if name == step and isinstance(name, str) == isinstance(step, str):
                written.append(step)
                key, node = position, child
                break
    return tuple(written), key, node


def to_builtins(node: Node) -> Any:
    """Return the bare value: dicts, lists and scalars."""
    if isinstance(node, ScalarNode):
        return node.value
    if isinstance(node, SequenceNode):
        return [to_builtins(item) for item in node.items]
    return {key: to_builtins(entry.value) for key, entry in node.entries.items()}


# ----------------------------------------------------------------------------------- What stands where in a spec
# Every pass over the tree (substitution, secrets, paths, templates, schema) asks here, so that they agree.

Pattern = tuple[str, ...]

_ALSO_BELOW = {"agent": "agents.*", "prompt": "agents.*", "tools": "user"}
"""Keys of a spec that each seat, or the user, has too; the value is the prefix of their paths."""


def patterns(*texts: str) -> tuple[Pattern, ...]:
    """Return paths written with dots as patterns; `*` is one step, a final `**` is any number of steps, or none.

    A path below a key of `_ALSO_BELOW` also gives the path below the same key of a seat, or of the user.
    """
    below = [f"{_ALSO_BELOW[top]}.{text}" for text in texts if (top := text.partition(".")[0]) in _ALSO_BELOW]
    return tuple(tuple(text.split(".")) for text in (*texts, *below))


ROWS = patterns("dataset.items.**", "dataset.fallback.items.**")
ARGS = patterns("rewards.*.args.**", "solution.turns.*.tools.*.args.**", "solution.turns.*.user_tools.*.args.**")
HEADERS = patterns("servers.*.headers_env.*", "servers.*.*.headers_env.*", "tools.*.mcp.headers_env.*")
EXPRESSIONS = patterns("dataset.filter")
COMMAND_KEYS = patterns(
    "sandbox.setup.**", "sandbox.services.*.command.**", "sandbox.services.*.healthy",
    "agent.program.command.**", "artifacts.*.command", "tools.*.mcp.command.**", "user.turns.*.setup.**",
)  # fmt: skip
PROSE = patterns(
    "prompt.**", "dataset.columns.**", "sandbox.files.*.content", "sandbox.setup.**",
    "sandbox.services.*.files.*.content", "rewards.*.args.**", "solution.**", "user.system", "user.turns.**",
    "artifacts.**", "agent.program.files.*.content", "agents.*.message_template",
)  # fmt: skip
TEMPLATES = (
    *PROSE,
    *patterns(
        "sandbox.image", "sandbox.workdir", "sandbox.files.**", "sandbox.env.**", "sandbox.limits.**",
        "sandbox.services.**", "user.**", "tools.*.schemas", "tools.*.names.**", "agent.program.**",
    ),
)  # fmt: skip
TEXT_FILES = patterns(
    "prompt.system.file", "prompt.user.file", "prompt.messages.*.content.file", "user.system.file",
    "tools.*.schemas.file",
)  # fmt: skip
CODE = patterns(
    "agent.program.python", "dataset.generator", "tools.*.python", "state", "state.python", "schedule.fn",
    "rewards.*.fn", "serve.trainer",
)  # fmt: skip
SOURCE_FILES = patterns(
    "dataset.harbor", "sandbox.files.*.from", "sandbox.services.*.files.*.from", "sandbox.ssh.known_hosts",
    "agent.program.files.*.from", "tools.*.mcp.files.*.from", "user.turns.*.files.*.from",
    "rewards.*.args.files.*.from", "rewards.*.args.calibrate",
)  # fmt: skip
MODES = patterns(
    "sandbox.files.*.mode", "sandbox.services.*.files.*.mode", "agent.program.files.*.mode",
    "tools.*.mcp.files.*.mode", "user.turns.*.files.*.mode",
)  # fmt: skip
"""Permissions: digits that are octal, with or without YAML's own sign of it."""
OUTPUTS = patterns(
    "atropos.data_path_to_save_groups", "atropos.data_dir_to_save_evals", "toolsets.record", "toolsets.replay"
)
FREE = (
    *ROWS, *ARGS,
    *patterns("dataset.columns.**", "solution.**", "agent.extra_body.**", "evaluate.agent.extra_body.**", "atropos.**",
              "prompt.messages.*.tool_calls.**"),
)  # fmt: skip
"""Values that belong to the user: null stays null there."""


def _path_matches(pattern: Pattern, path: NodePath) -> bool:
    if pattern[-1] == "**":
        pattern = pattern[:-1]
        path = path[: len(pattern)]
    return len(pattern) == len(path) and all(step in ("*", name) for step, name in zip(pattern, path, strict=True))


def is_in(path: NodePath, among: tuple[Pattern, ...]) -> bool:
    """Return True where one of these covers the path."""
    return any(_path_matches(pattern, path) for pattern in among)


def is_template_place(path: NodePath) -> bool:
    """Return True where `{{ }}` is rendered per row."""
    if is_in(path, TEXT_FILES) or path[:2] in (("user", "server"), ("user", "state"), ("user", "transform")):
        return False
    return is_in(path, TEMPLATES)


def is_command(path: NodePath) -> bool:
    """Return True for text that a shell reads, which has its own use for `$`."""
    if is_in(path, COMMAND_KEYS):
        return True
    return "command" in path and (is_in(path, ARGS) or path[:1] == ("solution",))


def is_row(path: NodePath) -> bool:
    """Return True inside rows that are written in the spec: data, never substituted or rendered."""
    return is_in(path, ROWS)
