"""Parse Kimi K2's section of calls.

Each is ``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>``.
"""

from __future__ import annotations

import re
from functools import partial

from hermes_rl.tokens.parsers.base import ParsedCall, Status, Tools, decode, loads, make_call, section, skip_blanks

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?")


class KimiK2:
    """Parser of Kimi K2; see `base.Parser`."""

    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _END)

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        return section(text, _SECTION, _SECTION_END, _CALL, partial(_parse_call, text))


def _parse_call(text: str, start: int) -> tuple[ParsedCall, int]:
    end = text.find(_END, start)
    separator = text.find(_ARGUMENTS, start, end if end >= 0 else len(text))
    if separator >= 0:
        try:
            _, json_end = decode(text, skip_blanks(text, separator + len(_ARGUMENTS)))
            end = text.find(_END, json_end)
        except ValueError:
            pass
    if end < 0:
        return ParsedCall(text[start:].strip(), Status.UNCLOSED), len(text)
    body, end = text[start:end], end + len(_END)
    raw = body.strip()
    identity, arguments_tag, arguments = body.partition(_ARGUMENTS)
    match = _ID.fullmatch(identity.strip())
    if not arguments_tag or match is None:
        return ParsedCall(raw, Status.MALFORMED), end
    try:
        value = loads(arguments) if arguments.strip() else {}
    except ValueError:
        return ParsedCall(raw, Status.INVALID_JSON, match["name"], id=identity.strip()), end
    return make_call(raw, match["name"], value, identity.strip()), end


KIMI_K2 = KimiK2()
