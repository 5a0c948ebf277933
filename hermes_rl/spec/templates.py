"""Templates over a row: a text of the spec becomes a value, once for each row.

A string that is exactly one `{{ expression }}` gives the expression's value with its type; any other template
gives text. Lists and mappings are rendered through, keys are literal, nothing is rendered twice, and None
never becomes text. The dataset, the prompt and everything else that depends on a row is rendered here. The Jinja
environment is sandboxed, strict about what is missing, and offers a short list of functions.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import lru_cache
from traceback import walk_tb
from types import UnionType
from typing import Annotated, Any, NotRequired, TypeVar, Union, get_args, get_origin, get_type_hints

from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, UndefinedError, nodes
from jinja2 import TemplateError as JinjaError
from jinja2.environment import Template as JinjaTemplate
from jinja2.environment import TemplateExpression
from jinja2.exceptions import FilterArgumentError
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import safe_range
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import ErrorDetails
from typing_extensions import TypedDict, is_typeddict

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.spec.patterns import limited
from hermes_rl.spec.section import RENDERED, Section, is_template
from hermes_rl.spec.template_limits import LimitedEnvironment, limited_rendering
from hermes_rl.values import read_json

# ----------------------------------------------------------------------- The Jinja environment and its functions
# Owns what a template can call. How a template becomes a value is in `templates`.


class NoneInTextError(Exception):
    """A value inside text is None; `columns` are the columns that the expression reads."""

    def __init__(self, columns: tuple[str, ...], line: int) -> None:
        super().__init__("None in text")
        self.columns = columns
        self.line = line


class RowEnvironment(LimitedEnvironment):
    """Environment in which attributes of a mapping are its keys first, so that `row.items` is a column if there is
    one."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, Mapping) and attribute in obj:
            return obj[attribute]
        return super().getattr(obj, attribute)


def fromjson(value: Any) -> Any:
    """Return the value of a JSON text; return a value that is not a text unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value)
    except ValueError as error:
        raise FilterArgumentError(f"fromjson: this is not JSON: {error}") from None


def tojson(value: Any, indent: int | None = None) -> str:
    """Return JSON text without escaping characters (this is not HTML)."""

    def to_dict(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        raise TypeError(f"tojson: a {type(value).__name__} cannot be written as JSON")

    return json.dumps(value, ensure_ascii=False, indent=indent, default=to_dict)


def regex_search(value: Any, pattern: str, group: int | str | None = None) -> str | None:
    """Return the first match: the given group, else the first group, else the whole; None without a match."""
    match: str | None = limited("search", pattern, str(value), group)
    return match


def regex_findall(value: Any, pattern: str) -> list[Any]:
    """Return all matches, in the form of `re.findall`."""
    matches: list[Any] = limited("findall", pattern, str(value))
    return matches


def regex_replace(value: Any, pattern: str, replacement: str = "") -> str:
    """Return the text with every match replaced."""
    replaced: str = limited("replace", pattern, str(value), replacement)
    return replaced


def default(value: Any, default_value: Any = "", boolean: bool = False) -> Any:
    """Return `default_value` if the value is missing or None (or, with `boolean`, empty)."""
    if isinstance(value, Undefined) or value is None or (boolean and not value):
        return default_value
    return value


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def not_none(value: Any, columns: list[str], line: int) -> Any:
    """Return the value of an expression; raise `NoneInTextError` for None, which a text would contain as `None`."""
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
    "b64encode": lambda value: base64.b64encode(_as_bytes(value)).decode("ascii"),
    "b64decode": lambda value: base64.b64decode(value).decode(),
    "sha256": lambda value: hashlib.sha256(_as_bytes(value)).hexdigest(),
    "quote": lambda value: shlex.quote(str(value)),
}
"""Filters besides Jinja's own."""
GLOBALS = {"range": safe_range, "zip": zip, "enumerate": enumerate, "dict": dict}
"""Names that are there without being columns, besides `row`."""
ROW = "row"
_UNWANTED_FILTERS = ("random", "pprint", "urlize", "xmlattr")
_TEXT_FILTER = "_not_none"


@lru_cache(maxsize=1)
def _row_environment() -> RowEnvironment:
    """Return the environment that every template of a spec is compiled in."""
    environment = RowEnvironment(undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    environment.filters.update(FILTERS)
    for name in _UNWANTED_FILTERS:
        environment.filters.pop(name, None)
    environment.filters[_TEXT_FILTER] = not_none
    environment.globals.clear()
    environment.globals.update(GLOBALS)
    return environment


def guard_text(template: nodes.Template) -> nodes.Template:
    """Wrap every expression inside text in `not_none`, which knows its line and its columns."""
    for output in template.find_all(nodes.Output):
        for index, node in enumerate(output.nodes):
            if not isinstance(node, nodes.TemplateData):
                columns = nodes.List([nodes.Const(name) for name in columns_of(node)], lineno=node.lineno)
                arguments: list[nodes.Expr] = [columns, nodes.Const(node.lineno, lineno=node.lineno)]
                output.nodes[index] = nodes.Filter(node, _TEXT_FILTER, arguments, [], None, None, lineno=node.lineno)
    return template


def columns_of(node: nodes.Node) -> list[str]:
    """Return the names that an expression reads, and the columns that it reads through `row`."""
    names = [name.name for name in _all_nodes(node, nodes.Name) if name.ctx == "load"]
    for item in _all_nodes(node, nodes.Getitem):
        if isinstance(item.node, nodes.Name) and item.node.name == ROW and isinstance(item.arg, nodes.Const):
            names.append(str(item.arg.value))
    for item in _all_nodes(node, nodes.Getattr):
        if isinstance(item.node, nodes.Name) and item.node.name == ROW:
            names.append(item.attr)
    return [name for name in dict.fromkeys(names) if name != ROW and name not in GLOBALS]


def _all_nodes(node: nodes.Node, kind: type[Any]) -> list[Any]:
    root_match = [node] if isinstance(node, kind) else []
    return [*root_match, *node.find_all(kind)]


# -------------------------------------------------------------------------------------------- Compiled templates
# Owns telling a single expression, which keeps its type, from text. Errors are Jinja's own; `templates` words them.


class Compiled:
    """One compiled template; `typed` if it is a single expression."""

    def __init__(self, source: str) -> None:
        try:
            self._compile(source)
        except (RecursionError, MemoryError, SyntaxError) as error:  # from Python's compiler
            raise TemplateSyntaxError(f"it is nested too deeply or too long ({type(error).__name__})", 1) from None

    def _compile(self, source: str) -> None:
        environment = _row_environment()
        tree = environment.parse(source)
        self.columns = _columns_read(tree)
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
            return _settle_value(self.typed(values))
        assert self.text is not None
        return self.text.render(values)


compiled = lru_cache(maxsize=4096)(Compiled)


def _single_expression(source: str) -> str | None:
    """Return the expression of a string that is exactly one `{{ expression }}`."""
    tokens = list(_row_environment().lex(source))
    if len(tokens) < 2 or tokens[0][1] != "variable_begin" or tokens[-1][1] != "variable_end":
        return None
    expression_tokens = tokens[1:-1]
    if any(
        kind in ("variable_begin", "variable_end", "data", "block_begin", "comment") for _, kind, _ in expression_tokens
    ):
        return None
    return "".join(text for _, _, text in expression_tokens)


def _columns_read(tree: nodes.Template) -> dict[str, int]:
    """Return the columns that a template reads, each with the line that reads it first."""
    columns = set(columns_of(tree)) - {name.name for name in tree.find_all(nodes.Name)}  # through `row`
    columns |= find_undeclared_variables(tree) - GLOBALS.keys() - {ROW}
    lines: dict[str, int] = {}
    for node in tree.find_all((nodes.Name, nodes.Getitem, nodes.Getattr)):
        for name in columns_of(node) if not isinstance(node, nodes.Name) else [node.name]:
            if name in columns:
                lines[name] = min(node.lineno, lines.get(name, node.lineno))
    return lines


def _settle_value(value: Any) -> Any:
    """Return the value of an expression: iterators run out, and nothing in it may be missing."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Undefined):
        str(value)  # a strict undefined names the missing column when it is used
    if isinstance(value, Iterator) or type(value) in (range, zip, enumerate):
        value = list(value)
    if isinstance(value, (list, tuple)):
        return [_settle_value(item) for item in value]
    if isinstance(value, (dict, Mapping)):
        return {key: _settle_value(item) for key, item in value.items()}
    return value


_PLAIN = frozenset({str, int, float, bool, type(None)})
"""Types of most values, which are not looked into: rows may have thousands."""


# ----------------------------------------------------------------------------------------------------- Rendering

S = TypeVar("S", bound=Section)


class TemplateError(UserError):
    """A template cannot be rendered for a row, or what it gives cannot be used.

    `where` is the place in the spec, such as ``rewards.tests.args``, or the file of the template; `line` counts from 1
    inside the template's text; `path` leads from the rendered section to the value.
    """

    def __init__(
        self,
        message: str,
        *,
        location: str = "",
        row: str = "",
        line: int | None = None,
        column: str | None = None,
        path: tuple[str | int, ...] = (),
    ) -> None:
        prefix = ", ".join(part for part in (location, f"row {row}" if row else "") if part)
        super().__init__(f"{prefix}: {message}" if prefix else message)
        self.message, self.location, self.row, self.line, self.column, self.path = (
            message,
            location,
            row,
            line,
            column,
            path,
        )


def render(value: Any, row: Mapping[str, Any], *, location: str = "", key: str = "") -> Any:
    """Return a value of the spec for a row, with all templates in nested lists and mappings rendered.

    Args:
        value: the value in the spec.
        row: the columns.
        location: path in the spec, for messages, such as ``rewards.tests.args``.
        key: the row's key, for messages.

    Raises:
        TemplateError: a column is missing, None would become text, or the expression fails.
    """
    if isinstance(value, Mapping):
        return {name: render(item, row, location=_below(location, name), key=key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [render(item, row, location=_below(location, index), key=key) for index, item in enumerate(value)]
    if not is_template(value):
        return value
    return _render(value, row, location, key)


def _below(location: str, step: object) -> str:
    return f"{location}.{step}" if location else str(step)


def _render(source: str, row: Mapping[str, Any], location: str, key: str) -> Any:
    try:
        with limited_rendering():
            return compiled(source)(row)
    except NoneInTextError as error:
        raise _none_in_text(error, row, location, key) from None
    except TemplateSyntaxError as error:
        raise TemplateError(f"template: {error.message}", location=location, row=key, line=error.lineno) from None
    except UndefinedError as error:
        raise _missing_error(error, source, row, location, key) from None
    except (
        JinjaError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError, MemoryError
    ) as error:  # fmt: skip
        message = f"template: {type(error).__name__}: {error}"
        raise TemplateError(message, location=location, row=key, line=_failed_line(error, source)) from None


def _none_in_text(error: NoneInTextError, row: Mapping[str, Any], location: str, key: str) -> TemplateError:
    column = next((name for name in error.columns if name in row and row[name] is None), None)
    column_list = f" over {', '.join(error.columns)}" if error.columns else ""
    subject = f"column `{column}` is None" if column else f"an expression{column_list} is None"
    message = f"{subject}, which cannot be text; use `| default('…')`"
    return TemplateError(message, location=location, row=key, line=error.line, column=column)


def _missing_error(
    error: UndefinedError, source: str, row: Mapping[str, Any], location: str, key: str
) -> TemplateError:
    for name, line in compiled(source).columns.items():
        if name not in row:
            message = f"there is no column `{name}`{did_you_mean(name, row)}"
            return TemplateError(message, location=location, row=key, line=line, column=name)
    return TemplateError(f"template: {error.message}", location=location, row=key, line=_failed_line(error, source))


def _failed_line(error: BaseException, source: str) -> int | None:
    """Return the line of a text in which rendering failed; Jinja keeps none for a single expression."""
    if compiled(source).typed is not None:
        return None
    frames = walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename in ("<template>", "<unknown>")]
    return lines[-1] if lines else None


def render_text(value: str, row: Mapping[str, Any], *, location: str = "", key: str = "") -> str:
    """Return a text rendered like `render`: numbers become text, None is a TemplateError."""
    result = render(value, row, location=location, key=key)
    if result is None:
        columns = tuple(columns_used(value))
        raise _none_in_text(NoneInTextError(columns, 1), row, location, key)
    if isinstance(result, list | dict | bytes):
        kind = {list: "a list", dict: "a mapping"}.get(type(result), "bytes")
        message = f"the template gives {kind}, and this is text; write it as text, such as by `| tojson` or `| join`"
        raise TemplateError(message, location=location, row=key)
    return result if isinstance(result, str) else str(result)


def render_section(part: S, row: Mapping[str, Any], *, location: str = "", key: str = "") -> S:
    """Return a section for a row, each value with the type of its key. Raises TemplateError for another type."""
    if not part.model_fields_set:
        return part
    values = render(part.model_dump(by_alias=True, exclude_unset=True), row, location=location, key=key)
    try:
        return type(part).model_validate(values, strict=False, context={RENDERED: True})
    except ValidationError as error:
        raise _wrong_type(error, location, key) from None


def _wrong_type(error: ValidationError, location: str, key: str) -> TemplateError:
    first = error.errors(include_url=False, include_input=False)[0]
    value_location = ".".join(str(step) for step in (location, *first["loc"]) if step != "")
    message = f"the template gives a value that does not fit: {_reason_text(first)}"
    return TemplateError(message, location=value_location, row=key, path=first["loc"])


def _reason_text(error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        return f"there is no key `{error['loc'][-1]}` here"
    return f"{error['msg'][:1].lower()}{error['msg'][1:]}"


def coerce(value: Any, annotation: Any, *, location: str = "", key: str = "") -> Any:
    """Return a rendered value as the type of its target: `"3"` as 3 for an int; raises TemplateError."""
    try:
        (coerced,) = _adapter_of(annotation).validate_python((value,), context={RENDERED: True})
        return coerced
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        subpath = ".".join(map(str, first["loc"][1:]))
        raise TemplateError(
            f"the template gives a value that does not fit{subpath and f' (at {subpath})'}: {_reason_text(first)}",
            location=location,
            row=key,
            path=first["loc"][1:],
        ) from None
    except (PydanticUserError, TypeError, NameError):
        return value  # not a type for values, such as a forward reference


def _adapter_of(annotation: Any) -> TypeAdapter[tuple[Any]]:
    try:
        hash(annotation)
    except TypeError:  # what `Annotated` adds may be anything
        return _tuple_adapter.__wrapped__(annotation)
    return _tuple_adapter(annotation)


@lru_cache(maxsize=256, typed=True)
def _tuple_adapter(annotation: Any) -> TypeAdapter[tuple[Any]]:
    """Return a validator for a value inside a tuple, so that types without configuration inherit the tuple's."""
    config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True, extra="forbid")
    return TypeAdapter(tuple[_portable_type(annotation)], config=config)  # type: ignore[misc]


def _portable_type(annotation: Any) -> Any:
    """Return an annotation that pydantic takes in Python 3.11 too, for which `typing.TypedDict` keeps too little."""
    if sys.version_info >= (3, 12):
        return annotation
    if is_typeddict(annotation) and not hasattr(annotation, "__pydantic_config__"):
        hints = get_type_hints(annotation, include_extras=True)
        required = annotation.__required_keys__
        fields = {name: _portable_type(kind) for name, kind in hints.items()}
        fields = {name: kind if name in required else NotRequired[kind] for name, kind in fields.items()}
        return TypedDict(annotation.__name__, fields)  # type: ignore[operator]
    outer, parts = get_origin(annotation), get_args(annotation)
    if outer is Annotated:
        return Annotated[(_portable_type(parts[0]), *parts[1:])]
    if outer in (Union, UnionType):
        return Union[tuple(map(_portable_type, parts))]  # noqa: UP007 - of as many as there are
    if isinstance(outer, type) and issubclass(outer, Collection):
        return outer[tuple(map(_portable_type, parts))]  # type: ignore[index]
    return annotation


def evaluate(expression: str, row: Mapping[str, Any], *, location: str = "", key: str = "") -> Any:
    """Return the value of an expression without braces, such as `dataset.filter`; raises TemplateError."""
    return _render(f"{{{{ {expression} }}}}", row, location, key)


def has_template(value: Any) -> bool:
    """Return True if any text of a value is a template."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(has_template(item) for item in value)
    return is_template(value)


def columns_used(value: Any) -> dict[str, int]:
    """Return the columns that the templates of a value read, each with its first line; raises TemplateError."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return {name: line for item in value for name, line in columns_used(item).items()}
    if not is_template(value):
        return {}
    check_syntax(value)
    return dict(compiled(value).columns)


def check_syntax(source: str) -> None:
    """Compile a template; raise TemplateError if it is invalid."""
    try:
        compiled(source)
    except TemplateSyntaxError as error:
        raise TemplateError(f"template: {error.message}", line=error.lineno) from None
    except JinjaError as error:
        raise TemplateError(f"template: {error.message}") from None


def literal(text: str) -> str:
    """Return a template that renders to exactly this text: the stored form of `!raw`."""
    if not is_template(text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'{{{{ "{escaped}" }}}}'
