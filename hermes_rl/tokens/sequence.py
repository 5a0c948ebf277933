"""What a trainer gets of a rollout: tokens, what of them was sampled, and the log-probabilities.

Owns the compact form: 4 bytes per token and 8 more per sampled one. Masks and full-length lists of
log-probabilities are views that are made when they are asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Self

MASKED = -100
"""The mask of a token that is not trained on."""
MASKED_LOGPROB = 1.0
"""The log-probability at masked positions: a value that no sampled token can have."""


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
class Span:
    """Tokens `start` to `stop` (exclusive) of a sequence were sampled in model call `turn`, which counts from 0."""

    turn: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """Tokens in order, and the spans of them that were sampled; everything else is context."""

    ids: array[int]
    spans: tuple[Span, ...]
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
    def of(cls, tokens: Many[int], masks: Many[int], logprobs: Many[float] | None = None) -> Self:
        """From lists of one length; a mask is `MASKED` or the token itself. Each run of trained tokens is a turn."""
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

    def spread(self, values: Many[float], elsewhere: float) -> list[float]:
        """Values of sampled tokens at their places, `elsewhere` at all others."""
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

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and log-probabilities in memory."""
        numbers = 0 if self.sampled is None else len(self.sampled) * self.sampled.itemsize
        return len(self.ids) * self.ids.itemsize + numbers


def _runs(masks: Many[int]) -> Iterator[Span]:
    start, turn = None, 0
    for place, mask in enumerate([*masks, MASKED]):
        if mask != MASKED and start is None:
            start = place
        elif mask == MASKED and start is not None:
            yield Span(turn, start, place)
            start, turn = None, turn + 1
