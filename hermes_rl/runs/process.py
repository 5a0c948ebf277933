"""Process mode: write groups to a file until it has as many as the spec requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from hermes_rl.errors import RunError
from hermes_rl.rollouts.rollout import Group, RolloutState
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.formats import FILES, RecordedRollouts, RolloutChoice, group_of, is_trained, seats_of, write_format
from hermes_rl.runs.groups import GroupsFile
from hermes_rl.runs.progress import GroupLog, WandbLog
from hermes_rl.runs.run import GroupSerializer, Run
from hermes_rl.runs.setup import RunOptions, SpecRun, open_run
from hermes_rl.runs.store import Line
from hermes_rl.spec.model import Spec
from hermes_rl.terminal_text import most_frequent

MANY = 10
"""Minimum number of uniform groups before the user is notified."""
MIN_USELESS_GROUPS = 100
"""Minimum number of dropped or excluded groups after which a run that has written nothing ends."""


@dataclass
class ProcessSummary:
    """Result of process mode; `there` groups existed before, `stopped` is the budget that ended it.

    `failed` are groups with infrastructure failures, `dropped` the groups that the spec drops for their stop reason, by
    cause.
    """

    written: int = 0
    existing: int = 0
    uniform: int = 0
    unmade: int = 0
    """Groups of which an environment's user code made nothing."""
    exact: int = 0
    """Token-exact groups that were written now; `sampled` and `trained` are the tokens of all."""
    sampled: int = 0
    trained: int = 0
    attempts: int = 0
    """Rollouts that were run, failed attempts included."""
    failed: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    """Quarantined rows: row_key, cause, detail."""
    failure_summary: str = ""
    """Summary of the rollouts that failed; see `hermes_rl.runs.failure_rates`."""
    fallbacks: int = 0
    """Groups that the fallback of a reward graded, as its judge was unavailable."""
    seconds: float = 0.0
    stopped: str | None = None
    retried: str = ""
    """Summary of the retries; see `hermes_rl.runs.setup.Retried`."""

    def count(self, group: Group) -> None:
        """Count a group that was written, and its tokens."""
        self.written += 1
        values = [value for rollout in group.rollouts for value in rollout.rewards.values()]
        self.fallbacks += any(value.metrics.get("fallback") for value in values)
        if (proof := group.provenance) is not None:
            self.exact += proof.exact
            masked = [one for one in group.rollouts if one.masked and one.state is not RolloutState.RETRIES_EXHAUSTED]
            excluded = sum(sequence.trained_length for one in masked for sequence in one.sequences or ())
            self.sampled, self.trained = self.sampled + proof.sampled, self.trained + proof.trained - excluded


async def run_process(spec: Spec, launch: RunOptions) -> tuple[ProcessSummary, RunDirectory]:
    """Run process mode of a spec, into its run directory.

    Raises `UserError` if the spec, or the content of the directory, does not allow it; `RunError` if too many groups
    failed, or nothing more can be written.
    """
    async with open_run(spec, launch) as opened:
        assert opened.records.groups_file is not None
        work = Processing(opened.run, opened.records.groups_file, spec.process.groups, opened.log)
        summary = await work.play(opened.records.changed)
        summary.retried = opened.retried.summary
        opened.directory.add({"failed": summary.failed, "quarantined": summary.quarantined})
        section, kind = spec.process, spec.process.format
        if kind != "atropos":
            choice = RolloutChoice(section.min_score, section.keep_best, spec.evaluate.success_threshold)
            for message in await asyncio.to_thread(
                write_format, kind, opened.directory.path / FILES[kind], _recorded_rollouts(opened, work.file), choice
            ):
                launch.progress.note(message)
        for reason, count in most_frequent(opened.encoder.missing_tokens()):
            if reason == opened.encoder.missing:
                continue  # the user was notified at the start
            launch.progress.note(f"{count} rollout{' has' if count == 1 else 's have'} no tokens: {reason}")
        return summary, opened.directory


def _recorded_rollouts(opened: SpecRun, file: GroupsFile) -> RecordedRollouts:
    store, on_stop = opened.store, opened.spec.on_stop

    def groups() -> Iterator[Group]:
        for members in lines(file.groups()):
            if is_trained(members):
                yield group_of(members, on_stop)

    def lines(names: Iterable[str]) -> Iterator[list[Line]]:
        return (seat for members in store.lines(names) for seat in seats_of(members))

    rewards, tokenizer = list(opened.spec.rewards), opened.encoder.tokenizer
    return RecordedRollouts(groups, lambda: lines(store.groups), rewards, tokenizer, on_stop)


class Processing:
    """Writes the groups of a run into a file, continuing from the groups in it, until it has the `target`."""

    def __init__(self, run: Run, file: GroupsFile, target: int, log: GroupLog | None = None) -> None:
        self.run, self.file, self.target, self.log = run, file, target, log or WandbLog(None)
        self.summary = ProcessSummary()
        self._done: set[str] = set()
        self._lines: dict[str, tuple[list[dict[str, Any]], list[bytes]]] = {}
        """Encoded groups that have ended, by their id: the records, and their JSON."""

    async def play(self, changed: Set[str] = frozenset()) -> ProcessSummary:
        """Write the missing groups; groups in `changed`, which changed since they were written, are written again.

        Raises `RunError` if too many groups failed, there are no rows, or nothing more can be written; `UserError` if
        the content of the file cannot be continued.
        """
        started, run, summary = time.monotonic(), self.run, self.summary
        unfinished = self._take_up(changed)
        scores = [] if run.store is None else run.store.graded
        run.progress.start(self.target, self.complete, unfinished_rollouts=unfinished, scores=scores)
        playing = run.groups(skip=lambda _, group, __: group in self._done, demand=self, prepare=self._prepare)
        async with aclosing(playing):
            async for group in playing:
                await self._add_group(group)
        if self.complete < self.target and summary.stopped is None:
            if rows := run.quarantine.record():
                last = rows[-1]["detail"]
                raise RunError(f"every row is quarantined, because each failed repeatedly. The last: {last}")
            raise RunError("the dataset has no rows to run; see dataset.filter, .eval and .limit")
        summary.attempts = run.attempts
        summary.failed, summary.dropped = dict(run.budget.failures), dict(run.budget.excluded)
        summary.quarantined, summary.failure_summary = run.quarantine.record(), run.failure_rates.summary
        summary.seconds = time.monotonic() - started
        return summary

    @property
    def complete(self) -> int:
        """Groups that are in the file."""
        return self.summary.existing + self.summary.written

    # ------------------------------------------------------------------ demand (`runs.run.Demand`)

    @property
    def satisfied(self) -> bool:
        self.summary.stopped = self.summary.stopped or self.run.budget.used_up()
        return self.summary.stopped is not None or self.complete >= self.target

    def wants(self, running: int) -> bool:
        return self.complete + running < self.target

    # ------------------------------------------------------------------ groups

    def _take_up(self, changed: Set[str]) -> int:
        """Read the existing groups; return how many rollouts of incomplete groups exist."""
        store = self.run.store
        if store is None:
            self._done = set(self.file.groups())
            self.summary.existing = len(self._done)
            return 0
        written = self.file.reconcile(store, changed, compare=not isinstance(self.run.environment, GroupSerializer))
        drop = self.run.plan.drop_uniform
        self._done = written | {group for group in store.groups if store.excluded(group, drop_uniform=drop)}
        self.summary.existing = len(written)
        return store.rollouts_of_unfinished_groups()

    async def _prepare(self, group: Group) -> None:
        """Make the records of a group; slow work here does not delay other groups."""
        if not self.run.excluded(group):
            lines = await self.run.lines(group)
            self._lines[group.id] = lines, await self.file.encoded(lines)

    async def _add_group(self, group: Group) -> None:
        lines, encoded = self._lines.pop(group.id, ([], []))
        if lines:
            self.file.write(encoded)
            self.summary.count(group)
        elif group.dropped is None:
            self._discard(group)
        self._give_up()
        await self.log.group(group, self.complete if lines else None, lines)
        self.run.progress.step(self.complete, group)

    def _give_up(self) -> None:
        """End a run that writes nothing, however long it runs."""
        summary, ended = self.summary, self.run.budget.excluded.total()
        excluded = summary.uniform + summary.unmade + ended
        if summary.written == 0 and excluded > max(10 * self.target, MIN_USELESS_GROUPS):
            raise RunError(
                f"{excluded} groups were excluded ({summary.uniform} uniform, {ended} by `on_stop`, {summary.unmade} "
                "by the environment's code) and none was written: the task may be too easy or too hard for this "
                "policy"
            )

    def _discard(self, group: Group) -> None:
        """Count a group that is not written although nothing failed; notify the user if there are many."""
        summary = self.summary
        if self.run.excluded(group):
            summary.uniform += 1
        else:
            summary.unmade += 1
        if (summary.uniform + summary.unmade) % max(self.target, MANY) == 0:
            self.run.progress.note(
                f"excluded {summary.uniform} uniform groups, and {summary.unmade} by the environment's code; "
                f"{self.complete} of {self.target} are written: if this continues, the run never ends"
            )
