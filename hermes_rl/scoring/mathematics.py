"""Compare mathematical expressions, one of which a policy wrote.

A reply such as ``9^{9^{9^9}}`` can keep a computer algebra system busy forever while it holds the interpreter's lock
and consumes all memory. Therefore this module is meant for worker processes for user code, which are killed on timeout.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal

from hermes_rl.errors import RewardFailure

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")
_AFTER_HASHES = re.compile(r"####(?!#)[ \t]*+(?!\d+[.)][ \t]+[^\W\d])(?=[-+*$\\(.\d])([^\n]*\d[^\n]*)")
"""A line with an answer in the form of GSM8K; neither a textual heading nor a numbered one (`#### 1. Check`)."""
_AT_BEGIN = re.compile(
    r"\$?[ \t]*([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?)(?:%|\\%)?(?=[.,;:!?*]|\s+(?!\\|[-+/^*])|$)"
)
"""A number, possibly an amount of money, that stands alone: the line ends after it, or words follow."""
_PERCENT = re.compile(r"(?<=\d)\s?\\?%")
"""The percent sign of a number, which counts without it: 31% is 31. The library accepts both 31 and 0.31."""
_ANNOUNCED = re.compile(r"\banswer(?: is\b|:)", re.IGNORECASE)
_HEDGED = re.compile(
    r"\d[^\w\n.]{0,8}(?:,\s|\bor\b|\band\b)[^\w\n]{0,8}(?:(?:maybe|perhaps|possibly|even|is)[^\w\n]{1,8})?\d"
)
"""Two numbers of which the library takes the first."""
_ESCAPED_DOLLAR = re.compile(r"\\\$(?=[ \t]*[-+]?\d)")


def equal(answer: str, target: str) -> tuple[bool, str | None]:
    """Return True if the last expression of `answer` equals `target`, and otherwise the reason.

    The last ``\\boxed{…}`` of the reply counts, else the text after its last ``####``, else its last expression. A
    reply that announces two numbers equals neither.

    Raises:
        RewardFailure: the target is not an expression.
    """
    answer, target = _PERCENT.sub("", answer), _PERCENT.sub("", target)
    boxed = last_boxed(answer)
    stated = _after_hashes(answer) if boxed is None else boxed
    expected = _after_hashes(target) or _strip_latex(target).strip()
    if stated is not None and _NUMBER.fullmatch(stated) and _NUMBER.fullmatch(expected):
        verdict = Decimal(stated) == Decimal(expected)
    elif stated is None and len(parts := _ANNOUNCED.split(answer)) > 1:
        statement = f"The answer is {parts[-1]}"
        verdict = ("," in expected or not _HEDGED.search(statement)) and _is_equal(_strip_latex(statement), expected)
    else:
        verdict = _is_equal(_strip_latex(answer) if stated is None else f"\\boxed{{{stated}}}", expected)
    return verdict, None if verdict else f"{stated or 'the answer'} is not equal to {target}"


def compile_patterns() -> None:
    """Compile the patterns of math-verify, which takes 60 ms at the first comparison."""
    _is_equal("$1$", "1")


def _is_equal(answer: str, target: str) -> bool:
    from math_verify import parse, verify

    # The library's own timeouts use signals with a handler, which cannot run inside one long operation. It logs a
    # warning for each call without them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = parse(f"${target}$", parsing_timeout=None)
    if not gold:
        raise RewardFailure(f"math_equal: the target {target!r} is not a number or expression")
    return bool(verify(gold, parse(answer, parsing_timeout=None), timeout_seconds=None))


def _after_hashes(text: str) -> str | None:
    """Return the answer in the last line ``#### …``, without the words after a number, or None if there is none."""
    lines = _AFTER_HASHES.findall(text)
    if not lines:
        return None
    line = _strip_latex(lines[-1]).strip().strip("*").strip()
    number_match = _AT_BEGIN.match(line)
    return line if number_match is None else number_match[1].replace(",", "")


def _strip_latex(text: str) -> str:
    """Return a text without LaTeX forms of dollar signs and thousands separators, which are parsed only in formulas."""
    return _ESCAPED_DOLLAR.sub("", text.replace("{,}", ","))


def last_boxed(text: str) -> str | None:
    """Return the content of the last closed ``\\boxed{…}``, or None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, content_start = 1, start + len("\\boxed{")
    for position in range(content_start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[content_start:position].strip()
    return None
