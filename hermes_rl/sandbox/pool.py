"""Sandboxes that are started ahead, so that a rollout finds one waiting.

Owns when spares are made, who gets one, and that all of them go in the end. A spare is a sandbox without anything of a
rollout in it: no files, no setup, no command has run. What differs between the sandboxes of a run (files, setup,
environment, times) is told to it when it is taken; for what differs more (image, limits, network) there are others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace

from hermes_rl.errors import HermesRLError
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox
from hermes_rl.sandbox.bubblewrap import BubblewrapSandbox
from hermes_rl.sandbox.config import SandboxConfig

log = logging.getLogger(__name__)

SPARES = 2
"""Waiting sandboxes of one kind."""
HEAD_START = 0.02
"""Seconds that a taken sandbox has for itself: the start of the next one would make its own ten times as long."""
MOST = 8
"""Waiting sandboxes of all kinds together; of the kind that was not asked for longest, they go first."""


class Pool:
    """Gives sandboxes as `create_sandbox` does, some of them started already. It belongs to one event loop."""

    def __init__(self) -> None:
        self._spares: OrderedDict[Hashable, list[BubblewrapSandbox]] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._refilling: set[Hashable] = set()
        """Kinds of which a spare is being made: a burst of rollouts must not start twice as many sandboxes."""
        self._closed = False
        self.taken = 0
        """How many sandboxes were waiting when they were asked for."""

    def create(self, config: SandboxConfig) -> Sandbox:
        """A sandbox for `config`, still to be started by the caller; and see to it that the next finds one too."""
        if config.backend != "bubblewrap" or self._closed:
            return create_sandbox(config)
        kind = _kind(config)
        waiting = self._spares.setdefault(kind, [])
        self._spares.move_to_end(kind)
        if kind not in self._refilling:
            self._refilling.add(kind)
            self._later(self._refill(kind, config))
        while waiting:
            spare = waiting.pop(0)
            if spare.alive:
                spare.config = config
                self.taken += 1
                return spare
            self._later(spare.close())
        return create_sandbox(config)

    async def close(self) -> None:
        """End all that wait; those that were taken are their takers'."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        spares = [spare for waiting in self._spares.values() for spare in waiting]
        self._spares.clear()
        ended = await asyncio.gather(*(spare.close() for spare in spares), return_exceptions=True)
        for error in ended:
            if isinstance(error, BaseException):
                raise error

    def _later(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _refill(self, kind: Hashable, config: SandboxConfig) -> None:
        try:
            await asyncio.sleep(HEAD_START)
            await self._fill(kind, config)
        finally:
            self._refilling.discard(kind)

    async def _fill(self, kind: Hashable, config: SandboxConfig) -> None:
        while len(self._spares.get(kind, ())) < SPARES and not self._closed:
            spare = create_sandbox(replace(config, files=(), setup=(), env={}, lifetime=None))
            assert isinstance(spare, BubblewrapSandbox)
            try:
                await spare.boot()
            except HermesRLError as error:
                # Whoever needs one starts it again and is told; nobody waits for this one.
                log.debug("a spare sandbox did not start: %s", error)
                return
            self._spares.setdefault(kind, []).append(spare)
            await self._shrink()

    async def _shrink(self) -> None:
        while sum(map(len, self._spares.values())) > MOST:
            kind = next(kind for kind, waiting in self._spares.items() if waiting)
            await self._spares[kind].pop().close()


def _kind(config: SandboxConfig) -> Hashable:
    return config.image, config.packages, config.workdir, config.network, config.limits
