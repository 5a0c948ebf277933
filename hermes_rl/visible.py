"""Text of agents, models and servers, made fit to be seen on a terminal.

A terminal obeys control characters: they move, recolour and erase what stands there, set its title or answer for the
user. Controls of writing direction show a line in another order than it has. Both are shown escaped, as JSON has them.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator

KEPT = "\n\t\u200c\u200d"
"""Control and format characters that do no harm: line breaks, tabs, and what joins letters and emoji."""


def visible(text: str) -> str:
    """`text` with all other control and format characters, line separators and surrogates as ``\\u001b``."""
    if text.isascii() and text.isprintable():
        return text
    return text.translate(_ESCAPED)


class _Escaped:
    """What `str.translate` asks for each character; a list of single characters would take 70 MB for a text of 1 MB."""

    def __getitem__(self, code: int) -> int | str:
        character = chr(code)
        if character in KEPT or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return code
        data = character.encode("utf-16-be", "surrogatepass")
        return "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2))


_ESCAPED = _Escaped()


def most_frequent(reasons: Counter[str], most: int = 3) -> Iterator[tuple[str, int]]:
    """Yield the most frequent reasons with their counts, and all others together behind them."""
    yield from reasons.most_common(most)
    if further := reasons.total() - sum(count for _, count in reasons.most_common(most)):
        yield "other reasons", further


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, which takes an `s` in the plural."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
