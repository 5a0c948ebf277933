"""JSON of long lists without holding up the event loop.

Python's encoder keeps the interpreter to itself until it has finished; a group of eight long rollouts would stop
everything for most of a second even from a thread. Here long lists of numbers are written piece by piece, and between
two pieces others get their turn. One thread does it for all, so that several groups at once do not add up.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

PIECE = 2048
"""Numbers that are written at a time: about a millisecond."""
_BREATH = 0.0005
"""Seconds that others get after each piece."""
COMPRESS_FROM = 1024
"""Bytes from which a body is compressed."""


async def encoded(value: Any) -> bytes:
    """The JSON of a value, made in the encoding thread. Raises ValueError for what JSON does not have (NaN)."""
    return await asyncio.get_running_loop().run_in_executor(_thread(), _whole, value)


async def body_of(value: Any) -> tuple[bytes, dict[str, str]]:
    """A request's body and its headers; compressed where that is worth it."""
    body = await encoded(value)
    headers = {"Content-Type": "application/json"}
    if len(body) < COMPRESS_FROM:
        return body, headers
    packed = await asyncio.get_running_loop().run_in_executor(_thread(), gzip.compress, body, 1)
    return packed, {**headers, "Content-Encoding": "gzip"}


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="hermes-rl-encoding")


def _whole(value: Any) -> bytes:
    return "".join(_pieces(value)).encode("ascii")


def _pieces(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield "{"
        for place, (key, item) in enumerate(value.items()):
            yield f"{',' if place else ''}{json.dumps(str(key))}:"
            yield from _pieces(item)
        yield "}"
    elif isinstance(value, list) and len(value) > PIECE and isinstance(value[0], int | float):
        yield from _long(value)
    elif isinstance(value, list) and value and isinstance(value[0], list | dict):
        yield "["
        for place, item in enumerate(value):
            yield "," if place else ""
            yield from _pieces(item)
        yield "]"
    else:
        yield _dumped(value)


def _long(numbers: list[Any]) -> Iterator[str]:
    yield "["
    for start in range(0, len(numbers), PIECE):
        yield f"{',' if start else ''}{_dumped(numbers[start : start + PIECE])[1:-1]}"
        time.sleep(_BREATH)
    yield "]"


def _dumped(value: Any) -> str:
    """Without blanks, which are an eighth of long lists."""
    return json.dumps(value, allow_nan=False, default=_plain, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Numbers of numpy and the like, which hand-written environments may send."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
