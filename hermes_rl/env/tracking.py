"""What an environment counts while it trains, and how it reaches wandb.

Only training is counted here: an evaluation's numbers are logged beside them and change none of them. wandb is used
where it was asked for.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any, Literal

import aiohttp

from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.runs.tracker import Tracker

logger = logging.getLogger(__name__)

DETAILS = 20
"""Tool errors of a step that are shown one by one."""


class Tracking:
    """Mixin of `HermesAgentBaseEnv`: training metrics under the names that people know."""

    config: Any
    wandb_mode: Literal["online", "offline", "disabled"] = "online"
    tracker: Tracker | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.pending_metrics: dict[str, Any] = {}
        """Logged with the next step: what an evaluation found."""
        self._clear()
        super().__init__(*args, **kwargs)

    def _clear(self) -> None:
        self.reward_buffer: list[float] = []
        self.tool_error_buffer: list[dict[str, Any]] = []
        self.dropped: Counter[str] = Counter()
        self.reward_values: dict[str, list[float]] = {}

    def track_rollout(self, rollout: Rollout) -> None:
        """Count a finished rollout of training."""
        if rollout.result is not None:
            self.tool_error_buffer += [
                {"turn": e.turn, "tool": e.tool_name, "args": str(e.arguments)[:200], "error": e.error[:300]}
                for e in rollout.result.tool_errors
            ]
        if rollout.score is not None:
            self.reward_buffer.append(rollout.score)
        for name, reward in rollout.rewards.items():
            if reward.value is not None:
                self.reward_values.setdefault(name, []).append(reward.value)

    def track_dropped(self, group: Group) -> None:
        """Count a group that could not be completed, and say why."""
        self.dropped[str(group.dropped)] += 1
        logger.warning("group %s dropped (%s): %s", group.id, group.dropped, group.detail)

    async def setup_wandb(self) -> None:
        """Begin a wandb run where `use_wandb` asks for it, in the project that the trainer has named."""
        if not self.config.use_wandb:
            return
        project, group = self.wandb_project, None  # type: ignore[has-type]
        while project is None:
            url = f"{self.config.rollout_server_url}/wandb_info"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                info = await answer.json()
            project, group = info["project"], info["group"]
            if project is None:
                await asyncio.sleep(1)
        self.wandb_project, self.wandb_group = project, group
        name = f"{self.config.wandb_name}-{time.strftime('%Y-%m-%d-%H%M%S')}"
        config = self.config.model_dump(mode="json")
        self.tracker = Tracker(project, name, mode=self.wandb_mode, group=group, config=config)

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the kept rollouts as readable text."""
        rows = [row for group in self.rollouts_for_wandb for row in group]  # type: ignore[attr-defined]
        if rows and self.tracker is not None:
            wandb_metrics["train/rollouts"] = self.tracker.table(rows)
        return wandb_metrics

    def training_metrics(self) -> dict[str, Any]:
        """The training metrics since the last call."""
        metrics: dict[str, Any] = {}
        if self.reward_buffer:
            metrics["train/mean_reward"] = sum(self.reward_buffer) / len(self.reward_buffer)
        for name, values in self.reward_values.items():
            metrics[f"train/reward/{name}"] = sum(values) / len(values)
        metrics["train/tool_errors_count"] = len(self.tool_error_buffer)
        if self.tool_error_buffer:
            lines = [f"[turn {e['turn']}] {e['tool']}({e['args']}): {e['error']}" for e in self.tool_error_buffer]
            metrics["train/tool_error_details"] = "\n".join(lines[:DETAILS])
        for cause, count in self.dropped.items():
            metrics[f"train/groups_dropped/{cause}"] = count
        self._clear()
        return metrics

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log the given metrics with those of training; call `super().wandb_log(metrics)` from a subclass."""
        metrics = {**self.pending_metrics, **self.training_metrics(), **(wandb_metrics or {})}
        self.pending_metrics = {}
        await super().wandb_log(metrics)  # type: ignore[misc]
