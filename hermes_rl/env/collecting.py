"""Collecting rollouts and groups for Atropos' hooks, and for whoever asks without a trainer: whole groups or none."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.env.assemble import FURTHER, assemble, checked, layered
from hermes_rl.env.items import group_id, items_of, row_of
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Encoder, Group, Rollout, RolloutKey, RolloutState
from hermes_rl.rollouts.runner import REPLAYS, Recorded, RolloutRunner, Unrecorded
from hermes_rl.runs.groups import OF_TEACHER, group_lines
from hermes_rl.runs.run import Plan, Run
from hermes_rl.servers.base import ChatServer

logger = logging.getLogger(__name__)


class Collecting:
    """Mixin of `HermesAgentBaseEnv`: replaces how BaseEnv collects trajectories.

    atroposlib's own drops the logprobs, misaligns optional lists, and lets one failed rollout end the group.
    """

    config: Any
    _core: Environment
    _encoder: Encoder
    max_num_workers: int
    _rollout_store: Recorded = Unrecorded()
    """The record of rollouts, where the environment keeps one."""
    _group_numbers: itertools.count[int]
    get_next_item: Callable[[], Awaitable[Any]]
    _track_rollout: Callable[[Rollout], None]
    _track_dropped: Callable[[Group], None]

    async def groups(
        self, rows: Sequence[Any] | None = None, policy: ChatServer | None = None
    ) -> AsyncGenerator[Group, None]:
        """Yield groups of rollouts with their tokens, without any trainer.

        Args:
            rows: items to play, once each; None: those of `get_next_item` until it returns None.
            policy: another policy than the environment's own.
        """
        plan = Plan(size=self.config.group_size, repeat=False, concurrency=self._rollouts_in_flight)
        run = Run(self._core, self._items(rows), plan, encoder=self._encoder, policy=policy)
        async with aclosing(run.groups()) as playing:
            async for group in playing:
                yield group

    @property
    def _rollouts_in_flight(self) -> int:
        """Rollouts that `groups` and `process` play at a time."""
        return max(1, int(self.max_num_workers)) * int(self.config.group_size)

    def _items(self, rows: Sequence[Any] | None) -> list[Row] | AsyncIterator[Row]:
        if rows is not None:
            return [row_of(item, number) for number, item in enumerate(rows)]
        env: Any = self
        return items_of(env, pauses=False)

    def _named(self, item: Any) -> tuple[Row, str]:
        """An item as a row, with the id of its group: the one of the run that asks for it, else one of its own."""
        number = next(self._group_numbers)
        row = row_of(item, number)
        return row, group_id() or f"{row.key}:{number}"

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """Play and grade one rollout; (None, []) where infrastructure failed it for good."""
        row, group = self._named(item)
        runner = RolloutRunner(self._core, store=_Tracked(self), encode=self._encoder.encode)
        rollout = await runner.member(RolloutKey(row, group, 0, 1))
        if rollout.error is not None:
            logger.error("rollout %s was not graded (%s): %s", rollout.id, rollout.ending, rollout.error)
            return None, []
        whole = Group(group, row, [rollout])
        await self._encoder.encode_group(whole)
        first, *further = self._layers_of(whole)
        return {**_item_of(first), FURTHER: [_item_of(layer) for layer in further]}, []

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """Play a group: whole, or None. An overridden `collect_trajectory` is called once per member."""
        if type(self).collect_trajectory is not Collecting.collect_trajectory:
            return await self._collect_by_hand(item)
        row, group_id = self._named(item)
        runner = RolloutRunner(self._core, store=_Tracked(self), encode=self._encoder.encode)
        group = await runner.start(row, group_id, self.config.group_size)
        if group.dropped is not None:
            self._track_dropped(group)
            return None, []
        await self._encoder.encode_group(group)
        layers = await asyncio.to_thread(self._layers_of, group)
        return layers if len(layers) > 1 else layers[0], []

    async def _collect_by_hand(self, item: Any) -> tuple[Any, list[Any]]:
        calls = [asyncio.create_task(self._one_by_hand(item)) for _ in range(self.config.group_size)]
        try:
            results = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        backlog = [further for _, more in results for further in more]
        items = [scored for scored, _ in results if scored is not None]
        if len(items) < len(results):
            return None, backlog
        layers = [assemble(layer) for layer in layered(items)]
        return layers if len(layers) > 1 else layers[0], backlog

    async def _one_by_hand(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """One overridden `collect_trajectory`, repeated where it raises or gives nothing."""
        for attempt in range(REPLAYS + 1):
            try:
                scored, backlog = await self.collect_trajectory(item)
                if scored is not None:
                    return checked(scored), list(backlog)
            except Exception:  # a user's code may raise anything, and costs its own group at most; the log says what
                logger.exception("collect_trajectory failed (attempt %d of %d)", attempt + 1, REPLAYS + 1)
        return None, []

    def _layers_of(self, group: Group) -> list[dict[str, Any]]:
        """The group as Atropos' ScoredDataGroups: one where each rollout has one sequence."""
        return group_lines(group, self._generation_params())

    def _generation_params(self) -> dict[str, Any]:
        """How the policy samples in training, for the lines of groups."""
        options = self._core.options("train")
        params = {"temperature": options.temperature, "top_p": options.top_p}
        return {name: value for name, value in params.items() if value is not None}


class _Tracked:
    """The environment's record of rollouts, which counts those that have ended for its metrics."""

    def __init__(self, env: Collecting) -> None:
        self._env, self._store = env, env._rollout_store

    async def recall(self, key: RolloutKey) -> Rollout | None:
        return await self._store.recall(key)

    def attempts(self, key: RolloutKey) -> int:
        return self._store.attempts(key)

    def record(self, *rollouts: Rollout) -> None:
        for rollout in rollouts:
            if rollout.state is not RolloutState.WAITING:
                self._env._track_rollout(rollout)
        self._store.record(*rollouts)


def _item_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group of one as a ScoredDataItem."""
    lists = {"tokens", "masks", "scores", "messages", "inference_logprobs", *OF_TEACHER}
    return {key: (value[0] if key in lists and value else value) for key, value in group.items()}
