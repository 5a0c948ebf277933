"""Parse GLM-4.5: ``<tool_call>name`` and ``<arg_key>…</arg_key><arg_value>…</arg_value>`` pairs up to ``</tool_call>``.

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
    make_call,
    openings,
    schemas_of,
    typed,
)

_OPENING, _CLOSING = "<tool_call>", "</tool_call>"
_NEXT = re.compile(f"{_OPENING}|{_CLOSING}")
_TAGS = (_OPENING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
"""All of these are tokens, so none can be part of a value: otherwise another tag is missing or duplicated."""
_KEY = re.compile(r"\s*+<arg_key>([^<>]*+)</arg_key>\s*+<arg_value>")
_VALUE_END = re.compile(r"</arg_value>(?=\s*+(?:<arg_key>|</tool_call>|\Z))")
"""The tag ends a value if a call continues or ends after it."""


class Glm:
    """Parser of GLM; see `base.Parser`. A call without arguments is only its name."""

    markers = (_OPENING, _CLOSING, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        read = partial(_parse_block, text, Ends(text, _VALUE_END), Ends(text, _NEXT), schemas_of(tools))
        return openings(text, _OPENING, _CLOSING, read)


def _parse_block(text: str, ends: Ends, tags: Ends, schemas: Schemas, start: int) -> tuple[ParsedCall, int]:
    tag = tags.next(start)
    key = text.find("<arg_key>", start, tag.start() if tag is not None else len(text))
    name_end = key if key >= 0 else tag.start() if tag is not None else len(text)
    name, position = text[start:name_end].strip(), name_end
    arguments: dict[str, Any] = {}
    is_valid = "\n" not in name
    while (key_match := _KEY.match(text, position)) is not None and (ended := ends.next(key_match.end())) is not None:
        key_name, value = key_match[1].strip(), text[key_match.end() : ended.start()]
        is_valid &= key_name not in arguments and key_name != "" and not any(tag in value for tag in _TAGS)
        arguments[key_name] = typed(schemas, name, key_name, value)
        position = ended.end()
    tag = tags.next(position)
    end = tag.start() if tag is not None else len(text)
    raw = text[start:end].strip()
    if tag is None or tag[0] == _OPENING:
        return ParsedCall(raw, Status.UNCLOSED), end
    if not is_valid or text[position:end].strip():
        return ParsedCall(raw, Status.MALFORMED, name.partition("\n")[0]), tag.end()
    return make_call(raw, name, arguments), tag.end()


GLM = Glm()
