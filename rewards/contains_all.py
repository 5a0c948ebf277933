"""Everything that had to be said was said."""

from __future__ import annotations

from typing import Any, Literal

from hermes_rl import Score


def contains_all(
    result: Any, *, values: list[str], where: Literal["all", "final"] = "all", ignore_case: bool = True
) -> Score:
    """Return 1 if the policy's messages contain each of `values`, else 0; 1 for an empty list.

    Args:
        values: texts to search for literally: a number is found within a longer number.
        where: search all messages of the policy, or only its final response.
        ignore_case: compare without regard to case (Unicode case folding).
    """
    reply = "\n".join(result.texts) if where == "all" else result.final_response
    reply = reply.casefold() if ignore_case else reply
    missing = [value for value in values if (value.casefold() if ignore_case else value) not in reply]
    reason = f"not said: {', '.join(missing)}" if missing else None
    return Score(not missing, reason=reason, metrics={"found": len(values) - len(missing)})
