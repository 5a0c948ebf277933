"""Which sandbox a reward looks into: the rollout's own, or a fresh one with the rollout's artifacts laid in.

Owns when each lives. Artifacts are taken before the first reward; the rollout's own sandbox is given back as soon as
no reward that is still to come looks into it; a fresh one lives as long as its reward.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from hermes_rl.errors import SandboxFailure
from hermes_rl.scoring.grader import GradedReward
from hermes_rl.threads import Places
from hermes_rl.tools.artifacts import Artifact, Request, take
from hermes_rl.tools.context import ToolContext
from hermes_rl.tools.machine import ToolRuntime

PER_CORE = 2
"""Fresh sandboxes at once, for each core. What runs in them is mostly work, against a limit of time: one that is late
because too many ran beside it would be a wrong 0."""

_places = Places(PER_CORE * len(os.sched_getaffinity(0)))


class RewardMachines:
    """The sandboxes of one rollout's rewards; call it with a reward, for as long as that runs.

    Args:
        runtime: the rollout's own.
        rewards: all that will ask, in order.
    """

    def __init__(self, runtime: ToolRuntime, rewards: Sequence[GradedReward]) -> None:
        self.runtime = runtime
        self._waiting = [reward.name for reward in rewards if _looks(reward) and not reward.fresh]

    async def take(self, requests: Sequence[Request], timeout: float) -> Mapping[str, Artifact]:
        """Take the artifacts from the rollout's sandbox. Raises `SandboxFailure` where that is gone by our doing."""
        if requests:
            sandbox = await self.runtime.sandbox()
            self.runtime.artifacts = await take(sandbox, requests, timeout)
        return self.runtime.artifacts

    @asynccontextmanager
    async def __call__(self, reward: GradedReward) -> AsyncIterator[ToolContext]:
        await self._give_back()
        if not reward.fresh or not _looks(reward):
            yield ToolContext(self.runtime.task_id)
            if reward.name in self._waiting:
                self._waiting.remove(reward.name)
            return
        async with self._fresh(reward.name) as runtime:
            yield ToolContext(runtime.task_id)

    async def _give_back(self) -> None:
        if not self._waiting:
            await self.runtime.release()

    @asynccontextmanager
    async def _fresh(self, name: str) -> AsyncIterator[ToolRuntime]:
        own = self.runtime
        fresh = ToolRuntime(own.config, task_id=f"{own.task_id}/{name}", toolkit=own.toolkit, state=own.state)
        async with _places.here(), fresh as runtime:
            runtime.artifacts = own.artifacts
            try:
                await runtime.laid.lay(await runtime.sandbox(), own.artifacts)
            except OSError as error:
                raise SandboxFailure(f"artifacts cannot be laid into a fresh sandbox: {error}") from error
            yield runtime


def _looks(reward: GradedReward) -> bool:
    return reward.function.uses_context
