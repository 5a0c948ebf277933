"""`Row` and `Rows`: what a rollout starts from, and the sequence (maybe endless) that a run draws from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any


@dataclass(frozen=True)
class Row:
    """One row of the dataset.

    Attributes:
        key: what identifies it, the same in every run.
        columns: its values by name, the derived ones included; not to be changed.
        index: its place in the source, from 0.
        digest: hash of its content as the source gave it (64 hex digits).
    """

    key: str
    columns: Mapping[str, Any]
    index: int
    digest: str


class Rows:
    """Rows in the order they are played; every iteration starts again from the first.

    Attributes:
        length: how many, or None where that is not known or without end.
        fingerprint: hash of keys and contents, for the run's record.
        fallback: True where the spec's fallback stands in for the dataset.
    """

    def __init__(
        self,
        make: Callable[[], Iterator[Row]],
        *,
        length: int | None,
        fingerprint: str,
        fallback: bool = False,
    ) -> None:
        self._make = make
        self.length = length
        self.fingerprint = fingerprint
        self.fallback = fallback

    @classmethod
    def of(cls, rows: Sequence[Row], *, fingerprint: str, fallback: bool = False) -> Rows:
        """Rows that are all there."""
        return cls(lambda: iter(rows), length=len(rows), fingerprint=fingerprint, fallback=fallback)

    def __iter__(self) -> Iterator[Row]:
        return self._make()

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("these rows may be without end; look at `length`")
        return self.length

    def __bool__(self) -> bool:
        return self.length != 0

    def __getitem__(self, index: int) -> Row:
        if index < 0:
            index += len(self)
        for row in islice(self, index, index + 1) if index >= 0 else ():
            return row
        raise IndexError("there are fewer rows")
