"""The final answer is mathematically equal to the target."""

from __future__ import annotations

from typing import Any

from hermes_rl import Score
from hermes_rl.scoring.mathematics import compile_patterns, equal
from hermes_rl.scoring.reward_value import requires, takes_at_most


@requires("target | regex_search('[^\\\\s\\'$%]') is not none", "the target is not a number or expression")
@takes_at_most("timeout", imports=("math_verify",), prepare=compile_patterns)
def math_equal(result: Any, *, target: str, timeout: float = 10.0) -> Score:
    """Return 1 if the answer equals `target` as an expression (``0.5`` = ``1/2`` = ``\\frac{1}{2}``), else 0.

    The answer is the last ``\\boxed{…}`` if there is one, else the start of the last line ``#### …``, as in GSM8K,
    else the last number or expression that math-verify finds.

    Args:
        target: a number or a LaTeX expression.
        timeout: seconds for the comparison; an answer that takes longer to evaluate scores 0.
    """
    verdict, reason = equal(result.final_response, target)
    return Score(verdict, reason=reason)
