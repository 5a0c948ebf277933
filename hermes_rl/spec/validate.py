"""Convert a tree to a `Spec`, and report every problem at its position.

Pydantic finds the faults of values; this module adds their positions and words the messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hermes_rl.errors import Problem
from hermes_rl.plugins import closest, did_you_mean
from hermes_rl.spec import nodes
from hermes_rl.spec.hints import home_of, short_form
from hermes_rl.spec.model import Spec
from hermes_rl.spec.nodes import (
    Entry,
    MappingNode,
    Mark,
    Node,
    NodePath,
    ScalarNode,
    SequenceNode,
    find,
    is_null,
    locate,
    rewrite,
    to_builtins,
)
from hermes_rl.spec.origin import find_position, is_secret_key
from hermes_rl.spec.rules import broken_rules
from hermes_rl.spec.section import keys_at
from hermes_rl.spec.suggest import choices

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "mapping_type": "a mapping",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "finite_number": "a finite number",
    "none_required": "nothing",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


class Validated(NamedTuple):
    """Result of validating a tree: its spec if it is valid, else the problems and their paths."""

    tree: MappingNode
    spec: Spec | None
    problems: list[Problem]
    wrong: list[NodePath]


def corrected(node: Node, model: type[BaseModel] = Spec, path: NodePath = ()) -> tuple[Node, dict[NodePath, Problem]]:
    """Return the tree with each misspelt key renamed to its probable name, and the problem of each such key.

    Only the misspelling is reported: neither that the right key is missing, nor that the content of the wrong one is
    unexpected.
    """
    problems: dict[NodePath, Problem] = {}
    if isinstance(node, SequenceNode):
        items = []
        for index, item in enumerate(node.items):
            item, below = corrected(item, model, (*path, index))
            items.append(item)
            problems |= below
        return replace(node, items=tuple(items)), problems
    if isinstance(node, ScalarNode) or nodes.is_row(path):
        return node, {}
    known_keys, entries = keys_at(model, path), {}
    for name, entry in node.entries.items():
        meant = None if not known_keys or name in known_keys or is_secret_key(name) else closest(name, known_keys)
        key = meant if meant and meant not in node.entries and meant not in entries else name
        value, below = corrected(entry.value, model, (*path, key))
        entries[key] = Entry(entry.key, value)
        problems |= below
        if key != name:
            problems[(*path, key)] = entry.key.problem(f"unknown key `{name}`{choices(name, known_keys)}")
    return replace(node, entries=entries), problems


def validate(root: MappingNode, *, confined: bool = True, misspelt: Collection[NodePath] = ()) -> Validated:
    """Check types and rules of a tree; `confined` keeps the sources of files below their folder.

    What is wrong below a key that was misspelt is not told: another key may have been meant.
    """
    # YAML has made 420 of ``0o644``; without its sign, 644 is what people write for the same.
    tree = rewrite(
        _prune_nulls(root, ()),
        lambda path, node: (
            replace(node, value=node.text)
            if node.is_plain and node.text.startswith("0o") and nodes.is_in(path, nodes.MODES)
            else node
        ),
    )
    assert isinstance(tree, MappingNode)
    tree, spec, errors = _parse_variables(tree)
    wrong = [locate(tree, error["loc"])[0] or error["loc"][:1] for error in errors]
    clear = [error for error, path in zip(errors, wrong, strict=True) if not _is_below(path, misspelt)]
    problems = [problem for error in clear if (problem := problem_of(tree, error)) is not None]
    data = to_builtins(tree)
    folder_of = (lambda path: locate(tree, path)[2].position.source.folder) if confined else None
    for fault in broken_rules(data, folder_of):
        wrong.append(fault.path)
        node = find(tree, fault.path)
        unread = isinstance(node, ScalarNode) and node.broken  # so that a problem is already known
        if not unread and not _is_below(fault.path, misspelt):
            problems.append(find_position(tree, fault.path, fault.part).problem(fault.message))
    if spec is None or problems:
        return Validated(tree, None, problems, wrong)
    spec._tree = tree
    return Validated(tree, spec, [], wrong)


def parse_tree(tree: MappingNode) -> Spec | None:
    """Return the spec of a tree with valid types, regardless of the rules, or None if a type is wrong."""
    tree, spec, _ = _parse_variables(tree)
    if spec is not None:
        spec._tree = tree
    return spec


def _parse_variables(tree: MappingNode) -> tuple[MappingNode, Spec | None, list[ErrorDetails]]:
    """Return a variable's value as the type of its field: text where text is wanted, even if it is 8."""
    try:
        return tree, Spec.model_validate(to_builtins(tree)), []
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
    texts = {locate(tree, error["loc"])[0] for error in errors if error["type"] == "string_type"}
    changed = rewrite(tree, lambda path, node: _as_text(node) if path in texts else node)
    if changed == tree:
        return tree, None, errors
    assert isinstance(changed, MappingNode)
    return _parse_variables(changed)


def _as_text(node: ScalarNode) -> ScalarNode:
    if node.written is None or not node.is_plain or isinstance(node.value, str):
        return node
    return replace(node, value=node.text)


def _prune_nulls(node: Node, path: NodePath) -> Node:
    """Return the tree without the keys whose value is null, which are the same as absent, except in the user's data."""
    if not isinstance(node, MappingNode) or nodes.is_in(path, nodes.FREE):
        return node
    entries = {}
    for key, entry in node.entries.items():
        entry_path = (*path, key)
        if is_null(entry.value) and not nodes.is_in(entry_path, nodes.FREE):
            continue
        entries[key] = Entry(entry.key, _prune_nulls(entry.value, entry_path))
    return replace(node, entries=entries)


def _is_below(path: NodePath, ancestors: Collection[NodePath]) -> bool:
    return any(path[: len(ancestor)] == ancestor for ancestor in ancestors)


def problem_of(tree: MappingNode, error: ErrorDetails, model: type[BaseModel] = Spec) -> Problem | None:
    """Return the problem of an error, with its message and position, or None if it has been reported already."""
    path = error["loc"]
    if error["type"] == "spec":
        path = (*locate(tree, path)[0], *error["ctx"]["path"])
        return _unless_broken(tree, path, find_position(tree, path, error["ctx"]["at"]), error["ctx"]["message"])
    if error["type"] == "extra_forbidden":
        return _unknown_key(tree, path, model)
    if error["type"] == "missing":
        key, (written, _, _) = path[-1], locate(tree, path[:-1])
        message = f"missing key `{key}`" if isinstance(key, str) else f"expected {key + 1} values or more"
        return _unless_broken(tree, written, find_position(tree, written, "key"), message)
    written, _, node = locate(tree, path)
    if error["type"] == "too_short" and isinstance(node, SequenceNode) and node.items:
        return None  # pydantic counts the valid items; each invalid one has its own problem
    return _unless_broken(tree, written, find_position(tree, written, "value"), _wrong_value(error, node, written))


def _unless_broken(tree: Node, path: NodePath, position: Mark, message: str) -> Problem | None:
    node = locate(tree, path)[2]
    if isinstance(node, ScalarNode) and node.broken:
        return None
    return position.problem(message)


def _unknown_key(tree: MappingNode, path: NodePath, model: type[BaseModel]) -> Problem | None:
    name = str(path[-1])
    if is_secret_key(name):
        return None
    written, key, _ = locate(tree, path)
    known_keys = keys_at(model, written[:-1])
    elsewhere = "" if model is not Spec or did_you_mean(name, known_keys) else home_of(name)
    hint = elsewhere or choices(name, known_keys)
    return key.problem(f"unknown key `{name}`{hint}")


def _wrong_value(error: ErrorDetails, node: Node, path: NodePath) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {describe(node)}{short_form(path, node)}"
    if kind in _BOUNDS:
        comparison, bound = _BOUNDS[kind]
        return f"must be {comparison} {context[bound]:g}, got {describe(node)}"
    if kind == "literal_error":
        names = [name.strip("'") for name in str(context["expected"]).replace(" or ", ", ").split(", ")]
        names = [name.lower() if name in ("True", "False") else name for name in names]
        written = str(node.value) if isinstance(node, ScalarNode) else ""
        return f"{describe(node)} is not possible here{choices(written, names)}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind == "too_long":
        return f"expected at most {context['max_length']} values, got {context['actual_length']}"
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}"


def describe(node: Node) -> str:
    """Return a short description of a value."""
    if isinstance(node, MappingNode):
        return "a mapping"
    if not isinstance(node, ScalarNode):
        return "a list"
    if node.value is None:
        return "nothing"
    if isinstance(node.value, bool):
        return "true" if node.value else "false"
    excerpt = node.text if len(node.text) <= 40 else f"{node.text[:37]}…"
    return f'the text "{excerpt}"' if isinstance(node.value, str) else f"the number {excerpt}"


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems sorted by position, one per position: later ones usually follow from the first."""
    first: dict[tuple[str, int, int, str], Problem] = {}
    for problem in problems:
        message = problem.message if problem.line is None else ""
        first.setdefault((problem.file, problem.line or 0, problem.column or 0, message), problem)
    return [first[key] for key in sorted(first)]
