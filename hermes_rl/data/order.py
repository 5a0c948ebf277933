"""The order of rows: a shuffle that depends on its seed and the rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from hermes_rl.data.hashing import seeded
from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.spec.suggest import did_you_mean

WINDOW = 1000
"""Rows among which endless data is shuffled."""


def shuffled(rows: Iterable[Row], seed: int) -> list[Row]:
    """Finite rows in an order of chance; a row that is added or left out does not move the others."""
    return sorted(rows, key=lambda row: (seeded(seed, f"{row.digest}:{row.key}"), row.index))


def ordered(rows: Iterable[Row], by: str) -> list[Row]:
    """Finite rows by a column, smallest first, or largest first with ``-`` in front; equal ones stay as they were.

    Raises:
        UserError: a row has no such column, or values that cannot be compared.
    """
    column, largest_first = by.removeprefix("-"), by.startswith("-")
    rows = list(rows)
    for row in rows:
        if column not in row.columns:
            raise UserError(
                f"dataset.order: row {row.key} has no column {column!r}{did_you_mean(column, set(row.columns))}"
            )
    try:
        return sorted(rows, key=lambda row: row.columns[column], reverse=largest_first)
    except TypeError as error:
        raise UserError(f"dataset.order: the values of {column!r} cannot be compared: {error}") from error


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
