"""`Run`: the one controller of rollouts, for every purpose.

It selects the next row, starts groups while there is capacity for them, and yields each group when it ends. Process,
evaluate, serve, `validate --deep`, the Python API and environments written by hand all consume `Run.groups`; none of
them has a separate loop over groups. A slow source of rows is read concurrently with the running groups (`RowSource`),
and `RunBudget` ends a run that has used up its budget. `hermes_rl.runs.setup` opens the run of a spec.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.data.load import Split
from hermes_rl.data.rows import Row, Rows
from hermes_rl.errors import RunError
from hermes_rl.rollouts.admission import POLL_INTERVAL, Admission, Fixed, admission
from hermes_rl.rollouts.environment import Environment
from hermes_rl.rollouts.rollout import Encoder, Group, Rollout, group_provenance
from hermes_rl.rollouts.runner import RETRIES, RolloutRunner
from hermes_rl.runs.failure_rates import FailureRates
from hermes_rl.runs.groups import group_lines
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.remaining import Curriculum, Quarantine, group_name
from hermes_rl.runs.store import RolloutStore
from hermes_rl.runs.workers import PolicyWorkers, Workers
from hermes_rl.servers.base import POLICY, ChatServer
from hermes_rl.servers.usage import Meter, Usage
from hermes_rl.threads import end_tasks, run_in_thread

# ------------------------------------------------------------------------------------------ Sources of rows
# A finite list of rows is used directly. A generator, a streamed dataset or an environment's user code may wait for a
# network or compute; these are read in a thread, concurrently with the running groups.

T = TypeVar("T")


class RowSource:
    """Rows that can be iterated any number of times, as far as their source allows it.

    They are in memory or are streamed; an asynchronous source is iterated once.
    """

    def __init__(self, rows: Iterable[Row] | AsyncIterable[Row]) -> None:
        self._rows = rows
        self.slow = isinstance(rows, AsyncIterable) or (isinstance(rows, Rows) and rows.length is None)
        self._peeked_pass: tuple[Row, AsyncIterator[Row]] | None = None
        """First row and the remaining iterator, if a caller has read the row before the first pass."""

    @property
    def length(self) -> int | None:
        """Number of rows, or None if it is unknown or infinite."""
        return len(self._rows) if not self.slow and isinstance(self._rows, Rows | list | tuple) else None

    async def first(self) -> Row | None:
        """Return the first row as a representative, or None if there is none. The next pass starts with it."""
        rows = self._pass()
        async for row in rows:
            if self.slow:
                self._peeked_pass = row, rows
            return row
        return None

    async def require_first(self, split: Split) -> Row:
        """Return the first row; raises RunError if there is none."""
        first = await self.first()
        if first is not None:
            return first
        if split == "eval":
            raise RunError("the dataset has no rows to evaluate on; see dataset.eval, .filter and .limit")
        raise RunError("the dataset has no rows to run; see dataset.filter, .eval and .limit")

    async def __aiter__(self) -> AsyncIterator[Row]:
        peeked_pass, self._peeked_pass = self._peeked_pass, None
        if peeked_pass is not None:
            yield peeked_pass[0]
        async for row in peeked_pass[1] if peeked_pass is not None else self._pass():
            yield row

    async def _pass(self) -> AsyncIterator[Row]:
        if isinstance(self._rows, AsyncIterable):
            async for row in self._rows:
                yield row
        elif not self.slow:
            for row in self._rows:
                yield row
        else:
            rows = self._rows
            iterator: Iterator[Row] = await run_in_thread(lambda: iter(rows))
            while (following := await run_in_thread(lambda: next(iterator, None))) is not None:
                yield following


class Lookahead(Generic[T]):
    """Next item of an asynchronous source; a `slow` source is read concurrently with everything else, and calls `wake`
    then.
    """

    def __init__(self, source: AsyncIterator[T], *, slow: bool, wake: Callable[[], None]) -> None:
        self._source, self._slow, self._wake = source, slow, wake
        self._next_item: asyncio.Task[T | None] | None = None
        self.exhausted = False

    async def take(self) -> T | None:
        """Return the next item, or None if it has not arrived yet or there is no other (`exhausted`)."""
        if not self._slow:
            return self._answered(await self._next())
        if self._next_item is None:
            self._next_item = asyncio.create_task(self._next())
            self._next_item.add_done_callback(lambda _: self._wake())
        if not self._next_item.done():
            return None
        task, self._next_item = self._next_item, None
        return self._answered(task.result())

    async def _next(self) -> T | None:
        return await anext(self._source, None)

    def _answered(self, item: T | None) -> T | None:
        self.exhausted = item is None
        return item

    async def close(self) -> None:
        """Stop reading."""
        if self._next_item is not None:
            await end_tasks([self._next_item])


# ----------------------------------------------------------------- Budget of a run: failures, tokens, time


@dataclass
class RunBudget:
    """Counts the use of resources by a run; `None` is unlimited.

    `max_failures` are groups (rows, in evaluation) whose retries were exhausted by infrastructure failures,
    `max_tokens` prompt and completion tokens of the policy as counted by its servers, `max_cost` US dollars of all
    models as reported by servers or computed from the spec's prices, `deadline` seconds from the start. `meter` counts
    the calls of all starts of the run.
    """

    max_failures: int | None = None
    max_tokens: int | None = None
    deadline: float | None = None
    max_cost: float | None = None
    meter: Meter = field(default_factory=Meter)
    clock: Callable[[], float] = time.monotonic
    failures: Counter[str] = field(default_factory=Counter)
    excluded: Counter[str] = field(default_factory=Counter)
    """Groups that the spec drops by a stop reason caused by the policy."""
    last_failure: str = ""
    ended: str | None = None
    """Reason for which a caller ended the run early, or None."""

    def __post_init__(self) -> None:
        self.started = self.clock()

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of the policy."""
        return self.meter.roles.get(POLICY, Usage()).tokens

    @property
    def problem(self) -> str | None:
        """Reason why a limit cannot be enforced, because servers do not report its quantity; None if all can be."""
        if self.max_cost is not None and self.meter.unpriced:
            role = self.meter.unpriced[0]
            return (
                f"budget.max_cost cannot be enforced: the server of `{role}` does not report costs (usage.cost); "
                f"set servers.{role}.prices, or use budget.max_tokens"
            )
        if self.max_tokens is not None and self.meter.roles.get(POLICY, Usage()).uncounted:
            return (
                "budget.max_tokens cannot be kept: the policy's server does not say how many tokens a call has "
                "(usage.prompt_tokens and usage.completion_tokens); use budget.deadline"
            )
        return None

    def count(self, group: Group) -> None:
        """Count a finished group; raises RunError if too many groups failed."""
        if group.dropped is None:
            return
        failed = next((r for r in group.rollouts if r.error is not None and not r.stop_reason.graded), None)
        if failed is None and group.dropped.graded:
            self.excluded[str(group.dropped)] += 1  # the spec drops this stop reason; nothing has failed
            return
        self.failures[str(failed.stop_reason if failed is not None else group.dropped)] += 1
        self.last_failure = (failed.error if failed is not None else group.detail) or ""
        if self.max_failures is not None and self.failures.total() > self.max_failures:
            causes = ", ".join(f"{cause}: {count}" for cause, count in self.failures.most_common())
            raise RunError(
                f"{self.failures.total()} groups failed ({causes}), more than "
                f"budget.max_failures ({self.max_failures}) allows. The last: {self.last_failure}"
            )

    def require_kept(self) -> None:
        """Raise RunError if a limit of the budget cannot be enforced, such as a cost limit without known prices."""
        if (problem := self.problem) is not None:
            raise RunError(problem)

    def spent(self) -> str | None:
        """Return a description of the exhausted budget of model calls, after which no call starts; None if there is
        some left.
        """
        if self.max_tokens is not None and self.tokens >= self.max_tokens:
            return f"budget.max_tokens ({self.max_tokens}) is used up"
        if self.max_cost is not None and self.meter.known_cost >= self.max_cost:
            return f"budget.max_cost ({self.max_cost:g} $) is used up"
        return None

    def used_up(self) -> str | None:
        """Return a description of the exhausted limit that ends the run cleanly; None while there is budget."""
        if self.ended is not None:
            return self.ended
        if (spent := self.spent()) is not None:
            return spent
        if self.deadline is not None and self.clock() - self.started >= self.deadline:
            return f"budget.deadline ({self.deadline:g} s) has passed"
        return None


# ------------------------------------------------------------------------------------------------- The controller

BURST = 1000
"""Rollouts that start in one turn of the event loop; many thousands would stop it for seconds."""

DETAIL = 300
"""Maximum characters of a stop reason's detail in run.json."""
PASSED_BY = 256
"""Rows after which other tasks get their turn: each takes some 10 µs, and all rows of an epoch may be skipped."""

REFUSALS, SAME_REFUSALS = 16, 3
"""Groups refused before any rollout was graded, for any reason and for the same reason, from which the run ends: the
spec is wrong, not a row.
"""
MAX_QUARANTINED_IN_A_ROW = 100_000
"""Consecutive quarantined rows after which the search for another ends: a source may repeat the same rows forever."""

Skip = Callable[[Row, str, int], bool]
"""Returns True to skip a row, from the row, the id that its group would have, and the epoch."""


@dataclass(frozen=True)
class Plan:
    """Settings for running the groups of a run.

    Attributes:
        size: rollouts of a group, all on one row.
        split: "train" or "eval".
        repeat: the rows are run repeatedly, epoch after epoch; otherwise each is run once.
        require_complete: a group is dropped if the retries of a member are exhausted; else that member has no score.
        keep_lost: in such a group a member whose retries are exhausted counts as the worst, as long as two have a
            score.
        drop_uniform: a group whose scores are all equal is not passed to a trainer or a file.
        prefer_differing: rows whose groups still differ in score are preferred (see `Curriculum`).
        concurrency: rollouts in flight; None: as many as the machine and the servers carry.
        retries: maximum number of retries of a rollout after infrastructure failures.
        generation_params: sampling parameters of the policy, for the records of groups.
        fingerprint: fingerprint of the run, for the records of groups.
        id_marker: suffix of the id of each group, unique to the run; empty for a resumed run.
    """

    size: int
    split: str = "train"
    repeat: bool = True
    require_complete: bool = True
    keep_lost: bool = False
    drop_uniform: bool = False
    prefer_differing: bool = False
    concurrency: int | None = None
    retries: int = RETRIES
    generation_params: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    id_marker: str = ""


class Demand(Protocol):
    """Remaining demand of the consumer of a run's groups."""

    def wants(self, running: int) -> bool:
        """Return True if another group may start while `running` groups are running."""

    @property
    def satisfied(self) -> bool:
        """True if no further group must start; the run ends when the running groups have ended."""


class UnlimitedDemand:
    """Demand for every group."""

    satisfied = False

    def wants(self, running: int) -> bool:
        return True


class _RunningGroups:
    """Tasks of the groups of a run that are running, or have ended and were not taken; sets `changed` when one ends."""

    def __init__(self, changed: asyncio.Event) -> None:
        self.tasks: set[asyncio.Task[Group]] = set()
        self.ended: deque[asyncio.Task[Group]] = deque()
        self._changed = changed

    def __len__(self) -> int:
        return len(self.tasks)

    def add(self, task: asyncio.Task[Group]) -> None:
        self.tasks.add(task)
        task.add_done_callback(self._end)

    def take(self, *, refused: bool) -> Iterator[Group]:
        """Yield the groups that have ended; raises the errors of their tasks.

        `refused`: calls are refused, so that a group may have been cancelled.
        """
        while self.ended:
            task = self.ended.popleft()
            self.tasks.discard(task)
            if not (refused and task.cancelled()):
                yield task.result()

    def _end(self, task: asyncio.Task[Group]) -> None:
        self.ended.append(task)
        self._changed.set()


@runtime_checkable
class GroupRunner(Protocol):
    """Environment that runs complete groups by user code."""

    async def run_group(self, row: Row, group: str, epoch: int, size: int) -> Group: ...


@runtime_checkable
class GroupSerializer(Protocol):
    """Environment whose user code makes or changes the records of a group."""

    async def lines(self, group: Group, lines: list[dict[str, Any]]) -> list[dict[str, Any]]: ...


class Run:
    """Controls the rollouts of one environment on rows, by the plan.

    Args:
        store: the record of rollouts; None records nothing.
        encoder: gives rollouts their tokens; None leaves them without.
        budget: resources that the run may use.
        progress: receives messages for the user.
        policy: another policy than the environment's.
        options: limits and sampling of a rollout; None: the environment's options for the split.
        exclusive: as for `RolloutRunner`.
        workers: other processes that run rollouts; None: this process does.
        sibling_runs: the runs that share this process; this one is added to them.
    """

    def __init__(
        self,
        environment: Environment,
        rows: RowSource | Iterable[Row] | AsyncIterable[Row],
        plan: Plan,
        *,
        store: RolloutStore | None = None,
        encoder: Encoder | None = None,
        budget: RunBudget | None = None,
        progress: Progress | None = None,
        policy: ChatServer | None = None,
        options: LoopOptions | None = None,
        exclusive: Callable[[str], AbstractAsyncContextManager[Any]] = nullcontext,
        workers: Workers | PolicyWorkers | None = None,
        sibling_runs: list[Run] | None = None,
    ) -> None:
        self.environment, self.plan, self.store, self.encoder = environment, plan, store, encoder
        self.rows = rows if isinstance(rows, RowSource) else RowSource(rows)
        self.budget = budget or RunBudget()
        self.progress = progress or Progress(quiet=True)
        self.quarantine = Quarantine()
        self.failure_rates = FailureRates()
        self.stop_reasons: dict[str, dict[str, Any]] = {}
        """Attempts of this start by stop reason: their number (`count`; for an episode, the stop reason of the first
        seat that did not end naturally), and the detail of the first one (`first`), if it is known.
        """
        self.curriculum = Curriculum(plan.prefer_differing)
        self.admission: Admission
        if workers is None:
            self.admission = admission(plan.concurrency, policy or environment.policy)
        else:
            self.admission = workers.admission(plan.concurrency)
        # The error itself ends the run, not the number of failed groups.
        max_refusals = max(1, min(self.rows.length or REFUSALS, self.budget.max_failures or REFUSALS))
        self.runner = RolloutRunner(
            environment,
            split=plan.split,
            concurrency=plan.concurrency,
            policy=policy,
            options=options,
            store=store,
            encoder=encoder,
            on_played=self._notify_played,
            refusals=min(REFUSALS, max_refusals),
            same_refusals=min(SAME_REFUSALS, max_refusals),
            retries=plan.retries,
            exclusive=exclusive,
            elsewhere=workers,
        )
        self.on_played: list[Callable[[Rollout], None]] = []
        """Receives every rollout that was run, failed attempts included."""
        self._workers = workers
        self.sibling_runs = [] if sibling_runs is None else sibling_runs
        self.sibling_runs.append(self)
        self.started_groups = 0
        """Groups that this start of the run has started."""
        self.attempts = 0
        """Rollouts that this start of the run has run, failed attempts included."""
        self.paused = False
        """True if nothing new starts for now; rollouts in flight continue."""
        self._changed = asyncio.Event()
        self._recorded: frozenset[str] = frozenset()
        """Recorded groups that the curriculum has counted."""
        if store is not None and plan.prefer_differing:
            self._recorded = frozenset(group for group in store.groups if store.complete(group))
            for group in sorted(self._recorded, key=lambda group_id: store.groups[group_id].epoch):
                self.curriculum.count(store.groups[group].row_key, store.uniform(group))

    async def groups(
        self,
        *,
        skip: Skip = lambda row, group, epoch: False,
        demand: Demand | None = None,
        prepare: Callable[[Group], Awaitable[None]] | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Yield groups in the order in which they end; close it with `contextlib.aclosing`.

        Another group starts while the machine and the servers carry it and the demand requests it. A slow group does
        not block others, and neither does a slow source of rows. When the budget of tokens or cost is used up, groups
        that need another call of a model are cancelled. When the generator is closed, everything in flight is cancelled
        and released.

        Args:
            skip: selects rows to skip, such as rows that an earlier start has finished.
            demand: remaining demand; None: every group.
            prepare: processes an ended group, concurrently with all running groups, before it is yielded.

        Raises:
            RunError: a budget of failures is used up, or servers do not report tokens or cost although they are
                bounded.
        """
        demand = demand or UnlimitedDemand()
        running = _RunningGroups(self._changed)
        source = Lookahead(self._rows_to_run(skip), slow=self.rows.slow, wake=self._changed.set)
        prepared = self._prepare(prepare)
        burst_size = 0
        try:
            with self.budget.meter.heard_by(partial(self._require_budget, asyncio.get_running_loop())):
                while True:
                    self.budget.require_kept()
                    following = await source.take() if self._may_start_group(source, demand, len(running)) else None
                    is_exhausted = source.exhausted or demand.satisfied or self.budget.spent() is not None
                    if following is not None:
                        running.add(self._start(*following, prepared))
                        burst_size += self.plan.size
                        if burst_size >= BURST:
                            burst_size = 0
                            await asyncio.sleep(0)
                    elif is_exhausted and not running:
                        break
                    elif not running.ended:
                        await self._wait(for_ever=is_exhausted)
                    self._changed.clear()
                    for group in running.take(refused=self.budget.spent() is not None):
                        self._count_group(group)
                        yield group
        finally:
            await source.close()
            await end_tasks(running.tasks)

    def _may_start_group(self, source: Lookahead[Any], demand: Demand, running: int) -> bool:
        """Return True if another group may start while `running` groups are running."""
        if source.exhausted or demand.satisfied or self.paused or self.budget.spent() is not None:
            return False
        # Rollouts of other runs use the same cores and the same memory.
        other_open = sum(run.runner.open for run in self.sibling_runs if run is not self)
        return self.admission.admits(self.runner.open, other_open) and demand.wants(running)

    def _require_budget(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let no further call to a model start if the budget of calls is used up; rewards call models from threads."""
        if self.budget.problem is not None:
            loop.call_soon_threadsafe(self._changed.set)
        elif self.budget.spent() is not None:
            self.budget.meter.close()
            loop.call_soon_threadsafe(self._changed.set)
            if self._workers is not None:
                loop.call_soon_threadsafe(self._workers.refuse_calls)

    def wake(self) -> None:
        """Check now if another group may start: the demand has changed."""
        self._changed.set()

    @property
    def concurrency(self) -> int | None:
        """Target number of rollouts in flight; None: as many as the machine and the servers carry."""
        return self.admission.concurrency if isinstance(self.admission, Fixed) else None

    def set_concurrency(self, rollouts: int) -> None:
        """Keep this number of rollouts in flight from now on; surplus rollouts are finished."""
        self.admission = Fixed(max(1, rollouts), self.admission.descriptors, self.admission.memory)
        self.runner.slots.bound(max(1, rollouts))
        self.wake()

    async def lines(self, group: Group) -> list[dict[str, Any]]:
        """Return the records of a group for a file or a trainer; see `hermes_rl.runs.groups`."""
        lines = group.parts
        if lines is None:
            lines = await self._lines(group)
        return await self.environment.lines(group, lines) if isinstance(self.environment, GroupSerializer) else lines

    async def _lines(self, group: Group) -> list[dict[str, Any]]:
        compared = group.compared()
        if compared[0] is group:
            return group_lines(group, self.plan.generation_params, self.plan.fingerprint)
        lines = []
        for part in compared:
            if not (self.plan.drop_uniform and part.uniform):
                part.provenance = await group_provenance(part)
                lines += group_lines(part, self.plan.generation_params, self.plan.fingerprint, episode_group=group.id)
        # Together they are the group of the run, whose records are written and sent as one.
        return [{**line, "layer": index, "layers": len(lines)} for index, line in enumerate(lines)]

    def excluded(self, group: Group) -> bool:
        """Return True if a group is not for a trainer or a file: it was dropped, or all of its scores are equal."""
        return group.dropped is not None or (self.plan.drop_uniform and group.uniform)

    # ------------------------------------------------------------------ the next row

    async def _rows_to_run(self, skip: Skip) -> AsyncIterator[tuple[Row, str, int]]:
        """Yield each row to run, with the id of its group and the epoch."""
        epoch = passed_by = set_aside = 0
        occurrences: Counter[str] = Counter()
        while True:
            empty = True
            async for row in self.rows:
                passed_by += 1
                if passed_by % PASSED_BY == 0:
                    await asyncio.sleep(0)
                if row.key in self.quarantine:
                    set_aside += 1
                    if set_aside > MAX_QUARANTINED_IN_A_ROW:
                        return
                    continue
                empty, set_aside = False, 0
                occurrence = epoch if self.plan.repeat else occurrences[row.key]
                group = group_name(row.key, occurrence, repeat=self.plan.repeat) + self.plan.id_marker
                if not self.plan.repeat:
                    occurrences[row.key] += 1
                if self.store is not None:
                    self.store.require_same(row, group)
                if not skip(row, group, occurrence) and self.curriculum.wants(row.key, occurrence):
                    yield row, group, occurrence
            if empty or not self.plan.repeat:
                return
            epoch += 1

    # ------------------------------------------------------------------ running groups

    def _start(
        self, row: Row, group: str, epoch: int, prepare: Callable[[Group], Awaitable[None]]
    ) -> asyncio.Task[Group]:
        size, environment = self.plan.size, self.environment
        self.started_groups += 1
        if not isinstance(environment, GroupRunner):
            with self.budget.meter.counting():  # the group's tasks inherit it
                return self.runner.start(
                    row,
                    group,
                    size,
                    epoch=epoch,
                    require_complete=self.plan.require_complete,
                    keep_lost=self.plan.keep_lost,
                    on_change=self._changed.set,
                    prepare=prepare,
                )

        async def play() -> Group:
            with Meter(asyncio.current_task()).counting():
                played = await environment.run_group(row, group, epoch, size)
            await prepare(played)
            return played

        def leave(_: object) -> None:
            self.runner.open -= size

        self.runner.open += size
        with self.budget.meter.counting():
            task = asyncio.create_task(play())
        task.add_done_callback(leave)
        return task

    def _prepare(
        self, extra_preparation: Callable[[Group], Awaitable[None]] | None
    ) -> Callable[[Group], Awaitable[None]]:
        async def prepare(group: Group) -> None:
            if group.id not in self._recorded:
                self.curriculum.count(group.row.key, None if None in group.baseline else group.uniform)
            if self.encoder is not None and group.parts is None and not self.excluded(group):
                await self.encoder.encode_group(group)
            if extra_preparation is not None:
                await extra_preparation(group)

        return prepare

    def _notify_played(self, rollout: Rollout) -> None:
        self.attempts += 1
        word = self.failure_rates.count(rollout)
        if word is not None:
            self.progress.note(word)
        seat = min(rollout.seats, key=lambda seat: seat.stop_reason.finished_naturally)
        errors = seat.result.tool_errors if seat.result is not None else []
        detail = seat.error or (errors[-1].error if errors else None)
        self.stop_reasons.setdefault(str(seat.stop_reason), {"count": 0, "first": detail and detail[:DETAIL]})[
            "count"
        ] += 1
        for listen in self.on_played:
            listen(rollout)

    def _count_group(self, group: Group) -> None:
        """Count an ended group, and notify the user if something went wrong."""
        self.failure_rates.end(group)
        if group.dropped is not None and self.plan.require_complete:
            self.progress.note(f"group {group.id} dropped ({group.dropped}): {group.detail}")
        if self.quarantine.count(group):
            self.progress.note(f"quarantined row {group.row.key}: it failed repeatedly ({group.detail})")
        self.budget.count(group)

    async def _wait(self, *, for_ever: bool) -> None:
        """Wait until something has changed.

        There is no event for free capacity of a server, the cores or the memory: they are polled. (`wait_for` can lose
        a cancellation that arrives in the same moment as the awaited result.)
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(None if for_ever else POLL_INTERVAL):
                await self._changed.wait()
