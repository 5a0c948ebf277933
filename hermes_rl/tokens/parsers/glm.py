"""GLM-4.5: ``<tool_call>name`` and pairs of ``<arg_key>…</arg_key><arg_value>…</arg_value>`` up to ``</tool_call>``.

GLM-4.7 and 5 write the same without line breaks.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from hermes_rl.tokens.parsers.base import ParsedCall, Status, Tools, made, openings, typed

_CLOSING = "</tool_call>"
_PAIR = re.compile(
    r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>(.*?)</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))", re.DOTALL
)


class Glm:
    """See `base.Parser`; a call without arguments is its name alone."""

    markers = ("<tool_call>", _CLOSING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        return openings(text, "<tool_call>", partial(_block, text, tools))


def _block(text: str, tools: Tools | None, start: int) -> tuple[ParsedCall, int]:
    key, closing = text.find("<arg_key>", start), text.find(_CLOSING, start)
    name_end = min((place for place in (key, closing) if place >= 0), default=len(text))
    name, place = text[start:name_end].strip(), name_end
    arguments: dict[str, Any] = {}
    while (pair := _PAIR.match(text, place)) is not None:
        arguments[pair[1].strip()] = typed(tools, name, pair[1].strip(), pair[2])
        place = pair.end()
    end = text.find(_CLOSING, place)
    if end < 0:
        return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
    raw = text[start:end].strip()
    if text[place:end].strip() or "" in arguments or "\n" in name:
        return ParsedCall(raw, Status.MALFORMED, name.partition("\n")[0]), end + len(_CLOSING)
    return made(raw, name, arguments), end + len(_CLOSING)


GLM = Glm()
