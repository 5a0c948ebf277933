"""Process and evaluate of a stub world, into a folder."""

from __future__ import annotations

import io
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.rollouts.encode import Encoder
from hermes_rl.runs.budget import Budget
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.evaluate import EvaluatePlan, Evaluation, evaluate
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.process import ProcessPlan, ProcessSummary, process
from hermes_rl.runs.progress import Progress
from tests.rollouts.worlds import World, rows


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def play_process(
    world: World,
    folder: Path,
    plan: ProcessPlan,
    *,
    count: int = 3,
    budget: Budget | None = None,
    said: io.StringIO | None = None,
) -> ProcessSummary:
    """Process over `count` rows."""
    with RunDirectory(folder) as directory:
        return await process(
            world,
            rows(count),
            plan,
            directory,
            encoder=Encoder(None, "no tokenizer"),
            budget=budget or Budget(),
            progress=Progress(said or io.StringIO()),
        )


async def play_evaluate(
    world: World,
    plan: EvaluatePlan | None = None,
    *,
    given: list[Row] | None = None,
    budget: Budget | None = None,
    folder: Path | None = None,
    **more: Any,
) -> Evaluation:
    """Evaluate on four rows, or those given; `lines` of the result are its rollouts."""
    chosen = rows(4) if given is None else given
    plan = plan or EvaluatePlan()
    kept = Kept.of(RunDirectory(folder or Path(tempfile.mkdtemp())), world, plan.rollouts)
    kept.load()
    with closing(kept):
        return await evaluate(
            world, chosen, plan, kept, budget=budget or Budget(), progress=Progress(io.StringIO()), **more
        )


def rollouts_of(found: Evaluation) -> list[dict[str, Any]]:
    """The lines of the rollouts, in the order of the rows."""
    return [line for row in found.kept.lines(found.keys) for line in row]
