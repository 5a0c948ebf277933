"""The order of rows: a shuffle that depends on its seed and the rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from hermes_rl.data.hashing import seeded
from hermes_rl.data.rows import Row

WINDOW = 1000
"""Rows among which endless data is shuffled."""


def shuffled(rows: Iterable[Row], seed: int) -> list[Row]:
    """Finite rows in an order of chance; a row that is added or left out does not move the others."""
    return sorted(rows, key=lambda row: (seeded(seed, f"{row.digest}:{row.key}"), row.index))


def shuffled_stream(rows: Iterable[Row], seed: int) -> Iterator[Row]:
    """Endless rows, shuffled within a window that moves along."""
    random = Random(seed)
    waiting: list[Row] = []
    for row in rows:
        if len(waiting) < WINDOW:
            waiting.append(row)
            continue
        place = random.randrange(WINDOW)
        yield waiting[place]
        waiting[place] = row
    random.shuffle(waiting)
    yield from waiting
