"""What the policy cites is what its tools gave it."""

from __future__ import annotations

import re
from typing import Any

from hermes_rl import Score

URL = re.compile(r"https?://[^\s<>\"'`\])}]+")


def citations(result: Any, *, at_least: int = 1) -> Score:
    """The share of the addresses cited in the final answer that stand in answers of tools; 0 for fewer than `at_least`.

    Addresses begin with http:// or https:// and end at white space, quotes or closing brackets; punctuation at their
    end and a final `/` do not count. Equal ones count once.

    Args:
        at_least: number of different addresses that have to be cited.
    """
    cited = addresses(result.final_response)
    seen = {address for call in result.tool_calls for address in addresses(call.result)}
    if len(cited) < at_least or not cited:
        return Score(0.0, reason=f"{len(cited)} of {at_least} sources", metrics={"cited": len(cited)})
    made_up = sorted(cited - seen)
    reason = f"not from a tool: {', '.join(made_up)[:300]}" if made_up else None
    return Score(1 - len(made_up) / len(cited), reason=reason, metrics={"cited": len(cited)})


def addresses(text: str) -> set[str]:
    """The different addresses in a text."""
    return {found.rstrip(".,;:!?").rstrip("/") for found in URL.findall(text)}
