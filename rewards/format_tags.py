"""The final answer is built of tags, as the prompt asked."""

from __future__ import annotations

import re
from typing import Any


def format_tags(result: Any, *, tags: list[str]) -> bool:
    """1 if the last thing the policy said is `<tag>…</tag>` for each of `tags` in order and nothing else, else 0.

    White space around the tags does not matter; what is inside must not be blank, and holds none of these tags.

    Args:
        tags: names, such as [think, answer].
    """
    parts = r"\s*".join(f"<{tag}>(.*?)</{tag}>" for tag in map(re.escape, tags))
    match = re.fullmatch(rf"\s*{parts}\s*", result.final_response, re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return match is not None and all(
        part.strip() and not any(mark in part for mark in marks) for part in match.groups()
    )
