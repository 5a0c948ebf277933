"""Which sandbox a reward looks into: the rollout's own, or a fresh one with the rollout's artifacts laid in.

Owns when each lives, and that nothing of the agent runs in the rollout's own before a reward. Artifacts are taken
before the first reward; the rollout's own sandbox is given back as soon as no reward that is still to come looks into
it; a fresh one lives as long as its reward.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.scoring.grader import GradedReward
from hermes_rl.threads import Places
from hermes_rl.tools.artifacts import ArtifactRequest, TakenArtifact, take
from hermes_rl.tools.context import ToolContext
from hermes_rl.tools.machine import SandboxFactory, ToolRuntime
from hermes_rl.tools.toolkit import Toolkit

log = logging.getLogger(__name__)

PER_CORE = 2
"""Fresh sandboxes at once, for each core. What runs in them is mostly work, against a limit of time: one that is late
because too many ran beside it would be a wrong 0."""

_places = Places(PER_CORE * len(os.sched_getaffinity(0)))


class RewardMachines:
    """The sandboxes of one rollout's rewards; call it with a reward, for as long as that runs.

    Args:
        runtime: the rollout's own.
        rewards: all that will ask, in order.
        only_kept: names of artifacts that are not laid into fresh sandboxes.
    """

    def __init__(self, runtime: ToolRuntime, rewards: Sequence[GradedReward], only_kept: Collection[str] = ()) -> None:
        self.runtime = runtime
        self._only_kept = only_kept
        self._waiting = [reward.name for reward in rewards if _looks(reward) and not reward.fresh]

    async def take(self, requests: Sequence[ArtifactRequest], timeout: float) -> Mapping[str, TakenArtifact]:
        """Take the artifacts from the rollout's sandbox. Raises `SandboxFailure` where that is gone by our doing."""
        if requests:
            sandbox = await self.runtime.sandbox()
            self.runtime.artifacts = await take(sandbox, requests, timeout)
        return self.runtime.artifacts

    @asynccontextmanager
    async def __call__(self, reward: GradedReward) -> AsyncIterator[ToolContext]:
        await self._give_back()
        if not reward.fresh or not _looks(reward):
            if _looks(reward):
                await self.runtime.settle()  # what another reward has run may have left processes of the agent
            yield ToolContext(self.runtime.task_id)
            if reward.name in self._waiting:
                self._waiting.remove(reward.name)
            return
        own = self.runtime
        given = own.config, own.toolkit, own.state, own.artifacts, self._only_kept, own.factory
        async with _fresh(f"{own.task_id}/{reward.name}", *given) as context:
            yield context

    async def _give_back(self) -> None:
        if not self._waiting:
            await _released(self.runtime.release())


class KeptMachines:
    """Sandboxes for the rewards of a rollout that is over: fresh ones alone, as its own is gone.

    Args:
        name: of the rollout.
        config: what its sandbox was made by.
        toolkit: what a reward may call.
        artifacts: reads those that were kept of it; blocks.
        factory: where sandboxes come from.
        only_kept: names of artifacts that are not laid into fresh sandboxes.
    """

    def __init__(
        self,
        name: str,
        config: SandboxConfig,
        toolkit: Toolkit,
        artifacts: Callable[[], Mapping[str, TakenArtifact]],
        factory: SandboxFactory,
        only_kept: Collection[str] = (),
    ) -> None:
        self._only_kept = only_kept
        self._name, self._config, self._toolkit, self._artifacts = name, config, toolkit, artifacts
        self._factory = factory

    @asynccontextmanager
    async def __call__(self, reward: GradedReward) -> AsyncIterator[ToolContext | None]:
        if not _looks(reward):
            yield None
            return
        artifacts = await asyncio.to_thread(self._artifacts)
        given = self._config, self._toolkit, None, artifacts, self._only_kept, self._factory
        async with _fresh(f"{self._name}/{reward.name}", *given) as context:
            yield context


@asynccontextmanager
async def _fresh(
    name: str,
    config: SandboxConfig,
    toolkit: Toolkit,
    state: Any,
    artifacts: Mapping[str, TakenArtifact],
    only_kept: Collection[str],
    factory: SandboxFactory,
) -> AsyncIterator[ToolContext]:
    """A new sandbox with artifacts laid in, for as long as a reward looks into it.

    Those that are `only_kept` are known to the reward, but their files are not in its sandbox.
    """
    runtime = ToolRuntime(config, task_id=name, toolkit=toolkit, state=state, factory=factory)
    async with _places.here():
        try:
            runtime.artifacts = artifacts
            try:
                laid = {name: artifact for name, artifact in artifacts.items() if name not in only_kept}
                await runtime.laid.lay(await runtime.sandbox(), laid)
            except OSError as error:
                raise SandboxFailure(f"artifacts cannot be laid into a fresh sandbox: {error}") from error
            yield ToolContext(runtime.task_id)
        finally:
            await _released(runtime.close())


async def _released(releasing: Awaitable[None]) -> None:
    """Release a sandbox. What lives on in it is said, and takes no value from a reward: the agent may wish that."""
    try:
        await releasing
    except SandboxFailure as failure:
        log.error("a sandbox was not released: %s", failure.detail)


def _looks(reward: GradedReward) -> bool:
    return reward.function.uses_context
