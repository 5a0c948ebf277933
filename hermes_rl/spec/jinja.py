"""The Jinja environment of templates: sandboxed, strict about what is missing, with a short list of functions.

Owns what a template can call. How a template becomes a value is in `templates`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, Undefined, nodes
from jinja2.exceptions import FilterArgumentError
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range


class NoneInTextError(Exception):
    """A value inside text is None; `columns` are those that the expression reads."""

    def __init__(self, columns: tuple[str, ...], line: int) -> None:
        super().__init__("None in text")
        self.columns = columns
        self.line = line


class RowEnvironment(ImmutableSandboxedEnvironment):
    """Attributes of a mapping are its keys first, so that `row.items` is a column where there is one."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def fromjson(value: Any) -> Any:
    """The value of a JSON text; a value that is none already stays as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise FilterArgumentError(f"fromjson: this is not JSON: {error}") from None


def tojson(value: Any, indent: int | None = None) -> str:
    """JSON text, with every character as it is (this is not HTML)."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=_as_json)


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"tojson: a {type(value).__name__} cannot be written as JSON")


def regex_search(value: Any, pattern: str, group: int | str | None = None) -> str | None:
    """The first match: the given group, else the first group, else the whole; None without a match."""
    match = re.search(pattern, str(value))
    if match is None:
        return None
    if group is None:
        group = 1 if match.re.groups else 0
    found = match[group]
    return found if found is None else str(found)


def regex_findall(value: Any, pattern: str) -> list[Any]:
    """All matches, as `re.findall` gives them."""
    return [list(found) if isinstance(found, tuple) else found for found in re.findall(pattern, str(value))]


def regex_replace(value: Any, pattern: str, replacement: str = "") -> str:
    """The text with every match replaced."""
    return re.sub(pattern, replacement, str(value))


def default(value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    """`default_value` where the value is missing or None (and, with `boolean`, wherever it is empty)."""
    if isinstance(value, Undefined) or value is None or (boolean and not value):
        return default_value
    return value


def _b64encode(value: Any) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else str(value).encode()).decode("ascii")


def _b64decode(value: str) -> str:
    return base64.b64decode(value).decode()


def _sha256(value: Any) -> str:
    return hashlib.sha256(value if isinstance(value, bytes) else str(value).encode()).hexdigest()


def not_none(value: Any, columns: list[str], line: int) -> Any:
    """Used around every expression inside text."""
    if value is None:
        raise NoneInTextError(tuple(columns), line)
    return value


FILTERS = {
    "fromjson": fromjson,
    "tojson": tojson,
    "regex_search": regex_search,
    "regex_findall": regex_findall,
    "regex_replace": regex_replace,
    "default": default,
    "d": default,
    "b64encode": _b64encode,
    "b64decode": _b64decode,
    "sha256": _sha256,
    "quote": lambda value: shlex.quote(str(value)),
}
"""Filters besides Jinja's own."""
GLOBALS = {"range": safe_range, "zip": zip, "enumerate": enumerate, "dict": dict}
"""Names that are there without being columns, besides `row`."""
ROW = "row"
_UNWANTED_FILTERS = ("random", "pprint", "urlize", "xmlattr")
_TEXT_FILTER = "_not_none"


def make_environment() -> RowEnvironment:
    """The environment that every template of a spec is compiled in."""
    environment = RowEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters.update(FILTERS)
    for name in _UNWANTED_FILTERS:
        environment.filters.pop(name, None)
    environment.filters[_TEXT_FILTER] = not_none
    environment.globals.clear()
    environment.globals.update(GLOBALS)
    return environment


def guard_text(template: nodes.Template) -> nodes.Template:
    """Every expression inside text goes through `not_none`, which knows its line and its columns."""
    for output in template.find_all(nodes.Output):
        output.nodes = [_guarded(node) for node in output.nodes]
    return template


def _guarded(node: nodes.Expr) -> nodes.Expr:
    if isinstance(node, nodes.TemplateData):
        return node
    columns = nodes.List([nodes.Const(name) for name in columns_of(node)], lineno=node.lineno)
    arguments: list[nodes.Expr] = [columns, nodes.Const(node.lineno, lineno=node.lineno)]
    return nodes.Filter(node, _TEXT_FILTER, arguments, [], None, None, lineno=node.lineno)


def columns_of(node: nodes.Node) -> list[str]:
    """The names that an expression reads, and the columns that it reads through `row`."""
    found = [name.name for name in _all(node, nodes.Name) if name.ctx == "load"]
    for item in _all(node, nodes.Getitem):
        if isinstance(item.node, nodes.Name) and item.node.name == ROW and isinstance(item.arg, nodes.Const):
            found.append(str(item.arg.value))
    for item in _all(node, nodes.Getattr):
        if isinstance(item.node, nodes.Name) and item.node.name == ROW:
            found.append(item.attr)
    return [name for name in dict.fromkeys(found) if name != ROW and name not in GLOBALS]


def _all(node: nodes.Node, kind: type[Any]) -> list[Any]:
    own = [node] if isinstance(node, kind) else []
    return [*own, *node.find_all(kind)]
