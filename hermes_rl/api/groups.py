"""Define `Groups`: iterate over the groups of a run, run groups ahead, and exclude groups from the iteration."""

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
from hermes_rl.threads import OfThisProcess, end_tasks

ENDED = 4
"""Maximum number of finished groups whose tokens are being created; at this number no group starts."""


class Groups(OfThisProcess, AbstractAsyncContextManager["Groups"]):
    """Groups in order of completion; close it, or leave its `async with`, to stop running groups.

    Cancelling the wait for a group ends the iteration and releases everything in flight.

    Attributes:
        excluded: number of excluded groups by reason: "uniform" or "stale".
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
        self.excluded: Counter[str] = Counter()
        self._endless = endless
        self._repeated_rows: list[Row] = []
        self._fresh: set[str] = set()
        """Groups that ran just now, and were not taken from a record, until the next one is requested."""
        self._handed: str = ""
        self._run = _create_once(make)
        self._weights, self._max_staleness = weights, max_staleness
        self._playing = _all_groups(self._run, make, self._repeated_rows, self._fresh, ahead)
        self._asking: asyncio.Task[Group | None] | None = None
        self._closing = asyncio.Lock()

    async def open(self) -> Self:
        """Check the arguments before anything runs; otherwise this happens with the first group.

        Raises:
            UserError: an argument is invalid.
        """
        await self._run()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Group:
        if self._asking is not None:
            raise UserError(
                "another caller already waits for a group of this iteration; use one iteration for each caller"
            )
        self._asking = asyncio.create_task(self._next())
        try:
            group = await self._asking
        finally:
            self._asking = None
        if group is None:
            raise StopAsyncIteration
        return group

    def play_again(self, group: Group) -> bool:
        """Run the row of the latest group again, after the others, if the group came from the record.

        A stale group would always be returned from the record under its id, so its row runs under another id. A group
        that ran just now is not repeated: the weights have changed meanwhile, and may change again.
        """
        if self._endless or group.id in self._fresh:
            return False  # rows repeat, so this row comes again
        self._repeated_rows.append(group.row)
        return True

    async def close(self) -> None:
        """End the iteration and wait until everything in flight is released; may be called twice, also concurrently."""
        if self._asking is not None:
            await end_tasks([self._asking])
        async with self._closing:  # the caller that waits for a group closes too, once its wait was cancelled
            await self._playing.aclose()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _next(self) -> Group | None:
        async for run, group in self._playing:
            self._fresh.discard(self._handed)
            self._handed = group.id
            reason = await self._hold_reason(run, group)
            if reason is None:
                return group
            if reason == "stale" and self.play_again(group):
                continue
            self.excluded[reason] += 1
        return None

    async def _hold_reason(self, run: Run, group: Group) -> str | None:
        """Return the reason for excluding a group, or None."""
        if group.dropped is not None:
            return None
        if run.excluded(group):
            return "uniform"
        if self._max_staleness is None:
            return None
        now, oldest = await self._weights(), group.provenance.oldest if group.provenance is not None else None
        if now is None or oldest is None:
            raise UserError(
                "max_staleness: the policy does not report the version of its weights. Set `policy.version` before the "
                "first group, give the policy a `version`, or let each answer carry one"
            )
        return "stale" if now - oldest > self._max_staleness else None


def _create_once(make: Callable[[Sequence[Row] | None, int], Awaitable[Run]]) -> Callable[[], Awaitable[Run]]:
    """Return a function that creates the run on its first call; as a closure, it is freed with its iteration."""
    making, runs = asyncio.Lock(), list[Run]()

    async def run() -> Run:
        async with making:
            if not runs:
                runs.append(await make(None, 0))
            return runs[0]

    return run


async def _all_groups(
    first: Callable[[], Awaitable[Run]],
    make: Callable[[Sequence[Row] | None, int], Awaitable[Run]],
    repeated_rows: list[Row],
    fresh: set[str],
    ahead: int,
) -> AsyncGenerator[tuple[Run, Group], None]:
    """Yield the groups of the first run, and then the groups of further runs for the repeated rows."""
    run, repeat_index = await first(), 0
    while True:
        run.on_played.append(lambda rollout: fresh.add(rollout.key.group))
        async with aclosing(_groups_of(run, ahead)) as playing:
            async for group in playing:
                yield run, group
        if not repeated_rows:
            return
        rows, repeat_index = list(repeated_rows), repeat_index + 1
        repeated_rows.clear()
        run = await make(rows, repeat_index)


async def _groups_of(run: Run, ahead: int) -> AsyncGenerator[Group, None]:
    class GroupDemand:
        """Demand for groups until a budget of the spec is used up, and none while too many finished groups wait."""

        @property
        def satisfied(self) -> bool:
            return run.budget.used_up() is not None

        def wants(self, running: int) -> bool:
            return running - ceil(run.runner.open / run.plan.size) < ENDED

    async with aclosing(run.groups(demand=GroupDemand())) as playing:
        if not ahead:
            async for group in playing:
                yield group
            return
        async with aclosing(_prefetch(playing, ahead)) as waiting:
            async for group in waiting:
                yield group


async def _prefetch(playing: AsyncGenerator[Group, None], capacity: int) -> AsyncGenerator[Group, None]:
    """Yield the same groups; up to `capacity` finished ones wait while none is requested."""
    ended: asyncio.Queue[Group | None] = asyncio.Queue()
    room = asyncio.Semaphore(capacity)

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
        await pumping  # other errors are raised here
    finally:
        await end_tasks([pumping])
