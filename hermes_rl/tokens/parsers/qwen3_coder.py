"""Parse Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>``."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from hermes_rl.tokens.parsers.base import (
    Ends,
    ParsedCall,
    Schemas,
    Status,
    Tools,
    make_call,
    openings,
    schemas_of,
    typed,
)

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_END = re.compile(r"</function>\s*+</tool_call>")
_FUNCTION = re.compile(r"\s*+<function=([^>\n]*+)>")
_PARAMETER = re.compile(r"\s*+<parameter=([^>\n]*+)>(?:\r?\n)?+")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*+(?:<parameter=|</function>|\Z))")
"""The tag may be part of a value too; it ends a value if another parameter or none follows."""
_INNER = re.compile(r"^[ \t]*+<parameter=[^>\n]++>", re.MULTILINE)
_TAG = re.compile(r"<(/?)parameter\b")


class Qwen3Coder:
    """Parser of Qwen3-Coder; see `base.Parser`."""

    markers = (_OPENING, _CLOSING)

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        return openings(text, _OPENING, _CLOSING, partial(_block, text, Ends(text, _END), schemas_of(tools)))


def _block(text: str, ends: Ends, schemas: Schemas, start: int) -> tuple[ParsedCall, int]:
    end = ends.next(start)
    following = text.find(_OPENING, start, end.start() if end is not None else len(text))
    closing = text.find(_CLOSING, start, following if following >= 0 else len(text))
    if end is not None and following < 0:
        return _call(text[start : end.start()], text[start : end.end()], schemas), end.end()
    if closing >= 0:
        return ParsedCall(text[start:closing].strip(), Status.MALFORMED), closing + len(_CLOSING)
    cut = following if following >= 0 else len(text)
    return ParsedCall(text[start:cut].strip(), Status.UNCLOSED), cut


def _call(body: str, block: str, schemas: Schemas) -> ParsedCall:
    raw, head = block.removesuffix(_CLOSING).strip(), _FUNCTION.match(body)
    if head is None:
        return ParsedCall(raw, Status.MALFORMED)
    name, position = head[1].strip(), head.end()
    arguments: dict[str, Any] = {}
    ends = Ends(body, _PARAMETER_END)
    while (parameter := _PARAMETER.match(body, position)) is not None and (
        ended := ends.next(parameter.end())
    ) is not None:
        key, value = parameter[1].strip(), body[parameter.end() : ended.start()]
        if value.endswith("\n"):
            value = value[:-1].removesuffix("\r")
        if key in arguments or not _is_one_value(value):
            return ParsedCall(raw, Status.MALFORMED, name)
        arguments[key] = typed(schemas, name, key, value)
        position = ended.end()
    if body[position:].strip() or "" in arguments:
        return ParsedCall(raw, Status.MALFORMED, name)
    return make_call(raw, name, arguments)


def _is_one_value(value: str) -> bool:
    """Return True if no tag is missing: a value contains no parameter tag, and opens the elements that it closes."""
    opened = 0
    for tag in _TAG.finditer(value):
        opened += -1 if tag[1] else 1
        if opened < 0:
            return False
    return _INNER.search(value) is None


QWEN3_CODER = Qwen3Coder()
