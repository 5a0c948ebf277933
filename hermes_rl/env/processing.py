"""Process mode of hand-written environments: their own `collect_trajectories`, several groups at a time."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermes_rl.env.assemble import with_content
from hermes_rl.errors import HermesRLError, RunError
from hermes_rl.runs.directory import Journal
from hermes_rl.runs.encoding import encoded
from hermes_rl.runs.progress import Progress

if TYPE_CHECKING:
    from hermes_rl.env.base import HermesAgentBaseEnv

logger = logging.getLogger(__name__)


async def process_by_hand(env: HermesAgentBaseEnv) -> int:
    """Write `total_steps` groups to `data_path_to_save_groups`, going on from those that are there.

    A group is all that one item gave, however many lines it takes. Each line says which item that was (`item`, counted
    from 0), so that the same command again leaves out the items whose groups are there. Returns how many groups were
    written by this call.

    Raises:
        RunError: more groups failed than were asked for.
    """
    path = Path(env.config.data_path_to_save_groups or f"data/{env.name or 'groups'}.jsonl")
    journal = Journal(path)
    try:
        return await _Processing(env, journal).play()
    finally:
        journal.close()


class _Processing:
    def __init__(self, env: HermesAgentBaseEnv, journal: Journal) -> None:
        self.env, self.journal, self.progress = env, journal, Progress()
        self.target = int(env.config.total_steps)
        self.done = _items(journal)
        self.there = len(self.done)
        self.written = self.failed = 0

    async def play(self) -> int:
        running: set[asyncio.Task[None]] = set()
        exhausted, count = False, 0
        self.progress.begin(self.target, self.there)
        try:
            while True:
                while not exhausted and self._wanted(len(running)):
                    item = await self.env.get_next_item()
                    exhausted = item is None
                    number = self.env._number_of(item, count)
                    count += 1
                    if item is not None and number not in self.done:
                        running.add(asyncio.create_task(self._group(item, number)))
                if not running:
                    self._conclude()
                    return self.written
                running = await self._settle(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _wanted(self, running: int) -> bool:
        return self.there + self.written + running < self.target and running < max(1, self.env.max_num_workers)

    async def _settle(self, running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        done, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        return pending

    def _conclude(self) -> None:
        """Say what is in the file now."""
        complete = self.there + self.written
        why = "" if complete >= self.target else "; there are no more items"
        self.progress.note(f"{complete} of {self.target} groups are in {self.journal.path}{why}")

    async def _group(self, item: Any, number: int) -> None:
        group = await self._collected(item)
        parts = [with_content(dict(part)) for part in (group if isinstance(group, list) else [group]) if part]
        if parts:
            self.journal.append_lines([await encoded({**part, "item": number}) for part in parts])
            self.written += 1
            await self.env.add_rollouts_for_wandb(parts[0], item)
        else:
            self._fail()
        self.env.curr_step = self.there + self.written
        await self.env.wandb_log()

    async def _collected(self, item: Any) -> Any:
        """The group of the environment's own code; None where that raised, which ends no other group."""
        try:
            group, _ = await self.env.collect_trajectories(item)
            return await self.env.postprocess_histories(group) if group else None
        except HermesRLError:
            raise
        except Exception:
            logger.exception("a group of %r failed", item)
            return None

    def _fail(self) -> None:
        self.failed += 1
        if self.failed > max(self.target, 10):
            raise RunError(f"{self.failed} groups could not be played; see the warnings above for the causes")


def _items(journal: Journal) -> set[int]:
    """The numbers of the items whose groups are there; a first line without a number is that of the next item."""
    found: set[int] = set()
    for line in journal.read():
        if "item" in line:
            found.add(line["item"])
        elif not line.get("layer"):
            found.add(len(found))
    return found
