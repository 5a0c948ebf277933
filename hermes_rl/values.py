"""The border for values that somebody else writes: JSON, numbers and text.

It decides once what becomes of what Python can hold and others cannot. A number beyond the range of floats, infinity
and NaN are null in JSON, read or written. A whole number may have any number of digits: `is_number` says whether it can
be computed with. Half of a character (a lone surrogate) is escaped in JSON, and comes back as it was. Objects and lists
within each other without end are refused.

Reading JSON makes an object of each value, and what is done with them afterwards takes longer still, all of it while
nothing else of the runner gets a turn. The size of a text says little: a long one may be one string. So its values are
counted first, in one pass over the text which lets others have their turn. And where a value may begin at many places
of a text, an attempt to read one costs no more than what is read: Python's error looks at all that stands before it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import marshal
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeGuard, TypeVar
from urllib.parse import quote

try:
    import orjson
except ImportError:  # engines import this module in their own environments, which may lack it, and send nothing
    orjson = None  # type: ignore[assignment]

T = TypeVar("T")

# --------------------------------------------------------------------------------------------- Numbers and text

LARGEST_NUMBER = 1e100
"""What is larger is not computed with: sums of squares of billions of such numbers are still finite."""
LARGEST_COUNT = 2**53
"""A count that is larger is none: beyond it JSON numbers of other languages are not exact."""


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that can be computed with; true and false are none."""
    return isinstance(value, (int, float)) and value is not True and value is not False and abs(value) <= LARGEST_NUMBER


def count_of(value: object) -> int:
    """Return a count that somebody has told, 0 where it is none."""
    return int(value) if is_number(value) and 0 <= value <= LARGEST_COUNT else 0


def own_copy(value: T) -> T:
    """Return a copy of a value through and through; of plain ones in a seventh of the time that `deepcopy` takes."""
    plain: Any = value
    try:
        copied: T = marshal.loads(marshal.dumps(plain))
    except ValueError:  # it holds an object of another kind, or nests deeply
        return copy.deepcopy(value)
    return copied


def whole_text(text: str) -> str:
    """Return the text with pairs of surrogates joined and each lone one, which UTF-8 lacks, replaced by U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


LONGEST_NAME = 200
"""Characters of a name that becomes a file or directory; file systems take 255 bytes."""


def safe_name(text: str) -> str:
    """Return a name of at most `LONGEST_NAME` ASCII characters for a file, a part of a path or URL, or a header.

    Other characters than letters, digits and ``_.-~:`` are percent-encoded, and different texts have different names.
    """
    quoted = quote(text, safe=":", errors="surrogatepass")
    if not quoted.strip("."):
        quoted = "%2E" * len(quoted)
    if len(quoted) <= LONGEST_NAME:
        return quoted
    return f"{quoted[: LONGEST_NAME - 17]}-{hashlib.sha256(quoted.encode()).hexdigest()[:16]}"


def system_bytes(text: str) -> bytes:
    """Return a path, an argument or a variable as the system takes it; `ValueError` where it cannot be one."""
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:
        data = b"\0"
    if b"\0" in data:
        raise ValueError(f"{text[:200]!r} holds a null byte or half of a character, which no program can be given")
    return data


# --------------------------------------------------------------------------------------------------- Whole JSON


class TooDeepError(ValueError):
    """More than `MOST_LEVELS` objects and lists are within each other, or more than Python can read."""

    def __init__(self) -> None:
        super().__init__("nested too deeply")


def read_own_json(text: str | bytes) -> Any:
    """Return the value of a JSON text that a run has written. Raises `ValueError` where it is none, `TypeError` where
    it is no text."""
    if not isinstance(text, str | bytes):
        raise TypeError(f"JSON is a text, not a {type(text).__name__}")
    if isinstance(text, bytes) and orjson is not None and _MANY_DIGITS not in text.translate(_DIGITS_AS_ZEROS):
        # In a fourth of the time. It refuses what Python's takes: halves of characters, numbers without end, NaN.
        with suppress(ValueError):
            return orjson.loads(text)
    try:
        whole = text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass")
        value, end = _DECODER.raw_decode(whole) if whole[:1] in _BEGINNINGS else (None, -1)
        return value if end == len(whole) else _DECODER.decode(whole)
    except RecursionError:
        raise TooDeepError from None


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError` where it is none, or `TooDeepError`."""
    value = read_own_json(text)
    openings = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, openings)) > MOST_LEVELS and too_deep(value):  # type: ignore[arg-type]
        raise TooDeepError
    return value


_BUFFER = 1 << 14
"""Bytes that orjson begins with; a longer text takes what it needs."""


def write_message(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a value as JSON in UTF-8 without blanks, for a request; raises `TypeError` as `write_json` does.

    It is several times as fast. Files keep their blanks: those who search in their lines know them.
    """
    plain = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
    try:
        written = orjson.dumps(value, default, plain)
        # orjson keeps a buffer of 16 kB for a short text, and thousands of requests may wait for their answers.
        return bytes(memoryview(written)) if len(written) < _BUFFER else written
    except orjson.JSONEncodeError:  # half of a character, a number without end, keys that are no text, or an error
        return write_json(value, default=default)


def write_json(
    value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None, *, ascii_only: bool = False
) -> bytes:
    """Return a value as JSON in UTF-8; raises `TypeError` where it holds what neither JSON nor `default` can say."""
    encode = _encoder(indent, default, ascii_only).encode
    try:
        text = encode(value)
    except ValueError:
        text = encode(_finite(value))
    return text.encode("utf-8", "backslashreplace")  # for a lone surrogate, its escape in JSON as well


@lru_cache(maxsize=16)
def _encoder(indent: int | None, default: Callable[[Any], Any] | None, ascii_only: bool) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=ascii_only, allow_nan=False, indent=indent, default=default)


def _float(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


_MANY_DIGITS = b"0" * 19
"""orjson makes a float of a whole number beyond 64 bits."""
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() else byte for byte in range(256))
_DECODER = json.JSONDecoder(parse_float=_float, parse_constant=lambda name: None)
_BEGINNINGS = frozenset("{[")
"""Of most texts: then no blanks have to be looked for."""


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------ JSON within bounds

MOST_VALUES = 100_000
"""Values of a text that is read; separators and keys count as some too, and so do numbers and blanks by their length.
Python takes 50 to 100 ms for so many, in which nothing else has its turn, in whatever thread they are read."""
PER_VALUE = 32
"""Bytes outside of strings that count as a value: to read a number takes the square of its digits."""
LARGEST = 4 << 20
"""Characters of the arguments of a call that are read."""
MOST_LEVELS = 200
"""Levels of objects and lists within each other; what is done with a value goes down all of them."""

NESTED = f"have more than {MOST_LEVELS} objects and lists within each other"

_IN_STRING = re.compile(rb'(?:[^"\\]{1,65536}+|\\.){0,64}+', re.DOTALL)
"""A part of what stands between the quotes of a string, of bounded length."""


def too_many_values(text: str | bytes, most: int = MOST_VALUES) -> bool:
    """Return True if a JSON text has more than `most` values; any text may be given."""
    if len(text) <= most:
        return False
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    marks = (b",", b"[", b"{")
    # Most texts have few values even if all that stands in their strings is counted, and need not be looked through.
    if sum(map(data.count, marks)) + (data.count(b'"') + 1) // 2 + 1 + len(data) // PER_VALUE <= most:
        return False
    count = place = 0
    while count <= most:
        begin = data.find(b'"', place)
        end = begin if begin >= 0 else len(data)
        count += 1 + sum(data.count(mark, place, end) for mark in marks) + (end - place) // PER_VALUE
        if begin < 0:
            return count > most
        place = begin + 1
        while (piece := _IN_STRING.match(data, place)) is not None and piece.end() > place:
            place = piece.end()
        place += 1
    return True


def read_bounded(text: str | bytes, largest: int = LARGEST, most: int = MOST_VALUES) -> Any:
    """Return the value of a JSON text; whoever reads it elsewhere may take it for one that can be read. Raises
    `ValueError` where it is none, or one that is too large or nested too deeply; the message is a predicate."""
    if len(text) > largest or too_many_values(text, most):
        raise ValueError(f"are too large to be read: at most {largest} characters and {most} values")
    try:
        return read_json(text)
    except TooDeepError:
        raise ValueError(NESTED) from None
    except ValueError as error:
        raise ValueError(f"are not valid JSON: {error}") from None


WINDOW = 512
"""Characters of the first part of a text in which a value is looked for; each further part is eight times longer."""
LONGEST_WORD = 16
"""Characters at the end of a part that may be the beginning of something longer, such as ``-Infinity``."""


class UnwantedValueError(ValueError):
    """A value that is not wanted, wherever the text ends; for what a decoder calls."""


def read_value(decoder: json.JSONDecoder, text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at `start` and its end, like `raw_decode`, in time for what is read alone. Raises
    `ValueError` where there is none, or one with too many levels; a `JSONDecodeError` has its place behind `start`."""
    size = WINDOW
    while True:
        whole = start + size >= len(text)
        try:
            value, end = decoder.raw_decode(text[start : start + size])
        except RecursionError:
            raise TooDeepError from None
        except ValueError as error:
            if whole or not _by_the_cut(error, size):
                raise
        else:
            if whole or end < size:
                if too_deep(value):
                    raise TooDeepError
                return value, start + end
        size *= 8


def _by_the_cut(error: ValueError, size: int) -> bool:
    """Whether it may be that a value cannot be read because only its first `size` characters were there."""
    if isinstance(error, json.JSONDecodeError):
        return error.pos >= size - LONGEST_WORD or error.msg.startswith("Unterminated")
    return not isinstance(error, UnwantedValueError)  # too many digits, unless the number goes on as another one


_HOLDERS = (dict, list)


def too_deep(value: object) -> bool:
    """Whether more than `MOST_LEVELS` objects and lists are within each other in a value that JSON can have."""
    level = [value] if isinstance(value, _HOLDERS) else []
    for _ in range(MOST_LEVELS):
        if not level:
            return False
        holders = (each.values() if isinstance(each, dict) else each for each in level)
        level = [inner for values in holders for inner in values if isinstance(inner, _HOLDERS)]
    return bool(level)
