"""Serve several specs to one trainer from one process: each has its own run, and all start and stop together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from hermes_rl.active_environment import ENVIRONMENT
from hermes_rl.env.serve import require_trajectory_api
from hermes_rl.env.spec_env import Served, run_serve
from hermes_rl.errors import HermesRLError, RunError, UserError
from hermes_rl.runs.cluster import connected
from hermes_rl.runs.rollout_worker import WorkerSetup
from hermes_rl.runs.run import Run
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.model import Spec
from hermes_rl.threads import end_tasks
from hermes_rl.trainers.registry import ATROPOS
from hermes_rl.trainers.serving import SharedTrainer


class _Environment:
    """One of the specs, served in its own task; `opened` is set when it is ready to start, or has failed."""

    def __init__(self, spec: Spec, launch: RunOptions, together: SharedTrainer, go: asyncio.Event) -> None:
        self.name, self.opened, self._go = spec.name, asyncio.Event(), go
        self.task = asyncio.create_task(self._serve(spec, launch, together))

    async def _serve(self, spec: Spec, launch: RunOptions, together: SharedTrainer) -> Served:
        ENVIRONMENT.set(spec.name)
        try:
            return await run_serve(spec, launch, together=together, before_registration=self._wait_for_start)
        finally:
            self.opened.set()

    async def _wait_for_start(self) -> None:
        self.opened.set()
        await self._go.wait()

    @property
    def problem(self) -> BaseException | None:
        """Exception that ended its task, or None if it is running, finished or cancelled."""
        return self.task.exception() if self.task.done() and not self.task.cancelled() else None


async def serve_together(served: Sequence[tuple[Spec, RunOptions]], note: Callable[[str], None]) -> list[Served]:
    """Serve several specs of different names until their common trainer has finished its steps.

    All specs are opened before any of them registers with the trainer. If one fails, all stop.

    Args:
        served: the specs and their launch options; all use the Ray cluster of the first one.
        note: a function that shows the user messages that concern no single environment.

    Returns:
        The result of each spec, in the same order.

    Raises:
        UserError: a spec, which the message names, is wrong, or the trajectory API does not respond.
        RunError: a spec, which the message names, failed, or the trainer stopped responding.
    """
    trainers = {(spec.serve.trainer, spec.serve.api_url) for spec, _ in served}
    for trainer, url in trainers:
        if trainer == ATROPOS:
            await require_trajectory_api(url)
    ray = served[0][1].ray
    if not isinstance(ray, str):
        return await _serve_all(served)
    async with connected([WorkerSetup(spec, one.mode, one.environ) for spec, one in served], ray, note) as connection:
        return await _serve_all([(spec, replace(launch, ray=connection)) for spec, launch in served])


async def _serve_all(served: Sequence[tuple[Spec, RunOptions]]) -> list[Served]:
    together, go, sibling_runs = SharedTrainer(len(served)), asyncio.Event(), list[Run]()
    logger = logging.getLogger("hermes_rl")
    level = logger.level
    # Set the level here, since the first run.log to close would restore the old level for all.
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    environments = [
        _Environment(spec, replace(launch, sibling_runs=sibling_runs), together, go) for spec, launch in served
    ]
    tasks = [environment.task for environment in environments]
    try:
        for environment in environments:
            await environment.opened.wait()
        _raise_problems(environments)
        go.set()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        _raise_problems(environments)
        return [task.result() for task in tasks]
    finally:
        await end_tasks(tasks)
        logger.setLevel(level)


def _raise_problems(environments: Sequence[_Environment]) -> None:
    """Raise the problems of the environments, if any, with the environments' names."""
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
