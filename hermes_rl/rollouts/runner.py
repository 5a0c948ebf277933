"""Run rollouts and groups of an environment.

A rollout with an infrastructure failure is retried in a fresh sandbox; if its retries are exhausted, its group is
dropped. A rollout always becomes a `Rollout`, never an exception. Only cancellation and errors common to all rollouts
are raised: a `RunError`, and a `UserError` that several rows had (`refusals`) while no rollout was graded. Once a
rollout was graded, the user's input works for it, so a later `UserError` belongs to one rollout and is caused by its
row or agent.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.program import ProgramDriver, context_of
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.data.rows import Row
from hermes_rl.errors import Failure, RunError, UserError, is_panic
from hermes_rl.rollouts.environment import EndingPolicy, Environment, MultiAgentEnvironment
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey, RolloutState
from hermes_rl.servers.base import ChatServer
from hermes_rl.servers.client import VersionListener
from hermes_rl.servers.pool import Limiter
from hermes_rl.servers.usage import Meter
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import end_tasks
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tools.base import ToolRuntime

log = logging.getLogger(__name__)

COMPARED = 2
"""Scored members that a group needs so that one with exhausted retries can count as its worst."""
RETRIES = 2
"""Number of retries of a rollout after infrastructure failures."""


class RolloutLog(Protocol):
    """Storage of a run's rollouts as used by the runner; `hermes_rl.runs.store.RolloutStore` stores them on disk."""

    async def recall(self, key: RolloutKey) -> Rollout | None:
        """Return the recorded rollout of this key, so that it does not run again; it may wait for its group."""

    def attempts(self, key: RolloutKey) -> int:
        """Return the number of recorded attempts of this key, so that no id is used twice."""

    def record(self, *rollouts: Rollout) -> None:
        """Write records of rollouts together. A rollout that waits for its group is written again with its score."""


class RemoteExecutor(Protocol):
    """Executor that runs rollouts in other processes or on other machines, such as `hermes_rl.runs.workers.Workers`."""

    async def run(self, key: RolloutKey, split: str) -> Rollout:
        """Run one attempt, including its tokens and the teacher's scores; raise errors that stop the run."""

    async def compare(self, rollouts: list[Rollout]) -> None:
        """Add the rewards that need the whole group. Raises Failure."""


class TokenEncoder(Protocol):
    """Encoder that sets the tokens of rollouts, such as `hermes_rl.rollouts.rollout.Encoder`."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of messages, or None if unknown."""

    async def encode(self, rollout: Rollout) -> None:
        """Set the sequences of a rollout that has none."""


class WorkerLostError(RunError):
    """Worker processes died repeatedly while running the same rollout."""


class NullRolloutLog:
    """Storage that keeps no rollouts."""

    async def recall(self, key: RolloutKey) -> Rollout | None:
        return None

    def attempts(self, key: RolloutKey) -> int:
        return 0

    def record(self, *rollouts: Rollout) -> None:
        """Do nothing: no record outlives the process."""


def _do_nothing(_: object) -> None:
    """Do nothing, as the default callback."""


class RolloutRunner:
    """Run an environment's rollouts, in training or in evaluation.

    Args:
        split: "train" or "eval", passed to the environment.
        concurrency: maximum rollouts in flight; None: no limit.
        policy: policy that replaces the environment's own.
        options: limits and sampling of a rollout; default: the environment's options for the split.
        store: storage of rollouts.
        encoder: sets the tokens of a graded rollout before it is recorded.
        on_played: called after every rollout, including failed attempts, before another starts.
        refusals: number of groups that must fail with a `UserError`, while none was graded, before it is raised.
        same_refusals: the same, for groups with identical error messages.
        retries: number of retries after infrastructure failures.
        id_marker: distinguishes its rollouts from others of the same groups; see `RolloutKey`.
        exclusive: held while a group with that id runs, so that a concurrent request for the same group waits and uses
            its records.
        elsewhere: runs rollouts instead of this process, which then only decides and records.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        split: str = "train",
        concurrency: int | None = None,
        policy: ChatServer | None = None,
        options: LoopOptions | None = None,
        store: RolloutLog | None = None,
        encoder: TokenEncoder | None = None,
        on_played: Callable[[Rollout], None] = _do_nothing,
        refusals: int = 1,
        same_refusals: int = 1,
        retries: int = RETRIES,
        id_marker: str = "",
        exclusive: Callable[[str], AbstractAsyncContextManager[Any]] = nullcontext,
        elsewhere: RemoteExecutor | None = None,
    ) -> None:
        self.environment, self.split, self.elsewhere = environment, split, elsewhere
        self.options = options or environment.options(split)
        self.slots = Limiter(concurrency or sys.maxsize, fixed=True)
        self.policy = policy if policy is not None else environment.policy
        self.store: RolloutLog = store if store is not None else NullRolloutLog()
        self.encoder, self._on_played = encoder, on_played
        self._refusals, self._same_refusals = refusals, same_refusals
        self.retries, self.id_marker, self.exclusive = retries, id_marker, exclusive
        self.teacher = environment.teacher if split == "train" else None
        # Checked once: checking a protocol takes longer than the overhead of a seat.
        seated = isinstance(environment, MultiAgentEnvironment) and bool(environment.seats)
        self._seated: MultiAgentEnvironment | None = environment if seated else None  # type: ignore[assignment]
        self.open = 0
        """Number of members of started groups that have not ended."""
        self.replayed = 0
        """Number of retried rollouts after infrastructure failures."""
        self._refused: dict[str, set[str]] = {}
        """Error message without the row's key → groups that failed with it."""
        self._graded = False
        """True if any rollout was graded, so that the user's input works for at least one."""
        self._compared = False
        """True if the members of any group were compared."""
        self._playing: set[ToolRuntime] = set()
        self._unexpected: set[str] = set()
        """Unexpected errors whose traceback was logged."""

    @property
    def phases(self) -> Counter[str]:
        """Phases of the rollouts that this process is running, except those whose sandbox is being created."""
        return Counter(runtime.phase for runtime in self._playing)

    def start(
        self,
        row: Row,
        group: str,
        size: int,
        *,
        epoch: int = 0,
        require_complete: bool = True,
        keep_lost: bool = False,
        on_change: Callable[[], None] | None = None,
        prepare: Callable[[Group], Awaitable[None]] | None = None,
    ) -> asyncio.Task[Group]:
        """Start a group; `on_change` is called after every member, `prepare` processes the group before it is returned.

        With `require_complete`, the first member that fails permanently stops the others and the group is dropped.
        Without it, every member runs to its end and failed ones stay without a score. With `keep_lost`, failed members
        get the state `retries_exhausted` and count as the worst of a group in which two others have a score.
        """
        leaving = [_OpenMember(self, on_change).leave for _ in range(size)]
        playing = asyncio.create_task(
            self._play_group(
                Group(group, row, [], epoch),
                leaving,
                prepare,
                require_complete,
                keep_lost=require_complete and keep_lost,
            )
        )
        for leave in leaving:  # a task that is cancelled before its first step runs no `finally`
            playing.add_done_callback(leave)
        return playing

    async def _play_group(
        self,
        group: Group,
        leaving: Sequence[Callable[..., None]],
        prepare: Callable[[Group], Awaitable[None]] | None,
        require_complete: bool,
        *,
        keep_lost: bool,
    ) -> Group:
        async with self.exclusive(group.id):
            members: list[asyncio.Task[Rollout]] = []
            for index, leave in enumerate(leaving):
                key = RolloutKey(group.row, group.id, index, len(leaving), epoch=group.epoch, id_marker=self.id_marker)
                members.append(asyncio.create_task(self.member(key, leave, hold=keep_lost)))
                members[-1].add_done_callback(leave)
            try:
                going_on = set(members)
                while going_on and not (require_complete and group.dropped):
                    ended, going_on = await asyncio.wait(going_on, return_when=asyncio.FIRST_COMPLETED)
                    _note_failures(group, (task for task in members if task in ended), keep_lost=keep_lost)
            finally:
                await end_tasks(members)  # until their sandboxes are released
            if group.dropped is None and any(task.cancelled() for task in members):
                raise asyncio.CancelledError  # calls were refused: a later start runs the missing members
            group.rollouts = [task.result() for task in members if not task.cancelled()]
            abandoned_members = [rollout for rollout in group.rollouts if keep_lost and rollout.state.abandoned]
            if abandoned_members and group.dropped is None and len(group.rollouts) - len(abandoned_members) < COMPARED:
                group.dropped, group.detail = abandoned_members[0].stop_reason, abandoned_members[0].error
            await self._score_together(group)
            for rollout in [member for member in abandoned_members if member.state is RolloutState.FAILED]:
                if group.dropped is None:
                    for seat in rollout.seats:
                        seat.state = RolloutState.RETRIES_EXHAUSTED
                    restore_derived_fields(self.environment, rollout)
                self._record(rollout)
        if prepare is not None:
            await prepare(group)
        return group

    async def member(
        self, key: RolloutKey, played: Callable[[], None] = lambda: None, *, hold: bool = False
    ) -> Rollout:
        """Run one member of a group, with retries, until it is graded or its retries are exhausted.

        `played` is called as soon as only recording is left, so that another member may start. With `hold`, a member
        with exhausted retries is not recorded: its state is decided when its group has ended.
        """
        recalled = await self.store.recall(key)
        if recalled is not None:
            restore_derived_fields(self.environment, recalled)
            if recalled.state is RolloutState.WAITING and not self.environment.has_group_rewards:
                self._score(recalled)  # the rewards that compared its group are no longer in the spec
                self._record(recalled)
            return recalled
        first = self.store.attempts(key)
        for attempt in range(first, first + self.retries + 1):
            await self.slots.acquire()
            try:
                rollout = await self._run_attempt(replace(key, attempt=attempt))
            finally:
                self.slots.release()
            self._on_played(rollout)
            last = not rollout.stop_reason.rule.retried or attempt == first + self.retries
            if not last:
                self.replayed += 1
                log.info("retrying rollout %s (%s): %s", rollout.id, rollout.stop_reason, rollout.error)
            if last:
                played()
                # Let the next one start first, so that its model works while this one is recorded.
                await asyncio.sleep(0)
            if rollout.error is None and self.encoder is not None:
                await self.encoder.encode(rollout)
            if not (last and hold and rollout.state.abandoned):
                self._record(rollout)
            if last:
                break
        return rollout

    def _record(self, *rollouts: Rollout) -> None:
        """Record rollouts; keep their JSON records only while they wait for their group."""
        self.store.record(*rollouts)
        for rollout in rollouts:
            if rollout.state is not RolloutState.WAITING:
                rollout.line = None

    async def alone(self, key: RolloutKey) -> Rollout:
        """Run one rollout without a group; a reward that compares group members gets it as a group of one."""
        if not self.environment.has_group_rewards:
            return await self.member(key)
        return (await self.start(key.row, key.group, 1)).rollouts[0]

    async def attempt(self, key: RolloutKey) -> Rollout:
        """Run one attempt for a runner in another process: with its tokens, and not recorded."""
        rollout = await self._run_attempt(key)
        if rollout.error is None and self.encoder is not None:
            await self.encoder.encode(rollout)
        return rollout

    async def _run_attempt(self, key: RolloutKey) -> Rollout:
        if self.elsewhere is not None:
            try:
                rollout = await self.elsewhere.run(key, self.split)
            except (UserError, WorkerLostError) as error:
                rollout = Rollout(key, 0)
                self._fail_alone(rollout, error)
            self._graded = self._graded or rollout.error is None
            restore_derived_fields(self.environment, rollout)
            versions = [each.weights.after for each in rollout.ledger if each.weights.after is not None]
            if versions and isinstance(self.policy, VersionListener):
                self.policy.hear(max(versions))  # a server may report its version only in replies
            return rollout
        rollout = await self.run(key)
        self._graded = self._graded or rollout.error is None
        if self.teacher is not None and rollout.error is None:
            started = time.perf_counter()
            if self.encoder is not None:
                await self.encoder.encode(rollout)
            with Meter(asyncio.current_task()).counting() as meter:
                try:
                    await self.teacher.ask(rollout)
                except Failure as failure:
                    rollout.fail(failure)
            rollout.add_usage(meter.roles, played=False)
            rollout.timings["teacher"] = time.perf_counter() - started
        return rollout

    async def run(self, key: RolloutKey) -> Rollout:
        """Run one rollout to its stop reason and grade it."""
        rollout = Rollout(key, key.seed(self.environment.seed), started_at=time.time())
        started = time.perf_counter()
        with Meter(asyncio.current_task()).counting() as meter:
            try:
                async with self.environment.runtime(key) as runtime:
                    self._playing.add(runtime)
                    try:
                        await self._converse(rollout, runtime)
                        await self._grade(rollout, runtime)
                    finally:
                        self._playing.discard(runtime)
                        rollout.timings["sandbox"] = runtime.start_seconds
                        if (sandbox_started_at := runtime.sandbox_started_at) is not None:
                            rollout.sandbox_start = {"started_at": sandbox_started_at, "seconds": runtime.start_seconds}
            except UserError as error:
                self._fail_alone(rollout, error)
            except RunError:
                raise
            except Failure as failure:
                if rollout.state is RolloutState.FAILED:
                    rollout.fail(failure)
                else:
                    # A graded rollout stays graded: otherwise an agent whose processes do not stop could avoid grading.
                    log.error(
                        "rollout %s keeps its grade, but its machine was not released: %s", rollout.id, failure.detail
                    )
            except BaseException as error:
                if not (isinstance(error, Exception) or is_panic(error)):
                    raise
                self._fail_unexpectedly(rollout, error)
        rollout.add_usage(meter.roles, played=True)
        for seat in rollout.seats:
            seat.started_at = rollout.started_at
            if seat.result is not None:
                seat.timings |= seat.result.timings.record()
            seat.timings["total"] = time.perf_counter() - started
        return rollout

    def _fail_alone(self, rollout: Rollout, error: UserError | WorkerLostError) -> None:
        """Assign the error to this rollout if another was graded or few groups have the error; otherwise raise it
        again.
        """
        if not self._graded:
            alike = self._refused.setdefault(str(error).replace(rollout.key.row.key, ""), set())
            alike.add(rollout.key.group)
            refused = len(set().union(*self._refused.values()))
            if refused >= self._refusals or len(alike) >= self._same_refusals:
                raise error
        log.error("rollout %s: %s", rollout.id, error)
        rollout.worker_died = isinstance(error, WorkerLostError)
        early_stop_reason = StopReason.SANDBOX_FAILURE if rollout.worker_died else StopReason.ROW_FAILURE
        rollout.fail(
            Failure(str(error), stop_reason=early_stop_reason if rollout.result is None else StopReason.REWARD_FAILURE)
        )

    def _fail_unexpectedly(self, rollout: Rollout, error: BaseException) -> None:
        """Assign an unexpected error to this rollout; log its traceback once."""
        detail = f"unexpected {type(error).__name__}: {error}"
        log.error("rollout %s: %s", rollout.id, detail, exc_info=None if detail in self._unexpected else error)
        self._unexpected.add(detail)
        if rollout.state is RolloutState.FAILED:  # otherwise it was graded, and keeps its grade
            stop_reason = StopReason.SANDBOX_FAILURE if rollout.result is None else StopReason.REWARD_FAILURE
            rollout.fail(Failure(detail, stop_reason=stop_reason))

    async def _converse(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        options = replace(self.options, seed=rollout.seed if self.options.seeded else None)
        tokenizer = None if self.encoder is None else self.encoder.tokenizer
        if self._seated is not None:
            await self._play_seats(rollout, runtime, self._seated, options, tokenizer)
            return
        program = self.environment.program(rollout.key, runtime, partial(context_of, self.policy, options))
        driver: HermesAgentLoop | ProgramDriver
        if program is not None:
            driver = ProgramDriver(self.policy, program, runtime, options, tokenizer)
        else:
            driver = HermesAgentLoop(
                self.policy,
                runtime.toolkit.schemas,
                task_id=runtime.task_id,
                options=options,
                user=await self.environment.user(rollout.key, runtime),
                tokenizer=tokenizer,
            )
        rollout.result = await driver.run(self.environment.prompt(rollout.key.row))
        rollout.stop_reason = rollout.result.stop_reason

    async def _play_seats(
        self,
        rollout: Rollout,
        runtime: ToolRuntime,
        environment: MultiAgentEnvironment,
        options: LoopOptions,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Run an episode of several agents; `rollout` belongs to the first trained seat."""
        seats = environment.seated(rollout.key)
        rollout.seat, *others = sorted(seats, key=lambda seat: not seat.trained)
        keys = [replace(rollout.key, seat=seat.name) for seat in others]
        seeds = [key.seed(environment.seed) for key in keys]
        rollout.others = [Rollout(key, seed, seat=seat) for key, seed, seat in zip(keys, seeds, others, strict=True)]
        drawn = {each.seat.name: each.seed if self.options.seeded else None for each in rollout.seats}
        user = await self.environment.user(rollout.key, runtime)
        table = environment.table(rollout.key, seats, runtime, self.policy, options, drawn, tokenizer, user)
        outcome = None
        try:
            outcome = await table.play(environment.schedule(rollout.key, runtime))
        except Failure as failure:
            failure.result = table.seats[rollout.seat.name].result
            raise
        finally:
            for each in rollout.seats:
                each.result = table.seats[each.seat.name].result
                if each.result is not None:
                    each.stop_reason, each.result.seat, each.result.outcome = (
                        each.result.stop_reason,
                        each.seat.name,
                        outcome,
                    )

    async def _grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        dropped = next((seat.stop_reason for seat in rollout.seats if self._policy(seat) == "drop"), None)
        if dropped is not None:
            for seat in rollout.seats:
                seat.error = f"the spec drops rollouts that end with {dropped}"
                seat.state = RolloutState.EXCLUDED
            return
        started, runtime.phase = time.perf_counter(), "rewards"
        for machine in (runtime, *runtime.apart.values()):
            await machine.settle()
        try:
            await self.environment.grade(rollout, runtime)
        finally:
            rollout.timings["rewards"] = time.perf_counter() - started
        if self.environment.has_group_rewards:
            for seat in rollout.seats:
                seat.state = RolloutState.WAITING
        else:
            self._score(rollout)

    def _policy(self, rollout: Rollout) -> EndingPolicy:
        return self.environment.on_stop_policy(rollout.stop_reason)

    def _score(self, rollout: Rollout) -> None:
        scores = [
            float(policy) if isinstance(policy := self._policy(seat), int | float) else self.environment.score(seat)
            for seat in rollout.seats
        ]
        for seat, score in zip(rollout.seats, scores, strict=True):
            seat.scored(score)
        restore_derived_fields(self.environment, rollout)

    async def _score_together(self, group: Group) -> None:
        """Call the rewards that compare the members, after which the members are scored."""
        waiting = [rollout for rollout in group.rollouts if rollout.state is RolloutState.WAITING]
        if not waiting:
            return
        if group.dropped is not None:
            never = any(rollout.state is RolloutState.EXCLUDED for rollout in group.rollouts)
            for rollout in waiting:
                # The record of a failed one still waits: a later start runs the missing member and compares both.
                outcome = "is excluded" if never else "failed"
                for seat in rollout.seats:
                    seat.state = RolloutState.EXCLUDED if never else RolloutState.FAILED
                    seat.error = f"not compared with its group, of which another member {outcome}: {group.detail}"
        else:
            await self._compare(group)
        self._record(*waiting)

    async def _compare(self, group: Group) -> None:
        members = [rollout for rollout in group.rollouts if not rollout.state.abandoned]
        try:
            with Meter(asyncio.current_task()).counting() as meter:
                await (self.elsewhere.compare if self.elsewhere is not None else self.environment.grade_group)(members)
            members[0].add_usage(meter.roles, played=False)  # shared by all members, so any of them may hold it
            for rollout in members:
                self._score(rollout)
            self._compared = True
        except (Failure, UserError) as error:
            if isinstance(error, UserError) and not self._compared:
                raise
            failure = (
                error if isinstance(error, Failure) else Failure(str(error), stop_reason=StopReason.REWARD_FAILURE)
            )
            for rollout in members:
                rollout.fail(failure)
            group.dropped, group.detail = failure.stop_reason, failure.detail


def _note_failures(group: Group, ended: Iterable[asyncio.Task[Rollout]], *, keep_lost: bool) -> None:
    """Drop a group of which a member has failed; `keep_lost`: one whose retries are exhausted does not count."""
    for rollout in [task.result() for task in ended if not task.cancelled()]:
        if rollout.error is not None and not (keep_lost and rollout.state.abandoned):
            group.dropped = group.dropped or rollout.stop_reason
            group.detail = group.detail or rollout.error


def restore_derived_fields(environment: Environment, rollout: Rollout) -> None:
    """Restore the fields that are not recorded: seed, mask, per-turn credit."""
    for seat in rollout.seats:
        policy = environment.on_stop_policy(seat.stop_reason)
        seat.seed = seat.key.seed(environment.seed)
        seat.masked = policy == "mask" or seat.state is RolloutState.RETRIES_EXHAUSTED
        fixed = isinstance(policy, int | float)
        seat.credit = None if fixed or seat.score is None else environment.credit(seat)


class _OpenMember:
    """A member that counts as open; it is removed exactly once, even if its task never started."""

    __slots__ = ("_on_change", "_runner")

    def __init__(self, runner: RolloutRunner, on_change: Callable[[], None] | None) -> None:
        self._runner: RolloutRunner | None = runner
        self._on_change = on_change
        runner.open += 1

    def leave(self, *_: object) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.open -= 1
            if self._on_change is not None:
                self._on_change()
