"""Rows for a run, without ever holding up its event loop.

Rows that are all there are taken as they are. A generator, a streamed dataset or an environment's own code may wait
for a network or compute; those are asked in a thread, beside the groups that are running.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import Generic, TypeVar

from hermes_rl.data.load import Split
from hermes_rl.data.rows import Row, Rows
from hermes_rl.errors import RunError
from hermes_rl.threads import in_thread

T = TypeVar("T")


class RowSource:
    """Rows that can be gone through any number of times, as far as what they come from allows it.

    Args:
        rows: rows that are there, or that come; asynchronous rows are gone through once.
    """

    def __init__(self, rows: Iterable[Row] | AsyncIterable[Row]) -> None:
        self._rows = rows
        self.slow = isinstance(rows, AsyncIterable) or (isinstance(rows, Rows) and rows.length is None)
        self._begun: tuple[Row, AsyncIterator[Row]] | None = None
        """The first row and what follows it, where somebody has looked at it before the first pass."""

    @property
    def length(self) -> int | None:
        """How many rows there are; None where that is not known, or there is no end."""
        return len(self._rows) if not self.slow and isinstance(self._rows, Rows | list | tuple) else None

    async def first(self) -> Row | None:
        """The first row, which stands for any; None where there is none. The next pass begins with it."""
        rows = self._pass()
        async for row in rows:
            if self.slow:
                self._begun = row, rows
            return row
        return None

    async def require_first(self, split: Split) -> Row:
        """The same; raises RunError where there is none."""
        first = await self.first()
        if first is not None:
            return first
        if split == "eval":
            raise RunError("the dataset has no rows to evaluate on; see dataset.eval, .filter and .limit")
        raise RunError("the dataset has no rows to play; see dataset.filter, .eval and .limit")

    async def __aiter__(self) -> AsyncIterator[Row]:
        begun, self._begun = self._begun, None
        if begun is not None:
            yield begun[0]
        async for row in begun[1] if begun is not None else self._pass():
            yield row

    async def _pass(self) -> AsyncIterator[Row]:
        if isinstance(self._rows, AsyncIterable):
            async for row in self._rows:
                yield row
        elif not self.slow:
            for row in self._rows:
                yield row
        else:
            rows = self._rows
            iterator: Iterator[Row] = await in_thread(lambda: iter(rows))
            while (following := await in_thread(lambda: next(iterator, None))) is not None:
                yield following


class Lookahead(Generic[T]):
    """The next item of an asynchronous source; a slow one is asked beside everything else.

    Args:
        source: what is asked.
        slow: whether asking it may take long.
        wake: called when the answer of a slow source is there.
    """

    def __init__(self, source: AsyncIterator[T], *, slow: bool, wake: Callable[[], None]) -> None:
        self._source, self._slow, self._wake = source, slow, wake
        self._asked: asyncio.Task[T | None] | None = None
        self.exhausted = False

    async def take(self) -> T | None:
        """The next item; None where it is not there yet, or there is no other (`exhausted`)."""
        if not self._slow:
            return self._taken(await self._next())
        if self._asked is None:
            self._asked = asyncio.create_task(self._next())
            self._asked.add_done_callback(lambda _: self._wake())
        if not self._asked.done():
            return None
        asked, self._asked = self._asked, None
        return self._taken(asked.result())

    async def _next(self) -> T | None:
        return await anext(self._source, None)

    def _taken(self, found: T | None) -> T | None:
        self.exhausted = found is None
        return found

    async def close(self) -> None:
        """Ask no more."""
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)
