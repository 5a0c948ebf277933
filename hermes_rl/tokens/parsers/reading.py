"""From the token ids of a turn to its text, reasoning and calls.

Owns which token is a marker. A model may write the letters of ``<tool_call>`` without its token, for example in prose
about tools. Where the tokenizer has a token for a marker, the letters alone get a break before they are parsed, and the
result loses it again. Leaves the formats to their parsers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hermes_rl.tokens.parsers.base import Parsed, Parser, Tools
from hermes_rl.tokens.parsers.text import without_reasoning
from hermes_rl.tokens.tokenizer import Tokenizer

_BREAK = "\ufdd0"
"""A code point that is no character, so that no text holds it."""
_OPENING = ("<think>", "[THINK]")
REASONING = (*_OPENING, "</think>", "[/THINK]")
"""Texts that open or close reasoning."""
_TAIL = 16


def parse_ids(
    parser: Parser,
    tokenizer: Tokenizer,
    completion: Sequence[int],
    prompt: Sequence[int],
    stops: Sequence[int],
    tools: Tools | None,
) -> Parsed:
    """Parse a turn; never raises. The end of `prompt` is enough: it tells whether the prompt has opened reasoning.

    Control tokens at the end are no part of the turn: a server may stop at other ends than the template's, because a
    model's generation_config.json can name several.
    """
    ended = list(completion)
    while ended and (ended[-1] in stops or _ends(tokenizer.decode([ended[-1]]), tokenizer, parser)):
        ended.pop()
    text, plain = marked_text(tokenizer, ended, parser.markers)
    found = parse_text(parser, text, tools, prefilled=opens_reasoning(tokenizer, prompt))
    return plain(found)


def _ends(token: str, tokenizer: Tokenizer, parser: Parser) -> bool:
    """Whether a token is a control token without a meaning for the parser."""
    return token in tokenizer.control and token not in (*parser.markers, *REASONING)


def parse_text(parser: Parser, text: str, tools: Tools | None = None, *, prefilled: bool = False) -> Parsed:
    """Parse a turn from its text, which has no control tokens at its end."""
    reasoning, rest = without_reasoning(text, prefilled=prefilled)
    content, calls = parser.calls(rest, tools)
    return Parsed(content, reasoning, calls)


def marked_text(
    tokenizer: Tokenizer, ids: Sequence[int], markers: Sequence[str]
) -> tuple[str, Callable[[Parsed], Parsed]]:
    """Return the text with breaks, and the function that takes them out of a result again."""
    text = tokenizer.decode(ids)
    special = [one for one in (*markers, *REASONING) if one in tokenizer.control or one in tokenizer.markup]
    if not any(one in text for one in special):
        return text, _as_it_is
    own = {tokenizer.encode(one)[0]: one for one in special}
    pieces: list[str] = []
    start = 0
    for place, token in enumerate(ids):
        if token in own:
            pieces += [_with_broken_markers(tokenizer.decode(ids[start:place]), special), own[token]]
            start = place + 1
    pieces.append(_with_broken_markers(tokenizer.decode(ids[start:]), special))
    marked = "".join(pieces)
    return (marked, _whole) if _BREAK in marked else (marked, _as_it_is)


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends inside of reasoning."""
    return tokenizer.decode(list(prompt[-_TAIL:])).rstrip().endswith(_OPENING) if len(prompt) else False


def _with_broken_markers(text: str, markers: Sequence[str]) -> str:
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
