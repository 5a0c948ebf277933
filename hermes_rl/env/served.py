"""What serve has done before: rollouts that need not be played, groups that need not be sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from hermes_rl.data.rows import Row
from hermes_rl.env.place import PLACE, Mark, Place
from hermes_rl.rollouts.environment import Environment
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.store import RolloutStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlacedRow(Row):
    """A row with its place among all that are handed out, over all passes."""

    number: int = 0

    @property
    def group(self) -> str:
        """The id of the group that is played on it."""
        return f"{self.key}:{self.number}"


class Served:
    """The files of a run of serve, of earlier starts and of this one."""

    def __init__(self, directory: RunDirectory, environment: Environment, size: int, *, drop: bool) -> None:
        self.store = RolloutStore(directory, size, compared=environment.has_group_rewards)
        try:
            self.place = Place(directory.journal(PLACE))
        except BaseException:
            self.store.close()
            raise
        self._drop = drop
        self._former: int | None = None
        """What the API called the environment before, while groups of that time are in its queue."""
        self._one = asyncio.Lock()
        self._sent: set[str] = set(self.place.sent)

    def settled(self, group: str) -> bool:
        """Whether the trainer has it, will have it, or is not to have it."""
        return group in self._sent or self.store.left_out(group, drop_uniform=self._drop)

    @asynccontextmanager
    async def sending(self, group: str) -> AsyncIterator[None]:
        """While a group is under way: one at a time, so that never more than one is in doubt."""
        async with self._one:
            self.place.sending(group)
            yield
            self.place.arrived(group)
            self._sent.add(group)

    async def restore(self, url: str, step: int, env_id: int) -> tuple[Mark, int]:
        """Find out what the trainer has not received, to be sent again; returns the state and their number.

        Args:
            url: of the trajectory API.
            step: at which the trainer goes on.
            env_id: what the API calls the environment now.
        """
        place = self.place
        known = await _status(url, place.env_id) if place.env_id is not None else None
        queued = None if known is None else int(known.get("self_queue_size", 0))
        lost: list[str] = []
        if place.queue_was_lost(step, queued):
            lost = place.go_back(step)
        elif place.doubtful and queued is not None and await self._all_arrived(url, step):
            self._former = place.env_id
            for group in list(place.doubtful):
                place.arrived(group)
        else:
            self._former = place.env_id  # its groups may still be in the queue
        place.registered(env_id)
        if not place.marks:
            place.mark(step, 0, {})
        self._sent = set(place.sent)
        return place.at(step), len(lost)

    async def mark(self, url: str, status: dict[str, Any], state: dict[str, Any]) -> None:
        """The trainer is at another step."""
        queued = int(status.get("self_queue_size", 0))
        if self._former is not None:
            former = await _status(url, self._former) or {}
            queued += int(former.get("self_queue_size", 0))
            self._former = self._former if former.get("self_queue_size") else None
        self.place.mark(status["current_step"], queued, state)

    async def _all_arrived(self, url: str, step: int) -> bool:
        """Whether the API has taken one more group than it was heard to, where this is its only environment."""
        status, info = await _json(f"{url}/status"), await _json(f"{url}/info")
        if not status or not info or not self.place.marks:
            return False
        first = self.place.marks[0]
        per_step = int(info["batch_size"]) // self.store.size
        received = first.gone + (step - first.step) * per_step + int(status["queue_size"])
        return received > len(self.place.sent)

    def close(self) -> None:
        """Close the files."""
        self.store.close()
        self.place.journal.close()


async def _status(url: str, env_id: int) -> dict[str, float] | None:
    return await _json(f"{url}/status-env", {"env_id": env_id})


async def _json(url: str, body: dict[str, int] | None = None) -> dict[str, float] | None:
    """What the API says; None where it does not."""
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, json=body) as answer:
            found = await answer.json() if answer.status == 200 else None
            return found if isinstance(found, dict) else None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        logger.info("%s: %s", url, error)
        return None
