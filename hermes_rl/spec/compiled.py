"""Templates compiled: the text of a template once parsed, ready for any number of rows.

Owns telling a single expression, which keeps its type, from text. Errors are Jinja's own; `templates` words them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.environment import Template as JinjaTemplate
from jinja2.environment import TemplateExpression
from jinja2.meta import find_undeclared_variables

from hermes_rl.spec.jinja import GLOBALS, ROW, columns_of, guard_text, make_environment


class Compiled:
    """One template, compiled; `typed` where it is a single expression."""

    def __init__(self, source: str) -> None:
        environment = _environment()
        tree = environment.parse(source)
        self.names = frozenset(find_undeclared_variables(tree)) - GLOBALS.keys() - {ROW}
        self.columns = _columns(tree, self.names)
        expression = _single_expression(source)
        self.typed: TemplateExpression | None = None
        self.text: JinjaTemplate | None = None
        if expression is not None:
            self.typed = environment.compile_expression(expression, undefined_to_none=False)
        else:
            self.text = environment.from_string(guard_text(tree))

    def __call__(self, row: Mapping[str, Any]) -> Any:
        values = {**row, ROW: row}
        if self.typed is not None:
            return _settled(self.typed(values))
        assert self.text is not None
        return self.text.render(values)


@lru_cache(maxsize=1)
def _environment() -> Any:
    return make_environment()


@lru_cache(maxsize=4096)
def compiled(source: str) -> Compiled:
    return Compiled(source)


def _single_expression(source: str) -> str | None:
    """The expression of a string that is exactly one `{{ expression }}`."""
    tokens = list(_environment().lex(source))
    if len(tokens) < 2 or tokens[0][1] != "variable_begin" or tokens[-1][1] != "variable_end":
        return None
    inner = tokens[1:-1]
    if any(kind in ("variable_begin", "variable_end", "data", "block_begin", "comment") for _, kind, _ in inner):
        return None
    return "".join(text for _, _, text in inner)


def _columns(tree: nodes.Template, undeclared: frozenset[str]) -> dict[str, int]:
    through_row = set(columns_of(tree)) - {name.name for name in tree.find_all(nodes.Name)}
    lines: dict[str, int] = {}
    for node in tree.find_all((nodes.Name, nodes.Getitem, nodes.Getattr)):
        for name in columns_of(node) if not isinstance(node, nodes.Name) else [node.name]:
            if name in undeclared or name in through_row:
                lines[name] = min(node.lineno, lines.get(name, node.lineno))
    return lines


def _settled(value: Any) -> Any:
    """The value of an expression: iterators run out, and nothing in it may be missing."""
    if isinstance(value, Undefined):
        str(value)  # a strict undefined says what is missing when it is used
    if isinstance(value, Iterator) or type(value) in (range, zip, enumerate):
        value = list(value)
    if isinstance(value, list | tuple):
        return [_settled(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _settled(item) for key, item in value.items()}
    return value
