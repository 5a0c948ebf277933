"""The final answer is built of tags, as the prompt asked."""

from __future__ import annotations

from typing import Any


def format_tags(result: Any, *, tags: list[str]) -> bool:
    """1 if the last thing the policy said is `<tag>…</tag>` for each of `tags` in order and nothing else, else 0.

    White space around the tags does not matter; what is inside must not be blank, and holds none of these tags.

    Args:
        tags: names, such as [think, answer].
    """
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    rest = result.final_response.strip()
    for tag in tags:
        part, end, after = rest.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not rest.startswith(f"<{tag}>") or not end or not part.strip() or any(mark in part for mark in marks):
            return False
        rest = after.lstrip()
    return not rest
