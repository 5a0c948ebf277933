"""The final answer is built of tags, as the prompt asked."""

from __future__ import annotations

import unicodedata
from typing import Any

FILLERS = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Letters and symbols that show nothing."""


def format_tags(result: Any, *, tags: list[str]) -> bool:
    """Return 1 if the final response is `<tag>…</tag>` for each of `tags` in order and nothing else, else 0.

    White space around the tags is ignored. Each tag must contain visible text, and none of these tags.

    Args:
        tags: names, such as [think, answer].
    """
    marks = [marker for tag in tags for marker in (f"<{tag}>", f"</{tag}>")]
    rest = result.final_response.strip()
    for tag in tags:
        part, end, after = rest.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not rest.startswith(f"<{tag}>") or not end or not _shows(part) or any(marker in part for marker in marks):
            return False
        rest = after.lstrip()
    return not rest


def _shows(text: str) -> bool:
    """Return True if a text has a letter, digit, symbol or punctuation mark; zero-width characters do not count."""
    return any(unicodedata.category(letter)[0] in "LNPS" and letter not in FILLERS for letter in text)
