"""Evaluate mode: every row of the evaluation split, several rollouts each, and what may be concluded.

The same loop with the same tools as in training; rewards, endings and sandboxes are no different. What it concludes
is computed from the records of the rollouts, so that a run that was cut short goes on to the same numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.data.rows import Row, Rows
from hermes_rl.errors import RunError
from hermes_rl.rollouts.admission import admission
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.groups import Source, once, play_groups
from hermes_rl.rollouts.rollout import Rollout
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.runs.budget import Budget
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.metrics import Played, metrics_of, row_of
from hermes_rl.runs.progress import Progress
from hermes_rl.servers.base import ChatServer

TOLERATED = 0.02
"""Share of rollouts that may stay without a grade before the evaluation counts as failed."""


@dataclass(frozen=True)
class EvaluatePlan:
    """`rollouts` per row; `success` is the score from which a rollout counts for pass@k; `span` bounds a score."""

    rollouts: int = 1
    concurrency: int | None = None
    success: float = 1.0
    span: tuple[float, float] = (0.0, 1.0)
    generation_params: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Evaluation:
    """What an evaluation found, over all rows that were played to their end, now or by an earlier call.

    `causes` counts the rollouts without a grade by what failed; `stopped` is the budget that ended it.
    """

    name: str
    metrics: dict[str, float]
    causes: Counter[str]
    rollouts: int
    kept: Kept = field(repr=False)
    keys: list[str] = field(repr=False)
    started: float = 0.0
    ended: float = 0.0
    model: str | None = None
    generation_params: Mapping[str, Any] = field(default_factory=dict)
    success: float = 1.0
    stopped: str | None = None

    ungraded_rows: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Rows with a rollout that has no grade: row_key, cause, detail."""

    @property
    def ungraded(self) -> int:
        """Rollouts that infrastructure failed for good, and those that could not be compared because of them."""
        return self.causes.total()

    @property
    def reliable(self) -> bool:
        """False where more rollouts than tolerated could not be graded."""
        return self.ungraded <= TOLERATED * self.rollouts

    def require_reliable(self) -> None:
        """Raise RunError where more rollouts than tolerated could not be graded."""
        if not self.reliable:
            raise RunError(
                f"more than {TOLERATED * 100:g} % of the rollouts could not be graded, see `error` in rollouts.jsonl"
            )

    def metrics_file(self) -> dict[str, Any]:
        """The content of metrics.json, with the keys of atroposlib's `BaseEnv.evaluate_log`."""
        return {
            "config_general": {
                "model_name": self.model,
                "total_evaluation_time_seconds": str(self.ended - self.started),
                "generation_parameters": dict(self.generation_params),
            },
            "results": {f"atropos|{self.name}_eval|0": self.metrics, "all": self.metrics},
        }

    def samples(self) -> Iterator[dict[str, Any]]:
        """The lines of samples.jsonl: atroposlib's `EvaluationSample` fields, and ours to find the rollout."""
        return (self._sample(line) for row in self.kept.lines(self.keys) for line in row)

    def _sample(self, line: Mapping[str, Any]) -> dict[str, Any]:
        score = line["score"]
        return {
            "messages": line["messages"],
            "score": score,
            "correct": None if score is None else score >= self.success,
            "finish_reason": line["ending"],
            **{key: line[key] for key in ("id", "row_key", "rewards", "error")},
        }


async def evaluate(
    environment: Environment,
    rows: Iterable[Row],
    plan: EvaluatePlan,
    kept: Kept,
    *,
    budget: Budget,
    progress: Progress,
    listener: Callable[[Rollout], None] | None = None,
    policy: ChatServer | None = None,
) -> Evaluation:
    """Play every row `plan.rollouts` times, but for the rollouts that are in `kept` already.

    Raises:
        RunError: there are no rows, nothing could be graded, or too many rows failed.
    """
    return await _Evaluate(environment, plan, kept, budget, progress, listener).play(rows, policy)


class _Evaluate:
    def __init__(
        self,
        environment: Environment,
        plan: EvaluatePlan,
        kept: Kept,
        budget: Budget,
        progress: Progress,
        listener: Callable[[Rollout], None] | None,
    ) -> None:
        self.environment, self.plan, self.kept = environment, plan, kept
        self.budget, self.progress, self.listener = budget, progress, listener
        self.started, self._begun = time.time(), time.monotonic()
        self.keys: list[str] = []
        self.stopped: str | None = None
        self.done = 0

    async def play(self, rows: Iterable[Row], policy: ChatServer | None) -> Evaluation:
        player = RolloutRunner(
            self.environment,
            split="eval",
            concurrency=self.plan.concurrency,
            listener=self._keep,
            policy=policy,
            memory=self.kept,
            spend=self.budget.spend,
        )
        there = sum(map(self.kept.complete, self.kept.groups))
        total = rows.length if isinstance(rows, Rows) else None
        self.progress.begin(total, there, what="rows", further=self.kept.unfinished())
        playing = play_groups(
            player,
            self._missing(rows),
            self.plan.rollouts,
            admission=admission(self.plan.concurrency, policy or self.environment.policy),
            whole=False,
            wanted=self._wanted,
        )
        async with aclosing(playing):
            async for group in playing:
                self.budget.count(group)
                self.done += 1
                self.progress.step(self.done, group)
        if not self.keys:
            raise RunError(self.stopped or "there are no rows to evaluate on; see dataset.eval")
        found = await asyncio.to_thread(conclude, self.environment.name, self.plan, self.kept, self.keys)
        # The clock of the machine may be set meanwhile; what took so long is another clock's to say.
        found.started, found.ended, found.stopped = self.started, self.started + self._elapsed(), self.stopped
        return found

    def _elapsed(self) -> float:
        return time.monotonic() - self._begun

    async def _missing(self, rows: Iterable[Row]) -> Source:
        """The rows of which something is left to play; all of them are remembered in their order."""
        async for row, group in once(rows):
            self.keys.append(group)
            self.kept.require_same(row, group)
            if self.kept.complete(group):
                self.done += 1
            else:
                yield row, group

    def _wanted(self, running: int) -> bool:
        self.stopped = self.stopped or self.budget.used_up()
        return self.stopped is None

    def _keep(self, rollout: Rollout) -> None:
        self.kept.keep(rollout)
        if self.listener is not None:
            self.listener(rollout)


def conclude(name: str, plan: EvaluatePlan, kept: Kept, keys: list[str]) -> Evaluation:
    """What the rollouts of these rows show, as far as all of a row were played.

    Raises:
        RunError: nothing was graded.
    """
    found = [row_of(row, kept.treatment) for row in kept.lines(keys)]
    played = [rollout for row in found for rollout in row]
    whole = (key for key in keys if kept.whole(key))
    if all(rollout.score is None for rollout in played):
        first = next((rollout.error for rollout in played if rollout.error), "")
        raise RunError(f"none of {len(played)} rollouts could be graded. The first: {first}")
    return Evaluation(
        name=name,
        metrics=metrics_of(found, plan.rollouts, plan.success, plan.span),
        causes=Counter(str(rollout.cause) for rollout in played if rollout.cause is not None),
        rollouts=len(played),
        kept=kept,
        keys=keys,
        model=next((rollout.model for rollout in played if rollout.model), None),
        generation_params=plan.generation_params,
        success=plan.success,
        ungraded_rows=[_ungraded(key, bad) for key, row in zip(whole, found, strict=True) if (bad := _failed(row))],
    )


def _failed(row: Sequence[Played]) -> Played | None:
    """The rollout that failed; the others of its row may be ungraded only because of it."""
    return next((rollout for rollout in row if rollout.cause is rollout.ending), None)


def _ungraded(key: str, failed: Played) -> dict[str, Any]:
    return {"row_key": key, "cause": str(failed.ending), "detail": failed.error}
