"""GLM-4.5: ``<tool_call>name`` and pairs of ``<arg_key>…</arg_key><arg_value>…</arg_value>`` up to ``</tool_call>``.

GLM-4.7 and 5 write the same without line breaks.
"""

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

_CLOSING = "</tool_call>"
_KEY = re.compile(r"\s*+<arg_key>([^<>]*+)</arg_key>\s*+<arg_value>")
_VALUE_END = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>|\Z))")
"""The tag may stand in a value too; it ends one where a call goes on or ends behind it."""


class Glm:
    """See `base.Parser`; a call without arguments is its name alone."""

    markers = ("<tool_call>", _CLOSING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        return openings(text, "<tool_call>", partial(_block, text, Ends(text, _VALUE_END), schemas_of(tools)))


def _block(text: str, ends: Ends, schemas: Schemas, start: int) -> tuple[ParsedCall, int]:
    closing = text.find(_CLOSING, start)
    key = text.find("<arg_key>", start, closing if closing >= 0 else len(text))
    name_end = min((place for place in (key, closing) if place >= 0), default=len(text))
    name, place = text[start:name_end].strip(), name_end
    arguments: dict[str, Any] = {}
    while (begun := _KEY.match(text, place)) is not None and (ended := ends.next(begun.end())) is not None:
        key_name = begun[1].strip()
        arguments[key_name] = typed(schemas, name, key_name, text[begun.end() : ended.start()])
        place = ended.end()
    end = text.find(_CLOSING, place)
    if end < 0:
        return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
    raw = text[start:end].strip()
    if text[place:end].strip() or "" in arguments or "\n" in name:
        return ParsedCall(raw, Status.MALFORMED, name.partition("\n")[0]), end + len(_CLOSING)
    return made(raw, name, arguments), end + len(_CLOSING)


GLM = Glm()
