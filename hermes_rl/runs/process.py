"""Process mode: play groups and write them, until there are as many as asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import RunError
from hermes_rl.rollouts.admission import admission
from hermes_rl.rollouts.curriculum import Curriculum
from hermes_rl.rollouts.encode import Encoder
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.groups import play_groups, repeated
from hermes_rl.rollouts.quarantine import Quarantine
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.runs.budget import Budget
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.files import GroupsFile
from hermes_rl.runs.kept import Kept
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.rescore import Regrading
from hermes_rl.runs.wandb_log import WandbLog

MANY = 10
"""Uniform groups, at least, before the user hears of them."""
HOPELESS = 100
"""Groups, at least, that are dropped or left out before a run that has written nothing ends."""


@dataclass(frozen=True)
class ProcessPlan:
    """`groups` is how many are written in the end; a uniform group is written unless `drop_uniform`.

    `regrade` brings rollouts and groups of an earlier call to the spec's scoring; `ready` hears once what is there
    has been looked at and found to be of this run.
    """

    group_size: int
    groups: int
    drop_uniform: bool = False
    prefer_differing: bool = False
    concurrency: int | None = None
    groups_path: Path | None = None
    generation_params: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    """Fingerprint of the run; each group is marked with it, since its file may be shared."""
    regrade: Regrading | None = None
    ready: Callable[[], None] | None = None


@dataclass
class ProcessSummary:
    """What a run of process mode did; `kept` groups were there before, `stopped` is the budget that ended it.

    `failed` are groups that infrastructure failed, `dropped` those that the spec drops for their ending, by cause.
    """

    written: int = 0
    kept: int = 0
    uniform: int = 0
    rollouts: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    """Rows that were set aside: row_key, cause, detail."""
    seconds: float = 0.0
    stopped: str | None = None


async def process(
    environment: Environment,
    rows: Iterable[Row],
    plan: ProcessPlan,
    directory: RunDirectory,
    *,
    encoder: Encoder,
    budget: Budget,
    progress: Progress,
    log: WandbLog | None = None,
) -> ProcessSummary:
    """Write `plan.groups` groups into the directory, going on from those that it already holds.

    Raises:
        RunError: too many groups failed, there are no rows, or nothing more can be written.
        UserError: what the directory holds cannot be gone on with.
    """
    with (
        closing(directory.journal(plan.groups_path or "groups.jsonl")) as journal,
        closing(Kept.of(directory, environment, plan.group_size)) as kept,
    ):
        groups = GroupsFile(journal, plan.run, moved=plan.groups_path is not None)
        run = _Process(environment, plan, groups, kept, encoder, budget, progress, log or WandbLog(None))
        return await run.play(rows)


class _Process:
    def __init__(
        self,
        environment: Environment,
        plan: ProcessPlan,
        groups: GroupsFile,
        kept: Kept,
        encoder: Encoder,
        budget: Budget,
        progress: Progress,
        log: WandbLog,
    ) -> None:
        self.plan, self.encoder, self.budget, self.progress, self.log = plan, encoder, budget, progress, log
        self.groups, self.kept = groups, kept
        self.done: set[str] = set()
        self.quarantine = Quarantine()
        self.curriculum = Curriculum(plan.prefer_differing)
        self.summary = ProcessSummary()
        self.admission = admission(plan.concurrency, environment.policy)
        self._lines: dict[str, list[bytes]] = {}
        """What is to be written of groups that have ended, by their id."""
        self.player = RolloutRunner(
            environment,
            concurrency=plan.concurrency,
            listener=self._keep,
            memory=kept,
            encode=encoder.encode,
            prepare=self._prepare,
            spend=budget.spend,
        )

    async def _look_at_what_is_there(self) -> None:
        """Everything is brought to what the spec says now, or refused untouched."""
        self.groups.check(self.plan.group_size)
        if self.plan.regrade is not None:
            await self.plan.regrade(self.kept)
        self.kept.load()
        written = self.groups.reconcile(self.kept, self.plan.regrade.changed if self.plan.regrade else frozenset())
        if self.plan.ready is not None:
            self.plan.ready()
        drop = self.plan.drop_uniform
        for group in sorted(self.kept.groups, key=lambda group: int(group.rpartition(":")[2])):
            self.curriculum.count(group.rpartition(":")[0], self.kept.scores(group))
        self.done = written | {group for group in self.kept.groups if self.kept.discarded(group, drop_uniform=drop)}
        self.summary.kept = len(written)

    @property
    def complete(self) -> int:
        return self.summary.kept + self.summary.written

    async def play(self, rows: Iterable[Row]) -> ProcessSummary:
        started = time.monotonic()
        await self._look_at_what_is_there()
        source = repeated(rows, skip=self._done, aside=self.quarantine)
        self.progress.begin(self.plan.groups, self.complete, further=self.kept.unfinished())
        playing = play_groups(self.player, source, self.plan.group_size, admission=self.admission, wanted=self._wanted)
        async with aclosing(playing):
            async for group in playing:
                self._take(group)
        if self.complete < self.plan.groups and self.summary.stopped is None:
            raise RunError(self._nothing_left())
        self.summary.failed = dict(self.budget.failures)
        self.summary.dropped = dict(self.budget.left_out)
        self.summary.quarantined = self.quarantine.record()
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def _done(self, row: Row, group: str) -> bool:
        self.kept.require_same(row, group)
        return group in self.done or not self.curriculum.wants(row.key, int(group.rpartition(":")[2]))

    def _wanted(self, running: int) -> bool:
        self.summary.stopped = self.summary.stopped or self.budget.used_up()
        return self.summary.stopped is None and self.complete + running < self.plan.groups

    def _keep(self, rollout: Rollout) -> None:
        self.summary.rollouts += 1
        self.kept.keep(rollout)

    async def _prepare(self, group: Group) -> None:
        """Make the lines of a group; what takes long here holds up no other group."""
        self.curriculum.count(group.row.key, [rollout.score for rollout in group.rollouts])
        if group.dropped is None and not (group.uniform and self.plan.drop_uniform):
            self._lines[group.id] = await self.groups.lines(group, self.encoder, self.plan.generation_params)

    def _take(self, group: Group) -> None:
        lines = self._lines.pop(group.id, None)
        if lines is not None:
            self.groups.journal.append_lines(lines)
            self.summary.written += 1
        elif group.dropped is not None:
            self.progress.note(f"group {group.id} dropped ({group.dropped}): {group.detail}")
        else:
            self._discard()
        if self.quarantine.count(group):
            self.progress.note(f"row {group.row.key} is set aside: it failed again and again ({group.detail})")
        self._give_up()
        self.log.group(group, self.complete if lines is not None else None)
        self.budget.count(group)
        self.progress.step(self.complete, group)

    def _nothing_left(self) -> str:
        rows = self.quarantine.record()
        if not rows:
            return "the dataset has no rows to play; see dataset.filter, .eval and .limit"
        return f"every row was set aside, as each failed again and again. The last: {rows[-1]['detail']}"

    def _give_up(self) -> None:
        """End a run that writes nothing, however long it plays."""
        left_out = self.summary.uniform + self.budget.left_out.total()
        if self.summary.written == 0 and left_out > max(10 * self.plan.groups, HOPELESS):
            raise RunError(
                f"{left_out} groups were left out ({self.summary.uniform} uniform, the others by `endings`) and none "
                "was written: the task may be too easy or too hard for this policy"
            )

    def _discard(self) -> None:
        self.summary.uniform += 1
        if self.summary.uniform % max(self.plan.groups, MANY) == 0:
            self.progress.note(
                f"{self.summary.uniform} groups were left out as uniform, {self.complete} of {self.plan.groups} are "
                "written; a task that is too easy or too hard for the policy never ends with drop_uniform"
            )
