"""The final answer is the target, character for character."""

from __future__ import annotations

from typing import Any


def exact_match(result: Any, *, target: str, ignore_case: bool = False, strip: bool = True) -> bool:
    """Return 1 if the final response is `target`, else 0.

    Args:
        target: the expected text.
        ignore_case: compare without regard to case (Unicode case folding).
        strip: ignore white space at both ends of both; white space inside counts.
    """
    reply, expected = result.final_response, target
    if strip:
        reply, expected = reply.strip(), expected.strip()
    if ignore_case:
        reply, expected = reply.casefold(), expected.casefold()
    return bool(reply == expected)
