"""Let one seat ask several others, and score its question."""

import asyncio
import re
from typing import Any

QUESTION = re.compile(r"\s*(\d{1,2})\s*([-+*])\s*(\d{1,2})\s*")
SIGNS = {"sums": "+", "differences": "-", "products": "*"}


async def ask(seats: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Let the proposer ask, and all solvers answer at the same time; an invalid question gets no answers."""
    question = await seats["proposer"].say()
    match = QUESTION.fullmatch(question or "")
    if match is None or match[2] != SIGNS[row["kind"]]:
        return {"value": None}
    a, b = int(match[1]), int(match[3])
    solvers = [seat for name, seat in seats.items() if name != "proposer"]
    await asyncio.gather(*(solver.say(f"What is {question}?") for solver in solvers))
    return {"value": {"+": a + b, "-": a - b, "*": a * b}[match[2]]}


def right(result: Any) -> float:
    """Return 1 for the right number."""
    value = (result.outcome or {}).get("value")
    return float(value is not None and result.final_response.strip() == str(value))


def between(result: Any, paid: dict[str, dict[str, float]]) -> float:
    """Return 1 if half of the solvers were right, 0 if all were, or none."""
    if (result.outcome or {}).get("value") is None:
        return 0.0
    share = [values["right"] for name, values in paid.items() if "right" in values]
    return 1.0 - abs(2 * sum(share) / len(share) - 1)
