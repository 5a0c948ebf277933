"""Several specs that feed one trainer from one process: each a run of its own, and all begin and end together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from hermes_rl.env.serve import require_trajectory_api
from hermes_rl.env.spec_env import Served, run_serve
from hermes_rl.errors import HermesRLError, RunError, UserError
from hermes_rl.runs.cluster import connected
from hermes_rl.runs.opening import Launch
from hermes_rl.runs.player import Opening
from hermes_rl.runs.run import Run
from hermes_rl.several import ENVIRONMENT
from hermes_rl.spec.model import Spec
from hermes_rl.threads import end_tasks
from hermes_rl.trainers.find import ATROPOS
from hermes_rl.trainers.serving import Together


class _Environment:
    """One of the specs; `opened` is set when nothing keeps it from beginning."""

    def __init__(self, spec: Spec, launch: Launch, together: Together, go: asyncio.Event) -> None:
        self.name, self.opened, self._go = spec.name, asyncio.Event(), go
        self.task = asyncio.create_task(self._serve(spec, launch, together))

    async def _serve(self, spec: Spec, launch: Launch, together: Together) -> Served:
        ENVIRONMENT.set(spec.name)
        try:
            return await run_serve(spec, launch, together=together, begin=self._begin)
        finally:
            self.opened.set()

    async def _begin(self) -> None:
        self.opened.set()
        await self._go.wait()

    @property
    def problem(self) -> BaseException | None:
        """What has ended it before its time."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


async def serve_together(served: Sequence[tuple[Spec, Launch]], note: Callable[[str], None]) -> list[Served]:
    """Play until the trainer has had its steps, with specs of different names that have the same trainer.

    All are opened before one of them registers with the trainer, and where one of them fails all end.

    Args:
        served: the specs, with what was asked for; the Ray cluster is the same for all.
        note: where the user is told what is of no single environment.

    Returns:
        What came of each, in the same order.

    Raises:
        UserError: what is wrong with any of the specs, with its name; nothing was played.
        RunError: one of them failed, by its name, or the trainer was lost.
    """
    trainers = {(spec.serve.trainer, spec.serve.api_url) for spec, _ in served}
    for trainer, url in trainers:
        if trainer == ATROPOS:
            await require_trajectory_api(url)
    ray = served[0][1].ray
    if not isinstance(ray, str):
        return await _served(served)
    async with connected([Opening(spec, one.mode, one.environ) for spec, one in served], ray, note) as connection:
        return await _served([(spec, replace(launch, ray=connection)) for spec, launch in served])


async def _served(served: Sequence[tuple[Spec, Launch]]) -> list[Served]:
    together, go, beside = Together(len(served)), asyncio.Event(), list[Run]()
    logger = logging.getLogger("hermes_rl")
    level = logger.level
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))  # the first run.log that closes would set it back
    environments = [_Environment(spec, replace(launch, beside=beside), together, go) for spec, launch in served]
    tasks = [environment.task for environment in environments]
    try:
        for environment in environments:
            await environment.opened.wait()
        _raise(environments)
        go.set()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        _raise(environments)
        return [task.result() for task in tasks]
    finally:
        await end_tasks(tasks)
        logger.setLevel(level)


def _raise(environments: Sequence[_Environment]) -> None:
    """Raise what has gone wrong, with the names of those that it happened to."""
    problems = {
        environment.name: environment.problem for environment in environments if environment.problem is not None
    }
    for name, problem in problems.items():
        if not isinstance(problem, HermesRLError):
            problem.add_note(f"in the environment {name}")
            raise problem
    if problems:
        kind = UserError if any(isinstance(problem, UserError) for problem in problems.values()) else RunError
        raise kind("\n".join(f"{name}: {problem}" for name, problem in problems.items()))
