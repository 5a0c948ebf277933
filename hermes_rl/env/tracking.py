"""What an environment counts while it trains, and how it reaches wandb.

Only training is counted here: evaluations keep their numbers to themselves. wandb is used where it was asked for.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from hermes_rl.rollouts.rollout import Group, Rollout

logger = logging.getLogger(__name__)

DETAILS = 20
"""Tool errors of a step that are shown one by one."""


class Tracking:
    """Mixin of `HermesAgentBaseEnv`: training metrics under the names that people know."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clear()

    def _clear(self) -> None:
        self.reward_buffer: list[float] = []
        self.tool_error_buffer: list[dict[str, Any]] = []
        self.dropped: Counter[str] = Counter()
        self.reward_values: dict[str, list[float]] = {}

    def track_rollout(self, rollout: Rollout) -> None:
        """Count a finished rollout of training."""
        if rollout.result is not None:
            self.tool_error_buffer += [
                {"turn": e.turn, "tool": e.tool_name, "args": e.arguments[:200], "error": e.error[:300]}
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

    def track_group(self, group: Group) -> None:
        """A whole group; a subclass keeps it."""

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add the training metrics since the last call and log; `super().wandb_log(metrics)` from a subclass."""
        metrics = dict(wandb_metrics or {})
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
        await super().wandb_log(metrics)  # type: ignore[misc]
