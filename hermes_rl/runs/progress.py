"""Progress of a run: messages on the terminal, and metrics for Weights & Biases if the spec requests them.

Everything on the terminal goes to stderr; results are for stdout. This is the only importer of wandb.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.training import TrainingMetrics
from hermes_rl.runs.wandb_text import readable
from hermes_rl.spec.model import Spec
from hermes_rl.spec.sections.modes import Wandb
from hermes_rl.terminal_text import escape_controls, pluralize

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------- Weights & Biases
# Nothing is set through the environment, and a run without `wandb:` never imports it. wandb must not record the command
# line, the console and the working tree: a key may be in any of them.

_PRIVATE = {"console": "off", "save_code": False, "disable_git": True, "x_disable_meta": True}


class Tracker:
    """One wandb run. Raises `UserError` if wandb cannot start a run: no account on this machine, or no write access to
    the project.
    """

    def __init__(
        self,
        project: str,
        name: str,
        *,
        mode: Literal["online", "offline", "disabled"] | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        import wandb

        self._wandb, self._failed = wandb, False
        try:
            self.run = wandb.init(
                project=project,
                name=name,
                group=group,
                mode=mode,
                config=dict(config or {}),
                dir=str(folder.resolve()) if folder is not None else None,
                # Two environments in one process have a run each.
                reinit="create_new" if wandb.run is not None else None,
                settings=wandb.Settings(**_PRIVATE),
            )
        except wandb.Error as error:
            reason = str(error).rstrip(".")
            raise UserError(f"wandb: {reason}. Run `wandb login`, or set wandb.mode to offline") from error

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers and texts under their names; log nothing more once wandb has failed, which is reported."""
        self._unless_failed(lambda: self.run.log(dict(metrics), step=step))

    def table(self, rows: Sequence[tuple[str, float]]) -> Any:
        """Return (text, score) pairs as a table that `log` accepts."""
        return self._wandb.Table(columns=["text", "score"], data=[list(row) for row in rows])

    def close(self) -> None:
        """Finish the run, so that its files are complete."""
        self._unless_failed(self.run.finish)

    def _unless_failed(self, send: Callable[[], object]) -> None:
        if self._failed:
            return
        try:
            send()
        except Exception as error:  # noqa: BLE001 - whatever the client raises, no run ends for want of a chart
            self._failed = True
            logger.warning(
                "stopped logging to wandb (%s: %s); the run continues, and its directory has all rollouts",
                type(error).__name__,
                error,
            )


# ------------------------------------------------------------------- What process and evaluate mode log to wandb

KEPT, PER_GROUP = 32, 1
"""Groups of which rollouts are shown, and rollouts shown of each, if `atropos:` does not set them."""


class GroupLog(Protocol):
    """Receives every group of process mode."""

    async def group(self, group: Group, written: int | None, lines: Sequence[dict[str, Any]]) -> None:
        """Log a group that has ended; it was the n-th that was `written`, with these records, or was excluded."""


class WandbLog:
    """The log of a run without a trainer; without a tracker it does nothing."""

    def __init__(self, tracker: Tracker | None, max_groups: int = KEPT, per_group: int = PER_GROUP) -> None:
        self.tracker = tracker
        self.per_group = None if per_group == -1 else per_group
        self.training = TrainingMetrics()
        self.texts: deque[list[tuple[str, float]]] = deque(maxlen=max_groups)

    async def group(self, group: Group, written: int | None, lines: Sequence[dict[str, Any]]) -> None:
        """Count a group, and log it if it is the n-th that was `written`."""
        if self.tracker is None:
            return
        self.training.add_group(group)
        if written is None:
            return
        self.tracker.log(self.training.take(), step=written)
        logged_rollouts = group.rollouts[: self.per_group]
        self.texts.append(
            [
                (readable(r.result.messages), r.score)
                for r in logged_rollouts
                if r.result is not None and r.score is not None
            ]
        )

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
    """Open the log that the spec's `wandb` requests, with its files below `folder`; raises UserError as `Tracker`."""
    settings, tracker = spec.wandb, None
    if settings is not None and settings.mode != "disabled":
        names = settings.project or spec.name, settings.name or spec.name
        tracker = Tracker(*names, mode=mode_of(settings), config=spec.resolved(), folder=folder)
    max_groups = spec.atropos.get("num_rollouts_to_keep", KEPT)
    log = WandbLog(tracker, max_groups, spec.atropos.get("num_rollouts_per_group_for_logging", PER_GROUP))
    try:
        yield log
    finally:
        log.close()


def mode_of(settings: Wandb) -> Literal["online", "offline", "disabled"] | None:
    """Return the mode that a spec names, or None if it names none, so that wandb reads WANDB_MODE itself."""
    return settings.mode if "mode" in settings.model_fields_set else None


# -------------------------------------------------------------------------------------------------- The terminal

EVERY = 5.0
"""Seconds between two lines if stderr is not a terminal."""


@dataclass(frozen=True)
class RunStatus:
    """Status of a run at this moment.

    Attributes:
        concurrency: target number of rollouts in flight; None: as many as the machine and the servers carry.
        phases: number of rollouts in flight by phase (`hermes_rl.tools.base.Phase`).
        waiting_calls: calls that have no slot at a server of the policy's yet.
        tokens: tokens that the policy's servers have read and written for all starts of the run.
        cost: US dollars of all calls whose cost is known, of all starts.
        failures: groups and rollouts that were not graded, by cause.
        retry_summary: description of the retries; empty if there were none.
        paused: True if nothing new starts for now.
    """

    in_flight: int
    concurrency: int | None
    phases: Mapping[str, int]
    waiting_calls: int
    tokens: int
    cost: float
    failures: Mapping[str, int]
    retry_summary: str
    paused: bool


class Watched(Protocol):
    """A run that a caller watches, and may steer; `hermes_rl.runs.setup.SpecRun` implements it and documents its
    members.
    """

    @property
    def directory(self) -> RunDirectory: ...

    def status(self) -> RunStatus: ...

    def pause(self, paused: bool) -> None: ...

    def finish(self) -> None: ...

    def set_concurrency(self, rollouts: int) -> None: ...


class Progress:
    """Counts groups and prints a line at intervals; on a terminal the line is rewritten in place."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.quiet = quiet
        self.total: int | None = None
        self.unit = "groups"
        self._scored, self._sum = 0, 0.0
        self.watched: Watched | None = None
        self.noted: Callable[[str], None] | None = None
        """Receives every note as well."""
        self._inline = self.stream.isatty()
        self._open_line = False
        self._last = time.monotonic()
        self._text = ""

    @contextmanager
    def watching(self, watched: Watched) -> Iterator[None]:
        """Watch a run while it is open."""
        self.watched = watched
        looking = asyncio.get_running_loop().create_task(self._refresh(watched))
        try:
            yield
        finally:
            looking.cancel()
            self.watched = None

    async def _refresh(self, watched: Watched) -> None:
        """Refresh the line from time to time, even if no group ends."""
        while True:
            await asyncio.sleep(max(self._last + EVERY - time.monotonic(), EVERY / 10))
            self._show_line()

    def start(
        self,
        total: int | None,
        done: int = 0,
        *,
        unit: str = "groups",
        unfinished_rollouts: int = 0,
        scores: Sequence[float] = (),
    ) -> None:
        """Show the total amount of work and the existing part of it.

        Args:
            unfinished_rollouts: number of existing rollouts of unfinished groups.
            scores: scores of the existing rollouts of finished groups.
        """
        self.total, self.unit = total, unit
        self._scored, self._sum = len(scores), math.fsum(scores)
        self._text = f"{done}/{total or '?'} {unit}"
        if (done or unfinished_rollouts) and not self.quiet:
            more = (
                f", and {pluralize(unfinished_rollouts, 'rollout')} of unfinished ones" if unfinished_rollouts else ""
            )
            self.note(f"resuming: {done} of {total or '?'} {unit} exist already{more}")

    def step(self, done: int, group: Group) -> None:
        """Count a group that has ended."""
        scores = [rollout.score for rollout in group.rollouts if rollout.score is not None]
        self.show(f"{done}/{self.total or '?'} {self.unit}", scores, last=done == self.total)

    def show(self, text: str, scores: Sequence[float], *, last: bool = False) -> None:
        """Add scores to the mean, and print the line with it if the last line is old enough."""
        self._scored, self._sum, self._text = self._scored + len(scores), self._sum + sum(scores), text
        self._show_line(at_once=last)

    def _show_line(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if self.quiet or not self._text or (now - self._last < (0.1 if self._inline else EVERY) and not at_once):
            return
        self._last = now
        retry_summary = self.watched.status().retry_summary if self.watched is not None else ""
        self.write(" · ".join(filter(None, [self._text, f"mean score {self.mean()}", retry_summary])))

    def mean(self) -> str:
        return f"{self._sum / self._scored:.3f}" if self._scored else "–"

    def note(self, message: str) -> None:
        """Show a message that the user must know, even with --quiet."""
        self.say(message)
        if self.noted is not None:
            self.noted(message)

    def say(self, message: str) -> None:
        """Show a line on any subject."""
        self.end()
        print(escape_controls(message), file=self.stream, flush=True)

    def end(self) -> None:
        """Finish a line that is rewritten in place."""
        if self._open_line:
            self.stream.write("\n")
            self._open_line = False

    def for_environment(self, name: str) -> Progress:
        """Return the progress of one of several environments, which adds its name."""
        return _Named(name, self)

    def write(self, text: str) -> None:
        """Print the status line."""
        text = escape_controls(text)
        if self._inline:
            self.stream.write(f"\r\x1b[2K{text}")
            self._open_line = True
        else:
            self.stream.write(text + "\n")
        self.stream.flush()


class _Named(Progress):
    """Progress of one of several environments, with its name before each line."""

    def __init__(self, name: str, shared: Progress) -> None:
        super().__init__(shared.stream, quiet=shared.quiet)
        self._name, self._shared = name, shared

    def say(self, message: str) -> None:
        self._shared.say(f"{self._name}: {message}")

    def write(self, text: str) -> None:
        self._shared.write(f"{self._name}: {text}")

    def end(self) -> None:
        self._shared.end()
