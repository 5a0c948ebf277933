"""From token ids to text in which only a marker's own token is a marker.

A model may write the letters of ``<tool_call>`` without its token, in prose about tools for example. Where the
tokenizer has a token for a marker, the letters alone are given a break, which is taken out of what was parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hermes_rl.tokens.parsers.base import Parsed
from hermes_rl.tokens.tokenizer import Tokenizer

_BREAK = "\ufdd0"
"""A code point that is no character, so that no text holds it."""
_OPENING = ("<think>", "[THINK]")
REASONING = (*_OPENING, "</think>", "[/THINK]")
"""Texts that open or close reasoning."""
_TAIL = 16


def marked_text(
    tokenizer: Tokenizer, ids: Sequence[int], markers: Sequence[str]
) -> tuple[str, Callable[[Parsed], Parsed]]:
    """The text, and what takes the breaks out of a result again."""
    text = tokenizer.decode(ids)
    special = [one for one in (*markers, *REASONING) if one in tokenizer.control or one in tokenizer.markup]
    if not any(one in text for one in special):
        return text, _as_it_is
    own = {tokenizer.encode(one)[0]: one for one in special}
    pieces: list[str] = []
    start = 0
    for place, token in enumerate(ids):
        if token in own:
            pieces += [_broken(tokenizer.decode(ids[start:place]), special), own[token]]
            start = place + 1
    pieces.append(_broken(tokenizer.decode(ids[start:]), special))
    marked = "".join(pieces)
    return (marked, _whole) if _BREAK in marked else (marked, _as_it_is)


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends inside of reasoning."""
    return tokenizer.decode(list(prompt[-_TAIL:])).rstrip().endswith(_OPENING) if len(prompt) else False


def _broken(text: str, markers: Sequence[str]) -> str:
    for marker in markers:
        text = text.replace(marker, marker[0] + _BREAK + marker[1:])
    return text


def _as_it_is(parsed: Parsed) -> Parsed:
    return parsed


def _whole(parsed: Parsed) -> Parsed:
    calls = [
        replace(
            call, raw=_plain(call.raw), name=_plain(call.name), arguments=_plain(call.arguments), id=_plain(call.id)
        )
        for call in parsed.calls
    ]
    return Parsed(_plain(parsed.content), _plain(parsed.reasoning), calls)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(_BREAK, "")
    if isinstance(value, Mapping):
        return json.loads(json.dumps(value).replace("\\ufdd0", ""))
    return value
