"""`Groups`: iterating over the groups of a run, how far ahead is played, and what is held back from the one who
iterates."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from math import ceil
from typing import Self

from hermes_rl.data.rows import Row
from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.run import Run
from hermes_rl.threads import end_tasks

ENDED = 4
"""Groups whose members have all ended and whose tokens are being made: with so many of them no other group begins."""


class Groups(AbstractAsyncContextManager["Groups"]):
    """Groups as they end; close it, or leave its `async with`, to end what is in flight.

    Cancelling the wait for a group ends the iteration and releases all that is in flight.

    Attributes:
        left_out: how many groups were not handed out, by the reason: "uniform" or "stale".
    """

    def __init__(
        self,
        make: Callable[[Sequence[Row] | None, int], Awaitable[Run]],
        *,
        ahead: int,
        weights: Callable[[], Awaitable[int | None]],
        max_staleness: int | None,
        endless: bool = False,
    ) -> None:
        self.left_out: Counter[str] = Counter()
        self._endless = endless
        self._again: list[Row] = []
        self._fresh: set[str] = set()
        """Groups that were played just now, and not taken from a record, until the next one is asked for."""
        self._handed: str = ""
        self._run = _once(make)
        self._weights, self._max_staleness = weights, max_staleness
        self._playing = _played(self._run, make, self._again, self._fresh, ahead)
        self._asking: asyncio.Task[Group | None] | None = None
        self._closing = asyncio.Lock()

    async def open(self) -> Self:
        """Find out what is wrong with what was asked for before anything is played; the first group does it otherwise.

        Raises:
            UserError: what is wrong.
        """
        await self._run()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        if self._asking is not None:
            raise UserError("somebody else waits for a group of this iteration already; use one for each")
        self._asking = asyncio.create_task(self._next())
        try:
            group = await self._asking
        finally:
            self._asking = None
        if group is None:
            raise StopAsyncIteration
        return group

    def play_again(self, group: Group) -> bool:
        """Have the row of the latest group played anew, after the others, where the group came from the record.

        A group that has grown too old is answered from the record under its name for ever, so that its row is played
        under another name. One that was played just now is not: the weights have moved meanwhile, and may again.
        """
        if self._endless or group.id in self._fresh:
            return False  # where rows come over and over, that row comes again
        self._again.append(group.row)
        return True

    async def close(self) -> None:
        """End the iteration and wait until everything in flight is released; may be called twice, also at once."""
        if self._asking is not None:
            await end_tasks([self._asking])
        async with self._closing:  # whoever waits for a group closes too, once that wait was cancelled
            await self._playing.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _next(self) -> Group | None:
        async for run, group in self._playing:
            self._fresh.discard(self._handed)
            self._handed = group.id
            reason = await self._held_back(run, group)
            if reason is None:
                return group
            if reason == "stale" and self.play_again(group):
                continue
            self.left_out[reason] += 1
        return None

    async def _held_back(self, run: Run, group: Group) -> str | None:
        """Why a group is not handed out now."""
        if group.dropped is not None:
            return None
        if run.left_out(group):
            return "uniform"
        if self._max_staleness is None:
            return None
        now, oldest = await self._weights(), group.certificate.oldest if group.certificate is not None else None
        if now is None or oldest is None:
            raise UserError(
                "max_staleness: the policy does not tell the version of its weights. Set `policy.version` before the "
                "first group, give the policy a `version`, or let each answer carry one"
            )
        return "stale" if now - oldest > self._max_staleness else None


def _once(make: Callable[[Sequence[Row] | None, int], Awaitable[Run]]) -> Callable[[], Awaitable[Run]]:
    """Return what makes the run with its first call; a closure, so that an iteration that is left is free at once."""
    making, runs = asyncio.Lock(), list[Run]()

    async def run() -> Run:
        async with making:
            if not runs:
                runs.append(await make(None, 0))
            return runs[0]

    return run


async def _played(
    first: Callable[[], Awaitable[Run]],
    make: Callable[[Sequence[Row] | None, int], Awaitable[Run]],
    again: list[Row],
    fresh: set[str],
    ahead: int,
) -> AsyncGenerator[tuple[Run, Group], None]:
    """Yield the groups of the first run, and then those of further runs on the rows that are to be played again."""
    run, number = await first(), 0
    while True:
        run.on_played.append(lambda rollout: fresh.add(rollout.key.group))
        async with aclosing(_groups_of(run, ahead)) as playing:
            async for group in playing:
                yield run, group
        if not again:
            return
        rows, number = list(again), number + 1
        again.clear()
        run = await make(rows, number)


async def _groups_of(run: Run, ahead: int) -> AsyncGenerator[Group, None]:
    class Wanted:
        """Groups until a budget of the spec is used up, and none while too many have ended that nobody has."""

        @property
        def satisfied(self) -> bool:
            return run.budget.used_up() is not None

        def wants(self, running: int) -> bool:
            return running - ceil(run.runner.open / run.plan.size) < ENDED

    async with aclosing(run.groups(demand=Wanted())) as playing:
        if not ahead:
            async for group in playing:
                yield group
            return
        async with aclosing(_ahead(playing, ahead)) as waiting:
            async for group in waiting:
                yield group


async def _ahead(playing: AsyncGenerator[Group, None], most: int) -> AsyncGenerator[Group, None]:
    """Yield the same groups; up to `most` that have ended wait while nobody asks."""
    ended: asyncio.Queue[Group | None] = asyncio.Queue()
    room = asyncio.Semaphore(most)

    async def pump() -> None:
        try:
            while await room.acquire() and (group := await anext(playing, None)) is not None:
                ended.put_nowait(group)
        finally:
            ended.put_nowait(None)

    pumping = asyncio.create_task(pump())
    try:
        while (group := await ended.get()) is not None:
            room.release()
            yield group
        await pumping  # what ended it otherwise is raised here
    finally:
        await end_tasks([pumping])
