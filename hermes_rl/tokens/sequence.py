"""Sequences: the tokens that a trainer gets of a rollout, which of them were sampled, and their log-probabilities.

Owns the compact form in memory, 4 bytes per token and 8 more per sampled one, and the form in files: at most 16 bytes
per token, usually 4 to 10. Masks and full-length lists of log-probabilities are views, made when they are asked for.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

MASKED = -100
"""The mask of a token that is not trained on."""
MASKED_LOGPROB = 1.0
"""The log-probability at masked positions: a value that no sampled token can have."""
Number = TypeVar("Number", int, float)


def ids(values: Iterable[int] = ()) -> array[int]:
    """Token ids, 4 bytes each."""
    return array("i", values)


def listed(tokens: array[int]) -> bytes:
    """Token ids as a JSON list without its brackets."""
    return str(tokens.tolist())[1:-1].encode("ascii")


def numbers(values: Iterable[float] = ()) -> array[float]:
    """Log-probabilities, 8 bytes each: what a server said, to the last bit."""
    return array("d", values)


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """Tokens `start` to `stop` (exclusive) of a sequence, sampled in model call `turn`, which counts from 0."""

    turn: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens in order, and the spans of them that were sampled; everything else is context."""

    ids: array[int]
    spans: tuple[SampledSpan, ...]
    sampled: array[float] | None = None
    """One log-probability per sampled token, in order; None where the server gave none that fit."""

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if not end <= span.start <= span.stop <= len(self.ids):
                raise ValueError(f"the span {span} overlaps another, or lies outside of {len(self.ids)} tokens")
            end = span.stop
        if self.sampled is not None and len(self.sampled) != self.trained_length:
            raise ValueError(
                f"tokens and logprobs differ in length: {self.trained_length} sampled tokens, {len(self.sampled)}"
            )

    @classmethod
    def of(cls, tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float] | None = None) -> Self:
        """Make a sequence from lists of one length; a mask is `MASKED` or the token. Each run of tokens is a turn."""
        if len({len(tokens), len(masks), len(tokens if logprobs is None else logprobs)}) != 1:
            raise ValueError("tokens, masks and logprobs differ in length")
        spans = tuple(_runs(masks))
        sampled = None
        if logprobs is not None:
            sampled = numbers(logprobs[i] for span in spans for i in range(span.start, span.stop))
        return cls(ids(tokens), spans, sampled)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_length(self) -> int:
        """How many tokens were sampled."""
        return sum(span.stop - span.start for span in self.spans)

    @property
    def tokens(self) -> list[int]:
        return self.ids.tolist()

    @property
    def masks(self) -> list[int]:
        """One per token: `MASKED` or the token itself."""
        masks = [MASKED] * len(self.ids)
        for span in self.spans:
            masks[span.start : span.stop] = self.ids[span.start : span.stop].tolist()
        return masks

    @property
    def logprobs(self) -> list[float] | None:
        """One per token, `MASKED_LOGPROB` where it was not sampled."""
        return None if self.sampled is None else self.spread(self.sampled, MASKED_LOGPROB)

    def spread(self, values: Sequence[float], elsewhere: float) -> list[float]:
        """Put values of sampled tokens at their places, and `elsewhere` at all others."""
        line, taken = [elsewhere] * len(self.ids), 0
        for span in self.spans:
            count = span.stop - span.start
            line[span.start : span.stop] = values[taken : taken + count]
            taken += count
        return line

    @property
    def trained(self) -> list[int]:
        """The tokens that are trained on, in order."""
        return [token for span in self.spans for token in self.ids[span.start : span.stop]]


def _runs(masks: Sequence[int]) -> Iterator[SampledSpan]:
    start, turn = None, 0
    for place, mask in enumerate([*masks, MASKED]):
        if mask != MASKED and start is None:
            start = place
        elif mask == MASKED and start is not None:
            yield SampledSpan(turn, start, place)
            start, turn = None, turn + 1


def packed(sequence: TokenSequence) -> dict[str, Any]:
    """Write the sequence as JSON; `unpacked` gives it back to the last bit.

    Ids are 32-bit and log-probabilities 64-bit numbers, little-endian, compressed and written as base64.
    """
    return {
        "ids": _text(sequence.ids),
        "spans": [[span.turn, span.start, span.stop] for span in sequence.spans],
        "logprobs": None if sequence.sampled is None else _text(sequence.sampled),
    }


def unpacked(record: Mapping[str, Any]) -> TokenSequence:
    """Read the sequence of a record; raises ValueError where the record holds none."""
    try:
        spans = tuple(SampledSpan(*map(int, span)) for span in record["spans"])
        sampled = None if record["logprobs"] is None else _numbers(record["logprobs"], numbers())
        return TokenSequence(_numbers(record["ids"], ids()), spans, sampled)
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"this is no packed sequence: {type(error).__name__}: {error}") from error


def _text(values: array[Any]) -> str:
    return b64encode(zlib.compress(_little(values).tobytes(), 1)).decode("ascii")


def _numbers(text: str, into: array[Number]) -> array[Number]:
    into.frombytes(zlib.decompress(b64decode(text)))
    return _little(into)


def _little(values: array[Number]) -> array[Number]:
    """Return the values in the byte order of files."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values
