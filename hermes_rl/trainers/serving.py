"""Serve a trainer: send the groups of a run, one after another, to any implementation of the trainer interface."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from math import inf
from typing import Any, TypeVar

from hermes_rl.data.rows import Row
from hermes_rl.errors import RunError, UserError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog, content_of
from hermes_rl.runs.groups import GroupsFile
from hermes_rl.runs.remaining import Quarantine
from hermes_rl.runs.run import Run
from hermes_rl.threads import end_tasks, run_in_thread, settled
from hermes_rl.trainers.base import GroupRefused, Registered, Registration, Trainer, TrainerState
from hermes_rl.trainers.checks import Checks

logger = logging.getLogger(__name__)
T = TypeVar("T")

OUTBOX = 64
"""Maximum number of groups waiting to be sent; a slow trainer may request any number."""
IN_VAIN = 128
"""Number of consecutive useless groups after which serving ends. Even if only one group in twenty were usable, the
probability of such a series would be one in 700.
"""
WAYS_OUT = {
    "uniform": "such a group teaches nothing: choose rows that the policy solves sometimes, give rewards more values, "
    "raise serve.group_size or agent.temperature, or send such groups too (serve.drop_uniform: false)",
    "too_long": "shorten rollouts (agent.max_trajectory_tokens, agent.max_tokens, agent.max_turns), raise "
    "serve.max_token_length if the trainer takes longer sequences, or set serve.on_too_long to truncate or mask",
    "stale": "sample with newer weights (serve.concurrency, atropos.max_batches_offpolicy), raise serve.max_staleness, "
    "or send such groups too (serve.on_stale: keep)",
    "unproven": "hermes-rl doctor SPEC explains why tokens are not exact; serve.allow_inexact: true sends these too",
}
"""Advice about groups that are not sent, by cause."""
LOOK = 0.1
"""Seconds between two polls of the trainer."""
ASKING = 10.0
"""Timeout in seconds for a server to report its weights when groups have arrived."""
CLOSING = 60.0
"""Timeout in seconds for a trainer to close."""
LAST_EVALUATIONS = 600.0
"""Maximum seconds for evaluations after the trainer's last step."""


class Hooks:
    """Actions of an environment in addition to sending groups; this one does nothing. See
    `hermes_rl.env.serve.EnvHooks`.
    """

    evaluate_every = 0
    """Steps between two evaluations; 0 or less: never."""
    evaluation_share = 1.0
    """Fraction of the groups in flight that continue during an evaluation: 1 all, 0: none starts."""

    async def registered(self, answer: Registered, step: int) -> None:
        """Handle the trainer's response to the registration."""

    async def stepped(self, before: int, now: int) -> None:
        """Handle a change of the trainer's step."""

    async def evaluate(self, step: int) -> None:
        """Evaluate with the weights of this step."""

    async def sending(self, group: Group, lines: list[dict[str, Any]]) -> None:
        """Handle a group that is about to be sent."""

    async def excluded(self, group: Group, cause: str, detail: str) -> None:
        """Handle a group that is not sent."""

    async def arrived(self, ages: Sequence[int], stale: int) -> None:
        """Handle groups that the trainer has taken from its queue.

        Args:
            ages: current age of the oldest weights of each, in versions, if known.
            stale: number of groups older than allowed.
        """

    def state(self) -> Any:
        """Return the state to restore with the trainer's step, as JSON."""

    def restore(self, state: Any) -> None:
        """Restore the result of `state` at the step at which the trainer continues."""


class Serving:
    """Feed a trainer until it has completed its steps; this is the demand of the run's groups.

    Args:
        run, trainer: source and receiver of the groups.
        registration, log: description of the environment for the trainer, and the log of deliveries.
        checks: conditions for groups; the trainer's maximum sequence length is added to them.
        hooks: further actions of the environment.
        file: file to which sent groups are written too.
        version: returns the newest version of the policy's weights, if the trainer does not report it.
        together: environments of this process that feed the trainer; None: only this one.
    """

    def __init__(
        self,
        run: Run,
        trainer: Trainer,
        registration: Registration,
        log: DeliveryLog,
        checks: Checks,
        hooks: Hooks,
        *,
        file: GroupsFile | None = None,
        version: Callable[[], Awaitable[int | None]] | None = None,
        together: SharedTrainer | None = None,
    ) -> None:
        self.run, self.trainer, self.registration = run, trainer, registration
        self.log, self.checks, self.hooks, self.file = log, checks, hooks, file
        self.version = version
        self.state = TrainerState(step=0, wants=0)
        self.sent = 0
        """Number of groups sent since this start."""
        self.stopped: str | None = None
        self.weight = registration.weight
        """Weight for its fraction of the sequences of all environments; below 0: it takes no part in the turns."""
        self.looked = time.monotonic()
        """Time of its last poll of the trainer."""
        self.sent_at_poll = 0
        """Sequences that the trainer had from all environments when that poll started."""
        self.together = together or SharedTrainer()
        self._ended = self._settled = self._wants_told = 0
        """Groups of this start that have ended; groups that the trainer has received, or will not receive; sequences
        whose start the others know.
        """
        self._outbox: asyncio.Queue[Group] = asyncio.Queue()
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._in_vain: Counter[str] = Counter()
        """Useless groups since the last sent one, by cause."""
        self._oldest: dict[str, int] = {}
        """Oldest weights of each group in the trainer's queue."""
        self._written = set() if file is None else {line["group"] for line in file.journal.read("group")}
        self._evaluation: asyncio.Task[None] | None = None
        self._due: int | None = None
        """Step of an evaluation that waits for the running one."""
        self._before_evaluation = 0
        """Number of groups in flight when the evaluation started."""

    async def play(self) -> None:
        """Serve until the trainer has completed its steps, or a budget is used up.

        Raises:
            RunError: the trainer is lost, too many groups failed, or no row is left.
        """
        await self._register()
        await self.together.registered.wait()
        self.together.feeding.append(self)
        tasks = [asyncio.create_task(work) for work in (self._consume(), self._send_all(), self._poll_until_done())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            self.together.leave(self)
            for task in done:
                task.result()
            await self._finish_evaluations()
        finally:
            self.together.leave(self)
            if self._evaluation is not None:
                tasks.append(self._evaluation)
            await end_tasks(tasks)

    # ------------------------------------------------------------------ demand (`runs.run.Demand`)

    @property
    def satisfied(self) -> bool:
        self.stopped = self.stopped or self.run.budget.used_up()
        return self.stopped is not None or self.state.finished

    def wants(self, running: int) -> bool:
        if self._wants_told < self.started_sequences:
            self._wants_told = self.started_sequences
            self.together.wake()
        return self.can_start and self.room and self.together.turn(self)

    # ------------------------------------------------------------------ coordination with others (`SharedTrainer`)

    @property
    def started_sequences(self) -> int:
        """Number of sequences that it has started."""
        return self.run.started_groups * self.run.plan.size

    @property
    def pending(self) -> int:
        """Number of sequences started but not received by the trainer: running, queued or being sent."""
        return (self.run.started_groups - self._settled) * self.run.plan.size

    @property
    def can_start(self) -> bool:
        """True if it could start another group on its own."""
        return not self._is_waiting and not self._is_full

    @property
    def full(self) -> bool:
        """True if it has the maximum number of groups in flight, and starts another as soon as one ends."""
        return not self._is_waiting and self._is_full

    @property
    def _is_waiting(self) -> bool:
        """True if nothing new may start, even when a group ends."""
        if self.satisfied or self.run.paused:
            return True
        share = self.hooks.evaluation_share if self._evaluation is not None else 1.0
        return share < 1 and self._running_count >= self._before_evaluation * share

    @property
    def _is_full(self) -> bool:
        plan = self.run.plan
        if self._outbox.qsize() >= OUTBOX:
            return True
        if plan.concurrency is None:
            return False
        return self._running_count >= max(1, round(plan.concurrency // plan.size * self.state.share))

    @property
    def room(self) -> bool:
        """True if the trainer would accept another group, according to the last poll."""
        return self.together.in_flight(self.sent_at_poll) < self.state.wants * self.run.plan.size

    @property
    def _running_count(self) -> int:
        """Number of running groups."""
        return self.run.started_groups - self._ended

    def wake(self) -> None:
        """Check again if another group may start."""
        self.run.wake()

    # ------------------------------------------------------------------ the trainer

    async def _register(self) -> None:
        answer = await self._call_trainer(Registered, "register", self.registration, self.log)
        for group in [group for group in self.log.doubtful if group in answer.arrived]:
            self.log.has(group)
        lost_groups = [group for group in self.log.delivered if group in answer.lost]
        going_on = bool(self.log.delivered)
        self.log.record_loss(lost_groups)
        self.log.registered(answer.session)
        self.state = await self._state()
        step_mark = self.log.mark_at(self.state.step)
        if not self.log.marks or self.log.marks[-1].step != self.state.step:
            self.log.step(self.state.step, self.state.queued, step_mark.state)
        self.run.quarantine = Quarantine(step_mark.state.get("quarantined") or ())
        if step_mark.state.get("environment") is not None:
            self.hooks.restore(step_mark.state["environment"])
        bounds = [bound for bound in (self.checks.longest, answer.longest) if bound is not None]
        self.checks.longest = min(bounds, default=None)
        await self.hooks.registered(answer, self.state.step)
        if going_on:
            more = f", resending {len(lost_groups)} groups that it had not received" if lost_groups else ""
            self.run.progress.note(f"resuming at step {self.state.step}{more}; finished groups do not run again")

    async def _state(self) -> TrainerState:
        return await self._call_trainer(TrainerState, "state")

    async def _call_trainer(self, kind: type[T], method: str, *arguments: Any) -> T:
        """Return the result of a trainer's method, which may be user code.

        Raises:
            UserError, GroupRefused: raised by the method; the latter by `send` alone.
            RunError: the method raises this or another exception, or returns a value of another type.
        """
        trainer = f"trainer {self.trainer.name}: {method}"
        try:
            call = await settled(trainer, getattr(self.trainer, method), *arguments)
            if call.cancelled():
                raise RunError(f"{trainer} raised CancelledError")
            answer = call.result()
        except (UserError, RunError, asyncio.CancelledError):
            raise
        except Exception as error:
            if isinstance(error, GroupRefused) and method == "send":
                raise
            problem = f"{type(error).__name__}: {error}"
            raise RunError(f"{trainer} raised {problem:.2000}") from error
        if not isinstance(answer, kind):
            raise RunError(f"{trainer} returned {answer!r:.60}, not a {kind.__name__}")
        return answer

    async def _poll_until_done(self) -> None:
        """Poll the trainer until it has completed its steps."""
        while not self.satisfied:
            await asyncio.sleep(LOOK)
            # Groups that arrive during the poll may be missing in its result, and count as in flight until the next
            # one.
            now, sent_at_poll, before = time.monotonic(), self.together.sent, self.state.step
            state = await self._state()
            self.looked, self.sent_at_poll, self.state = now, sent_at_poll, state
            if self.state.step != before:
                # Record the groups that the trainer has used by this step, between two sends.
                async with self.together.under_way:
                    if self.together.sent != sent_at_poll:  # it is unknown if it counted the group that was being sent
                        self.state = await self._state()
                    state_then = {"quarantined": self.run.quarantine.record(), "environment": self.hooks.state()}
                    self.log.step(self.state.step, self.state.queued, state_then)
                await self._look_at_arrivals()
                # Once, even if the step skipped several multiples of `evaluate_every`.
                every = self.hooks.evaluate_every
                if every > 0 and before // every < self.state.step // every:
                    self._due = self.state.step
                await self.hooks.stepped(before, self.state.step)
            self._begin_evaluation()
            self.together.wake()

    async def _look_at_arrivals(self) -> None:
        """Determine the age of the groups that the trainer has just taken, and log a warning if they are too old.

        They were fresh enough when they were sent. Weights may have changed while they waited in the trainer's queue,
        from which nothing can be withdrawn.
        """
        waiting = set(self.log.delivered[self.log.marks[-1].groups_taken :])
        oldest = [self._oldest.pop(group) for group in list(self._oldest) if group not in waiting]
        now = None
        if oldest:
            with suppress(TimeoutError):  # do not wait for a server that loads weights
                async with asyncio.timeout(ASKING):
                    now = await self._newest_version()
        if now is None:
            return
        ages, bound = [max(0, now - version) for version in oldest], self.checks.max_staleness
        stale = 0 if bound is None else sum(age > bound for age in ages)
        if stale:
            logger.warning(
                "%d of %d groups were too old when the trainer took them at step %d: up to %d versions old, and "
                "serve.max_staleness allows %s. They were fresh when they were sent, and have waited in the trainer's "
                "queue: let fewer wait there (atropos.max_batches_offpolicy), or bound the importance ratio in the "
                "trainer",
                stale, len(ages), self.state.step, max(ages), bound,
            )  # fmt: skip
        await self.hooks.arrived(ages, stale)

    async def _newest_version(self) -> int | None:
        """Return the version of the newest weights, as reported by the trainer or the policy's server."""
        if self.state.version is not None or self.version is None:
            return self.state.version
        return await self.version()

    # ------------------------------------------------------------------ evaluations

    def _begin_evaluation(self) -> None:
        """Start the due evaluation, or leave it due while another one runs."""
        if self._evaluation is not None and self._evaluation.done():
            self._evaluation.result()
            self._evaluation = None
        if self._due is None or self._evaluation is not None:
            return
        step, self._due = self._due, None
        self._before_evaluation = self.run.runner.open // self.run.plan.size
        self._evaluation = asyncio.create_task(self.hooks.evaluate(step))

    async def _finish_evaluations(self) -> None:
        """Wait for the evaluations of the last steps, for a limited time: the model server may end with its trainer."""
        try:
            async with asyncio.timeout(LAST_EVALUATIONS):
                self._begin_evaluation()
                while self._evaluation is not None:
                    await asyncio.wait([self._evaluation])
                    self._begin_evaluation()
        except TimeoutError:
            logger.error("stopped the evaluation of the last step: it took more than %g seconds", LAST_EVALUATIONS)

    # ------------------------------------------------------------------ groups

    async def _consume(self) -> None:
        """Take finished groups of the run; sending them does not block running ones."""
        async with aclosing(self.run.groups(skip=self._skip, demand=self, prepare=self._prepare)) as playing:
            async for group in playing:
                self._ended += 1
                if not self.run.excluded(group):
                    self._outbox.put_nowait(group)
                    continue
                self._settled += 1
                if group.dropped is not None:
                    await self._leave_out(group, str(group.dropped), group.detail or "")
                else:
                    await self._leave_out(group, "uniform", f"all of its scores are the same, {group.scores[:1]}")
        if self.satisfied:
            await asyncio.Event().wait()  # the end of the run is detected elsewhere
        aside = self.run.quarantine.record()
        if not aside:
            raise RunError("no rows are left, and the trainer has not completed its steps")
        raise RunError(f"every row is quarantined, because each failed repeatedly. The last: {aside[-1]['detail']}")

    def _skip(self, row: Row, group: str, epoch: int) -> bool:
        if self.log.is_resolved(group):
            return True
        store = self.run.store
        return store is not None and store.excluded(group, drop_uniform=self.run.plan.drop_uniform)

    async def _prepare(self, group: Group) -> None:
        if not self.run.excluded(group):
            self._lines[group.id] = await self.run.lines(group)

    async def _send_all(self) -> None:
        while True:
            group = await self._outbox.get()
            try:
                await self._send(group, self._lines.pop(group.id, []))
                self._settled += 1
                self.together.sent += self.run.plan.size
            except GroupRefused as refused:
                self._settled += 1
                self.log.exclude(group.id, refused.cause)
                await self._leave_out(group, refused.cause, refused.detail)

    async def _leave_out(self, group: Group, cause: str, detail: str) -> None:
        """Record that a group is not sent. Raises `RunError` after too many consecutive useless groups."""
        remedy = WAYS_OUT.get(cause)
        first = not self._in_vain[cause]
        message = f"{detail}; {remedy} (further ones are in the run's log alone)" if first and remedy else detail
        logger.log(
            logging.WARNING if first else logging.INFO, "group %s was not sent (%s): %s", group.id, cause, message
        )
        await self.hooks.excluded(group, cause, detail)
        if group.dropped is not None and not group.dropped.graded:
            return  # an infrastructure failure, which the budget counts
        self._in_vain[cause] += 1
        if self._in_vain.total() < IN_VAIN:
            return
        counts = ", ".join(f"{count} {cause}" for cause, count in self._in_vain.most_common() if count)
        main_cause, _ = self._in_vain.most_common(1)[0]
        raise RunError(
            f"the last {IN_VAIN} groups were of no use to the trainer ({counts}), the last one because {detail}"
            + (f". {main_cause}: {WAYS_OUT[main_cause]}" if main_cause in WAYS_OUT else "")
        )

    async def _send(self, group: Group, lines: list[dict[str, Any]]) -> None:
        if not lines:
            raise GroupRefused("no_lines", "the environment's own code has created no lines from it")
        version = self.state.version if self.checks.max_staleness is None else await self._newest_version()
        usable = self.checks.usable(lines, version)
        await self.hooks.sending(group, usable)
        if self.file is not None and group.id not in self._written:
            self.file.write(await self.file.encoded(usable))
            self._written.add(group.id)
        scores = list(usable[0]["scores"])  # the trainer owns the records once it has them, and may change them
        oldest = [line["provenance"]["oldest"] for line in usable if line.get("provenance")]
        content = await run_in_thread(lambda: content_of(usable[-1]["tokens"], usable[-1]["scores"]))
        async with self.together.under_way:
            self.log.sending(group.id, content)
            await self._call_trainer(object, "send", group, usable)
            self.log.has(group.id)
        if oldest and None not in oldest:
            self._oldest[group.id] = min(oldest)
        self.sent += 1
        self._in_vain.clear()
        self.run.progress.show(f"step {self.state.step} · {self.sent} groups sent", scores)


async def closed(trainer: Trainer) -> None:
    """Close a trainer, for a limited time. What fails is logged, since the run has ended before."""
    try:
        async with asyncio.timeout(CLOSING):
            call = await settled(f"trainer {trainer.name}: close", trainer.close)
        if not call.cancelled():
            call.result()
    except Exception as error:  # noqa: BLE001 - the code of a trainer
        logger.warning("trainer %s: close failed: %s: %s", trainer.name, type(error).__name__, error)


class SharedTrainer:
    """The environments of one process that feed one trainer: their turns, and a lock for sending.

    Their weights determine their fractions of the sequences. The next one to start a group has the fewest started
    sequences relative to its weight; one that cannot start does not block others, and catches up later.
    """

    def __init__(self, environment_count: int = 1) -> None:
        self.feeding: list[Serving] = []
        self.under_way = asyncio.Lock()
        """Held while a group is sent, so that at most one is in doubt."""
        self.registered = asyncio.Barrier(environment_count)
        """None sends before all are registered: the trainer's latest group shows which groups arrived."""
        self.sent = 0
        """Number of sequences that the trainer has received from all of them."""

    def leave(self, serving: Serving) -> None:
        """Record that it starts nothing more; may be called twice."""
        if serving in self.feeding:
            self.feeding.remove(serving)
            self.wake()

    @property
    def pending(self) -> int:
        """Number of sequences started by any of them and not received by the trainer."""
        return sum(serving.pending for serving in self.feeding)

    def in_flight(self, sent_at_poll: int) -> int:
        """Return the number of sequences that a poll of the trainer may have missed.

        Each sequence counts from its start until a poll that started after its arrival, so that none is missed while it
        moves between stages.

        Args:
            sent_at_poll: `sent` at the start of that poll.
        """
        return self.pending + self.sent - sent_at_poll

    def turn(self, mine: Serving) -> bool:
        """Return True if it is this one's turn to start another group.

        Wait for one that has started less if it has not polled the trainer since, because it may find the same
        capacity, and if it has the maximum number of groups in flight: otherwise others would take its fraction
        permanently, since it is always full.
        """
        lagging_environments = [
            serving for serving in self.feeding if serving.weight >= 0 and _used_share(serving) < _used_share(mine)
        ]
        return mine.weight < 0 or not any(
            serving.full or (serving.can_start and (serving.room or serving.looked < mine.looked))
            for serving in lagging_environments
        )

    def wake(self) -> None:
        """Let all of them check their turn: one has started a group, or has polled the trainer."""
        for serving in self.feeding:
            serving.wake()


def _used_share(serving: Serving) -> float:
    return serving.started_sequences / serving.weight if serving.weight > 0 else inf
