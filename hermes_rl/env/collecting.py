"""Collecting rollouts and groups for Atropos' hooks, and for whoever asks without a trainer: whole groups or none."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.env.hooks import ConductedEnv, call, mistake
from hermes_rl.errors import HermesRLError
from hermes_rl.plugins import place_of
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Encoder, Group, Rollout, RolloutKey, RolloutState
from hermes_rl.rollouts.runner import REPLAYS, Recorded, RolloutRunner, Unrecorded
from hermes_rl.runs.groups import FILLER_OVERRIDE, OF_TEACHER, group_lines
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.run import Plan, Run, RunBudget
from hermes_rl.runs.training import TrainingMetrics
from hermes_rl.servers.base import ChatServer
from hermes_rl.threads import end_tasks
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB
from hermes_rl.trainers.base import GroupRefused
from hermes_rl.trainers.checks import Checks, completed

# --------------------------- Putting the rollouts of a group together for Atropos: whole, aligned, or not at all
# atroposlib's own `collect_trajectories` drops the logprobs and misaligns optional lists; this keeps every list either
# as long as the group or None.

FURTHER = "further"
"""Key of an item under which its rollout's other sequences lie, as items."""
_OPTIONAL = ("advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides", "images",
             "distill_token_ids", "distill_logprobs")  # fmt: skip


def assemble(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """ScoredDataItems of `collect_trajectory` as one ScoredDataGroup.

    An optional field is kept where every item has it.
    """
    group: dict[str, Any] = {
        "tokens": [item["tokens"] for item in items],
        "masks": [item["masks"] for item in items],
        "scores": [float(item["scores"]) for item in items],
    }
    for name in _OPTIONAL:
        values = [item.get(name) for item in items]
        group[name] = values if all(value is not None for value in values) else None
    overrides = [item["group_overrides"] for item in items if item.get("group_overrides")]
    group["group_overrides"] = {key: value for part in overrides for key, value in part.items()}
    if any("layer" in item for item in items):
        group["layer"] = max(item.get("layer", 0) for item in items)
    group["generation_params"] = next((i["generation_params"] for i in items if i.get("generation_params")), None)
    return completed(group)


def layered(items: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the items of each layer, one for each member; a member without a further sequence gets a filler."""
    deepest = max(len(item.get(FURTHER) or ()) for item in items)
    further = [[_further(item, number) for item in items] for number in range(deepest)]
    return [list(items), *further]


def _further(item: dict[str, Any], number: int) -> dict[str, Any]:
    names = item.get(FURTHER) or ()
    if number < len(names):
        return {"overrides": {}, **names[number], "layer": number + 1}
    filler = {"tokens": item["tokens"][:1], "masks": [MASKED], "inference_logprobs": [MASKED_LOGPROB]}
    filler |= {name: [value] for name, value in OF_TEACHER.items() if item.get(name) is not None}
    return {**filler, "scores": item["scores"], "overrides": dict(FILLER_OVERRIDE), "layer": number + 1}


def checked(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the item; raises `ValueError` where it lacks tokens, masks or a score, or its score is not finite, which
    makes a whole batch fail."""
    missing = [name for name in ("tokens", "masks", "scores") if item.get(name) is None]
    if missing:
        raise ValueError(f"collect_trajectory returned an item without {missing[0]!r}")
    if not math.isfinite(float(item["scores"])):
        raise ValueError(f"collect_trajectory returned the score {item['scores']}, which is not finite")
    return dict(item)


# An environment's own code as the conductor meets it: its items as rows, its collected groups, its changed lines

logger = logging.getLogger(__name__)

PAUSE = 0.2
"""Seconds until `get_next_item` is asked again after it gave None, where that pauses."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


GroupTools = tuple[list[dict[str, Any]], set[str]]
"""Schemas of the tools of a group, and the names of those that may be called."""

GROUP_ID: ContextVar[str | None] = ContextVar("GROUP_ID", default=None)
"""The id of the group that the environment's own code is collecting; None outside of a run."""
_group_tools: ContextVar[GroupTools | None] = ContextVar("group_tools", default=None)


@dataclass(frozen=True)
class ItemRow(Row):
    """A row that stands for an item, which is its `columns`."""


@contextmanager
def collecting(group: str) -> Iterator[None]:
    """Say that the environment's own code collects this group, within the block."""
    before = GROUP_ID.set(group)
    try:
        yield
    finally:
        GROUP_ID.reset(before)


def row_of(item: Any, index: int = 0) -> Row:
    """Return an item of `get_next_item`, which may be anything, as a row; its key is a hash of what it prints as."""
    if isinstance(item, Row):
        return item
    printed = _ADDRESS.sub("", repr(item))  # an address in memory is another one in the next process
    digest = hashlib.sha256(printed.encode("utf-8", "surrogatepass")).hexdigest()
    return ItemRow(key=digest[:16], columns=item, index=index, digest=digest)


async def items_of(env: ConductedEnv, *, pauses: bool) -> AsyncIterator[Row]:
    """Yield the items of an environment, as it hands them out; those that its code gave back come first.

    Args:
        env: the environment.
        pauses: None from `get_next_item` means that there is nothing now; otherwise that there is nothing more.
    """
    number = 0
    while True:
        item = env.backlog.pop(0) if env.backlog else await call(env.get_next_item)
        if item is None and not pauses:
            return
        if item is None:
            await asyncio.sleep(PAUSE)
            continue
        yield row_of(item, number)
        number += 1


def run_of(
    env: ConductedEnv, *, pauses: bool, budget: RunBudget, progress: Progress, drop_uniform: bool = False
) -> Run:
    """Return the run that plays the items of an environment, once each; `pauses` as for `items_of`."""
    plan = Plan(
        size=int(env.config.group_size),
        repeat=False,
        drop_uniform=drop_uniform,
        concurrency=env._rollouts_in_flight,
        generation_params=env._generation_params(),
    )
    items = items_of(env, pauses=pauses)
    return Run(env._environment(), items, plan, encoder=env._encoder, budget=budget, progress=progress)


class WithOwnCode:
    """An environment whose `postprocess_histories` has the last word on the lines of a group."""

    def __init__(self, env: ConductedEnv, environment: Environment) -> None:
        self._env, self._environment = env, environment
        self._checks = Checks(group_size=int(env.config.group_size), tokens=False)
        self._proven: set[str] = set()
        """Methods that have made a group that can be used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def lines(self, group: Group, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the lines after `postprocess_histories`; none where it gives nothing, or what cannot be used."""
        argument: Any = lines if len(lines) > 1 else lines[0]
        processed = await call(self._env.postprocess_histories, argument)
        named = {"group": group.id, "row_key": group.row.key}
        return [{**line, **named} for line in self._usable(group, self._env.postprocess_histories, processed)]

    def _usable(self, group: Group, method: Callable[..., Any], returned: Any) -> list[dict[str, Any]]:
        """Return what a method has made of a group; where it cannot be used, none, and the group is dropped, or
        `UserError` where the method has never made one that can."""
        lines = [line for line in (returned if isinstance(returned, list) else [returned]) if line]
        try:
            usable = self._checks.usable(lines, None)
        except GroupRefused as refused:
            problem = mistake(method, f"gave a group that cannot be used: {refused.detail}")
            if method.__name__ not in self._proven and refused.cause != "not_finite":
                raise problem from refused
            group.dropped, group.detail = Ending.CANCELLED, str(problem)
            return []
        if usable:
            self._proven.add(method.__name__)
        return usable


class CollectsByHand(WithOwnCode):
    """An environment that overrides `collect_trajectory` or `collect_trajectories`."""

    async def play_group(self, row: Row, group: str, epoch: int, size: int) -> Group:
        """Return the group that its code collected, as dropped where that raised or gave nothing."""
        GROUP_ID.set(group)
        played = Group(group, row, [], epoch)
        env: Any = self._env
        by_hand = type(env).collect_trajectories is Collecting.collect_trajectories
        method = env.collect_trajectory if by_hand else env.collect_trajectories
        try:
            item = row.columns if isinstance(row, ItemRow) else row
            collected, backlog = await env.collect_trajectories(item)
        except HermesRLError:
            raise
        except Exception as error:
            logger.exception("a group of %s failed", row.key)
            played.dropped, played.detail = Ending.CANCELLED, f"collect_trajectories raised {place_of(error, method)}"
            return played
        env.backlog.extend(backlog or ())
        played.parts = self._usable(played, method, collected)
        if not played.parts and played.dropped is None:
            played.dropped = Ending.CANCELLED
            played.detail = "collect_trajectories gave no group; the log says why"
        return played


# -------------------------------------------------------------------------------- collecting


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
    _resolve_tools_for_group: Callable[[], GroupTools]
    _training_counts: TrainingMetrics

    async def groups(
        self, rows: Sequence[Any] | None = None, policy: ChatServer | None = None
    ) -> AsyncGenerator[Group, None]:
        """Yield groups of rollouts with their tokens, without any trainer.

        Args:
            rows: items to play, once each; None: those of `get_next_item` until it returns None.
            policy: another policy than the environment's own.
        """
        env: Any = self
        items = items_of(env, pauses=False) if rows is None else [row_of(item, n) for n, item in enumerate(rows)]
        plan = Plan(size=self.config.group_size, repeat=False, concurrency=self._rollouts_in_flight)
        run = Run(self._core, items, plan, encoder=self._encoder, policy=policy)
        async with aclosing(run.groups()) as playing:
            async for group in playing:
                yield group

    @property
    def _rollouts_in_flight(self) -> int:
        """Rollouts that `groups` and `process` play at a time."""
        return max(1, int(self.max_num_workers)) * int(self.config.group_size)

    def _named(self, item: Any) -> tuple[Row, str]:
        """Return an item as a row, with the id of its group: that of the run that asks for it, else one of its own."""
        number = next(self._group_numbers)
        row = row_of(item, number)
        return row, GROUP_ID.get() or f"{row.key}:{number}"

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """Play and grade one rollout; (None, []) where infrastructure failed it for good."""
        row, group = self._named(item)
        runner = RolloutRunner(self._core, store=_Tracked(self), encoder=self._encoder)
        rollout = await runner.member(RolloutKey(row, group, 0, 1))
        if rollout.error is not None:
            logger.error("rollout %s was not graded (%s): %s", rollout.id, rollout.ending, rollout.error)
            return None, []
        whole = Group(group, row, [rollout])
        await self._encoder.encode_group(whole)
        first, *further = self._layers_of(whole)
        return {**_item_of(first), FURTHER: [_item_of(layer) for layer in further]}, []

    @property
    def _current_group_tools(self) -> GroupTools | None:
        """The tools of the group that is played; of several at a time each has its own."""
        return _group_tools.get()

    @_current_group_tools.setter
    def _current_group_tools(self, tools: GroupTools | None) -> None:
        _group_tools.set(tools)

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """Play a group: whole, or None. An overridden `collect_trajectory` is called once per member."""
        before = _group_tools.set(self._resolve_tools_for_group())
        try:
            if type(self).collect_trajectory is not Collecting.collect_trajectory:
                return await self._collect_by_hand(item)
            row, name = self._named(item)
            runner = RolloutRunner(self._core, store=_Tracked(self), encoder=self._encoder)
            group = await runner.start(row, name, self.config.group_size)
            if group.dropped is not None:
                self._training_counts.dropped[str(group.dropped)] += 1
                logger.warning("group %s dropped (%s): %s", group.id, group.dropped, group.detail)
                return None, []
            await self._encoder.encode_group(group)
            layers = await asyncio.to_thread(self._layers_of, group)
            return layers if len(layers) > 1 else layers[0], []
        finally:
            _group_tools.reset(before)

    async def _collect_by_hand(self, item: Any) -> tuple[Any, list[Any]]:
        calls = [asyncio.create_task(self._one_by_hand(item)) for _ in range(self.config.group_size)]
        try:
            results = await asyncio.gather(*calls)
        finally:
            await end_tasks(calls)
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
        """Return the group as Atropos' ScoredDataGroups: one where each rollout has one sequence."""
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
                self._env._training_counts.add_rollout(rollout)
        self._store.record(*rollouts)


def _item_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group of one as a ScoredDataItem."""
    lists = {"tokens", "masks", "scores", *_OPTIONAL}
    return {key: (next(iter(value or ()), None) if key in lists else value) for key, value in group.items()}
