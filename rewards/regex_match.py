"""The final answer contains something that matches a regular expression."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import Pattern


def regex_match(result: Any, *, pattern: Pattern, ignore_case: bool = False, full: bool = False) -> bool:
    """Return 1 if `pattern` (Python `re` syntax) is found in the final response, else 0.

    Args:
        pattern: the regular expression; `.` does not match a line break unless the pattern has `(?s)`.
        ignore_case: match without regard to case.
        full: the complete response must match, not only a part of it.
    """
    expression = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    match = expression.fullmatch if full else expression.search
    return match(result.final_response) is not None
