"""How far a judge agrees with people: measured on labelled cases before it may judge.

Source of the format: one JSON object a line, ``{"answer", "score"}`` and whatever the rubric needs beside it
(``question``, ``reference``); scores are from 0 to 1.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError

NEAR = 0.25
"""A verdict agrees with a label that is this near, on a scale from 0 to 1."""

_measured: dict[tuple[str, str, str], float] = {}
"""Agreement by judge, file and its content's hash: measured once per process."""


async def require_agreement(
    judge: str, file: str, least: float, score: Callable[[Mapping[str, Any]], Awaitable[float]]
) -> float:
    """The share of the cases of `file` in which `score` agrees with the label.

    Raises:
        UserError: the file cannot be used, or the share is below `least`.
        JudgeFailure: the judge failed.
    """
    cases, digest = await asyncio.to_thread(_cases, file)
    key = (judge, file, digest)
    if key not in _measured:
        given = await asyncio.gather(*(score(case) for case in cases))
        agreeing = sum(abs(value - case["score"]) <= NEAR for value, case in zip(given, cases, strict=True))
        _measured[key] = agreeing / len(cases)
    if _measured[key] < least:
        raise UserError(
            f"judge {judge!r} agrees with {_measured[key]:.0%} of {len(cases)} labelled cases in {file}, less than "
            f"min_agreement ({least:.0%}): use another judge, or mend the rubric"
        )
    return _measured[key]


def _cases(file: str) -> tuple[list[dict[str, Any]], str]:
    try:
        lines = [line for line in Path(file).read_text("utf-8").split("\n") if line.strip()]
        cases = [json.loads(line) for line in lines]
        usable = bool(cases) and all(isinstance(c["answer"], str) and 0 <= c["score"] <= 1 for c in cases)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"calibrate: {file} cannot be used: {error}") from error
    if not usable:
        raise UserError(f"calibrate: {file} needs lines with an `answer` and a `score` from 0 to 1")
    return cases, str(hash(tuple(lines)))
