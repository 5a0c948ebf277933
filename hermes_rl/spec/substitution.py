"""Substitute `${VAR}` and `${VAR:-default}` when a spec is loaded.

Only a complete value is substituted. Commands, templates, rows and the filter use `$` for other purposes and stay
unchanged; so does longer text for the model or a reward, unless all of it is `${VAR}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hermes_rl.errors import Problem, UserError
from hermes_rl.others_files import read_regular
from hermes_rl.spec import nodes
from hermes_rl.spec.nodes import Node, NodePath, ScalarNode, rewrite
from hermes_rl.spec.reader import resolve
from hermes_rl.spec.section import is_template

_WHOLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", re.DOTALL)
_ESCAPED = re.compile(r"\$\$\{[^}]*\}")
_PART = re.compile(r"(?<!\$)(?:\$\$)*\$\{")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def substitute(root: Node, environ: Mapping[str, str]) -> tuple[Node, list[Problem]]:
    """Return the tree with variables substituted, and the problems found."""
    problems: list[Problem] = []

    def change(path: NodePath, node: ScalarNode) -> ScalarNode:
        try:
            return _substituted(path, node, environ)
        except ValueError as error:
            problems.append(node.position.problem(str(error)))
            return replace(node, broken=True, value=None)

    return rewrite(root, change), problems


def _substituted(path: NodePath, node: ScalarNode, environ: Mapping[str, str]) -> ScalarNode:
    if not isinstance(node.value, str) or "$" not in node.text or node.raw or _is_kept(path, node):
        return node
    match = _WHOLE.fullmatch(node.text)
    if match:
        return _with_text(node, _variable_value(match[1], match[2], environ))
    if nodes.is_in(path, nodes.PROSE):
        return _with_text(node, node.text[1:]) if _ESCAPED.fullmatch(node.text) else node
    if _PART.search(node.text):
        raise ValueError("a variable must be the whole value: ${VAR} or ${VAR:-default}; write $${ for the characters")
    return _with_text(node, node.text.replace("$$", "$")) if "$$" in node.text else node


def _is_kept(path: NodePath, node: ScalarNode) -> bool:
    if nodes.is_row(path) or nodes.is_command(path) or nodes.is_in(path, nodes.EXPRESSIONS):
        return True
    return nodes.is_template_place(path) and is_template(node.text)


def _with_text(node: ScalarNode, text: str) -> ScalarNode:
    value = resolve(text) if node.is_plain else text
    return replace(node, value=value, text=text, written=node.text)


def _variable_value(name: str, default: str | None, environ: Mapping[str, str]) -> str:
    if _SECRET.search(name):
        raise ValueError(f"{name} looks like a secret, which must not enter a spec; name it in a key that ends in _env")
    value = environ.get(name, "")
    if value:
        return value
    if default is None:
        raise ValueError(f"the variable {name} is not set; set it, or write ${{{name}:-default}}")
    return default


def read_env_file(path: Path) -> dict[str, str]:
    """Return the variables of a file of lines `NAME=value`, without `export` and quotes; raises UserError."""
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    variables = {}
    for line_number, line in enumerate(lines, start=1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name.strip()):
            raise UserError(f"{path}:{line_number}:1: expected NAME=value")
        variables[name.strip()] = _strip_comment(value.strip())
    return variables


def _strip_comment(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value.partition(" #")[0].rstrip()
