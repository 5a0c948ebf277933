"""Serving a trainer: the groups of a run, sent one after another to whatever stands behind the trainers' seam."""

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
from hermes_rl.errors import HermesRLError, RunError
from hermes_rl.rollouts.rollout import Group
from hermes_rl.runs.deliveries import DeliveryLog, content_of
from hermes_rl.runs.groups import GroupsFile
from hermes_rl.runs.left import Quarantine
from hermes_rl.runs.run import Run
from hermes_rl.threads import end_tasks, in_thread
from hermes_rl.trainers.base import GroupRefused, Registered, Registration, Trainer, TrainerState
from hermes_rl.trainers.checks import Checks

logger = logging.getLogger(__name__)
T = TypeVar("T")

OUTBOX = 64
"""Groups that may wait to be sent; a trainer that is slow to take them may want any number."""
IN_VAIN = 128
"""Groups in a row that are of no use to the trainer, after which serving ends. If only one group in twenty were of use,
so many would come in a row with a chance of one in 700."""
WAYS_OUT = {
    "uniform": "such a group teaches nothing: choose rows that the policy solves sometimes, give rewards more values, "
    "raise serve.group_size or agent.temperature, or send such groups too (serve.drop_uniform: false)",
    "too_long": "shorten rollouts (agent.max_trajectory_tokens, agent.max_tokens, agent.max_turns), raise "
    "serve.max_token_length if the trainer takes longer sequences, or set serve.on_too_long to truncate or mask",
    "stale": "sample with newer weights (serve.concurrency, env.max_batches_offpolicy), raise serve.max_staleness, or "
    "send such groups too (serve.on_stale: keep)",
    "uncertified": "hermes-rl doctor SPEC says why tokens are not exact; serve.allow_inexact: true sends these too",
}
"""What to do about groups that are not sent, by the cause."""
LOOK = 0.1
"""Seconds between two looks at the trainer."""
ASKING = 10.0
"""Seconds for a server to say which weights it has, when groups have arrived."""
LAST_EVALUATIONS = 600.0
"""Seconds that evaluations may still take when the trainer has had its last step."""


class Hooks:
    """What an environment does beside sending groups; this one does nothing. See `hermes_rl.env.serve.EnvHooks`."""

    evaluate_every = 0
    """Steps between two evaluations; 0 or less: never."""
    evaluation_share = 1.0
    """The share of the groups in flight that go on while an evaluation runs: 1 all, 0 none begins."""

    async def registered(self, answer: Registered, step: int) -> None:
        """Take note that the trainer has answered the registration."""

    async def stepped(self, before: int, now: int) -> None:
        """Take note that the trainer is at another step."""

    async def evaluate(self, step: int) -> None:
        """Evaluate with the weights of this step."""

    async def sending(self, group: Group, lines: list[dict[str, Any]]) -> None:
        """Take note that a group is about to be sent."""

    async def left_out(self, group: Group, cause: str, detail: str) -> None:
        """Take note that a group is not sent."""

    async def arrived(self, ages: Sequence[int], stale: int) -> None:
        """Take note of groups that the trainer has taken out of its queue.

        Args:
            ages: how many versions behind the oldest weights of each are at this moment, where both are known.
            stale: how many of them are older than may be sent.
        """

    def state(self) -> Any:
        """Return what is to be restored with the trainer's step, as JSON."""

    def restore(self, state: Any) -> None:
        """Take up what `state` gave at the step at which the trainer goes on."""


class Serving:
    """Feeds a trainer until it has had its steps; it is the demand of the run's groups.

    Args:
        run, trainer: what gives the groups, and what takes them.
        registration, log: what the trainer is told about the environment, and what it was sent.
        checks: what the trainer can use; the longest sequence that it takes is added to them.
        hooks: what the environment does beside.
        file: where groups that are sent are written too.
        version: tells the newest version of the policy's weights, where the trainer does not.
        together: the environments of this process that feed the trainer; None: it is the only one.
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
        together: Together | None = None,
    ) -> None:
        self.run, self.trainer, self.registration = run, trainer, registration
        self.log, self.checks, self.hooks, self.file = log, checks, hooks, file
        self.version = version
        self.state = TrainerState(step=0, wants=0)
        self.sent = 0
        """Groups that this start has sent."""
        self.stopped: str | None = None
        self.weight = registration.weight
        """Its part of the sequences of all environments; below 0: it takes no part in the turns."""
        self.looked = time.monotonic()
        """The time of its last look at the trainer."""
        self.seen = 0
        """Sequences that the trainer had from all environments when that look began."""
        self.together = together or Together()
        self._ended = self._settled = self._wants_told = 0
        """Groups of this start that have ended; those that the trainer has, or is not to have; sequences whose
        beginning the others know of."""
        self._outbox: asyncio.Queue[Group] = asyncio.Queue()
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._in_vain: Counter[str] = Counter()
        """Groups that were of no use since the last one that was sent, by cause."""
        self._oldest: dict[str, int] = {}
        """The oldest weights of each group that the trainer has and has not been seen to take."""
        self._written = set() if file is None else {line["group"] for line in file.journal.read("group")}
        self._evaluation: asyncio.Task[None] | None = None
        self._due: int | None = None
        """The step of an evaluation that waits for the one that is running."""
        self._before_evaluation = 0
        """Groups that were in flight when the evaluation began."""

    async def play(self) -> None:
        """Serve until the trainer has had its steps, or a budget is used up. Raises `RunError` where the trainer is
        lost, too many groups failed, or no row is left to play."""
        await self._register()
        await self.together.registered.wait()
        self.together.feeding.append(self)
        tasks = [asyncio.create_task(work) for work in (self._consume(), self._send_all(), self._follow())]
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

    # ------------------------------------------------------------------ what is wanted (`runs.run.Demand`)

    @property
    def satisfied(self) -> bool:
        self.stopped = self.stopped or self.run.budget.used_up()
        return self.stopped is not None or self.state.finished

    def wants(self, running: int) -> bool:
        if self._wants_told < self.begun:
            self._wants_told = self.begun
            self.together.wake()
        return self.able and self.room and self.together.turn(self)

    # ------------------------------------------------------------------ beside others (`Together`)

    @property
    def begun(self) -> int:
        """Sequences that it has begun to play."""
        return self.run.begun * self.run.plan.size

    @property
    def pending(self) -> int:
        """Sequences that it has begun and the trainer does not have: they are played, queued or being sent."""
        return (self.run.begun - self._settled) * self.run.plan.size

    @property
    def able(self) -> bool:
        """Whether nothing of its own keeps it from beginning another group."""
        return not self._waits and not self._at_bound

    @property
    def full(self) -> bool:
        """Whether it has as many groups in flight as it may, and begins another as soon as one of them ends."""
        return not self._waits and self._at_bound

    @property
    def _waits(self) -> bool:
        """Whether nothing new is to begin, even where a group ends."""
        if self.satisfied or self.run.paused:
            return True
        share = self.hooks.evaluation_share if self._evaluation is not None else 1.0
        return share < 1 and self._running >= self._before_evaluation * share

    @property
    def _at_bound(self) -> bool:
        plan = self.run.plan
        if self._outbox.qsize() >= OUTBOX:
            return True
        if plan.concurrency is None:
            return False
        return self._running >= max(1, round(plan.concurrency // plan.size * self.state.share))

    @property
    def room(self) -> bool:
        """Whether the trainer would take another group, as far as it has seen."""
        return self.together.in_flight(self.seen) < self.state.wants * self.run.plan.size

    @property
    def _running(self) -> int:
        """Groups that are played."""
        return self.run.begun - self._ended

    def wake(self) -> None:
        """Look again whether another group may begin."""
        self.run.wake()

    # ------------------------------------------------------------------ the trainer

    async def _register(self) -> None:
        answer = await self._answer(Registered, "register", self.registration, self.log)
        for group in answer.arrived:
            self.log.has(group)
        self.log.lost(list(answer.lost))
        going_on = bool(self.log.delivered or answer.lost)
        self.log.registered(answer.session)
        self.state = await self._state()
        mark = self.log.at(self.state.step)
        if not self.log.marks or self.log.marks[-1].step != self.state.step:
            self.log.step(self.state.step, self.state.queued, mark.state)
        self.run.quarantine = Quarantine(mark.state.get("quarantined") or ())
        if mark.state.get("environment") is not None:
            self.hooks.restore(mark.state["environment"])
        bounds = [bound for bound in (self.checks.longest, answer.longest) if bound is not None]
        self.checks.longest = min(bounds, default=None)
        await self.hooks.registered(answer, self.state.step)
        if going_on:
            more = f", {len(answer.lost)} groups that it had not received are sent again" if answer.lost else ""
            self.run.progress.note(f"going on at step {self.state.step}{more}; nothing that was played is played again")

    async def _state(self) -> TrainerState:
        return await self._answer(TrainerState, "state")

    async def _answer(self, kind: type[T], method: str, *arguments: Any) -> T:
        """Return what a method of the trainer, which may be the user's code, returns.

        Raises:
            GroupRefused, HermesRLError: as the method does.
            RunError: it raises anything else, or returns something that is not of this kind.
        """
        try:
            answer = await getattr(self.trainer, method)(*arguments)
        except HermesRLError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise RunError(f"trainer {self.trainer.name}: {method} raised {type(error).__name__}: {error}") from error
        if not isinstance(answer, kind):
            raise RunError(f"trainer {self.trainer.name}: {method} returned {answer!r:.60}, not a {kind.__name__}")
        return answer

    async def _follow(self) -> None:
        """Look at the trainer again and again, until it has had its steps."""
        while not self.satisfied:
            await asyncio.sleep(LOOK)
            # What arrives during the look may be missing in its answer, and counts as in flight until the next one.
            now, seen, before = time.monotonic(), self.together.sent, self.state.step
            state = await self._state()
            self.looked, self.seen, self.state = now, seen, state
            if self.state.step != before:
                # What the trainer has used by this step, between two sends.
                async with self.together.under_way:
                    if self.together.sent != seen:  # it may or may not have counted the group that was being sent
                        self.state = await self._state()
                    state_then = {"quarantined": self.run.quarantine.record(), "environment": self.hooks.state()}
                    self.log.step(self.state.step, self.state.queued, state_then)
                await self._look_at_arrivals()
                # Once, even if the step jumped over several multiples of `evaluate_every`.
                every = self.hooks.evaluate_every
                if every > 0 and before // every < self.state.step // every:
                    self._due = self.state.step
                await self.hooks.stepped(before, self.state.step)
            self._begin_evaluation()
            self.together.wake()

    async def _look_at_arrivals(self) -> None:
        """See how old the groups are that the trainer has just taken, and say so where they are too old.

        They were fresh enough when they were sent. Weights may have moved while they waited in the trainer's queue, out
        of which nothing can be taken back.
        """
        waiting = set(self.log.delivered[self.log.marks[-1].taken :])
        oldest = [self._oldest.pop(group) for group in list(self._oldest) if group not in waiting]
        now = None
        if oldest:
            with suppress(TimeoutError):  # a server that loads weights is not waited for
                async with asyncio.timeout(ASKING):
                    now = await self._newest()
        if now is None:
            return
        ages, bound = [max(0, now - version) for version in oldest], self.checks.max_staleness
        stale = 0 if bound is None else sum(age > bound for age in ages)
        if stale:
            logger.warning(
                "%d of %d groups were too old when the trainer took them at step %d: up to %d versions behind, where "
                "serve.max_staleness allows %s. They were fresh when they were sent, and have waited in the trainer's "
                "queue: let fewer wait there (env.max_batches_offpolicy), or bound the importance ratio in the trainer",
                stale, len(ages), self.state.step, max(ages), bound,
            )  # fmt: skip
        await self.hooks.arrived(ages, stale)

    async def _newest(self) -> int | None:
        """Return the version of the newest weights, as the trainer or the policy's server tells it."""
        if self.state.version is not None or self.version is None:
            return self.state.version
        return await self.version()

    # ------------------------------------------------------------------ evaluations

    def _begin_evaluation(self) -> None:
        """Begin the evaluation that is due, unless another one runs: then it follows that one."""
        if self._evaluation is not None and self._evaluation.done():
            self._evaluation.result()
            self._evaluation = None
        if self._due is None or self._evaluation is not None:
            return
        step, self._due = self._due, None
        self._before_evaluation = self.run.runner.open // self.run.plan.size
        self._evaluation = asyncio.create_task(self.hooks.evaluate(step))

    async def _finish_evaluations(self) -> None:
        """Wait for the evaluations of the last steps, for a bounded time: the model server may end with its trainer."""
        try:
            async with asyncio.timeout(LAST_EVALUATIONS):
                self._begin_evaluation()
                while self._evaluation is not None:
                    await asyncio.wait([self._evaluation])
                    self._begin_evaluation()
        except TimeoutError:
            logger.error("the evaluation of the last step is given up: it took more than %g seconds", LAST_EVALUATIONS)

    # ------------------------------------------------------------------ groups

    async def _consume(self) -> None:
        """Take the groups of the run as they end; sending them holds up none that is played."""
        async with aclosing(self.run.groups(skip=self._skip, demand=self, prepare=self._prepare)) as playing:
            async for group in playing:
                self._ended += 1
                if not self.run.left_out(group):
                    self._outbox.put_nowait(group)
                    continue
                self._settled += 1
                if group.dropped is not None:
                    await self._leave_out(group, str(group.dropped), group.detail or "")
                else:
                    await self._leave_out(group, "uniform", f"all of its scores are the same, {group.scores[:1]}")
        if self.satisfied:
            await asyncio.Event().wait()  # what ends the run is heard of elsewhere
        aside = self.run.quarantine.record()
        if not aside:
            raise RunError("there are no more rows to play, and the trainer has not had its steps")
        raise RunError(f"every row was set aside, as each failed again and again. The last: {aside[-1]['detail']}")

    def _skip(self, row: Row, group: str, epoch: int) -> bool:
        if self.log.settled(group):
            return True
        store = self.run.store
        return store is not None and store.left_out(group, drop_uniform=self.run.plan.drop_uniform)

    async def _prepare(self, group: Group) -> None:
        if not self.run.left_out(group):
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
                self.log.leave_out(group.id, refused.cause)
                await self._leave_out(group, refused.cause, refused.detail)

    async def _leave_out(self, group: Group, cause: str, detail: str) -> None:
        """Note that a group is not sent. Raises `RunError` if too many in a row were of no use to the trainer."""
        way = WAYS_OUT.get(cause)
        first = not self._in_vain[cause]
        said = f"{detail}; {way} (further ones are in the run's log alone)" if first and way else detail
        logger.log(logging.WARNING if first else logging.INFO, "group %s was not sent (%s): %s", group.id, cause, said)
        await self.hooks.left_out(group, cause, detail)
        if group.dropped is not None and not group.dropped.graded:
            return  # an infrastructure failure, which the budget counts
        self._in_vain[cause] += 1
        if self._in_vain.total() < IN_VAIN:
            return
        counts = ", ".join(f"{count} {cause}" for cause, count in self._in_vain.most_common() if count)
        most, _ = self._in_vain.most_common(1)[0]
        raise RunError(
            f"the last {IN_VAIN} groups were of no use to the trainer ({counts}), the last one because {detail}"
            + (f". {most}: {WAYS_OUT[most]}" if most in WAYS_OUT else "")
        )

    async def _send(self, group: Group, lines: list[dict[str, Any]]) -> None:
        if not lines:
            raise GroupRefused("no_lines", "the environment's own code has made nothing of it")
        version = self.state.version if self.checks.max_staleness is None else await self._newest()
        usable = self.checks.usable(lines, version)
        await self.hooks.sending(group, usable)
        if self.file is not None and group.id not in self._written:
            self.file.write(await self.file.encoded(usable))
            self._written.add(group.id)
        content = await in_thread(lambda: content_of(usable[-1]["tokens"], usable[-1]["scores"]))
        async with self.together.under_way:
            self.log.sending(group.id, content)
            await self._answer(object, "send", group, usable)
            self.log.has(group.id)
        oldest = [line["certificate"]["oldest"] for line in usable if line.get("certificate")]
        if oldest and None not in oldest:
            self._oldest[group.id] = min(oldest)
        self.sent += 1
        self._in_vain.clear()
        self.run.progress.show(f"step {self.state.step} · {self.sent} groups sent", usable[0]["scores"])


class Together:
    """The environments of one process, so many, that one trainer gets its groups from: whose turn it is, and who sends.

    Their weights say which part of the sequences is whose. Of those that have something to begin, the one that has
    begun least for its weight is next; one that cannot begin holds up no other, and catches up later.
    """

    def __init__(self, number: int = 1) -> None:
        self.feeding: list[Serving] = []
        self.under_way = asyncio.Lock()
        """Held while a group is sent, so that never more than one is in doubt."""
        self.registered = asyncio.Barrier(number)
        """None sends before all are registered: what the trainer has taken last tells which groups arrived."""
        self.sent = 0
        """Sequences that the trainer has from any of them."""

    def leave(self, serving: Serving) -> None:
        """Take note that it begins nothing more; may be called twice."""
        if serving in self.feeding:
            self.feeding.remove(serving)
            self.wake()

    @property
    def pending(self) -> int:
        """Sequences that any of them has begun and the trainer does not have."""
        return sum(serving.pending for serving in self.feeding)

    def in_flight(self, seen: int) -> int:
        """Return the number of sequences that a look at the trainer may have missed.

        Each sequence that was begun counts from its beginning until a look that began after its arrival, so that none
        is missing while it moves from one place to the next.

        Args:
            seen: `sent` at the beginning of that look.
        """
        return self.pending + self.sent - seen

    def turn(self, mine: Serving) -> bool:
        """Whether it is this one's turn, where it could begin another group.

        One that is behind is waited for where it has not looked at the trainer since, as it may find the same room, and
        where all that it may have in flight is: others would take its share for good, since it is always full.
        """
        behind = [serving for serving in self.feeding if serving.weight >= 0 and _used(serving) < _used(mine)]
        return mine.weight < 0 or not any(
            serving.full or (serving.able and (serving.room or serving.looked < mine.looked)) for serving in behind
        )

    def wake(self) -> None:
        """Let all of them look whether it is their turn: one has begun a group, or has looked at the trainer."""
        for serving in self.feeding:
            serving.wake()


def _used(serving: Serving) -> float:
    return serving.begun / serving.weight if serving.weight > 0 else inf
