"""Playing rollouts and groups of an environment.

A rollout that infrastructure failed is played anew on a fresh machine; when that is in vain its group is dropped.
A rollout always becomes a `Rollout`, never an exception; only cancellation and the user's mistakes travel.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.data.rows import Row
from hermes_rl.errors import Failure
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.memory import Memory, NoMemory
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey
from hermes_rl.servers.base import ChatServer
from hermes_rl.tools.machine import ToolRuntime

REPLAYS = 2
"""How often a rollout that infrastructure failed is played anew."""

Listener = Callable[[Rollout], None]
"""Called with every finished rollout, failed attempts included, before anything else is done with it."""

Encode = Callable[[Rollout], Awaitable[None]]
Prepare = Callable[[Group], Awaitable[None]]


class RolloutRunner:
    """Plays an environment's rollouts, in training or in evaluation.

    Args:
        split: "train" or "eval", handed to the environment and the servers.
        concurrency: rollouts in flight; None: unbounded.
        listener: hears of every finished rollout.
        policy: another policy than the environment's own.
        memory: rollouts that are there already.
        encode: gives a graded rollout its tokens before the listener hears of it.
        prepare: what an ended group goes through before it is handed on, beside all that is played meanwhile.
        spend: hears of every rollout that was played, before another one begins in its place.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        split: str = "train",
        concurrency: int | None = None,
        listener: Listener | None = None,
        policy: ChatServer | None = None,
        memory: Memory | None = None,
        encode: Encode | None = None,
        prepare: Prepare | None = None,
        spend: Listener | None = None,
        replays: int = REPLAYS,
    ) -> None:
        self.environment = environment
        self.options = environment.options(split)
        self.slots = nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        self.listener = listener or (lambda rollout: None)
        self.policy = policy if policy is not None else environment.policy
        self.memory = memory or NoMemory()
        self.encode = encode
        self.prepare = prepare
        self.spend = spend or (lambda rollout: None)
        self.replays = replays
        self.open = 0
        """Members of started groups that have not ended."""

    def start(
        self,
        row: Row,
        group: str,
        size: int,
        *,
        whole: bool = True,
        on_change: Callable[[], None] | None = None,
    ) -> asyncio.Task[Group]:
        """Begin a group; every member that ends calls `on_change`.

        With `whole` the first member that fails for good ends the others and the group is dropped; without, every
        member is played to its end and the failed ones stay without a score.
        """
        members: list[asyncio.Task[Rollout]] = []
        for index in range(size):
            place = _Place(self, on_change)
            member = asyncio.create_task(self.member(RolloutKey(row, group, index, size), place.leave))
            member.add_done_callback(place.leave)
            members.append(member)
        finish = asyncio.create_task(self._finish(Group(group, row, []), members, whole))
        for member in members:
            # A task that is cancelled before its first step runs no `finally`.
            finish.add_done_callback(partial(_cancel_one, member))
        return finish

    async def _finish(self, group: Group, members: list[asyncio.Task[Rollout]], whole: bool) -> Group:
        try:
            for ended in asyncio.as_completed(members):
                rollout = await ended
                if rollout.error is not None:
                    group.dropped = group.dropped or rollout.ending
                    group.detail = group.detail or rollout.error
                    if whole:
                        break
        finally:
            await _cancel(members)
        group.rollouts = [task.result() for task in members if not task.cancelled()]
        await self._group_level(group)
        if self.prepare is not None:
            await self.prepare(group)
        return group

    async def member(self, key: RolloutKey, played: Callable[[], None] = lambda: None) -> Rollout:
        """Play one key, anew where infrastructure failed, until it is graded or given up.

        `played` hears when nothing is left but to write it down: then another rollout may begin.
        """
        known = await self.memory.recall(key)
        if known is not None:
            give_credit(self.environment, known)
            return known
        first = self.memory.attempts(key)
        for attempt in range(first, first + self.replays + 1):
            async with self.slots:
                rollout = await self.play(replace(key, attempt=attempt))
            self.spend(rollout)
            last = not rollout.ending.rule.retried or attempt == first + self.replays
            if last:
                played()
                # The next one begins first, so that its model works while this one is written down.
                await asyncio.sleep(0)
            await self._keep(rollout)
            if last:
                break
        return rollout

    async def _keep(self, rollout: Rollout) -> None:
        """On disk before it counts; one that is scored with its group is held until then."""
        if rollout.error is None and self.encode is not None:
            await self.encode(rollout)
        if rollout.error is None and self.environment.has_group_rewards:
            self.memory.hold(rollout)
        else:
            self.listener(rollout)

    async def play(self, key: RolloutKey) -> Rollout:
        """Play one rollout to its ending and grade it."""
        rollout = Rollout(key, key.seed(self.environment.seed))
        started = time.perf_counter()
        try:
            async with self.environment.machine(key) as runtime:
                await self._converse(rollout, runtime)
                await self._grade(rollout, runtime)
        except Failure as failure:
            rollout.fail(failure)
        if rollout.result is not None:
            rollout.timings |= rollout.result.timings.record()
        rollout.timings["total"] = time.perf_counter() - started
        return rollout

    async def _converse(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        options = replace(self.options, seed=rollout.seed if self.options.seeded else None)
        loop = HermesAgentLoop(
            self.policy,
            runtime.toolkit.schemas,
            task_id=runtime.task_id,
            options=options,
            user=await self.environment.user(rollout.key, runtime),
        )
        rollout.result = await loop.run(self.environment.prompt(rollout.key.row))
        rollout.ending = rollout.result.ending

    async def _grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        treatment = self.environment.treatment(rollout.ending)
        if treatment == "drop":
            rollout.error = f"the spec drops rollouts that end with {rollout.ending}"
            return
        started = time.perf_counter()
        await runtime.settle()
        await self.environment.grade(rollout, runtime)
        rollout.timings |= {"sandbox": runtime.start_seconds, "rewards": time.perf_counter() - started}
        rollout.masked = treatment == "mask"
        if not self.environment.has_group_rewards:
            self._score(rollout)

    def _score(self, rollout: Rollout) -> None:
        treatment = self.environment.treatment(rollout.ending)
        fixed = isinstance(treatment, int | float)
        rollout.score = float(treatment) if fixed else self.environment.score(rollout)
        give_credit(self.environment, rollout)

    async def _group_level(self, group: Group) -> None:
        """The rewards that compare the members; only then are their scores known."""
        unheard = [rollout for rollout in group.rollouts if rollout.error is None and rollout.score is None]
        if not self.environment.has_group_rewards or not unheard:
            return
        if group.dropped is not None:
            for rollout in unheard:
                rollout.error = f"not compared with its group, of which another member failed: {group.detail}"
        else:
            await self._compare(group)
        for rollout in unheard:
            self.listener(rollout)

    async def _compare(self, group: Group) -> None:
        try:
            await self.environment.grade_group(group.rollouts)
            for rollout in group.rollouts:
                self._score(rollout)
        except Failure as failure:
            for rollout in group.rollouts:
                rollout.fail(failure)
            group.dropped, group.detail = failure.ending, failure.detail


def give_credit(environment: Environment, rollout: Rollout) -> None:
    """Set the credit per turn of a scored rollout. It follows from the rewards, so it has no place in a file."""
    fixed = isinstance(environment.treatment(rollout.ending), int | float)
    rollout.credit = None if fixed or rollout.score is None else environment.credit(rollout)


class _Place:
    """A rollout's place among those that are open; it is left once, also by a task that never began."""

    def __init__(self, player: RolloutRunner, on_change: Callable[[], None] | None) -> None:
        self._player: RolloutRunner | None = player
        self._on_change = on_change
        player.open += 1

    def leave(self, *_: object) -> None:
        player, self._player = self._player, None
        if player is not None:
            player.open -= 1
            if self._on_change is not None:
                self._on_change()


def _cancel_one(member: asyncio.Task[Rollout], _: object) -> None:
    member.cancel()


async def _cancel(members: list[asyncio.Task[Rollout]]) -> None:
    """End what is still running and wait until its machines are released."""
    for task in members:
        task.cancel()
    await asyncio.gather(*members, return_exceptions=True)
