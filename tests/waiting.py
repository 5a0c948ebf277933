"""Waiting for an event in a test, with a bound that a busy machine keeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

BOUND = 60.0
"""Seconds until a wait fails. A test that passes does not wait for them."""
PAUSE = 0.01
"""Seconds between two looks."""


async def until(condition: Callable[[], Any], seconds: float = BOUND) -> Any:
    """Return the first true value of a condition, which may be async.

    Raises:
        AssertionError: there is none within the bound.
    """
    end = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= end  # read first, so that a process that was stopped looks once more
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert not late, _missed(condition, value, seconds)
        await asyncio.sleep(PAUSE)


def until_blocking(condition: Callable[[], Any], seconds: float = BOUND) -> Any:
    """Do what `until` does, for tests without an event loop."""
    end = time.monotonic() + seconds
    while True:
        late = time.monotonic() >= end
        if value := condition():
            return value
        assert not late, _missed(condition, value, seconds)
        time.sleep(PAUSE)


def stays(value: Callable[[], object], looks: int = 50) -> Callable[[], bool]:
    """Return a condition that is true after so many looks at a value that has not changed."""
    still, last = 0, value()

    def same() -> bool:
        nonlocal still, last
        now = value()
        still, last = (still + 1 if now == last else 0), now
        return still >= looks

    return same


async def turns(count: int = 100) -> None:
    """Let everything that is ready on the event loop go on, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def _missed(condition: Callable[[], object], value: object, seconds: float) -> str:
    return f"waited {seconds:g} s for {_source(condition)}: {value!r}"


def _source(condition: Callable[[], object]) -> str:
    """Return the source of a lambda, or the name of a function."""
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)
