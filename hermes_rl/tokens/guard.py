"""Text that must stay text: strings in messages that look like control tokens.

Owns the neutralising of strings such as ``<|im_end|>`` in tool output, dataset text and model text, so that only the
template makes control tokens. The text itself stays the same: each such string gets a break character before
rendering, and the rendered text is encoded piecewise between the breaks. Leaves rendering to the renderers.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hermes_rl.tokens.tokenizer import Messages, Tokenizer, Tools

_BREAKS = range(0xE000, 0xF8FF)
"""Private-use characters; the break is the first one that occurs nowhere in the texts."""


class Guard:
    """Guards the texts of one conversation for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, messages: Messages, tools: Tools | None) -> None:
        self._tokenizer = tokenizer
        self._break: str | None = None
        self.messages: Messages = messages
        self.tools = tools or None
        of_model, of_others = _patterns(tokenizer)
        patterns = [of_model if message.get("role") == "assistant" else of_others for message in messages]
        if any(map(_found, patterns, messages)) or _found(of_others, tools):
            self._break = _unused_character(messages, tools)
            self.messages = [_mapped(message, self._breaker(p)) for message, p in zip(messages, patterns, strict=True)]
            self.tools = _mapped(tools, self._breaker(of_others)) or None

    def encode(self, rendered: str) -> list[int]:
        """Encode a text that was rendered from the guarded messages."""
        if self._break is None:
            return self._tokenizer.encode(rendered)
        return [token for piece in rendered.split(self._break) for token in self._tokenizer.encode(piece)]

    def escaped(self, rendered: str) -> bool:
        """Whether the template wrote a break in another form, in which it cannot be taken out again."""
        return self._break is not None and _escape(self._break) in rendered.lower()

    def _breaker(self, pattern: re.Pattern[str] | None) -> Callable[[str], str]:
        if pattern is None:
            return str
        return lambda text: pattern.sub(lambda found: f"{found[0][0]}{self._break}{found[0][1:]}", text)


@functools.lru_cache(maxsize=16)
def _patterns(tokenizer: Tokenizer) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Return the patterns of the strings to break up, in texts of the model and in all others."""
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


def _found(pattern: re.Pattern[str] | None, value: Any) -> bool:
    """Whether the pattern is in a string of the value."""
    if pattern is None or value is None:
        return False
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, list | tuple):
        return any(_found(pattern, one) for one in value)
    return isinstance(value, Mapping) and any(_found(pattern, one) for pair in value.items() for one in pair)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Change every string in a value, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
