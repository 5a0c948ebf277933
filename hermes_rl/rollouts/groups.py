"""Many groups at once: start them as places become free, hand them on as they end.

This is the heart of every mode; what is done with a group is up to who asks for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Iterable, Iterator
from contextlib import suppress

from hermes_rl.data.rows import Row, Rows
from hermes_rl.rollouts.admission import LOOK, Admission
from hermes_rl.rollouts.player import Player
from hermes_rl.rollouts.rollout import Group

Source = AsyncIterator[tuple[Row, str]]
"""Rows with the id of the group that is played on each."""
BURST = 1000
"""Rollouts that begin in one turn of the event loop; many thousands would stop it for seconds."""


async def play_groups(
    player: Player,
    source: Source,
    size: int,
    *,
    admission: Admission,
    whole: bool = True,
    wanted: Callable[[int], bool] = lambda running: True,
) -> AsyncGenerator[Group, None]:
    """Yield groups in the order in which they end.

    Begins another group while `admission` admits another rollout and `wanted(groups running)` holds; one that takes
    long holds up no other. When the generator is closed, everything in flight is cancelled and released. Close it with
    `contextlib.aclosing`.
    """
    running: set[asyncio.Task[Group]] = set()
    ended: deque[asyncio.Task[Group]] = deque()
    changed = asyncio.Event()
    exhausted, begun = False, 0
    asked: asyncio.Task[tuple[Row, str] | None] | None = None

    def end(task: asyncio.Task[Group]) -> None:
        ended.append(task)
        changed.set()

    try:
        while True:
            begins = not exhausted and admission.admits(player.open) and wanted(len(running))
            if begins and asked is None:
                # A source may wait for a network; meanwhile groups end and are handed on.
                asked = asyncio.create_task(_following(source))
                asked.add_done_callback(lambda _: changed.set())
                await asyncio.sleep(0)
            answered = begins and asked is not None and asked.done()
            following = asked.result() if answered and asked is not None else None
            if answered:
                asked, exhausted = None, following is None
            if following is not None:
                task = player.start(*following, size, whole=whole, on_change=changed.set)
                task.add_done_callback(end)
                running.add(task)
                begun += size
                if begun >= BURST:
                    begun = 0
                    await asyncio.sleep(0)
            elif not running and not (begins and asked is not None):
                return
            else:
                # Nobody says when a server, the cores or the memory have room again: that is looked at now and then.
                # (`wait_for` can lose a cancellation that comes in the same moment as what it waits for.)
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if exhausted else LOOK):
                        await changed.wait()
            changed.clear()
            while ended:
                task = ended.popleft()
                running.discard(task)
                yield task.result()
    finally:
        unfinished = [*running, *([asked] if asked is not None else [])]
        for one in unfinished:
            one.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)


async def _following(source: Source) -> tuple[Row, str] | None:
    return await anext(source, None)


async def repeated(
    rows: Iterable[Row],
    skip: Callable[[Row, str], bool] = lambda row, group: False,
    aside: Container[str] = frozenset(),
) -> Source:
    """The rows over and over, each pass under new group ids (``<row key>:<pass>``); ends only where there are none.

    `skip` leaves out groups that an earlier run has finished, `aside` rows of which nothing more is played.
    """
    epoch = 0
    while True:
        empty = True
        async for row in _stream(rows):
            if row.key in aside:
                continue
            empty = False
            group = f"{row.key}:{epoch}"
            if not skip(row, group):
                yield row, group
        if empty:
            return
        epoch += 1


async def once(rows: Iterable[Row]) -> Source:
    """Every row once; the group has the row's key."""
    async for row in _stream(rows):
        yield row, row.key


async def _stream(rows: Iterable[Row]) -> AsyncIterator[Row]:
    if not isinstance(rows, Rows) or rows.length is not None:
        for row in rows:
            yield row
        return
    # A generator or a streamed dataset may wait for a network or compute; the loop must not.
    iterator: Iterator[Row] = await asyncio.to_thread(iter, rows)
    while (following := await asyncio.to_thread(_next, iterator)) is not None:
        yield following


def _next(iterator: Iterator[Row]) -> Row | None:
    for row in iterator:
        return row
    return None
