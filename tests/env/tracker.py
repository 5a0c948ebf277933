"""What an environment would log to wandb."""

from __future__ import annotations

from collections import Counter
from typing import Any

DROPPED = "train/groups_dropped/"
"""What the metric of a cause begins with, after the environment's name."""


class Tracker:
    """Keeps the metrics of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps.append(metrics)

    def table(self, rows: Any) -> str:
        return "table"

    def close(self) -> None:
        pass

    @property
    def dropped(self) -> Counter[str]:
        """Groups that were dropped, by cause."""
        counts = Counter[str]()
        for metrics in self.steps:
            counts.update({name.partition(DROPPED)[2]: n for name, n in metrics.items() if DROPPED in name})
        return counts


def tracked(env: Any) -> Tracker:
    """Let the environment log its next steps to the tracker that is returned."""
    env._wandb_run = tracker = Tracker()
    return tracker


async def logged(env: Any, metrics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Log a step as a trainer's step does, and return all of its metrics."""
    tracker = tracked(env)
    await env.wandb_log(metrics)
    return tracker.steps[-1]


async def dropped(env: Any) -> Counter[str]:
    """Log a step, and return the groups that were dropped before it, by cause."""
    tracker = tracked(env)
    await env.wandb_log()
    return tracker.dropped
