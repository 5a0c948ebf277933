"""Process mode of a compiled spec without the command line: what the benchmarks time is the run itself."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.groups import GroupsFile
from hermes_rl.runs.process import Processing
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.run import Plan, Run
from hermes_rl.runs.store import RolloutStore


async def play(
    compiled: CompiledSpec,
    rows: Iterable[Row],
    folder: Path,
    progress: Progress,
    encoder: Encoder,
    *,
    size: int,
    groups: int,
    concurrency: int | None,
) -> None:
    """Write so many groups of `size` into a run directory; without a concurrency as many rollouts at a time as fit."""
    async with compiled:
        with (
            RunDirectory(folder) as directory,
            closing(GroupsFile(directory.journal("groups.jsonl"), "")) as file,
            closing(RolloutStore(directory, size, compared=compiled.has_group_rewards)) as store,
        ):
            plan = Plan(size=size, concurrency=concurrency)
            run = Run(compiled, rows, plan, store=store, encoder=encoder, progress=progress)
            await Processing(run, file, groups).play()
