"""Text that must stay text: control tokens in what a template is given.

Owns the neutralising of strings such as ``<|im_end|>`` in tool output, dataset text and model text, so
that only the template makes control tokens. The text itself is not changed: a break character is put
into each such string before rendering, and the rendered text is encoded piecewise between the breaks.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hermes_rl.tokens.tokenizer import Messages, Tokenizer, Tools

_BREAKS = range(0xE000, 0xF8FF)
"""Private-use characters; one that occurs nowhere in the texts is taken as the break."""


class Guard:
    """Guards the texts of one conversation for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, messages: Messages, tools: Tools | None) -> None:
        self._tokenizer = tokenizer
        self._break = _unused_character(messages, tools)
        of_model, of_others = map(self._breaker, _patterns(tokenizer))
        self.messages = [
            _mapped(message, of_model if message.get("role") == "assistant" else of_others) for message in messages
        ]
        self.tools = _mapped(list(tools), of_others) if tools else None

    def encode(self, rendered: str) -> list[int]:
        """The ids of a text rendered from the guarded messages."""
        ids: list[int] = []
        for piece in rendered.split(self._break):
            ids += self._tokenizer.encode(piece)
        return ids

    def escaped(self, rendered: str) -> bool:
        """Whether the template wrote a break in another form, so that it cannot be taken out again."""
        return _escape(self._break) in rendered.lower()

    def _breaker(self, pattern: re.Pattern[str] | None) -> Callable[[str], str]:
        if pattern is None:
            return str
        return lambda text: pattern.sub(lambda found: f"{found[0][0]}{self._break}{found[0][1:]}", text)


@functools.lru_cache(maxsize=16)
def _patterns(tokenizer: Tokenizer) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """What is broken up in texts of the model, and in all others; some vocabularies have thousands of such tokens."""
    return _any_of(tokenizer.control), _any_of(tokenizer.control | tokenizer.markup)


def _any_of(tokens: frozenset[str]) -> re.Pattern[str] | None:
    # Runs of blanks and single characters are tokens of some vocabularies, but control nothing.
    risky = sorted((t for t in tokens if len(t) > 1 and t.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, risky))) if risky else None


def _unused_character(messages: Messages, tools: Tools | None) -> str:
    text = json.dumps([list(messages), tools], ensure_ascii=False, default=str).lower()
    unused = (one for one in map(chr, _BREAKS) if one not in text and _escape(one) not in text)
    return next(unused)


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
