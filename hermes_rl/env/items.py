"""An environment's own code as the conductor meets it: its items as rows, its collected groups, its changed lines."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from collections.abc import AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.errors import HermesRLError
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Group

if TYPE_CHECKING:
    from hermes_rl.env.base import HermesAgentBaseEnv

logger = logging.getLogger(__name__)

PAUSE = 0.2
"""Seconds until `get_next_item` is asked again after it gave None, where that pauses."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


_group_id: ContextVar[str | None] = ContextVar("group_id", default=None)
"""The id of the group that the environment's own code is collecting."""


@dataclass(frozen=True)
class ItemRow(Row):
    """A row that stands for an item, which is its `columns`."""


def group_id() -> str | None:
    """The id of the group that the environment's own code is collecting; None outside of a run."""
    return _group_id.get()


def row_of(item: Any, index: int = 0) -> Row:
    """An item of `get_next_item`, which may be anything, as a row; its key is a hash of what it prints as."""
    if isinstance(item, Row):
        return item
    printed = _ADDRESS.sub("", repr(item))  # an address in memory is another one in the next process
    digest = hashlib.sha256(printed.encode("utf-8", "surrogatepass")).hexdigest()
    return ItemRow(key=digest[:16], columns=item, index=index, digest=digest)


async def items_of(env: HermesAgentBaseEnv, *, pauses: bool) -> AsyncIterator[Row]:
    """The items of an environment, as it hands them out; those that its code gave back come first.

    Args:
        env: the environment.
        pauses: None from `get_next_item` means that there is nothing now; otherwise that there is nothing more.
    """
    number = 0
    while True:
        item = env.backlog.pop(0) if env.backlog else await env.get_next_item()
        if item is None and not pauses:
            return
        if item is None:
            await asyncio.sleep(PAUSE)
            continue
        yield row_of(item, number)
        number += 1


class WithOwnCode:
    """An environment whose `postprocess_histories` has the last word on the lines of a group."""

    def __init__(self, env: HermesAgentBaseEnv, environment: Environment) -> None:
        self._env, self._environment = env, environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    async def lines(self, group: Group, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The lines after `postprocess_histories`; none where it gives nothing."""
        given: Any = made if len(made) > 1 else made[0]
        processed: Any = await self._env.postprocess_histories(given)
        found = processed if isinstance(processed, list) else [processed]
        named = {"group": group.id, "row_key": group.row.key}
        return [{**line, **named} for line in found if line]


class CollectsByHand(WithOwnCode):
    """An environment that overrides `collect_trajectory` or `collect_trajectories`."""

    async def play_group(self, row: Row, group: str, epoch: int, size: int) -> Group:
        """The group that its code collected; dropped where that raised or gave nothing, which ends no other group."""
        _group_id.set(group)
        try:
            item = row.columns if isinstance(row, ItemRow) else row
            collected, backlog = await self._env.collect_trajectories(item)
        except HermesRLError:
            raise
        except Exception as error:
            logger.exception("a group of %s failed", row.key)
            detail = f"collect_trajectories raised {type(error).__name__}: {error}"
            return Group(group, row, [], epoch, dropped=Ending.CANCELLED, detail=detail)
        self._env.backlog.extend(backlog or ())
        parts = [part for part in (collected if isinstance(collected, list) else [collected]) if part]
        if not parts:
            detail = "collect_trajectories gave no group; the log says why"
            return Group(group, row, [], epoch, dropped=Ending.CANCELLED, detail=detail)
        return Group(group, row, [], epoch, parts=[dict(part) for part in parts])
