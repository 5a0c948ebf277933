"""Process mode: play groups and write them, until there are as many as asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.data.rows import Row
from hermes_rl.errors import RunError, UserError
from hermes_rl.rollouts.encode import Encoder
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.groups import play_groups, repeated
from hermes_rl.rollouts.player import Player
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.runs.budget import Budget
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.journal import Journal
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.records import group_record, rollout_record
from hermes_rl.runs.wandb_log import WandbLog

CONCURRENCY = 64
"""Rollouts in flight where the spec does not say."""
MANY = 10
"""Uniform groups, at least, before the user hears of them."""


@dataclass(frozen=True)
class ProcessPlan:
    """`groups` is how many are written in the end; a uniform group is written unless `drop_uniform`."""

    group_size: int
    groups: int
    drop_uniform: bool = False
    concurrency: int | None = None
    groups_path: Path | None = None
    generation_params: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    """Fingerprint of the run; each group is marked with it, since its file may be shared."""


@dataclass
class ProcessSummary:
    """What a run of process mode did; `kept` groups were there before, `stopped` is the budget that ended it."""

    written: int = 0
    kept: int = 0
    uniform: int = 0
    rollouts: int = 0
    failed: dict[str, int] = field(default_factory=dict)
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
    """
    run = _Process(environment, plan, directory, encoder, budget, progress, log or WandbLog(None))
    try:
        return await run.play(rows)
    finally:
        run.close()


class _Process:
    def __init__(
        self,
        environment: Environment,
        plan: ProcessPlan,
        directory: RunDirectory,
        encoder: Encoder,
        budget: Budget,
        progress: Progress,
        log: WandbLog,
    ) -> None:
        self.plan, self.encoder, self.budget, self.progress, self.log = plan, encoder, budget, progress, log
        self.groups = directory.journal(plan.groups_path or "groups.jsonl")
        self.rollouts = directory.journal("rollouts.jsonl")
        written, discarded = _finished(self.groups, self.rollouts, plan)
        self.done = written | discarded
        self.summary = ProcessSummary(kept=len(written))
        concurrency = plan.concurrency or CONCURRENCY
        self.concurrency = max(concurrency, 1)
        self.player = Player(environment, concurrency=self.concurrency, listener=self._keep)

    def close(self) -> None:
        self.groups.close()
        self.rollouts.close()

    @property
    def complete(self) -> int:
        return self.summary.kept + self.summary.written

    async def play(self, rows: Iterable[Row]) -> ProcessSummary:
        started = time.monotonic()
        source = repeated(rows, skip=self.done.__contains__)
        self.progress.begin(self.plan.groups, self.complete)
        playing = play_groups(
            self.player, source, self.plan.group_size, concurrency=self.concurrency, wanted=self._wanted
        )
        async with aclosing(playing):
            async for group in playing:
                await self._take(group)
        if self.complete < self.plan.groups and self.summary.stopped is None:
            raise RunError("the dataset has no rows to play; see dataset.filter, .eval and .limit")
        self.summary.failed = dict(self.budget.failures + self.budget.left_out)
        self.summary.seconds = time.monotonic() - started
        return self.summary

    def _wanted(self, running: int) -> bool:
        self.summary.stopped = self.summary.stopped or self.budget.used_up()
        return self.summary.stopped is None and self.complete + running < self.plan.groups

    def _keep(self, rollout: Rollout) -> None:
        self.summary.rollouts += 1
        self.budget.spend(rollout)
        self.rollouts.append(rollout_record(rollout))

    async def _take(self, group: Group) -> None:
        keep = group.dropped is None and not (group.uniform and self.plan.drop_uniform)
        if keep:
            await self.encoder.encode(group)
            self.groups.append(group_record(group, self.plan.generation_params, self.plan.run))
            self.summary.written += 1
        elif group.dropped is not None:
            self.progress.note(f"group {group.id} dropped ({group.dropped}): {group.detail}")
        else:
            self._discard()
        self._give_up()
        self.log.group(group, self.complete if keep else None)
        self.budget.count(group)
        self.progress.step(self.complete, group)

    def _give_up(self) -> None:
        """End a run that writes nothing, however long it plays."""
        left_out = self.summary.uniform + self.budget.left_out.total()
        if self.complete == 0 and left_out > max(10 * self.plan.groups, MANY):
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


def _finished(groups: Journal, rollouts: Journal, plan: ProcessPlan) -> tuple[set[str], set[str]]:
    """The groups that are written, and those that were played and discarded as uniform.

    Rollouts of groups that were cut short are taken out, so that no id appears twice when they are played again.
    """
    written = {_group_of(line, groups, plan) for line in groups.read()}
    scores: dict[str, list[float]] = {}
    for line in rollouts.read():
        if not {"group", "score"} <= set(line):
            raise UserError(f"{rollouts.path} holds lines that are no rollouts; move it, or use --fresh")
        if line["score"] is not None:
            scores.setdefault(line["group"], []).append(line["score"])
    discarded = {
        group
        for group, found in scores.items()
        if group not in written and plan.drop_uniform and len(found) == plan.group_size > 1 == len(set(found))
    }
    kept = [line for line in rollouts.read() if line["group"] in written | discarded]
    rollouts.keep(kept)
    return written, discarded


def _group_of(line: dict[str, Any], groups: Journal, plan: ProcessPlan) -> str:
    """The id of a group that is there; it must be one that this run may go on with."""
    if "group" not in line or "scores" not in line:
        raise UserError(f"{groups.path} holds groups that no run of process wrote; move it, or choose another place")
    if line.get("run") != plan.run:
        raise UserError(f"{groups.path} holds groups of another run; move it, or choose another place")
    if len(line["scores"]) != plan.group_size:
        raise UserError(
            f"{groups.path} holds groups of {len(line['scores'])}, this run makes groups of {plan.group_size}: "
            "keep the size, or start beside it with --fresh"
        )
    return str(line["group"])
