"""Count metrics while an environment trains, and log them to wandb if `use_wandb` is set.

Only training is counted: metrics of an evaluation are logged with the next step, and do not affect training metrics.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

from hermes_rl.runs.progress import Tracker
from hermes_rl.runs.training import TrainingMetrics


class Tracking:
    """Mixin of `HermesAgentBaseEnv`: training metrics, and a separate wandb run for the environment.

    Its state is in private attributes, as in all base classes of environments, since a subclass may choose any public
    name for its own attributes.
    """

    # Attributes of BaseEnv
    config: Any
    curr_step: int
    wandb_project: str | None
    wandb_group: str | None
    wandb_prepend: str | None
    rollouts_for_wandb: list[list[tuple[str, float]]]
    completion_lengths: list[int]
    max_token_len: int

    _wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Mode of wandb; None: wandb reads WANDB_MODE."""
    _wandb_folder: Path | None = None
    """Directory of wandb's files; None: a directory in the working directory."""
    _wandb_run: Tracker | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pending_metrics: dict[str, Any] = {}
        """Metrics of an evaluation, logged with the next step."""
        self._training_counts = TrainingMetrics()
        super().__init__(*args, **kwargs)

    @property
    def _tool_error_buffer(self) -> list[dict[str, Any]]:
        """Tool errors in training since the last log, under the reference design's name."""
        return self._training_counts.tool_errors

    @_tool_error_buffer.setter
    def _tool_error_buffer(self, errors: list[dict[str, Any]]) -> None:
        self._training_counts.tool_errors = errors

    def _begin_tracking(self) -> None:
        """Start a wandb run if `use_wandb` is set; without a project, the environment's `wandb_name` is the project."""
        if not self.config.use_wandb or self._wandb_run is not None:
            return
        self._wandb_run = Tracker(
            self.wandb_project or self.config.wandb_name,
            f"{self.config.wandb_name}-{time.strftime('%Y-%m-%d-%H%M%S')}",
            mode=self._wandb_mode,
            group=self.wandb_group,
            config=self.config.model_dump(mode="json"),
            folder=self._wandb_folder,
        )

    async def _end_tracking(self) -> None:
        """Finish the wandb run, if there is one."""
        if self._wandb_run is not None:
            tracker, self._wandb_run = self._wandb_run, None
            # The evaluation after the last step may have left metrics, and no other log follows.
            tracker.log(self._with_prefix(self._pending_metrics), step=self.curr_step)
            await asyncio.to_thread(tracker.close)

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics with a table of the saved rollouts as readable text."""
        rows = [row for group in self.rollouts_for_wandb for row in group]
        if rows and self._wandb_run is not None:
            wandb_metrics["train/rollouts"] = self._wandb_run.table(rows)
        return wandb_metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the given metrics together with the training metrics; call `super().wandb_log(metrics)` in a subclass.

        In serve mode each name starts with the environment's name, as in BaseEnv. The metrics go to this environment's
        own wandb run, whereas BaseEnv logs to the run that started first in the process.
        """
        metrics = {**self._pending_metrics, **self._training_counts.take(), **(wandb_metrics or {})}
        metrics |= _length_metrics(self.completion_lengths, self.max_token_len)
        metrics = self.perf_stats(await self.create_rollout_table(metrics))  # type: ignore[attr-defined]
        self._pending_metrics, self.rollouts_for_wandb, self.completion_lengths = {}, [], []
        if self._wandb_run is not None:
            self._wandb_run.log(self._with_prefix(metrics), step=self.curr_step)

    def _with_prefix(self, metrics: dict[str, Any]) -> dict[str, Any]:
        prefix = f"{self.wandb_prepend}_" if self.wandb_prepend is not None else ""
        return {f"{prefix}{name}": value for name, value in metrics.items()}


def _length_metrics(lengths: list[int], longest: int) -> dict[str, float]:
    """Return BaseEnv's metrics of trained tokens per sequence.

    As in BaseEnv, `…_p95` is the fraction of sequences longer than 95 % of `longest`.
    """
    if not lengths:
        return {}
    metrics = {
        "train/completion_lengths": fmean(lengths),
        "train/completion_lengths_std": pstdev(lengths),
        "train/completion_lengths_max": float(max(lengths)),
        "train/completion_lengths_min": float(min(lengths)),
    }
    if longest > 0:
        metrics["train/completion_lengths_p95"] = sum(n > 0.95 * longest for n in lengths) / len(lengths)
    return metrics
