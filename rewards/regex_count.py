"""The final answer contains enough that matches a regular expression."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hermes_rl import Score

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import Count, Pattern


def regex_count(
    result: Any, *, pattern: Pattern, at_least: Count = 1, ignore_case: bool = False, distinct: bool = False
) -> Score:
    """Return the number of matches of `pattern` (Python `re` syntax) in the final response over `at_least`, at most 1.

    Args:
        pattern: the regular expression; matches do not overlap.
        at_least: number of matches for a value of 1.
        ignore_case: match without regard to case.
        distinct: count equal matches once.
    """
    matches = [match.group() for match in re.finditer(pattern, result.final_response, re.IGNORECASE * ignore_case)]
    count = len(set(matches)) if distinct else len(matches)
    return Score(min(1.0, count / at_least), metrics={"count": count})
