"""Sequences in files: at most 16 bytes per token, usually 4 to 10.

Ids are 32-bit and log-probabilities 64-bit numbers, little-endian, compressed and written as base64.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, TypeVar

from hermes_rl.tokens.sequence import Sequence, Span, ids, numbers

Number = TypeVar("Number", int, float)


def packed(sequence: Sequence) -> dict[str, Any]:
    """The sequence as JSON; `unpacked` gives it back to the last bit."""
    return {
        "ids": _text(sequence.ids),
        "spans": [[span.turn, span.start, span.stop] for span in sequence.spans],
        "logprobs": None if sequence.sampled is None else _text(sequence.sampled),
    }


def unpacked(record: Mapping[str, Any]) -> Sequence:
    """The sequence of a record; raises ValueError where it is none."""
    try:
        spans = tuple(Span(*map(int, span)) for span in record["spans"])
        sampled = None if record["logprobs"] is None else _numbers(record["logprobs"], numbers())
        return Sequence(_numbers(record["ids"], ids()), spans, sampled)
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"this is no packed sequence: {type(error).__name__}: {error}") from error


def _text(values: array[Any]) -> str:
    return b64encode(zlib.compress(_little(values).tobytes(), 1)).decode("ascii")


def _numbers(text: str, into: array[Number]) -> array[Number]:
    into.frombytes(zlib.decompress(b64decode(text)))
    return _little(into)


def _little(values: array[Number]) -> array[Number]:
    """The values in the byte order of files."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values
