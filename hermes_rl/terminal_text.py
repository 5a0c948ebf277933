"""Make text of agents, models and servers safe for display on a terminal.

A terminal obeys control characters: they move, recolour and erase the display, set its title or respond for the user.
Controls of writing direction show a line in another order. Both are escaped, as in JSON.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

KEPT = "\n\t\u200c\u200d"
"""Harmless control and format characters: line breaks, tabs, and joiners of letters and emoji."""


def escape_controls(text: str) -> str:
    """Return `text` with all other control and format characters, line separators and surrogates as ``\\u001b``."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_ESCAPED)


class _Escaped:
    """Mapping for `str.translate`; a list of single characters would take 70 MB for a text of 1 MB."""

    def __getitem__(self, code: int) -> int | str:
        character = chr(code)
        if character in KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return code
        data = character.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{data[offset : offset + 2].hex()}" for offset in range(0, len(data), 2))


_ESCAPED = _Escaped()


def start_of(text: str, limit: int) -> str:
    """Return the start of a text in at most `limit` characters, cut between two words if possible."""
    if len(text) <= limit:
        return text
    start = text[: limit - 1]
    word_match = re.match(r"(.*\S)\s", start + text[limit - 1], re.DOTALL)
    return (word_match[1] if word_match and 2 * len(word_match[1]) > limit else start) + "…"


def end_of(text: str, limit: int) -> str:
    """Return the end of a text in at most `limit` characters, cut between two words if one starts in its first half."""
    if len(text) <= limit:
        return text
    end = text[-(limit - 1) :]
    word_match = re.search(r"\s(\S.*)", text[-limit] + end, re.DOTALL)
    return "…" + (word_match[1] if word_match and 2 * len(word_match[1]) > limit else end)


def most_frequent(reasons: Counter[str], limit: int = 3) -> Iterator[tuple[str, int]]:
    """Yield the most frequent reasons with their counts, and then the sum of all others."""
    yield from reasons.most_common(limit)
    if other_count := reasons.total() - sum(count for _, count in reasons.most_common(limit)):
        yield "other reasons", other_count


def pluralize(count: int, noun: str) -> str:
    """Return a number with its noun, with `s` in the plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
