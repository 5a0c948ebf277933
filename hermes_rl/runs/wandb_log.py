"""What process and evaluate log to wandb, where the spec asks for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.readable import readable
from hermes_rl.runs.tracker import Tracker
from hermes_rl.runs.training import TrainingMetrics
from hermes_rl.spec.model import Spec
from hermes_rl.spec.model.modes import Wandb

KEPT, PER_GROUP = 32, 1
"""Groups of which rollouts are shown, and rollouts shown of each, where `env:` does not say."""


class GroupLog(Protocol):
    """What is told of every group of process mode."""

    async def group(self, group: Group, written: int | None, lines: Sequence[dict[str, Any]]) -> None:
        """A group has ended; it was the n-th that was `written`, with these lines, or was left out."""
        ...


class WandbLog:
    """The log of a run without a trainer; without a tracker it does nothing."""

    def __init__(self, tracker: Tracker | None, kept: int = KEPT, per_group: int = PER_GROUP) -> None:
        self.tracker = tracker
        self.per_group = None if per_group == -1 else per_group
        self.training = TrainingMetrics()
        self.texts: deque[list[tuple[str, float]]] = deque(maxlen=kept)

    async def group(self, group: Group, written: int | None, lines: Sequence[dict[str, Any]]) -> None:
        """Count a group, and log it where it is the n-th that was `written`."""
        if self.tracker is None:
            return
        self.training.add_group(group)
        if written is None:
            return
        self.tracker.log(self.training.take(), step=written)
        shown = group.rollouts[: self.per_group]
        self.texts.append([(readable(r.result.messages), r.score or 0.0) for r in shown if r.result is not None])

    def metrics(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation."""
        if self.tracker is not None:
            self.tracker.log(metrics)

    def close(self) -> None:
        """Log the last rollouts as text, and finish the run."""
        if self.tracker is None:
            return
        rows = [row for texts in self.texts for row in texts]
        if rows:
            self.tracker.log({"train/rollouts": self.tracker.table(rows)})
        self.tracker.close()


@contextmanager
def wandb_log(spec: Spec, folder: Path) -> Iterator[WandbLog]:
    """The log that the spec's `wandb` asks for, with its files below `folder`.

    Raises:
        UserError: wandb cannot begin a run.
    """
    log = WandbLog(_tracker(spec, folder), **_shown(spec))
    try:
        yield log
    finally:
        log.close()


def mode_of(asked: Wandb) -> Literal["online", "offline", "disabled"] | None:
    """The mode that a spec names; None where it names none, so that wandb looks at WANDB_MODE itself."""
    return asked.mode if "mode" in asked.model_fields_set else None


def _tracker(spec: Spec, folder: Path) -> Tracker | None:
    asked = spec.wandb
    if asked is None or asked.mode == "disabled":
        return None
    project, name = asked.project or spec.name, asked.name or spec.name
    return Tracker(project, name, mode=mode_of(asked), config=spec.resolved(), folder=folder)


def _shown(spec: Spec) -> dict[str, Any]:
    names = {"num_rollouts_to_keep": "kept", "num_rollouts_per_group_for_logging": "per_group"}
    return {ours: spec.env[theirs] for theirs, ours in names.items() if theirs in spec.env}
