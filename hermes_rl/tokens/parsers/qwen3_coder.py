"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>``."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from hermes_rl.tokens.parsers.base import ParsedCall, Status, Tools, made, openings, typed

_END = re.compile(r"</function>\s*</tool_call>")
_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>")
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]*)>(?:\r?\n)?(.*?)(?:\r?\n)?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


class Qwen3Coder:
    """See `base.Parser`."""

    markers = ("<tool_call>", "</tool_call>")

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        return openings(text, "<tool_call>", partial(_block, text, tools))


def _block(text: str, tools: Tools | None, start: int) -> tuple[ParsedCall, int]:
    end = _END.search(text, start)
    if end is None:
        closing = text.find("</tool_call>", start)
        if closing < 0:
            return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
        return ParsedCall(text[start:closing].strip(), Status.MALFORMED), closing + len("</tool_call>")
    return _call(text[start : end.start()], text[start : end.end()], tools), end.end()


def _call(body: str, block: str, tools: Tools | None) -> ParsedCall:
    raw, head = block.removesuffix("</tool_call>").strip(), _FUNCTION.match(body)
    if head is None:
        return ParsedCall(raw, Status.MALFORMED)
    name, place = head[1].strip(), head.end()
    arguments: dict[str, Any] = {}
    while (parameter := _PARAMETER.match(body, place)) is not None:
        key = parameter[1].strip()
        arguments[key] = typed(tools, name, key, parameter[2])
        place = parameter.end()
    if body[place:].strip() or "" in arguments:
        return ParsedCall(raw, Status.MALFORMED, name)
    return made(raw, name, arguments)


QWEN3_CODER = Qwen3Coder()
