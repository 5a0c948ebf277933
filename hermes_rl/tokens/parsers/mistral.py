"""Parse Mistral: ``[TOOL_CALLS][{…}, …]`` to version 7, ``[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`` from version 11."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from hermes_rl.tokens.parsers.base import (
    Block,
    ParsedCall,
    Status,
    Tools,
    blocks,
    decode,
    make_call,
    of_object,
    skip_blanks,
)

_OPENING = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*+(?P<name>[^\s\[\]{}]++)\s*+(?:\[CALL_ID\]\s*+(?P<id>[^\s\[\]{}]*+)\s*+)?+(?:\[ARGS\])?+\s*+")
_FOLLOWING = re.compile(r'\}\s*+,\s*+(?=\{\s*+")')
_BETWEEN = re.compile(r"[ \t\r\n,]*+")
MOST_BROKEN = 16
"""Maximum number of unreadable calls in a list; the rest of the list counts as one more: each may scan to its end."""


class Mistral:
    """Parser of Mistral; see `base.Parser`."""

    markers = (_OPENING, "[CALL_ID]", "[ARGS]")

    def calls(self, text: str, tools: Tools | None) -> tuple[str, list[ParsedCall]]:
        def find(position: int) -> tuple[int, int] | None:
            offset = text.find(_OPENING, position)
            return (offset, offset + len(_OPENING)) if offset >= 0 else None

        for start, _, _ in blocks(text, find, partial(_first, text)):
            following = text[start + len(_OPENING) :]
            return text[:start].strip(), list(_section(following)) or [ParsedCall("", Status.MALFORMED)]
        return text, []


def _first(text: str, start: int) -> Block:
    """Return the end of the text after the first marker, if it is complete."""
    head = _HEAD.match(text, start)
    json_start = skip_blanks(text, start)
    try:
        return [], decode(
            text, json_start if text[json_start : json_start + 1] in ("[", "{") or head is None else head.end()
        )[1]
    except ValueError:
        return [ParsedCall(text[start:], Status.UNCLOSED)], len(text)


def _section(text: str) -> Iterator[ParsedCall]:
    """Yield the calls in the text after the first marker, all of which is calls."""
    for segment in text.split(_OPENING):
        if segment.lstrip().startswith("["):
            yield from _parse_list(segment.strip())
        elif segment.lstrip().startswith("{"):
            yield _object(segment.strip())
        elif segment.strip():
            yield _parse_named_call(segment)


def _parse_list(text: str) -> Iterator[ParsedCall]:
    """Yield the calls of a JSON list, parsed one by one, so that a broken call does not affect valid ones."""
    position, remaining = 1, MOST_BROKEN
    while True:
        if (between := _BETWEEN.match(text, position)) is not None:
            position = between.end()
        if position >= len(text):
            yield ParsedCall(text[:200], Status.UNCLOSED)
            return
        if text[position] == "]":
            return
        try:
            value, end = decode(text, position)
        except ValueError:
            remaining -= 1
            following = _FOLLOWING.search(text, position) if remaining else None
            broken = text[position : following.end() if following else len(text)]
            closed = following is not None or text.rstrip().endswith("]")
            yield ParsedCall(broken.strip(" ,]"), Status.INVALID_JSON if closed else Status.UNCLOSED)
            if following is None:
                return
            position = following.end()
            continue
        yield of_object(text[position:end], value)
        position = end


def _object(text: str) -> ParsedCall:
    try:
        value, _ = decode(text, 0)
    except ValueError:
        return ParsedCall(text, _status(text))
    return of_object(text, value)


def _parse_named_call(text: str) -> ParsedCall:
    raw, head = text.strip(), _HEAD.match(text)
    if head is None:
        return ParsedCall(raw, Status.MALFORMED)
    arguments = text[head.end() :]
    if not arguments.strip():
        return ParsedCall(raw, Status.UNCLOSED, head["name"], id=head["id"])
    try:
        value, end = decode(arguments, 0)
    except ValueError:
        return ParsedCall(raw, _status(raw), head["name"], id=head["id"])
    if arguments[end:].strip():
        return ParsedCall(raw, Status.INVALID_JSON, head["name"], id=head["id"])
    return make_call(raw, head["name"], value, head["id"])


def _status(text: str) -> Status:
    """Return the status of unreadable JSON: incomplete JSON was cut off."""
    return Status.INVALID_JSON if text.rstrip().endswith(("}", "]")) else Status.UNCLOSED


MISTRAL = Mistral()
