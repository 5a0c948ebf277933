"""Limit time and size of untrusted templates: chat templates of tokenizers, and templates of specs.

`LimitedEnvironment` renders like Jinja's sandbox, and raises `TemplateTooLarge` if a template computes for too long or
multiplies texts, so a template cannot block the process. Each loop, call and filter checks the time, and each operation
that can create a large value checks its operands first.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from threading import local
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 1.0
"""CPU time of one rendering."""
MAX_ELEMENTS = 1 << 26
"""Maximum number of elements of one value: characters of a text, entries of a list."""
TOTAL = 1 << 30
"""Maximum bytes of all values that one rendering creates."""
SHORT = 1 << 12
"""Maximum characters of texts that a filter may combine freely: the result is bounded by their product."""
LARGEST_COUNT = 1 << 20
"""Maximum number passed to a filter or method: many are widths."""
DIGITS_OF_NUMBERS = 4096
"""Maximum bits of the result of a multiplication or power."""
_SCALARS = frozenset({int, float, bool, type(None)})
_WIDTH = re.compile(r"[%{][^%{}a-zA-Z]*(?:\d{7}|\*)|\{[^{}]*\{")
"""A format field that is wide, or whose width is an argument."""
_FOUR_DIGITS = re.compile(r"[%{][^%{}a-zA-Z]*\d{4}")


class TemplateTooLarge(ValueError):
    """A template computes for too long, or creates values that are too large."""


class _Rendering(local):
    """Remaining limits of the rendering in this thread."""

    ticks = 0
    deadline = math.inf
    bytes_left: float = math.inf


_rendering = _Rendering()


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Limit the time and the memory of this thread's renderings within the block."""
    before = _rendering.deadline, _rendering.bytes_left
    _rendering.deadline, _rendering.bytes_left = time.thread_time() + SECONDS, TOTAL
    try:
        yield
    finally:
        _rendering.deadline, _rendering.bytes_left = before


def _check_deadline() -> None:
    _rendering.ticks += 1
    if _rendering.ticks & 7 == 0 and time.thread_time() > _rendering.deadline:
        raise TemplateTooLarge(f"the template took more than {SECONDS:g} s of CPU time")


def _check_size(value: Any) -> Any:
    """Return a value that a template has created, after checking its size."""
    if isinstance(value, Sized):
        _require_size(len(value))
        _rendering.bytes_left -= sys.getsizeof(value)
        if _rendering.bytes_left < 0:
            raise TemplateTooLarge(f"the template makes values of more than {TOTAL >> 20} MiB")
    return value


def _require_size(size: float) -> None:
    if size > MAX_ELEMENTS:
        raise TemplateTooLarge(f"the template makes a value of more than {MAX_ELEMENTS} elements")


def _join_texts(values: Iterable[Any]) -> str:
    size, texts = 0, []
    for value in values:
        text = value if type(value) is str else str(_check_written(value))
        texts.append(text)
        size += len(text)
        if size > MAX_ELEMENTS:
            _require_size(size)
    return str(_check_size("".join(texts)))


def _check_written(value: Any) -> Any:
    """Return a value that a template writes, after checking its size; a list of few entries may be large as a text."""
    if type(value) not in _SCALARS:
        _require_size(len(value) if type(value) is str else _element_count(value, {}))
    return value


def _element_count(value: Any, size_cache: dict[int, int]) -> int:
    """Return the number of elements of a value, nested ones included; repeated ones count each time."""
    kind = type(value)
    if kind is str or isinstance(value, (str, bytes)):
        return len(value)
    if kind in _SCALARS or not isinstance(value, (dict, list, tuple, Mapping)):
        return 1
    if id(value) not in size_cache:
        children = [each for pair in value.items() for each in pair] if isinstance(value, Mapping) else value
        size_cache[id(value)] = 1 + sum(_element_count(each, size_cache) for each in children)
    return size_cache[id(value)]


def _require_operands(operator: str, left_operand: Any, right: Any) -> None:
    if isinstance(left_operand, str) and operator == "%":
        _require_call((left_operand, *(right if isinstance(right, tuple) else (right,))), {}, formats=True)
    elif operator == "+" and isinstance(left_operand, Sized) and isinstance(right, Sized):
        _require_size(len(left_operand) + len(right))
    elif operator == "*":
        for value, count in ((left_operand, right), (right, left_operand)):
            if isinstance(value, Sized) and isinstance(count, int):
                _require_size(len(value) * max(count, 0))
    if isinstance(left_operand, int) and isinstance(right, int) and operator in ("*", "**"):
        bits = (
            left_operand.bit_length() * max(right, 1)
            if operator == "**"
            else left_operand.bit_length() + right.bit_length()
        )
        if abs(left_operand) > 1 and bits > DIGITS_OF_NUMBERS:
            raise TemplateTooLarge(f"the template makes a number of more than {DIGITS_OF_NUMBERS} bits")


def _require_call(arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, formats: bool = False) -> None:
    """Raise `TemplateTooLarge` if the result of a filter or method may be too large for its arguments."""
    _check_deadline()
    values = [*arguments[1:], *keywords.values()]
    if any(isinstance(value, int) and abs(value) > LARGEST_COUNT for value in values):
        raise TemplateTooLarge(f"the template gives a filter or method a number above {LARGEST_COUNT}")
    if formats and isinstance(text := arguments[0], str):
        if _WIDTH.search(text):
            raise TemplateTooLarge("the template formats a value with a width that is large or an argument")
        widest = max(
            [1_000_000 if _FOUR_DIGITS.search(text) else 1_000, *(_element_count(value, {}) for value in values)]
        )
        _require_size((text.count("%") + text.count("{")) * widest)


_REPEATING = frozenset({"indent", "expandtabs", "tojson"})
"""Filters and methods that may write blanks, as many as a number, for each element of their subject."""
_MULTIPLYING = frozenset({"replace", "join", "wordwrap", "sum", "translate", *_REPEATING})
"""Filters and methods whose result may have the product of the sizes of two arguments."""
_SPLITTING = frozenset({"split", "rsplit", "splitlines", "title", "wordcount", "urlize"})
"""Filters and methods that make an object for each word of a text."""
OBJECT = 8
"""Elements of a text that count for one word."""
_LOOKING = frozenset(
    {"_not_none", "count", "d", "default", "first", "get", "items", "keys", "last", "length", "list", "rejectattr",
     "selectattr", "values"}
)  # fmt: skip
"""Filters and methods that do not write their arguments."""
_FORMATTING = frozenset({"format", "format_map"})


def _require_result(name: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Raise `TemplateTooLarge` if the result of this filter or method may be too large."""
    _require_call(arguments, keywords, formats=name in _FORMATTING)
    if name in _LOOKING:
        return
    texts = [value for value in arguments if isinstance(value, str)]
    if name == "replace" and len(texts) == 3:
        _require_size(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]))
        return
    size_cache = dict[int, int]()
    values = (*arguments, *keywords.values())
    sizes = [_element_count(value, size_cache) for value in values]
    if name in _REPEATING:
        sizes += [abs(value) for value in values[1:] if isinstance(value, int)]
    if name == "wordwrap":  # it copies the rest of a word that is longer than a line for each line of it
        sizes += [max(map(len, text.split()), default=0) for text in texts[:1]]
    if name in _SPLITTING:
        sizes *= OBJECT
    _require_size(math.prod(sorted(sizes)[-2:]) if name in _MULTIPLYING else sum(sizes))


def _limit_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with limits."""
    if name in _LOOKING:
        return function
    formats = name in _FORMATTING

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not (keywords or formats) and all(type(value) is str and len(value) <= SHORT for value in arguments):
            return function(*arguments)
        _require_result(name, arguments, keywords)
        return _check_size(function(*arguments, **keywords))

    return call


class _Filters(dict[str, Callable[..., Any]]):
    """Filters of an environment, each with limits."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        super().__setitem__(name, _limit_filter(name, function))


def _comparing(compare: Callable[..., bool]) -> Callable[[Any, Any], bool]:
    return lambda left, right: compare(_measured(left), _measured(right))


def _measured(value: Any) -> Any:
    """Return a value that is compared or hashed; few lists and tuples, nested in each other, may take for ever."""
    _check_deadline()
    return _check_written(value)


class _Generator(CodeGenerator):
    """Code generator for templates whose loops, joined texts, comparisons and tuples are limited."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        super().visit_For(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        operands: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        if len(operands) > 2 or not any(isinstance(each.expr, nodes.Const) for each in operands):
            measured = nodes.EnvironmentAttribute("measured")
            for each in operands:
                each.expr = nodes.Call(measured, [each.expr], [], None, None, lineno=node.lineno)
        super().visit_Compare(node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self.write("environment.measured(")
        super().visit_Tuple(node, frame)
        if node.ctx == "load":
            self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits of time, within `limited_rendering`, and of size."""

    code_generator_class = _Generator
    concat = staticmethod(_join_texts)
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    tick = staticmethod(_check_deadline)
    measured = staticmethod(_measured)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"finalize": _check_written, **options})
        filters = self.filters
        self.filters = _Filters()
        for name, function in filters.items():
            self.filters[name] = function
        test: Any
        for name, test in self.tests.items():
            if name == "in" or test.__module__ == "_operator":
                self.tests[name] = _comparing(test)
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _require_operands(operator, left, right)
        return _check_size(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        subject = getattr(inspect.unwrap(__obj), "__self__", None)  # the sandbox wraps `format`
        if not isinstance(subject, (str, list, tuple, dict)):
            _check_deadline()
            return super().call(__context, __obj, *args, **kwargs)
        _require_result(__obj.__name__, (subject, *args), kwargs)
        return _check_size(super().call(__context, __obj, *args, **kwargs))
