"""Collect rollouts and complete groups for Atropos' hooks, and for callers without a trainer.

This module also adapts an environment's own code to a run: its items become rows, its collected groups and its changed
records become groups.
"""

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
from hermes_rl.env.hooks import ConductedEnv, author_error, call
from hermes_rl.errors import HermesRLError
from hermes_rl.plugins import place_of
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Encoder, Group, Rollout, RolloutKey, RolloutState
from hermes_rl.rollouts.runner import RETRIES, NullRolloutLog, RolloutLog, RolloutRunner
from hermes_rl.runs.deliveries import content_of
from hermes_rl.runs.groups import FILLER_OVERRIDE, OF_TEACHER, group_lines, to_json
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.run import Plan, Run, RunBudget
from hermes_rl.runs.training import TrainingMetrics
from hermes_rl.servers.base import ChatServer
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import end_tasks, run_exclusively
from hermes_rl.tokens.transcript import MASKED, MASKED_LOGPROB
from hermes_rl.trainers.base import GroupRefused
from hermes_rl.trainers.checks import Checks, completed

# --------------------------- Assembling the rollouts of a group for Atropos
# atroposlib's own `collect_trajectories` drops the logprobs and misaligns optional lists; here every list is as long as
# the group, or None.

FURTHER = "further"
"""Key of an item that contains the other sequences of its rollout, as items."""
_OPTIONAL = ("advantages", "ref_logprobs", "messages", "inference_logprobs", "overrides", "images",
             "distill_token_ids", "distill_logprobs")  # fmt: skip


def assemble(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return ScoredDataItems of `collect_trajectory` as one ScoredDataGroup.

    An optional field is included only if every item has it.
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


def stack_sequences(items: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the items of each layer: layer k has the k-th sequence of each member, or a filler if it has fewer."""
    deepest = max(len(item.get(FURTHER) or ()) for item in items)
    extra_layers = [[_layer_item(item, index) for item in items] for index in range(deepest)]
    return [list(items), *extra_layers]


def _layer_item(item: dict[str, Any], index: int) -> dict[str, Any]:
    names = item.get(FURTHER) or ()
    if index < len(names):
        return {"overrides": {}, **names[index], "layer": index + 1}
    filler = {"tokens": item["tokens"][:1], "masks": [MASKED], "inference_logprobs": [MASKED_LOGPROB]}
    filler |= {name: [value] for name, value in OF_TEACHER.items() if item.get(name) is not None}
    return {**filler, "scores": item["scores"], "overrides": dict(FILLER_OVERRIDE), "layer": index + 1}


def checked(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an item of `collect_trajectory`.

    Raises:
        ValueError: the item lacks tokens, masks or a score, or its score is not finite, which would make a trainer's
            batch fail.
    """
    missing = [name for name in ("tokens", "masks", "scores") if item.get(name) is None]
    if missing:
        raise ValueError(f"collect_trajectory returned an item without {missing[0]!r}")
    if not math.isfinite(float(item["scores"])):
        raise ValueError(f"collect_trajectory returned the score {item['scores']}, which is not finite")
    return dict(item)


# Adapting an environment's own code to a run: its items, its collected groups, its changed records

logger = logging.getLogger(__name__)

PAUSE = 0.2
"""Seconds until `get_next_item` is called again after it returned None, in modes in which None is a pause."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


GroupTools = tuple[list[dict[str, Any]], set[str]]
"""Tool schemas of a group, and the names of the tools that may be called."""

GROUP_ID: ContextVar[str | None] = ContextVar("GROUP_ID", default=None)
"""Id of the group that the environment's own code is collecting; None outside a run."""
_group_tools: ContextVar[GroupTools | None] = ContextVar("group_tools", default=None)


@dataclass(frozen=True)
class ItemRow(Row):
    """Row that wraps an item of `get_next_item` in `columns`."""


@contextmanager
def collecting(group: str) -> Iterator[None]:
    """Set `GROUP_ID` to this group within the block, in which the environment's own code runs."""
    before = GROUP_ID.set(group)
    try:
        yield
    finally:
        GROUP_ID.reset(before)


def row_of(item: Any, index: int = 0) -> Row:
    """Return an item of `get_next_item`, which may be any object, as a row whose key is a hash of the item's `repr`."""
    if isinstance(item, Row):
        return item
    printed = _ADDRESS.sub("", repr(item))  # memory addresses differ between processes
    digest = hashlib.sha256(printed.encode("utf-8", "surrogatepass")).hexdigest()
    return ItemRow(key=digest[:16], columns=item, index=index, digest=digest)


async def items_of(env: ConductedEnv, *, pauses: bool) -> AsyncIterator[Row]:
    """Yield the items of an environment as rows; items that its code returned to the backlog come first.

    Args:
        env: the environment.
        pauses: if True, None from `get_next_item` is a pause; if False, it ends the items.
    """
    index = 0
    while True:
        item = env.backlog.pop(0) if env.backlog else await call(env.get_next_item)
        if item is None and not pauses:
            return
        if item is None:
            await asyncio.sleep(PAUSE)
            continue
        yield row_of(item, index)
        index += 1


def run_of(
    env: ConductedEnv, *, pauses: bool, budget: RunBudget, progress: Progress, drop_uniform: bool = False
) -> Run:
    """Return a run that processes each item of an environment once; `pauses` is as for `items_of`."""
    plan = Plan(
        size=int(env.config.group_size),
        repeat=False,
        drop_uniform=drop_uniform,
        concurrency=env._rollouts_in_flight,
        generation_params=env._generation_params(),
    )
    items = items_of(env, pauses=pauses)
    return Run(env._environment(), items, plan, encoder=env._encoder, budget=budget, progress=progress)


class CustomPostprocessing:
    """Environment whose own `postprocess_histories` processes the records of each group last."""

    def __init__(self, env: ConductedEnv, environment: Environment) -> None:
        self._env, self._environment = env, environment
        self._checks = Checks(group_size=int(env.config.group_size), tokens=False)
        self._proven: set[str] = set()
        """Names of the methods that have returned a usable group."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def lines(self, group: Group, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the records after `postprocess_histories`; empty if it returns nothing or an unusable group."""
        argument: Any = lines if len(lines) > 1 else lines[0]
        processed = await call(self._env.postprocess_histories, argument)
        identity = {"group": group.id, "row_key": group.row.key}
        return [{**line, **identity} for line in await self._usable(group, self._env.postprocess_histories, processed)]

    async def _usable(self, group: Group, method: Callable[..., Any], returned: Any) -> list[dict[str, Any]]:
        """Return the records that a method returned for a group, or drop the group if they are unusable.

        Raises:
            UserError: the records are unusable and the method has never returned usable ones; a score that is not
                finite only drops the group.
        """
        lines = [line for line in (returned if isinstance(returned, list) else [returned]) if line]
        try:
            usable = self._checks.usable(lines, None)
            await run_exclusively(_require_plain, usable)
        except GroupRefused as refused:
            problem = author_error(method, f"gave a group that cannot be used: {refused.detail}")
            if method.__name__ not in self._proven and refused.cause != "not_finite":
                raise problem from refused
            group.dropped, group.detail = StopReason.CANCELLED, str(problem)
            return []
        if usable:
            self._proven.add(method.__name__)
        return usable


def _require_plain(lines: Sequence[dict[str, Any]]) -> None:
    """Raise GroupRefused for values that cannot be sent: objects that JSON lacks, NaN, tokens that are not integers."""
    for line in lines:
        try:
            to_json(line)
            content_of(line.get("tokens") or (), line["scores"])
        except (TypeError, ValueError, OverflowError) as error:
            raise GroupRefused("malformed", f"{type(error).__name__}: {error}") from error


class CustomCollection(CustomPostprocessing):
    """Environment that overrides `collect_trajectory` or `collect_trajectories`."""

    async def run_group(self, row: Row, group: str, epoch: int, size: int) -> Group:
        """Return the group that the environment's code collects; dropped if the code raises or returns nothing.

        Raises:
            HermesRLError: the code raised it.
        """
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
            played.dropped, played.detail = (
                StopReason.CANCELLED,
                f"collect_trajectories raised {place_of(error, method)}",
            )
            return played
        env.backlog.extend(backlog or ())
        played.parts = await self._usable(played, method, collected)
        if not played.parts and played.dropped is None:
            played.dropped = StopReason.CANCELLED
            played.detail = "collect_trajectories gave no group; see the log for the cause"
        return played


# -------------------------------------------------------------------------------- collecting


class Collecting:
    """Mixin of `HermesAgentBaseEnv` that replaces BaseEnv's collection of trajectories.

    BaseEnv drops the logprobs, misaligns optional lists, and lets one failed rollout end the group.
    """

    config: Any
    _core: Environment
    _encoder: Encoder
    max_num_workers: int
    _rollout_store: RolloutLog = NullRolloutLog()
    """Store of the environment's rollouts; by default nothing is stored."""
    _group_numbers: itertools.count[int]
    get_next_item: Callable[[], Awaitable[Any]]
    _resolve_tools_for_group: Callable[[], GroupTools]
    _training_counts: TrainingMetrics

    async def groups(
        self, rows: Sequence[Any] | None = None, policy: ChatServer | None = None
    ) -> AsyncGenerator[Group, None]:
        """Yield groups of rollouts with their tokens, without a trainer.

        Args:
            rows: the items to run, once each; None: the items of `get_next_item` until it returns None.
            policy: a policy that replaces the environment's own.
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
        """Number of concurrent rollouts of `groups` and process mode."""
        return max(1, int(self.max_num_workers)) * int(self.config.group_size)

    def _identify_item(self, item: Any) -> tuple[Row, str]:
        """Return an item as a row, and the id of its group: the run's current group, or a new one outside a run."""
        index = next(self._group_numbers)
        row = row_of(item, index)
        return row, GROUP_ID.get() or f"{row.key}:{index}"

    async def collect_trajectory(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """Run and grade one rollout; return it as a ScoredDataItem with an empty backlog.

        The item is None if an infrastructure failure persists after all retries.
        """
        row, group = self._identify_item(item)
        runner = RolloutRunner(self._core, store=_Tracked(self), encoder=self._encoder)
        rollout = await runner.member(RolloutKey(row, group, 0, 1))
        if rollout.error is not None:
            logger.error("rollout %s was not graded (%s): %s", rollout.id, rollout.stop_reason, rollout.error)
            return None, []
        single_group = Group(group, row, [rollout])
        await self._encoder.encode_group(single_group)
        first, *extra_layers = self._layers_of(single_group)
        return {**_item_of(first), FURTHER: [_item_of(layer) for layer in extra_layers]}, []

    @property
    def _current_group_tools(self) -> GroupTools | None:
        """Tools of the group that the current task runs, or None; concurrent groups have separate values."""
        return _group_tools.get()

    @_current_group_tools.setter
    def _current_group_tools(self, tools: GroupTools | None) -> None:
        _group_tools.set(tools)

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """Run a group; return it as a ScoredDataGroup, or a list with one per layer, and the backlog.

        The group is None if it is incomplete. An overridden `collect_trajectory` is called once per member.
        """
        before = _group_tools.set(self._resolve_tools_for_group())
        try:
            if type(self).collect_trajectory is not Collecting.collect_trajectory:
                return await self._collect_by_hand(item)
            row, name = self._identify_item(item)
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
        backlog = [extra_item for _, more in results for extra_item in more]
        items = [scored for scored, _ in results if scored is not None]
        if len(items) < len(results):
            return None, backlog
        layers = [assemble(layer) for layer in stack_sequences(items)]
        return layers if len(layers) > 1 else layers[0], backlog

    async def _one_by_hand(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """Call an overridden `collect_trajectory`, and retry if it raises or returns no item."""
        for attempt in range(RETRIES + 1):
            try:
                scored, backlog = await self.collect_trajectory(item)
                if scored is not None:
                    return checked(scored), list(backlog)
            except Exception:  # user code may raise anything; only its group fails, and the log has the traceback
                logger.exception("collect_trajectory failed (attempt %d of %d)", attempt + 1, RETRIES + 1)
        return None, []

    def _layers_of(self, group: Group) -> list[dict[str, Any]]:
        """Return the group as Atropos' ScoredDataGroups, one per layer; one in all if each rollout has one sequence."""
        return group_lines(group, self._generation_params())

    def _generation_params(self) -> dict[str, Any]:
        """Return the policy's temperature and top_p in training, for the records of groups."""
        options = self._core.options("train")
        params = {"temperature": options.temperature, "top_p": options.top_p}
        return {name: value for name, value in params.items() if value is not None}


class _Tracked:
    """Wrapper of the environment's store that counts finished rollouts for the metrics."""

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
    """Return a group with one member as a ScoredDataItem."""
    lists = {"tokens", "masks", "scores", *_OPTIONAL}
    return {key: (next(iter(value or ()), None) if key in lists else value) for key, value in group.items()}
