"""Parse YAML text into a tree of nodes, and collect every problem of the text.

The reader defines the dialect: YAML 1.2 core schema, UTF-8, one document, string keys, no tag except ``!raw``, no
merge keys, no duplicate keys. PyYAML only splits the text into events; this module interprets them. It also checks the
syntax of templates, and turns a `!raw` text into a template that renders to exactly that text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.errors import Problem
from hermes_rl.others_files import read_regular
from hermes_rl.spec import nodes
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import (
    Block,
    Entry,
    MappingNode,
    Mark,
    Node,
    NodePath,
    ScalarNode,
    SequenceNode,
    SourceText,
    rewrite,
)
from hermes_rl.spec.origin import line_mark
from hermes_rl.spec.section import is_template, keys_at
from hermes_rl.spec.templates import TemplateError, check_syntax, literal

MAX_SPEC_BYTES = 16 << 20
"""Bytes of a spec."""

# --------------------------------------------------------------- Plain scalars: null, booleans, numbers, or text

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INFINITE = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
_LONGEST_INT = 1000
"""Digits. Python refuses to parse much longer integers, and a real value never needs them."""


def resolve(text: str) -> str | int | float | bool | None:
    """Return the value of a plain scalar; raise ValueError if a number has too many digits."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    return _parse_number(text)


def _parse_number(text: str) -> str | int | float:
    if _INT.fullmatch(text):
        if len(text) > _LONGEST_INT:
            raise ValueError(f"a number of {len(text)} digits is too long; quote it if it is text")
        return int(text)
    if _OCTAL.fullmatch(text) or _HEX.fullmatch(text):
        return int(text[2:], 8 if text[1] == "o" else 16)
    if _FLOAT.fullmatch(text):
        return float(text)
    infinite = _INFINITE.fullmatch(text)
    if infinite:
        return float(f"{infinite[1]}inf")
    return float("nan") if text in _NAN else text


# ------------------------------------------------------------- Templates: their syntax, and the paths that allow them
# `!raw` text becomes a template that renders to exactly that text, so that later passes need no special case.

_WHERE = (
    "prompt, dataset.columns, sandbox.image, .workdir, .files, .setup, .env and .limits, rewards.*.args, solution, "
    "user, artifacts, agents and agent.program"
)
_LEFT_ALONE = nodes.patterns("description", "agent.extra_body.**", "evaluate.agent.extra_body.**", "atropos.**")
"""Text that is passed on unchanged, including braces."""


def check_templates(root: Node) -> tuple[Node, list[Problem]]:
    """Return the tree without `!raw`, and the problems of its templates."""
    problems: list[Problem] = []

    def change(path: NodePath, node: ScalarNode) -> ScalarNode:
        if node.broken or not isinstance(node.value, str) or nodes.is_row(path):
            return node
        if node.raw:
            return replace(node, value=literal(node.value)) if nodes.is_template_place(path) else node
        problem = _template_problem(path, node)
        if problem is not None:
            problems.append(problem)
            return replace(node, broken=True)
        return node

    return rewrite(root, change), problems


def _template_problem(path: NodePath, node: ScalarNode) -> Problem | None:
    expression = nodes.is_in(path, nodes.EXPRESSIONS)
    if not is_template(node.value):
        return _syntax_problem(node, f"{{{{ {node.value} }}}}") if expression else None
    if expression:
        return node.position.problem("the filter is an expression: leave the braces out")
    if nodes.is_template_place(path):
        return _syntax_problem(node, node.value)
    if nodes.is_in(path, _LEFT_ALONE) or _is_unknown(path):
        return None
    return node.position.problem(f"templates are not rendered here, only in {_WHERE}")


def _is_unknown(path: NodePath) -> bool:
    """Return True below a key that no spec has: that key is what is wrong."""
    keys_by_depth = (keys_at(Spec, path[:depth]) for depth in range(len(path)))
    return any(keys and step not in keys for keys, step in zip(keys_by_depth, path, strict=True))


def _syntax_problem(node: ScalarNode, source: str) -> Problem | None:
    try:
        check_syntax(source)
    except TemplateError as error:
        return line_mark(node, error.line or 1).problem(error.message)
    return None


# ---------------------------------------------------------------------------------------------------- The reader

_MOST_NODES = 1_000_000
"""Aliases of aliases can make a short text into a tree that fills the memory."""
_DEEPEST = 100
_BRACES = re.compile(r"\{\{|\{%|\$\{")
_SURROGATE = re.compile("[\ud800-\udfff]")
_AFTER_SIGN = "\0 \t\r\n\x85\u2028\u2029"
_UNQUOTED = re.compile(r"expected ',' or '[]}]', but got '.+'|mapping values are not .*|.* cannot start any token")
_KEY = re.compile(r"[ ]*(?:- +)*(?P<name>[^\s\"'#{}\[\],&*!|>%@`-][^:\"'#{}\[\]]*):(?= |$)")
"""The first key of a line."""
_MISPLACED = re.compile(r"mapping values are not .*|expected (<block end>|'<document start>'), but found '<block map.*")
_QUOTE = 'quote it: "{}"'


class _UnreadableError(Exception):
    """The text cannot be split into events any further; what was found so far stands."""


class _Loader(yaml.Loader):
    """PyYAML's tokenizer, with YAML 1.2's rule for `?` inside `{}` and `[]`.

    YAML 1.1 ends a plain text at every question mark there. In YAML 1.2, only a question mark that is followed by a
    blank, at a position where a value may start, is an indicator.
    """

    def check_key(self) -> bool:
        return self.peek(1) in _AFTER_SIGN

    def check_plain(self) -> bool:
        question = self.peek() == "?" and self.peek(1) not in _AFTER_SIGN + ",[]{}"
        return question or bool(super().check_plain())

    def scan_plain(self) -> Any:
        if not self.flow_level:
            return super().scan_plain()
        look = self.peek
        vars(self)["peek"] = lambda index=0: "x" if (char := look(index)) == "?" else char
        try:
            return super().scan_plain()
        finally:
            del vars(self)["peek"]


class _Reader:
    """Builds the nodes of one document."""

    def __init__(self, text: str, source: SourceText) -> None:
        self.source = source
        self.lines = text.split("\n")
        self.problems: list[Problem] = []
        self._anchors: dict[str, Node] = {}
        self._sizes: dict[int, int] = {}
        self._events = self._parse(text)

    def read(self) -> Node | None:
        """Return the root, or None for an empty document."""
        try:
            return self._document()
        except _UnreadableError:
            return None
        except RecursionError:
            self.problems.append(Mark(self.source, 1, 1).problem(f"nested more than {_DEEPEST} levels deep"))
            return None

    def _document(self) -> Node | None:
        next(self._events)
        event = next(self._events)
        if isinstance(event, yaml.StreamEndEvent):
            return None
        root = self._node(next(self._events), 0)
        next(self._events)
        event = next(self._events)
        if not isinstance(event, yaml.StreamEndEvent):
            self._report(event.start_mark, "a spec is one document; remove what follows `---`")
        return root

    def _parse(self, text: str) -> Iterator[Any]:
        try:
            yield from yaml.parse(text, Loader=_Loader)
        except yaml.MarkedYAMLError as error:
            self.problems.append(self._syntax(error))
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            position = Mark(self.source, before.count("\n") + 1, len(before) - before.rfind("\n"))
            self.problems.append(position.problem(f"the character U+{error.character:04X} is not allowed in YAML"))
        raise _UnreadableError

    def _syntax(self, error: yaml.MarkedYAMLError) -> Problem:
        yaml_mark = error.problem_mark or error.context_mark
        line, column = (yaml_mark.line, yaml_mark.column) if yaml_mark else (0, 0)
        message = error.problem or error.context or "cannot be read"
        written = self.lines[line] if line < len(self.lines) else ""
        braces = [match for match in _BRACES.finditer(written) if match.start() <= column]
        if braces:
            column = braces[-1].start()
            message = f"an unquoted {braces[-1][0]} breaks the flow mapping; quote the whole value"
        elif written[column : column + 1] == "\t" and not written[:column].strip():
            message = "a tab cannot indent YAML; use spaces"
        elif _MISPLACED.fullmatch(message) and (displaced := self._displaced_key(line, column)):
            message = displaced
        elif _UNQUOTED.fullmatch(message):
            message += f"; if the {written[column : column + 1] or 'line'} is part of a text, put the text in quotes"
        return Mark(self.source, line + 1, column + 1).problem(message)

    def _displaced_key(self, line: int, column: int) -> str | None:
        """Return a message with the columns that a key is between, if that explains the error of the first key of a
        line."""
        key = _KEY.match(self.lines[line]) if line < len(self.lines) else None
        if key is None or column > key.end("name"):
            return None
        above = ((line_index, _KEY.match(self.lines[line_index])) for line_index in range(line - 1, -1, -1))
        near = next(((line_index, match) for line_index, match in above if match is not None), None)
        if near is None or near[1].start("name") == key.start("name"):
            return None
        line_index, other = near
        indent = key.start("name")
        spaces = "1 space" if indent == 1 else f"{indent} spaces"
        return (
            f"`{key['name']}` starts after {spaces}, `{other['name']}` in line {line_index + 1} after "
            f"{other.start('name')}: keys of one mapping must start in the same column; quote a text that has a colon"
        )

    def _to_position(self, yaml_mark: Any) -> Mark:
        return Mark(self.source, yaml_mark.line + 1, yaml_mark.column + 1)

    def _report(self, yaml_mark: Any, message: str) -> None:
        self.problems.append(self._to_position(yaml_mark).problem(message))

    def _node(self, event: Any, depth: int) -> Node:
        if depth > _DEEPEST:
            self._report(event.start_mark, f"nested more than {_DEEPEST} levels deep")
            raise _UnreadableError
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._anchors:
                return self._anchors[event.anchor]
            return self._broken_node(event, f"the alias *{event.anchor} has no anchor before it")
        if not isinstance(event, yaml.ScalarEvent) and event.tag is not None:
            self._report(event.start_mark, f"the tag {event.tag} is not known; only !raw is, before a string")
        node: Node
        if isinstance(event, yaml.ScalarEvent):
            node = self._scalar(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(item := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(item, depth + 1))
            node = SequenceNode(self._to_position(event.start_mark), tuple(items))
        else:
            node = self._mapping(event, depth)
        self._sizes[id(node)] = self._size(event.start_mark, node)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _size(self, yaml_mark: Any, node: Node) -> int:
        parts: tuple[Node, ...] = ()
        if isinstance(node, SequenceNode):
            parts = node.items
        elif isinstance(node, MappingNode):
            parts = tuple(entry.value for entry in node.entries.values())
        size = 1 + sum(self._sizes.get(id(part), 1) for part in parts)
        if size > _MOST_NODES:
            self._report(yaml_mark, f"aliases make this larger than {_MOST_NODES} values")
            raise _UnreadableError
        return size

    def _mapping(self, event: Any, depth: int) -> Node:
        entries: dict[str, Entry] = {}
        braces = False
        while not isinstance(key := next(self._events), yaml.MappingEndEvent):
            name = self._key(key, depth)
            value = self._node(next(self._events), depth + 1)
            if name is None:
                braces = braces or (isinstance(key, yaml.MappingStartEvent) and bool(event.flow_style))
            elif name in entries:
                first = entries[name].key.line
                self._report(key.start_mark, f"duplicate key `{name}`; the first one is in line {first}")
            else:
                entries[name] = Entry(self._to_position(key.start_mark), value)
        if braces:
            return self._broken_node(event, "an unquoted {{ }} is a mapping to YAML; " + _QUOTE.format("{{ … }}"))
        return MappingNode(self._to_position(event.start_mark), entries)

    def _broken_node(self, event: Any, message: str) -> Node:
        self._report(event.start_mark, message)
        return ScalarNode(self._to_position(event.start_mark), None, "", is_plain=True, broken=True)

    def _key(self, event: Any, depth: int) -> str | None:
        """Return the name of a key; None after a problem was reported, or where `_mapping` will report one."""
        if not isinstance(event, yaml.ScalarEvent):
            self._node(event, depth + 1)
            if not (isinstance(event, yaml.MappingStartEvent) and event.flow_style):
                self._report(event.start_mark, "keys are strings; this one is a list, a mapping or an alias")
            return None
        if event.style is None and event.value == "<<":
            self._report(event.start_mark, "merge keys `<<` are not supported; use `extends`")
            return None
        node = self._scalar(event)
        if not isinstance(node.value, str):
            self._report(event.start_mark, f"keys are strings; {_QUOTE.format(event.value)}")
            return None
        return node.value

    def _scalar(self, event: Any) -> ScalarNode:
        position = self._to_position(event.start_mark)
        raw = event.tag == "!raw"
        if event.tag is not None and not raw:
            self._report(event.start_mark, f"the tag {event.tag} is not known; only !raw is")
        is_plain = event.style is None and not raw
        value: Any = self._join_surrogates(event)
        if is_plain:
            try:
                value = resolve(event.value)
            except ValueError as error:
                self._report(event.start_mark, str(error))
        text = value if isinstance(value, str) else event.value
        return ScalarNode(position, value, text, is_plain, raw, block=self._block(event))

    def _join_surrogates(self, event: Any) -> str:
        """Return the text with pairs of surrogates joined: JSON has them, and no file can."""
        text: str = event.value
        if text.isascii() or not _SURROGATE.search(text):
            return text
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._report(event.start_mark, "half of a surrogate pair is not a character")
            return _SURROGATE.sub("?", text)

    def _block(self, event: Any) -> Block | None:
        if event.style not in ("|", ">"):
            return None
        first = event.start_mark.line + 1
        last = max(event.end_mark.line, first)
        return Block(first + 1, tuple(self.lines[first:last]), folded=event.style == ">")


def read_text(text: str, source: SourceText) -> tuple[Node | None, list[Problem]]:
    """Return the root of a text (None when empty or unreadable) and its problems."""
    reader = _Reader(text, source)
    return reader.read(), reader.problems


def read_bytes(data: bytes, source: SourceText) -> tuple[Node | None, list[Problem]]:
    """Return the tree of a file's bytes, like `read_text`; anything except UTF-8 is a problem."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        position = Mark(source, before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        return None, [position.problem("the file is not UTF-8 here")]
    return read_text(text.replace("\r\n", "\n"), source)


def read_file(path: Path, name: str) -> tuple[Node | None, list[Problem]]:
    """Return the tree of a file that messages call `name`, like `read_bytes`; raise `OSError` if it cannot be read."""
    return read_bytes(read_regular(path, MAX_SPEC_BYTES), SourceText(name, path.resolve().parent))
