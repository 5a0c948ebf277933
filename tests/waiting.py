"""Waiting for an event in a test, with a bound that a busy machine keeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

BOUND = 30.0
"""Seconds until a wait fails. A test that passes does not wait for them."""
PAUSE = 0.01
"""Seconds between two looks."""


async def until(condition: Callable[[], T], what: str = "", seconds: float = BOUND) -> T:
    """Return the first true value of a condition; raise `AssertionError` if there is none within the bound."""
    for value in _looks(condition, what, seconds):
        if value:
            return value
        await asyncio.sleep(PAUSE)
    raise AssertionError  # _looks ends with an error


def until_blocking(condition: Callable[[], T], what: str = "", seconds: float = BOUND) -> T:
    """Do what `until` does, for tests without an event loop."""
    for value in _looks(condition, what, seconds):
        if value:
            return value
        time.sleep(PAUSE)
    raise AssertionError  # _looks ends with an error


async def steady(value: Callable[[], T], looks: int = 50, seconds: float = BOUND) -> T:
    """Return a value that has stayed the same for so many looks; raise `AssertionError` if it never does."""
    still, last = 0, value()

    def stays() -> bool:
        nonlocal still, last
        now = value()
        still, last = (still + 1 if now == last else 0), now
        return still >= looks

    await until(stays, f"{_named(value)} to stay the same", seconds)
    return last


async def turns(count: int = 100) -> None:
    """Let everything that is ready on the event loop go on, so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


def _looks(condition: Callable[[], T], what: str, seconds: float) -> Iterator[T]:
    end = time.monotonic() + seconds
    while True:
        last = time.monotonic() >= end  # read first, so that a process that was stopped looks once more
        value = condition()
        yield value
        if last:
            raise AssertionError(f"waited {seconds:g} s for {what or _named(condition)}; it is {value!r}")


def _named(condition: Callable[[], object]) -> str:
    """Return the source of a lambda, or the name of a function."""
    try:
        return " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        return repr(condition)
