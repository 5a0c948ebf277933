"""Comparing mathematical expressions, one of which a policy wrote.

An answer such as ``9^{9^{9^9}}`` can keep a computer algebra system busy for ever while it holds the interpreter's lock
and takes all memory, so this is for processes of foreign code, which are ended when they take too long.
"""

from __future__ import annotations

import re
from decimal import Decimal

from hermes_rl.errors import RewardFailure

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def equal(answer: str, target: str) -> tuple[bool, str | None]:
    """Whether the last expression of `answer` equals `target`, and the reason if not.

    Raises:
        RewardFailure: the target is no expression.
    """
    boxed = last_boxed(answer)
    if boxed is not None and _NUMBER.fullmatch(boxed) and _NUMBER.fullmatch(target.strip()):
        verdict = Decimal(boxed) == Decimal(target.strip())
    else:
        verdict = _verified(answer if boxed is None else f"\\boxed{{{boxed}}}", target)
    return verdict, None if verdict else f"{boxed or 'the answer'} is not equal to {target}"


def _verified(answer: str, target: str) -> bool:
    from math_verify import parse, verify

    # The library's own timeouts use signals with a handler, which cannot run inside one long operation.
    gold = parse(f"${target}$", parsing_timeout=None)
    if not gold:
        raise RewardFailure(f"math_equal: the target {target!r} is no number or expression")
    return bool(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


def last_boxed(text: str) -> str | None:
    """Return what stands in the last ``\\boxed{…}``; None where there is none that ends."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None
