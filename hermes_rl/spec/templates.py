"""Templates over a row: what is written in the spec becomes a value, once per row.

A string that is exactly one `{{ expression }}` gives the expression's value with its type; any other template
gives text. Lists and mappings are rendered through, keys are literal, nothing is rendered twice, and None
never becomes text. The dataset, the prompt and everything else that is rendered per row goes through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from traceback import walk_tb
from typing import Any, TypeVar

from jinja2 import TemplateError as JinjaError
from jinja2 import TemplateSyntaxError, UndefinedError
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from hermes_rl.errors import UserError
from hermes_rl.spec.compiled import compiled
from hermes_rl.spec.jinja import NoneInTextError
from hermes_rl.spec.model.base import RENDERED, Section, is_template
from hermes_rl.spec.suggest import did_you_mean

S = TypeVar("S", bound=Section)


class TemplateError(UserError):
    """A template cannot be rendered for a row.

    `line` counts from 1 inside the template's text; `path` leads from the rendered section to the value.
    """

    def __init__(
        self,
        message: str,
        *,
        where: str = "",
        row: str = "",
        line: int | None = None,
        column: str | None = None,
        path: tuple[str | int, ...] = (),
    ) -> None:
        place = ", ".join(part for part in (where, f"row {row}" if row else "") if part)
        super().__init__(f"{place}: {message}" if place else message)
        self.message = message
        self.row = row
        self.line = line
        self.column = column
        self.path = path


def render(value: Any, row: Mapping[str, Any], *, where: str = "", key: str = "") -> Any:
    """A value of the spec for a row: templates rendered, lists and mappings through and through.

    Args:
        value: what stands in the spec.
        row: the columns.
        where: name of the place, for messages, such as ``rewards.tests.args``.
        key: the row's key, for messages.

    Raises:
        TemplateError: a column is missing, None would become text, or the expression fails.
    """
    if isinstance(value, Mapping):
        return {name: render(item, row, where=_below(where, name), key=key) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [render(item, row, where=_below(where, index), key=key) for index, item in enumerate(value)]
    if not is_template(value):
        return value
    return _rendered(value, row, where, key)


def _below(where: str, step: object) -> str:
    return f"{where}.{step}" if where else str(step)


def _rendered(source: str, row: Mapping[str, Any], where: str, key: str) -> Any:
    try:
        return compiled(source)(row)
    except NoneInTextError as error:
        raise _none_in_text(error, row, where, key) from None
    except TemplateSyntaxError as error:
        raise TemplateError(f"template: {error.message}", where=where, row=key, line=error.lineno) from None
    except UndefinedError as error:
        raise _missing(error, source, row, where, key) from None
    except (JinjaError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"template: {type(error).__name__}: {error}"
        raise TemplateError(message, where=where, row=key, line=_line(error, source)) from None


def _none_in_text(error: NoneInTextError, row: Mapping[str, Any], where: str, key: str) -> TemplateError:
    column = next((name for name in error.columns if name in row and row[name] is None), None)
    over = f" over {', '.join(error.columns)}" if error.columns else ""
    what = f"column `{column}` is None" if column else f"an expression{over} is None"
    message = f"{what}, which cannot be text; use `| default('…')`"
    return TemplateError(message, where=where, row=key, line=error.line, column=column)


def _missing(error: UndefinedError, source: str, row: Mapping[str, Any], where: str, key: str) -> TemplateError:
    for name, line in compiled(source).columns.items():
        if name not in row:
            message = f"there is no column `{name}`{did_you_mean(name, row)}"
            return TemplateError(message, where=where, row=key, line=line, column=name)
    return TemplateError(f"template: {error.message}", where=where, row=key, line=_line(error, source))


def _line(error: BaseException, source: str) -> int | None:
    """The line of a text in which rendering failed; Jinja keeps none for a single expression."""
    if compiled(source).typed is not None:
        return None
    frames = walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename in ("<template>", "<unknown>")]
    return lines[-1] if lines else None


def render_text(value: str, row: Mapping[str, Any], *, where: str = "", key: str = "") -> str:
    """As `render`, for a place that is text: numbers become text, None is an error.

    Raises:
        TemplateError: as `render`.
    """
    result = render(value, row, where=where, key=key)
    if result is None:
        columns = tuple(columns_used(value))
        raise _none_in_text(NoneInTextError(columns, 1), row, where, key)
    return result if isinstance(result, str) else str(result)


def render_section(part: S, row: Mapping[str, Any], *, where: str = "", key: str = "") -> S:
    """A section of the spec for a row, each value coerced to the type of its key.

    Raises:
        TemplateError: as `render`, or a value does not have the type that its key declares.
    """
    values = render(part.model_dump(by_alias=True, exclude_unset=True), row, where=where, key=key)
    try:
        return type(part).model_validate(values, strict=False, context={RENDERED: True})
    except ValidationError as error:
        raise _wrong_type(error, where, key) from None


def _wrong_type(error: ValidationError, where: str, key: str) -> TemplateError:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(step) for step in (where, *first["loc"]) if step != "")
    message = f"the template gives a value that does not fit: {first['msg'][:1].lower()}{first['msg'][1:]}"
    return TemplateError(message, where=place, row=key, path=first["loc"])


def coerce(value: Any, annotation: Any, *, where: str = "", key: str = "") -> Any:
    """A rendered value as the type that its target declares: `"3"` as 3 for an int, 3 as `"3"` for text.

    Raises:
        TemplateError: it cannot be read as that type.
    """
    try:
        return _adapter(annotation).validate_python(value)
    except ValidationError as error:
        raise _wrong_type(error, where, key) from None
    except (PydanticUserError, TypeError, NameError):
        return value  # an annotation that is no type for values, such as a forward reference


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    config = ConfigDict(arbitrary_types_allowed=True, coerce_numbers_to_str=True)
    try:
        return TypeAdapter(annotation, config=config)
    except PydanticUserError:
        return TypeAdapter(annotation)  # models bring a configuration of their own


def evaluate(expression: str, row: Mapping[str, Any], *, where: str = "", key: str = "") -> Any:
    """The value of an expression without braces, such as `dataset.filter`.

    Raises:
        TemplateError: as `render`.
    """
    return _rendered(f"{{{{ {expression} }}}}", row, where, key)


def has_template(value: Any) -> bool:
    """Whether any text of a value is a template."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return any(has_template(item) for item in value)
    return is_template(value)


def columns_used(value: Any) -> dict[str, int]:
    """The columns that the templates of a value read, each with the line of its template that reads it first.

    Raises:
        TemplateError: a template is broken.
    """
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return {name: line for item in value for name, line in columns_used(item).items()}
    if not is_template(value):
        return {}
    check_syntax(value)
    return dict(compiled(value).columns)


def check_syntax(source: str, *, where: str = "") -> None:
    """Compile a template.

    Raises:
        TemplateError: it is broken.
    """
    try:
        compiled(source)
    except TemplateSyntaxError as error:
        raise TemplateError(f"template: {error.message}", where=where, line=error.lineno) from None
    except JinjaError as error:
        raise TemplateError(f"template: {error.message}", where=where) from None


def literal(text: str) -> str:
    """A template that gives exactly this text: how `!raw` is kept."""
    if not is_template(text):
        return text
    escaped = text.encode("unicode_escape").decode("ascii").replace('"', '\\"')
    return f'{{{{ "{escaped}" }}}}'
