"""Metrics of groups that run for training, under the names that users of Atropos know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from hermes_rl.rollouts.rollout import Group, Rollout

DETAILS = 20
"""Tool errors that are shown one by one."""


class TrainingMetrics:
    """Counts since the last `take`; an evaluation is never counted here."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.scores: list[float] = []
        self.tool_errors: list[dict[str, Any]] = []
        self.repaired = 0
        self.dropped: Counter[str] = Counter()
        self.sequences: Counter[str] = Counter()
        self._rewards: dict[str, list[float]] = {}
        self._ages: list[int] = []
        self._stale = 0

    def add_rollout(self, rollout: Rollout) -> None:
        """Count a finished rollout."""
        if rollout.result is not None:
            self.tool_errors += [
                {
                    "turn": e.turn,
                    "tool": e.tool_name,
                    "args": str(e.arguments)[:200],
                    "error": e.error[:300],
                    "result": e.tool_result[:300],
                }
                for e in rollout.result.tool_errors
            ]
            self.repaired += sum(call.repaired > 0 for call in rollout.result.tool_calls)
        if rollout.score is not None:
            self.scores.append(rollout.score)
        for name, reward in rollout.rewards.items():
            if reward.value is not None:
                self._rewards.setdefault(name, []).append(reward.value)

    def add_group(self, group: Group) -> None:
        """Count a group with its rollouts, and its cause if it was dropped."""
        for rollout in group.rollouts:
            self.add_rollout(rollout)
        if group.dropped is not None:
            self.dropped[str(group.dropped)] += 1

    def add_arrivals(self, ages: Sequence[int], stale: int) -> None:
        """Count groups that the trainer took, each with its staleness in versions, and how many were older than
        allowed.
        """
        self._ages += ages
        self._stale += stale

    def take(self) -> dict[str, Any]:
        """Return the metrics, and reset them."""
        metrics: dict[str, Any] = {}
        if self.scores:
            metrics["train/mean_reward"] = sum(self.scores) / len(self.scores)
        for name, values in self._rewards.items():
            metrics[f"train/reward/{name}"] = sum(values) / len(values)
        metrics["train/tool_errors_count"] = len(self.tool_errors)
        if self.repaired:
            metrics["train/repaired_calls"] = self.repaired
        if self.tool_errors:
            lines = [f"[turn {e['turn']}] {e['tool']}({e['args']}): {e['error']}" for e in self.tool_errors]
            metrics["train/tool_error_details"] = "\n".join(lines[:DETAILS])
        for cause, count in self.dropped.items():
            metrics[f"train/groups_dropped/{cause}"] = count
        for outcome, count in self.sequences.items():
            metrics[f"train/sequences_{outcome}"] = count
        if self._ages:
            metrics["train/staleness_mean"] = sum(self._ages) / len(self._ages)
            metrics["train/staleness_max"] = max(self._ages)
            metrics["train/groups_stale_on_arrival"] = self._stale
        self._clear()
        return metrics
