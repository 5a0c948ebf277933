"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>``."""

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
    made,
    openings,
    schemas_of,
    typed,
)

_END = re.compile(r"</function>\s*+</tool_call>")
_FUNCTION = re.compile(r"\s*+<function=([^>\n]*+)>")
_PARAMETER = re.compile(r"\s*+<parameter=([^>\n]*+)>(?:\r?\n)?+")
_PARAMETER_END = re.compile(r"</parameter>(?=\s*+(?:<parameter=|\Z))")
"""The tag may stand in a value too; it ends one where another parameter follows or none."""


class Qwen3Coder:
    """See `base.Parser`."""

    markers = ("<tool_call>", "</tool_call>")

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        return openings(text, "<tool_call>", partial(_block, text, Ends(text, _END), schemas_of(tools)))


def _block(text: str, ends: Ends, schemas: Schemas, start: int) -> tuple[ParsedCall, int]:
    end = ends.next(start)
    if end is None:
        closing = text.find("</tool_call>", start)
        if closing < 0:
            return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
        return ParsedCall(text[start:closing].strip(), Status.MALFORMED), closing + len("</tool_call>")
    return _call(text[start : end.start()], text[start : end.end()], schemas), end.end()


def _call(body: str, block: str, schemas: Schemas) -> ParsedCall:
    raw, head = block.removesuffix("</tool_call>").strip(), _FUNCTION.match(body)
    if head is None:
        return ParsedCall(raw, Status.MALFORMED)
    name, place = head[1].strip(), head.end()
    arguments: dict[str, Any] = {}
    ends = Ends(body, _PARAMETER_END)
    while (begun := _PARAMETER.match(body, place)) is not None and (ended := ends.next(begun.end())) is not None:
        key, value = begun[1].strip(), body[begun.end() : ended.start()]
        if value.endswith("\n"):
            value = value[:-1].removesuffix("\r")
        arguments[key] = typed(schemas, name, key, value)
        place = ended.end()
    if body[place:].strip() or "" in arguments:
        return ParsedCall(raw, Status.MALFORMED, name)
    return made(raw, name, arguments)


QWEN3_CODER = Qwen3Coder()
