"""Evaluate mode: every row of the evaluation split, several rollouts each, and what may be concluded.

The same loop with the same tools as in training; rewards, endings and sandboxes are no different.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.data.rows import Row, Rows
from hermes_rl.errors import RunError
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.groups import once, play_groups
from hermes_rl.rollouts.player import Player
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.runs.budget import Budget
from hermes_rl.runs.metrics import metrics_of
from hermes_rl.runs.process import CONCURRENCY
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
    """What an evaluation found. `rows` are all groups, those with ungraded members too."""

    name: str
    rows: list[Group]
    metrics: dict[str, float]
    ungraded: int
    started: float
    ended: float
    model: str | None = None
    generation_params: Mapping[str, Any] = field(default_factory=dict)
    success: float = 1.0
    stopped: str | None = None

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.rows for rollout in group.rollouts]

    @property
    def reliable(self) -> bool:
        """False where more rollouts than tolerated could not be graded."""
        return self.ungraded <= TOLERATED * len(self.rollouts)

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

    def samples(self) -> list[dict[str, Any]]:
        """The lines of samples.jsonl: atroposlib's `EvaluationSample` fields, and ours to find the rollout."""
        return [self._sample(rollout) for rollout in self.rollouts]

    def _sample(self, rollout: Rollout) -> dict[str, Any]:
        score = rollout.score
        return {
            "messages": rollout.result.messages if rollout.result else [],
            "score": score,
            "correct": None if score is None else score >= self.success,
            "finish_reason": str(rollout.ending),
            "id": rollout.id,
            "row_key": rollout.seat.row.key,
            "rewards": {name: value.record() for name, value in rollout.rewards.items()},
            "error": rollout.error,
        }


async def evaluate(
    environment: Environment,
    rows: Iterable[Row],
    plan: EvaluatePlan,
    *,
    budget: Budget,
    progress: Progress,
    listener: Callable[[Rollout], None] | None = None,
    policy: ChatServer | None = None,
) -> Evaluation:
    """Play every row `plan.rollouts` times.

    Raises:
        RunError: there are no rows, nothing could be graded, or too many rows failed.
    """
    started = time.time()
    concurrency = plan.concurrency or CONCURRENCY

    def heard(rollout: Rollout) -> None:
        budget.spend(rollout)
        if listener is not None:
            listener(rollout)

    player = Player(environment, split="eval", concurrency=concurrency, listener=heard, policy=policy)
    found: list[Group] = []
    stopped: list[str] = []

    def wanted(running: int) -> bool:
        reason = budget.used_up()
        if reason:
            stopped.append(reason)
        return not reason

    progress.begin(rows.length if isinstance(rows, Rows) else None, what="rows")
    playing = play_groups(player, once(rows), plan.rollouts, concurrency=concurrency, whole=False, wanted=wanted)
    async with aclosing(playing):
        async for group in playing:
            budget.count(group)
            found.append(group)
            progress.step(len(found), group)
    if not found:
        raise RunError(stopped[0] if stopped else "there are no rows to evaluate on; see dataset.eval")
    return _conclude(environment.name, found, plan, started, stopped[0] if stopped else None)


def _conclude(name: str, found: list[Group], plan: EvaluatePlan, started: float, stopped: str | None) -> Evaluation:
    rollouts = [rollout for group in found for rollout in group.rollouts]
    ungraded = sum(rollout.score is None and not rollout.ending.graded for rollout in rollouts)
    if all(rollout.score is None for rollout in rollouts):
        first = next((rollout.error for rollout in rollouts if rollout.error), "")
        raise RunError(f"none of {len(rollouts)} rollouts could be graded. The first: {first}")
    models = [rollout.policy["model"] for rollout in rollouts if rollout.policy]
    return Evaluation(
        name=name,
        rows=found,
        metrics=metrics_of(found, plan.rollouts, plan.success, plan.span),
        ungraded=ungraded,
        started=started,
        ended=time.time(),
        model=models[0] if models else None,
        generation_params=plan.generation_params,
        success=plan.success,
        stopped=stopped,
    )
