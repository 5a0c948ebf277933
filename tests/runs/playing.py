"""Process and evaluate of a stub world, into a folder."""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.rollout import Encoder
from hermes_rl.runs import evaluate as evaluating
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.groups import GroupsFile
from hermes_rl.runs.process import Processing, ProcessSummary
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.run import Plan, Run, RunBudget
from hermes_rl.runs.store import RolloutStore
from tests.rollouts.worlds import World, rows


@dataclass(frozen=True)
class ProcessPlan:
    """`groups` of `group_size` that are written in the end."""

    group_size: int
    groups: int
    drop_uniform: bool = False
    prefer_differing: bool = False
    concurrency: int | None = None
    groups_path: Path | None = None
    run: str = ""


@dataclass(frozen=True)
class EvaluatePlan:
    """As many `rollouts` of each row, so many at a time."""

    rollouts: int = 1
    concurrency: int | None = None
    success: float = 1.0
    span: tuple[float, float] = (0.0, 1.0)
    generation_params: dict[str, Any] = field(default_factory=dict)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def play_process(
    world: World,
    folder: Path,
    plan: ProcessPlan,
    *,
    count: int = 3,
    given: Any = None,
    budget: RunBudget | None = None,
    said: io.StringIO | None = None,
) -> ProcessSummary:
    """Process over `count` rows."""
    with RunDirectory(folder) as directory:
        journal = directory.journal(plan.groups_path or "groups.jsonl")
        file = GroupsFile(journal, plan.run, moved=plan.groups_path is not None)
        with closing(file):
            file.check(plan.group_size)
            with closing(RolloutStore(directory, plan.group_size, compared=world.has_group_rewards)) as store:
                run = Run(
                    world,
                    rows(count) if given is None else given,
                    Plan(
                        size=plan.group_size,
                        drop_uniform=plan.drop_uniform,
                        prefer_differing=plan.prefer_differing,
                        concurrency=plan.concurrency,
                        fingerprint=plan.run,
                    ),
                    store=store,
                    encoder=Encoder(None, "no tokenizer"),
                    budget=budget,
                    progress=Progress(said or io.StringIO()),
                )
                return await Processing(run, file, plan.groups).play()


async def play_evaluate(
    world: World,
    plan: EvaluatePlan | None = None,
    *,
    given: list[Row] | None = None,
    budget: RunBudget | None = None,
    folder: Path | None = None,
    listener: Any = None,
    policy: Any = None,
) -> evaluating.Evaluation:
    """Evaluate on four rows, or those given; `rollouts_of` the result are its rollouts."""
    chosen = rows(4) if given is None else given
    plan = plan or EvaluatePlan()
    directory = RunDirectory(folder or Path(tempfile.mkdtemp()))
    with closing(RolloutStore(directory, plan.rollouts, compared=world.has_group_rewards)) as store:
        run = Run(
            world,
            chosen,
            Plan(size=plan.rollouts, split="eval", repeat=False, require_complete=False, concurrency=plan.concurrency),
            store=store,
            budget=budget,
            progress=Progress(io.StringIO()),
            policy=policy,
        )
        if listener is not None:
            run.on_played.append(listener)
        return await evaluating.evaluate(
            run, evaluating.EvaluatePlan(plan.rollouts, plan.success, plan.span, plan.generation_params)
        )


def rollouts_of(found: evaluating.Evaluation) -> list[dict[str, Any]]:
    """The lines of the rollouts, in the order of the rows."""
    return [line for row in found.store.lines(found.groups) for line in row]
