"""Define how external values are read and written: JSON, numbers and text.

This module decides the handling of values that Python can represent and others cannot. A number beyond the range of
floats, infinity and NaN are null in JSON, read or written. A whole number may have any number of digits: `is_number`
returns True if it can be used in computations. A lone surrogate is escaped in JSON, and is restored unchanged. Objects
and lists nested too deeply are refused.

Parsing JSON creates an object for each value, and processing them takes longer still, while nothing else of the runner
can run. The size of a text is a poor measure: a long one may be one string. So its values are counted first, in one
pass over the text that lets other threads run. If a value may start at many positions of a text, an attempt to parse
one costs no more than the parsed part: Python's own error scans all text before it.
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
from urllib.parse import quote, urlsplit

try:
    import orjson
except ImportError:  # engines import this module in their own environments, which may lack it, and send nothing
    orjson = None  # type: ignore[assignment]

T = TypeVar("T")

# --------------------------------------------------------------------------------------------- Numbers and text

LARGEST_NUMBER = 1e100
"""Maximum number used in computations: sums of squares of billions of such numbers are still finite."""
LARGEST_COUNT = 2**53
"""Maximum valid count: beyond it JSON numbers of other languages are not exact."""


def is_number(value: object) -> TypeGuard[float]:
    """Return True if a value is a number that can be used in computations; booleans are not."""
    return isinstance(value, (int, float)) and value is not True and value is not False and abs(value) <= LARGEST_NUMBER


def parse_count(value: object) -> int:
    """Return an external count, or 0 if it is invalid."""
    return int(value) if is_number(value) and 0 <= value <= LARGEST_COUNT else 0


def deep_copy(value: T) -> T:
    """Return a deep copy of a value; for plain values in a seventh of the time of `deepcopy`."""
    any_value: Any = value
    try:
        copied: T = marshal.loads(marshal.dumps(any_value))
    except ValueError:  # it holds an object of another kind, or nests deeply
        return copy.deepcopy(value)
    return copied


def replace_surrogates(text: str) -> str:
    """Return the text with pairs of surrogates joined and each lone one, which UTF-8 lacks, replaced by U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


LONGEST_NAME = 200
"""Maximum characters of a name for a file or directory; file systems allow 255 bytes."""


@lru_cache(maxsize=1024)  # each call of a rollout needs that of its id
def safe_name(text: str) -> str:
    """Return a name of at most `LONGEST_NAME` ASCII characters for a file, a part of a path or URL, or a header.

    Characters other than letters, digits and ``_.-~:`` are percent-encoded, and different texts have different names.
    """
    quoted = quote(text, safe=":", errors="surrogatepass")
    if not quoted.strip("."):
        quoted = "%2E" * len(quoted)
    if len(quoted) <= LONGEST_NAME:
        return quoted
    return f"{quoted[: LONGEST_NAME - 17]}-{hashlib.sha256(quoted.encode()).hexdigest()[:16]}"


def url_text(value: str) -> str:
    """Return an HTTP address. Raise `ValueError` if it cannot be parsed, even if its scheme is valid."""
    try:
        _ = urlsplit(value).port
    except ValueError as error:
        raise ValueError(f"expected an address such as http://localhost:9001/v1: {error}") from None
    return value


def system_bytes(text: str) -> bytes:
    """Return a path, an argument or a variable as bytes for the system; raise `ValueError` if it is invalid."""
    try:
        data = os.fsencode(text)
    except UnicodeEncodeError:
        data = b"\0"
    if b"\0" in data:
        raise ValueError(f"{text[:200]!r} contains a null byte or an unpaired surrogate, which no program accepts")
    return data


# --------------------------------------------------------------------------------------------------- Whole JSON


class TooDeepError(ValueError):
    """More than `MOST_LEVELS` objects and lists are nested, or more than Python can parse."""

    def __init__(self) -> None:
        super().__init__("nested too deeply")


def read_own_json(text: str | bytes) -> Any:
    """Return the value of a JSON text that a run has written.

    Raises:
        ValueError: it is not JSON.
        TypeError: it is not a text.
    """
    if not isinstance(text, str | bytes):
        raise TypeError(f"JSON is a text, not a {type(text).__name__}")
    if isinstance(text, bytes) and orjson is not None and _MANY_DIGITS not in text.translate(_DIGITS_AS_ZEROS):
        # A fourth of the time. It refuses values that Python accepts: lone surrogates, infinity, NaN.
        with suppress(ValueError):
            return orjson.loads(text)
    try:
        full_text = text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass")
        value, end = _DECODER.raw_decode(full_text) if full_text[:1] in _BEGINNINGS else (None, -1)
        return value if end == len(full_text) else _DECODER.decode(full_text)
    except RecursionError:
        raise TooDeepError from None


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError` if it is invalid, or `TooDeepError`."""
    value = read_own_json(text)
    openings = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, openings)) > MOST_LEVELS and too_deep(value):  # type: ignore[arg-type]
        raise TooDeepError
    return value


_BUFFER = 1 << 14
"""Initial buffer of orjson in bytes; a longer text gets the required size."""


def write_message(value: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    """Return a value as JSON in UTF-8 without blanks, for a request; raises `TypeError` as `write_json` does.

    This is several times as fast. Files keep their blanks, because users search in them.
    """
    options = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
    try:
        written = orjson.dumps(value, default, options)
        # orjson keeps a buffer of 16 kB for a short text, and thousands of requests may wait for their responses.
        return bytes(memoryview(written)) if len(written) < _BUFFER else written
    except orjson.JSONEncodeError:  # a lone surrogate, infinity or NaN, keys that are not text, or an error
        return write_json(value, default=default)


def write_json(
    value: Any, indent: int | None = None, default: Callable[[Any], Any] | None = None, *, ascii_only: bool = False
) -> bytes:
    """Return a value as JSON in UTF-8; raise `TypeError` for objects that neither JSON nor `default` supports."""
    encode = _json_encoder(indent, default, ascii_only).encode
    try:
        text = encode(value)
    except ValueError:
        text = encode(_finite_or_none(value))
    return text.encode("utf-8", "backslashreplace")  # for a lone surrogate, its escape in JSON as well


@lru_cache(maxsize=16)
def _json_encoder(indent: int | None, default: Callable[[Any], Any] | None, ascii_only: bool) -> json.JSONEncoder:
    return json.JSONEncoder(ensure_ascii=ascii_only, allow_nan=False, indent=indent, default=default)


def _finite_float(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


_MANY_DIGITS = b"0" * 19
"""orjson converts a whole number beyond 64 bits to a float."""
_DIGITS_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() else byte for byte in range(256))
_DECODER = json.JSONDecoder(parse_float=_finite_float, parse_constant=lambda name: None)
_BEGINNINGS = frozenset("{[")
"""First characters of most texts: then no blanks need to be skipped."""


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ------------------------------------------------------------------------------------------ JSON within limits

MOST_VALUES = 100_000
"""Maximum number of values in a text; separators and keys count as some too, and numbers and blanks by their length.
Python takes 50 to 100 ms for this number, during which nothing else can run, in any thread.
"""
PER_VALUE = 32
"""Bytes outside strings that count as a value: parsing a number takes quadratic time in its digits."""
LARGEST = 4 << 20
"""Maximum characters of a call's arguments."""
MOST_LEVELS = 200
"""Maximum nesting of objects and lists; functions that process a value recurse through all levels."""

NESTED = f"have more than {MOST_LEVELS} objects and lists within each other"

_IN_STRING = re.compile(rb'(?:[^"\\]{1,65536}+|\\.){0,64}+', re.DOTALL)
"""A part of the content of a string, of bounded length."""


def too_many_values(text: str | bytes, max_values: int = MOST_VALUES) -> bool:
    """Return True if a JSON text has more than `max_values` values; any text may be given."""
    if len(text) <= max_values:
        return False
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    marks = (b",", b"[", b"{")
    # Most texts have few values even if the content of their strings is counted, and need no scan.
    if sum(map(data.count, marks)) + (data.count(b'"') + 1) // 2 + 1 + len(data) // PER_VALUE <= max_values:
        return False
    count = position = 0
    while count <= max_values:
        quote = data.find(b'"', position)
        end = quote if quote >= 0 else len(data)
        count += 1 + sum(data.count(separator, position, end) for separator in marks) + (end - position) // PER_VALUE
        if quote < 0:
            return count > max_values
        position = quote + 1
        while (string_match := _IN_STRING.match(data, position)) is not None and string_match.end() > position:
            position = string_match.end()
        position += 1
    return True


def read_bounded(text: str | bytes, largest: int = LARGEST, max_values: int = MOST_VALUES) -> Any:
    """Return the value of a JSON text within limits that any reader of the text can handle.

    Raises:
        ValueError: it is invalid, too large or nested too deeply; the message is a predicate.
    """
    if len(text) > largest or too_many_values(text, max_values):
        raise ValueError(f"are too large to be read: at most {largest} characters and {max_values} values")
    try:
        return read_json(text)
    except TooDeepError:
        raise ValueError(NESTED) from None
    except ValueError as error:
        raise ValueError(f"are not valid JSON: {error}") from None


def read_object(text: str | bytes, largest: int = LARGEST) -> dict[str, Any] | None:
    """Return the object of a JSON text within the limits of `read_bounded`; None if there is none in it."""
    try:
        value = read_bounded(text, largest)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


WINDOW = 512
"""Characters of the first part of a text in which a value is parsed; each further part is eight times longer."""
LONGEST_WORD = 16
"""Characters at the end of a part that may be the start of a longer token, such as ``-Infinity``."""


class UnwantedValueError(ValueError):
    """A value that is rejected regardless of the rest of the text; raised by functions that a decoder calls."""


def read_value(decoder: json.JSONDecoder, text: str, start: int) -> tuple[Any, int]:
    """Return the value that starts at `start` and its end, like `raw_decode`, in time proportional to the parsed part.

    Raises:
        ValueError: there is no value, or one with too many levels. A `JSONDecodeError` has its position relative to
            `start`.
    """
    size = WINDOW
    while True:
        reaches_end = start + size >= len(text)
        try:
            value, end = decoder.raw_decode(text[start : start + size])
        except RecursionError:
            raise TooDeepError from None
        except ValueError as error:
            if reaches_end or not _was_truncated(error, size):
                raise
        else:
            if reaches_end or end < size:
                if too_deep(value):
                    raise TooDeepError
                return value, start + end
        size *= 8


def _was_truncated(error: ValueError, size: int) -> bool:
    """Return True if parsing may have failed because the text was cut after `size` characters."""
    if isinstance(error, json.JSONDecodeError):
        return error.pos >= size - LONGEST_WORD or error.msg.startswith("Unterminated")
    return not isinstance(error, UnwantedValueError)  # too many digits, unless the number continues differently


_HOLDERS = (dict, list)


def too_deep(value: object) -> bool:
    """Return True if more than `MOST_LEVELS` objects and lists are nested in a value that JSON can represent."""
    level = [value] if isinstance(value, _HOLDERS) else []
    for _ in range(MOST_LEVELS):
        if not level:
            return False
        holders = (each.values() if isinstance(each, dict) else each for each in level)
        level = [child for values in holders for child in values if isinstance(child, _HOLDERS)]
    return bool(level)
