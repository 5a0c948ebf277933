"""Evaluate mode: run several rollouts on every row of the evaluation split, and compute the metrics.

The loop, the tools, rewards, stop reasons and sandboxes are the same as in training. Metrics are computed from the
records of the rollouts, so a resumed run gives the same numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hermes_rl.agent.result import ProgramRun
from hermes_rl.data.rows import Row
from hermes_rl.errors import RunError, UserError
from hermes_rl.rollouts.rollout import never_asked
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.metrics import metrics_by, metrics_by_seat, metrics_of, ratings, row_of, scores_of
from hermes_rl.runs.run import Run
from hermes_rl.runs.setup import RunOptions, generation_params, open_run
from hermes_rl.runs.statistics import interval
from hermes_rl.runs.store import RolloutStore
from hermes_rl.spec.model import Spec
from hermes_rl.spec.suggest import choices
from hermes_rl.terminal_text import most_frequent, pluralize

TOLERATED = 0.02
"""Share of rollouts that may lack a score before the evaluation counts as failed."""


@dataclass(frozen=True)
class EvaluatePlan:
    """`rollouts` per row; `success` is the score from which a rollout counts for pass@k; `span` bounds a score."""

    rollouts: int = 1
    success: float = 1.0
    span: tuple[float, float] = (0.0, 1.0)
    generation_params: Mapping[str, Any] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    """Columns of the rows to group metrics by."""

    @classmethod
    def from_spec(cls, spec: Spec) -> EvaluatePlan:
        """Return the plan of the spec."""
        return cls(
            rollouts=spec.evaluate.rollouts,
            success=spec.evaluate.success_threshold,
            span=spec.score.clamp or (0.0, 1.0),
            generation_params=generation_params(spec, "evaluate"),
            by=spec.evaluate.group_by,
        )

    def values(self, row: Row) -> tuple[str, ...]:
        """Return the row's values in the columns `by`; raises UserError if it lacks one of them."""
        for column in self.by:
            if column not in row.columns:
                raise UserError(
                    f"evaluate.group_by: row {row.key} has no column `{column}`{choices(column, row.columns)}"
                )
        return tuple(str(row.columns[column]) for column in self.by)


@dataclass
class Evaluation:
    """Result of an evaluation, over all rows that were run to completion, now or by an earlier call.

    `groups` are the ids of its rows' groups in the store. `causes` counts the rollouts without a score by their
    failure; `stopped` is the budget that ended it.
    """

    name: str
    metrics: dict[str, float]
    causes: Counter[str]
    rollouts: int
    plan: EvaluatePlan = field(repr=False)
    store: RolloutStore = field(repr=False)
    groups: list[str] = field(repr=False)
    uncounted: list[str] = field(repr=False)
    """Recorded groups that `metrics` do not count: of other rows, or without some of their rollouts."""
    started: float = 0.0
    ended: float = 0.0
    model: str | None = None
    interval: tuple[float, float] | None = None
    """95 % interval of the mean score, or None if the rows do not determine it."""
    stopped: str | None = None
    retried: str = ""
    """Summary of the retries; see `hermes_rl.runs.setup.Retried`."""
    unasked: Counter[str] = field(default_factory=Counter)
    """Rollouts whose agent program never called the model, by their outcome."""
    ungraded_rows: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Rows with a rollout that has no grade: row_key, cause, detail."""

    @property
    def ungraded(self) -> int:
        """Rollouts whose infrastructure failures exhausted the retries, and rollouts that could not be compared because
        of them.
        """
        return self.causes.total()

    @property
    def problem(self) -> str | None:
        """Reason why the evaluation counts as failed, or None if it does not."""
        if self.unasked.total() == self.rollouts:
            return "no agent program has called the model, so the scores do not measure it"
        if self.ungraded > TOLERATED * self.rollouts:
            failed = f"{self.ungraded} of {self.rollouts} rollouts could not be graded, more than {TOLERATED * 100:g} %"
            return f"{failed}; see `error` in rollouts.jsonl"
        return None

    @property
    def reliable(self) -> bool:
        """False if the evaluation counts as failed."""
        return self.problem is None

    def require_reliable(self) -> None:
        """Raise RunError if the evaluation counts as failed."""
        if self.problem is not None:
            raise RunError(self.problem)

    def metrics_file(self) -> dict[str, Any]:
        """Return the content of metrics.json, with the keys of atroposlib's `BaseEnv.evaluate_log`."""
        return {
            "config_general": {
                "model_name": self.model,
                "total_evaluation_time_seconds": str(self.ended - self.started),
                "generation_parameters": dict(self.plan.generation_params),
            },
            "results": {f"atropos|{self.name}_eval|0": self.metrics, "all": self.metrics},
        }

    def samples(self) -> Iterator[dict[str, Any]]:
        """Return the records of samples.jsonl: atroposlib's `EvaluationSample` fields, and fields that identify the
        rollout.
        """
        first = (line for row in self.store.lines(self.groups) for line in row)
        for line in (line for each in first for line in (each, *each.get("others", ()))):
            yield {
                "messages": line["messages"],
                "score": line["score"],
                "correct": None if line["score"] is None else line["score"] >= self.plan.success,
                "finish_reason": line["stop_reason"],
                **{key: line[key] for key in ("id", "row_key", "rewards", "error")},
            }


async def run_evaluate(spec: Spec, launch: RunOptions) -> tuple[Evaluation, RunDirectory]:
    """Evaluate a spec into its run directory.

    Raises `UserError` if the spec, or the content of the directory, does not allow it; `RunError` if nothing could be
    graded, or too many rows failed.
    """
    async with open_run(spec, launch) as opened:
        launch.progress.note(sampling_line(spec))
        evaluation = await evaluate(opened.run, EvaluatePlan.from_spec(spec))
        evaluation.retried = opened.retried.summary
        for reason, count in most_frequent(evaluation.unasked):
            launch.progress.note(f"{count} of {pluralize(evaluation.rollouts, 'rollout')}: {reason}")
        opened.log.metrics(evaluation.metrics)
        failures = {"failed": dict(evaluation.causes), "quarantined": evaluation.ungraded_rows}
        opened.directory.add({**failures, "uncounted": evaluation.uncounted})
        await asyncio.to_thread(write_evaluation, evaluation, evaluation_directory(spec, opened.directory))
        return evaluation, opened.directory


def sampling_line(spec: Spec) -> str:
    """Return the temperature of an evaluation and its reason: one rollout per row and several are not comparable."""
    if "temperature" in spec.evaluate.agent.model_fields_set:
        reason = "set by evaluate.agent.temperature"
    elif spec.evaluate.rollouts == 1:
        reason = "there is one rollout per row; evaluate.agent.temperature sets another"
    else:
        reason = f"there are {spec.evaluate.rollouts} rollouts per row, which use agent.temperature"
    return f"evaluation at temperature {spec.agent_for('evaluate').temperature:g}: {reason}"


def evaluation_directory(spec: Spec, directory: RunDirectory) -> RunDirectory:
    """Return the directory for metrics and samples."""
    moved = spec.atropos.get("data_dir_to_save_evals")
    return RunDirectory(Path(moved)) if moved else directory


def write_evaluation(evaluation: Evaluation, directory: RunDirectory) -> None:
    """Write metrics.json and samples.jsonl."""
    directory.path.mkdir(parents=True, exist_ok=True)
    directory.write_json("metrics.json", evaluation.metrics_file())
    with closing(directory.journal("samples.jsonl")) as samples:
        samples.keep(evaluation.samples())


async def evaluate(run: Run, plan: EvaluatePlan) -> Evaluation:
    """Run every row `plan.rollouts` times, except for rollouts that are already in the run's store.

    Raises `RunError` if there are no rows, nothing could be graded, or too many rows failed.
    """
    return await _Evaluating(run, plan).play()


class _Evaluating:
    """Demand of an evaluation (`runs.run.Demand`), which also stores the rows in their order."""

    def __init__(self, run: Run, plan: EvaluatePlan) -> None:
        assert run.store is not None, "metrics are computed from the records of the rollouts"
        self.run, self.plan, self.store = run, plan, run.store
        self.groups: dict[str, tuple[str, ...]] = {}
        self.stopped: str | None = None
        self.done = 0

    async def play(self) -> Evaluation:
        started, clock_start = time.time(), time.monotonic()
        run, store = self.run, self.store
        complete_count = sum(map(store.complete, store.groups))
        unfinished_rollouts = store.rollouts_of_unfinished_groups()
        run.progress.start(
            run.rows.length, complete_count, unit="rows", unfinished_rollouts=unfinished_rollouts, scores=store.graded
        )
        playing = run.groups(skip=self._skip, demand=self)
        async with aclosing(playing):
            async for group in playing:
                self.done += 1
                run.progress.step(self.done, group)
        if not self.groups:
            raise RunError(self.stopped or "there are no rows to evaluate on; see dataset.eval")
        if self.stopped is not None and not any(map(store.played, self.groups)):
            raise RunError(
                f"it ended before all rollouts of a row had ended: {self.stopped}. Complete results are saved, and the "
                "same command with a larger budget resumes the run"
            )
        evaluation = await asyncio.to_thread(conclude, run.environment.name, self.plan, store, self.groups)
        # The clock of the machine may be set meanwhile; durations come from the monotonic clock.
        evaluation.started, evaluation.ended = started, started + time.monotonic() - clock_start
        evaluation.stopped = self.stopped
        return evaluation

    @property
    def satisfied(self) -> bool:
        self.stopped = self.stopped or self.run.budget.used_up()
        return self.stopped is not None

    def wants(self, running: int) -> bool:
        return True

    def _skip(self, row: Row, group: str, epoch: int) -> bool:
        """Return True if no rollout of the row is left to run; all rows are stored in their order."""
        self.groups[group] = self.plan.values(row)
        complete = self.store.complete(group)
        self.done += complete
        return complete


def conclude(name: str, plan: EvaluatePlan, store: RolloutStore, groups: Mapping[str, tuple[str, ...]]) -> Evaluation:
    """Return the result of the rollouts of these rows, counting a row only if all of its rollouts were run.

    `groups` are the groups of the rows in their order, each with `plan.values` of its row. Raises `RunError` if nothing
    was graded.
    """
    complete_groups = [group for group in groups if store.played(group)]
    lines = list(store.lines(complete_groups))
    rows = [row_of(members) for members in lines]
    played = [rollout for row in rows for rollout in row]
    if all(rollout.score is None for rollout in played):
        first = next((rollout.error for rollout in played if rollout.error), "")
        raise RunError(f"none of {len(played)} rollouts could be graded. The first: {first}")
    metrics = metrics_of(rows, plan.rollouts, plan.success, plan.span)
    for index, column in enumerate(plan.by):
        values = [groups[group][index] for group in complete_groups]
        metrics |= metrics_by(rows, column, values, plan.rollouts, plan.success)
    metrics |= metrics_by_seat(lines, plan.rollouts, plan.success) | ratings(lines)
    return Evaluation(
        name=name,
        metrics=metrics,
        causes=Counter(str(rollout.cause) for rollout in played if rollout.cause is not None),
        rollouts=len(played),
        plan=plan,
        store=store,
        groups=list(groups),
        uncounted=sorted(store.groups.keys() - set(complete_groups)),
        model=next((rollout.model for rollout in played if rollout.model), None),
        interval=interval([scores_of(row) for row in rows]),
        unasked=Counter(
            never_asked(ProgramRun(**line["program"]))
            for line in chain.from_iterable(lines)
            if line.get("program", {"calls": True})["calls"] == [] and "seat" not in line  # a seat may have had no turn
        ),
        ungraded_rows=[
            {"row_key": store.groups[group].row_key, "cause": str(failed.stop_reason), "detail": failed.error}
            for group, row in zip(complete_groups, rows, strict=True)
            # The others of its row may be ungraded only because of the one that failed.
            if (failed := next((each for each in row if each.cause is each.stop_reason), None)) is not None
        ],
    )
