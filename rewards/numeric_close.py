"""The last number of the final answer is near the target."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from hermes_rl import Score
from hermes_rl.scoring.phrase_matching import LETTER

if TYPE_CHECKING:
    from hermes_rl.spec.argument_types import Finite

DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"(?<!{LETTER})(?<!\.)[-+−]?{DIGITS}(?:[eE][-+]?\d+)?(?!{LETTER})")


def numeric_close(result: Any, *, target: Finite, relative: Finite = 1e-6, absolute: Finite = 0.0) -> Score:
    """Return 1 if the last number of the final response is within the larger tolerance of `target`, else 0.

    Numbers are digits with an optional sign, thousands separators `,` or LaTeX's `{,}`, a decimal point and an
    exponent. Units and symbols around them are ignored, and `50%` is 50.

    Args:
        target: the expected number.
        relative: tolerance as a share of the target.
        absolute: tolerance in units of the target.
    """
    numbers = NUMBER.findall(result.final_response.replace("{,}", ","))
    if not numbers:
        return Score(0.0, reason="the answer has no number")
    answer_value = float(numbers[-1].replace(",", "").replace("−", "-"))
    close = math.isfinite(answer_value) and abs(answer_value - target) <= max(relative * abs(target), absolute)
    return Score(close, reason=None if close else f"{numbers[-1]} is not {target:g}")
