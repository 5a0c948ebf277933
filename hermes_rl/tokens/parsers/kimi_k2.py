"""Kimi K2: ``<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`` in a section."""

from __future__ import annotations

import re

from hermes_rl.tokens.parsers.base import ParsedCall, Quotes, Status, Tools, decode, loads, made, skip_blanks

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(?P<name>.*?)(?::\d+)?")


class KimiK2:
    """See `base.Parser`."""

    markers = (_SECTION, _SECTION_END, _CALL, _ARGUMENTS, _END)

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        start = min((place for place in (text.find(_SECTION), text.find(_CALL)) if place >= 0), default=-1)
        if start < 0 or Quotes(text).quoted(start, start + 1):
            return text, []
        calls: list[ParsedCall] = []
        place = start
        while (at := text.find(_CALL, place)) >= 0:
            call, place = _read(text, at + len(_CALL))
            calls.append(call)
        return text[:start].strip(), calls


def _read(text: str, begin: int) -> tuple[ParsedCall, int]:
    end = text.find(_END, begin)
    separator = text.find(_ARGUMENTS, begin, end if end >= 0 else len(text))
    if separator >= 0:
        try:
            _, behind = decode(text, skip_blanks(text, separator + len(_ARGUMENTS)))
            end = text.find(_END, behind)
        except ValueError:
            pass
    if end < 0:
        return ParsedCall(text[begin:].strip(), Status.UNCLOSED), len(text)
    return _call(text[begin:end]), end + len(_END)


def _call(body: str) -> ParsedCall:
    raw = body.strip()
    identity, separator, arguments = body.partition(_ARGUMENTS)
    match = _ID.fullmatch(identity.strip())
    if not separator or match is None:
        return ParsedCall(raw, Status.MALFORMED)
    try:
        value = loads(arguments) if arguments.strip() else {}
    except ValueError:
        return ParsedCall(raw, Status.INVALID_JSON, match["name"], id=identity.strip())
    return made(raw, match["name"], value, identity.strip())


KIMI_K2 = KimiK2()
