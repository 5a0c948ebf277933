"""Regular expressions of templates, within a limit of time.

A search holds the interpreter for as long as it takes, which a pattern can make for ever. So one that may take long by
the form of its pattern and the size of its text is done in a process that is ended.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import cache, lru_cache
from math import inf
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

SECONDS = 1.0
"""For one search in a process."""
STEPS = 1e8
"""Steps of a search that is done at once, at most; they take about a second."""
MAX_REPLACED_CHARACTERS = 1 << 26
"""Characters of a text in which matches are replaced."""
_REPEATS = (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT)
_FEW = 4
"""Repetitions of which there are so few that they count as one."""


class SlowPatternError(ValueError):
    """A search took too long."""


def limited(method: str, pattern: str, text: str, *more: Any) -> Any:
    """Return the result of a method of `METHODS`; raise `SlowPatternError` if it takes too long."""
    if (len(text) + 1) ** (1 + degree(pattern)) <= STEPS:
        return METHODS[method](pattern, text, *more)
    import asyncio

    from hermes_rl.plugins import Code
    from hermes_rl.user_code.failures import EndedError, ForeignError
    from hermes_rl.user_code.pool import POOL

    arguments = {"method": method, "pattern": pattern, "text": text, "more": list(more)}
    call: Coroutine[Any, Any, Any] = POOL.call(
        Code.from_ref(f"{__name__}:called"), arguments, "hermes_rl.plugins:identity", SECONDS
    )
    try:
        return asyncio.run_coroutine_threadsafe(call, _pattern_loop(os.getpid())).result()
    except (EndedError, ForeignError) as error:
        excerpt = pattern if len(pattern) <= 80 else f"{pattern[:80]}…"
        raise SlowPatternError(f"regex_{method}: {excerpt!r} on {len(text)} characters: {error}") from None


@cache
def _pattern_loop(process: int) -> asyncio.AbstractEventLoop:
    """Return this process's event loop in a separate thread, because the caller may be inside another loop."""
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="hermes-rl-patterns", daemon=True).start()
    return loop


def called(method: str, pattern: str, text: str, more: list[Any]) -> Any:
    """Return the result of a method; runs in a worker process."""
    return METHODS[method](pattern, text, *more)


def _search_text(pattern: str, text: str, group: int | str | None = None) -> str | None:
    match = re.search(pattern, text)
    if match is None:
        return None
    groups = match[(1 if match.re.groups else 0) if group is None else group]
    return groups if groups is None else str(groups)


def _find_all(pattern: str, text: str) -> list[Any]:
    return [list(groups) if isinstance(groups, tuple) else groups for groups in re.findall(pattern, text)]


def _replace_matches(pattern: str, text: str, replacement: str) -> str:
    if (len(text) + 1) * len(replacement) > MAX_REPLACED_CHARACTERS:
        raise SlowPatternError(f"regex_replace: the text may have more than {MAX_REPLACED_CHARACTERS} characters")
    return re.sub(pattern, replacement, text)


METHODS: Mapping[str, Callable[..., Any]] = {"search": _search_text, "findall": _find_all, "replace": _replace_matches}


@lru_cache(maxsize=1024)
def degree(pattern: str) -> float:
    """Return the degree of the polynomial that bounds a search's time in the text's length; infinite without such a
    bound."""
    try:
        return _growth_degree(parser.parse(pattern))
    except (re.error, RecursionError, OverflowError, TypeError):
        return 0  # not a valid pattern, which is reported when it is used


def _growth_degree(part: Any) -> float:
    """Return the degree of a part of a pattern, including its nested parts."""
    if isinstance(part, parser.SubPattern):
        return sum(_growth_degree(each) for each in part)
    if not isinstance(part, tuple | list):
        return 0
    operator, value = (part[0], part[1:]) if isinstance(part, tuple) and part else (None, part)
    if operator in _REPEATS:
        low, high, repeated_part = value[0]
        if high <= 1:
            return _growth_degree(repeated_part)
        within = inf if _is_ambiguous(repeated_part) else 0
        return within or (1 if high - low >= _FEW else 0)
    return sum(_growth_degree(each) for each in value)


def _is_ambiguous(part: Any) -> bool:
    """Return True if a part of a pattern may match one text in several ways."""
    if isinstance(part, parser.SubPattern):
        return any(_is_ambiguous(each) for each in part)
    if not isinstance(part, tuple | list):
        return False
    if isinstance(part, tuple) and part and part[0] in (*_REPEATS, codes.BRANCH):
        return part[0] is codes.BRANCH or part[1][0] != part[1][1] or _is_ambiguous(part[1][2])
    return any(_is_ambiguous(each) for each in part)
