"""`RolloutRunner`: plays rollouts and groups of an environment.

A rollout that infrastructure failed is played again in a fresh sandbox; when that is in vain its group is dropped.
A rollout always becomes a `Rollout`, never an exception; only cancellation travels, and what is equal for every
rollout: a `RunError`, and a `UserError` that several rows had (`refusals`) while none was graded. Once one was,
the user's input is right for that one, so that a `UserError` is about another rollout alone, whose row or agent brought
it about.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from hermes_rl.agent.loop import HermesAgentLoop
from hermes_rl.agent.program import ProgramDriver, context_of
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, RunError, UserError, is_panic
from hermes_rl.rollouts.environment import EndingPolicy, Environment, PlaysSeats
from hermes_rl.rollouts.rollout import Group, Rollout, RolloutKey, RolloutState
from hermes_rl.servers.base import ChatServer
from hermes_rl.servers.client import HearsVersions, Meter
from hermes_rl.servers.pool import Limiter
from hermes_rl.threads import end_tasks
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tools.base import ToolRuntime

log = logging.getLogger(__name__)

COMPARED = 2
"""Members with a score that a group needs, so that one that was lost can count as the worst of it."""
REPLAYS = 2
"""How often a rollout that infrastructure failed is played again."""


class Recorded(Protocol):
    """The record of a run's rollouts, as the runner uses it; `hermes_rl.runs.store.RolloutStore` is one on disk."""

    async def recall(self, key: RolloutKey) -> Rollout | None:
        """Return the recorded rollout of this place, so that it is not played again; it may wait for its group."""

    def attempts(self, key: RolloutKey) -> int:
        """How many attempts at this place are recorded, so that no id is given twice."""

    def record(self, *rollouts: Rollout) -> None:
        """Write rollouts down together. A rollout that waits for its group is written again once it has a score."""


class Elsewhere(Protocol):
    """Other processes that play, here or elsewhere; `hermes_rl.runs.workers.Workers` has some."""

    async def play(self, key: RolloutKey, split: str) -> Rollout:
        """Play one attempt, with its tokens and the teacher's word; raises what ends the run."""

    async def compare(self, rollouts: list[Rollout]) -> None:
        """Add the rewards that need the whole group. Raises Failure."""


class GivesTokens(Protocol):
    """What gives rollouts their tokens; `hermes_rl.rollouts.rollout.Encoder` is one."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of messages; None where it is not known."""

    async def encode(self, rollout: Rollout) -> None:
        """Set the sequences of a rollout that has none."""


class DiedElsewhere(RunError):
    """Those who play elsewhere died again and again over one and the same rollout."""


class Unrecorded:
    """The record of a run that keeps none."""

    async def recall(self, key: RolloutKey) -> Rollout | None:
        return None

    def attempts(self, key: RolloutKey) -> int:
        return 0

    def record(self, *rollouts: Rollout) -> None:
        """Nothing outlives the process."""


def _ignore(_: object) -> None:
    """Nobody wants to know."""


class RolloutRunner:
    """Plays an environment's rollouts, in training or in evaluation.

    Args:
        split: "train" or "eval", handed to the environment.
        concurrency: rollouts in flight; None: no bound of its own.
        policy: another policy than the environment's own.
        options: what bounds and steers a rollout; default: what the environment says for the split.
        store: the record of rollouts.
        encoder: gives a graded rollout its tokens before it is recorded.
        prepare: what an ended group goes through before it is handed on, while other groups are played.
        on_played: told of every rollout that was played, failed attempts included, before another begins in its place.
        replays: how often a rollout that infrastructure failed is played again.
        mark: tells its rollouts from others of the same groups; see `RolloutKey`.
        exclusive: held while a group of that id is played, so that the same group asked for again meanwhile waits, and
            is taken from the record.
        elsewhere: plays in the place of this process, which then decides and records only.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        split: str = "train",
        concurrency: int | None = None,
        policy: ChatServer | None = None,
        options: LoopOptions | None = None,
        store: Recorded | None = None,
        encoder: GivesTokens | None = None,
        prepare: Callable[[Group], Awaitable[None]] | None = None,
        on_played: Callable[[Rollout], None] = _ignore,
        replays: int = REPLAYS,
        mark: str = "",
        exclusive: Callable[[str], AbstractAsyncContextManager[Any]] = nullcontext,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.environment, self.split, self.elsewhere = environment, split, elsewhere
        self.options = options or environment.options(split)
        self.slots = Limiter(concurrency or sys.maxsize, fixed=True)
        self.policy = policy if policy is not None else environment.policy
        self.store: Recorded = store if store is not None else Unrecorded()
        self.encoder, self.prepare, self.on_played = encoder, prepare, on_played
        self.replays, self.mark, self.exclusive = replays, mark, exclusive
        self.teacher = environment.teacher if split == "train" else None
        # Asked once: to look through a protocol takes longer than all that a seat adds to a rollout.
        seated = isinstance(environment, PlaysSeats) and bool(environment.seats)
        self._seated: PlaysSeats | None = environment if seated else None  # type: ignore[assignment]
        self.open = 0
        """Members of started groups that have not ended."""
        self.replayed = 0
        """Rollouts that were played again, as infrastructure failed them."""
        self.refusals = 1
        """Groups that have to be refused by a `UserError` while none was graded, until it is raised."""
        self.same_refusals = 1
        """The same, of groups that are refused in the same words."""
        self._refused: dict[str, set[str]] = {}
        """Words of an error, but for the row's key → the groups that were refused by it."""
        self._graded = False
        """Whether any rollout was graded, so that the user's input is right for one at least."""
        self._compared = False
        """Whether the members of any group were compared."""
        self._playing: set[ToolRuntime] = set()
        self._unexpected: set[str] = set()
        """Unexpected errors whose traceback was logged."""

    @property
    def phases(self) -> Counter[str]:
        """What the rollouts that this process is playing are at; one whose machine is being made is not among them."""
        return Counter(runtime.phase for runtime in self._playing)

    def start(
        self,
        row: Row,
        group: str,
        size: int,
        *,
        epoch: int = 0,
        whole: bool = True,
        keep_lost: bool = False,
        on_change: Callable[[], None] | None = None,
    ) -> asyncio.Task[Group]:
        """Begin a group; every member that ends calls `on_change`.

        With `whole` the first member that fails for good ends the others and the group is dropped; without, every
        member is played to its end and the failed ones stay without a score. With `keep_lost` those that fail for good
        are lost, and count as the worst of a group in which two others have a score.
        """
        leaving = [_OpenMember(self, on_change).leave for _ in range(size)]
        playing = asyncio.create_task(
            self._play_group(Group(group, row, [], epoch), leaving, whole, keep_lost=whole and keep_lost)
        )
        for leave in leaving:  # a task that is cancelled before its first step runs no `finally`
            playing.add_done_callback(leave)
        return playing

    async def _play_group(
        self, group: Group, leaving: Sequence[Callable[..., None]], whole: bool, *, keep_lost: bool
    ) -> Group:
        async with self.exclusive(group.id):
            members: list[asyncio.Task[Rollout]] = []
            for index, leave in enumerate(leaving):
                key = RolloutKey(group.row, group.id, index, len(leaving), epoch=group.epoch, mark=self.mark)
                members.append(asyncio.create_task(self.member(key, leave, hold=keep_lost)))
                members[-1].add_done_callback(leave)
            try:
                going_on = set(members)
                while going_on and not (whole and group.dropped):
                    ended, going_on = await asyncio.wait(going_on, return_when=asyncio.FIRST_COMPLETED)
                    for rollout in [member.result() for member in members if member in ended]:
                        if rollout.error is not None and not (keep_lost and rollout.state.given_up):
                            group.dropped = group.dropped or rollout.ending
                            group.detail = group.detail or rollout.error
            finally:
                await end_tasks(members)  # until their sandboxes are released
            group.rollouts = [task.result() for task in members if not task.cancelled()]
            lost = [rollout for rollout in group.rollouts if keep_lost and rollout.state.given_up]
            if lost and group.dropped is None and len(group.rollouts) - len(lost) < COMPARED:
                group.dropped, group.detail = lost[0].ending, lost[0].error
            await self._score_together(group)
            for rollout in [member for member in lost if member.state is RolloutState.FAILED]:
                if group.dropped is None:
                    for seat in rollout.seats:
                        seat.state = RolloutState.LOST
                    take_up(self.environment, rollout)
                self._record(rollout)
        if self.prepare is not None:
            await self.prepare(group)
        return group

    async def member(
        self, key: RolloutKey, played: Callable[[], None] = lambda: None, *, hold: bool = False
    ) -> Rollout:
        """Play one member of a group, again where infrastructure failed, until it is graded or given up.

        `played` is called when nothing is left but to write the rollout down: then another one may begin. With `hold`
        one that is given up is not written down: what becomes of it is known when its group has ended.
        """
        recalled = await self.store.recall(key)
        if recalled is not None:
            take_up(self.environment, recalled)
            if recalled.state is RolloutState.WAITING and not self.environment.has_group_rewards:
                self._score(recalled)  # the rewards that compared its group are no longer in the spec
                self._record(recalled)
            return recalled
        first = self.store.attempts(key)
        for attempt in range(first, first + self.replays + 1):
            await self.slots.acquire()
            try:
                rollout = await self._attempted(replace(key, attempt=attempt))
            finally:
                self.slots.release()
            self.on_played(rollout)
            last = not rollout.ending.rule.retried or attempt == first + self.replays
            if not last:
                self.replayed += 1
                log.info("rollout %s is played again (%s): %s", rollout.id, rollout.ending, rollout.error)
            if last:
                played()
                # The next one begins first, so that its model works while this one is written down.
                await asyncio.sleep(0)
            if rollout.error is None and self.encoder is not None:
                await self.encoder.encode(rollout)
            if not (last and hold and rollout.state.given_up):
                self._record(rollout)
            if last:
                break
        return rollout

    def _record(self, *rollouts: Rollout) -> None:
        """Write rollouts down; their lines are needed again only where they wait for their group."""
        self.store.record(*rollouts)
        for rollout in rollouts:
            if rollout.state is not RolloutState.WAITING:
                rollout.line = None

    async def alone(self, key: RolloutKey) -> Rollout:
        """Play one rollout without mates; a reward that compares the members of a group gets it as a group of one."""
        if not self.environment.has_group_rewards:
            return await self.member(key)
        return (await self.start(key.row, key.group, 1)).rollouts[0]

    async def attempt(self, key: RolloutKey) -> Rollout:
        """Play one attempt for a runner in another process: with its tokens, and not recorded."""
        rollout = await self._attempted(key)
        if rollout.error is None and self.encoder is not None:
            await self.encoder.encode(rollout)
        return rollout

    async def _attempted(self, key: RolloutKey) -> Rollout:
        if self.elsewhere is not None:
            try:
                rollout = await self.elsewhere.play(key, self.split)
            except (UserError, DiedElsewhere) as error:
                rollout = Rollout(key, 0)
                self._fail_alone(rollout, error)
            self._graded = self._graded or rollout.error is None
            take_up(self.environment, rollout)
            versions = [each.weights.after for each in rollout.ledger if each.weights.after is not None]
            if versions and isinstance(self.policy, HearsVersions):
                self.policy.hear(max(versions))  # a server may tell its version in answers alone
            return rollout
        rollout = await self.play(key)
        self._graded = self._graded or rollout.error is None
        if self.teacher is not None and rollout.error is None:
            started = time.perf_counter()
            if self.encoder is not None:
                await self.encoder.encode(rollout)
            try:
                await self.teacher.ask(rollout)
            except Failure as failure:
                rollout.fail(failure)
            rollout.timings["teacher"] = time.perf_counter() - started
        return rollout

    async def play(self, key: RolloutKey) -> Rollout:
        """Play one rollout to its ending and grade it."""
        rollout = Rollout(key, key.seed(self.environment.seed))
        started = time.perf_counter()
        with Meter() as meter:
            try:
                async with self.environment.runtime(key) as runtime:
                    self._playing.add(runtime)
                    try:
                        await self._converse(rollout, runtime)
                        await self._grade(rollout, runtime)
                    finally:
                        self._playing.discard(runtime)
            except UserError as error:
                self._fail_alone(rollout, error)
            except RunError:
                raise
            except Failure as failure:
                if rollout.state is RolloutState.FAILED:
                    rollout.fail(failure)
                else:
                    # What was graded stays graded: else an agent whose processes do not end would choose not to be.
                    log.error(
                        "rollout %s keeps its grade, but its machine was not released: %s", rollout.id, failure.detail
                    )
            except BaseException as error:
                if not (isinstance(error, Exception) or is_panic(error)):
                    raise
                self._fail_unexpectedly(rollout, error)
        rollout.use(meter.roles, played=True)
        for seat in rollout.seats:
            if seat.result is not None:
                seat.timings |= seat.result.timings.record()
            seat.timings["total"] = time.perf_counter() - started
        return rollout

    def _fail_alone(self, rollout: Rollout, error: UserError | DiedElsewhere) -> None:
        """Let the error be this rollout's, where another one was graded or few groups have it; else raise it again."""
        if not self._graded:
            alike = self._refused.setdefault(str(error).replace(rollout.key.row.key, ""), set())
            alike.add(rollout.key.group)
            refused = len(set().union(*self._refused.values()))
            if refused >= self.refusals or len(alike) >= self.same_refusals:
                raise error
        log.error("rollout %s: %s", rollout.id, error)
        rollout.worker_died = isinstance(error, DiedElsewhere)
        begun = Ending.SANDBOX_FAILURE if rollout.worker_died else Ending.ROW_FAILURE
        rollout.fail(Failure(str(error), ending=begun if rollout.result is None else Ending.REWARD_FAILURE))

    def _fail_unexpectedly(self, rollout: Rollout, error: BaseException) -> None:
        """Let an error that nobody expected be this rollout's alone; its traceback is logged once."""
        detail = f"unexpected {type(error).__name__}: {error}"
        log.error("rollout %s: %s", rollout.id, detail, exc_info=None if detail in self._unexpected else error)
        self._unexpected.add(detail)
        if rollout.state is RolloutState.FAILED:  # else it was graded, and keeps its grade
            ending = Ending.SANDBOX_FAILURE if rollout.result is None else Ending.REWARD_FAILURE
            rollout.fail(Failure(detail, ending=ending))

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
        rollout.ending = rollout.result.ending

    async def _play_seats(
        self,
        rollout: Rollout,
        runtime: ToolRuntime,
        environment: PlaysSeats,
        options: LoopOptions,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Play an episode of several agents: the rollout is that of the first seat that is trained."""
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
                    each.ending, each.result.seat, each.result.outcome = each.result.ending, each.seat.name, outcome

    async def _grade(self, rollout: Rollout, runtime: ToolRuntime) -> None:
        dropped = next((seat.ending for seat in rollout.seats if self._policy(seat) == "drop"), None)
        if dropped is not None:
            for seat in rollout.seats:
                seat.error = f"the spec drops rollouts that end with {dropped}"
                seat.state = RolloutState.LEFT_OUT
            return
        started, runtime.phase = time.perf_counter(), "rewards"
        for machine in (runtime, *runtime.apart.values()):
            await machine.settle()
        await self.environment.grade(rollout, runtime)
        rollout.timings |= {"sandbox": runtime.start_seconds, "rewards": time.perf_counter() - started}
        if self.environment.has_group_rewards:
            for seat in rollout.seats:
                seat.state = RolloutState.WAITING
        else:
            self._score(rollout)

    def _policy(self, rollout: Rollout) -> EndingPolicy:
        return self.environment.ending_policy(rollout.ending)

    def _score(self, rollout: Rollout) -> None:
        scores = [
            float(policy) if isinstance(policy := self._policy(seat), int | float) else self.environment.score(seat)
            for seat in rollout.seats
        ]
        for seat, score in zip(rollout.seats, scores, strict=True):
            seat.scored(score)
        take_up(self.environment, rollout)

    async def _score_together(self, group: Group) -> None:
        """Call the rewards that compare the members; only then are the scores of the members known."""
        waiting = [rollout for rollout in group.rollouts if rollout.state is RolloutState.WAITING]
        if not waiting:
            return
        if group.dropped is not None:
            never = any(rollout.state is RolloutState.LEFT_OUT for rollout in group.rollouts)
            for rollout in waiting:
                # The record of one that failed still waits: a later start plays the missing member and compares both.
                what = "is left out" if never else "failed"
                for seat in rollout.seats:
                    seat.state = RolloutState.LEFT_OUT if never else RolloutState.FAILED
                    seat.error = f"not compared with its group, of which another member {what}: {group.detail}"
        else:
            await self._compare(group)
        self._record(*waiting)

    async def _compare(self, group: Group) -> None:
        members = [rollout for rollout in group.rollouts if not rollout.state.given_up]
        try:
            with Meter() as meter:
                await (self.elsewhere.compare if self.elsewhere is not None else self.environment.grade_group)(members)
            members[0].use(meter.roles, played=False)  # it is nobody's more than another's
            for rollout in members:
                self._score(rollout)
            self._compared = True
        except (Failure, UserError) as error:
            if isinstance(error, UserError) and not self._compared:
                raise
            failure = error if isinstance(error, Failure) else Failure(str(error), ending=Ending.REWARD_FAILURE)
            for rollout in members:
                rollout.fail(failure)
            group.dropped, group.detail = failure.ending, failure.detail


def take_up(environment: Environment, rollout: Rollout) -> None:
    """Set what follows from the environment, and so has no place in a record: seed, mask and credit per turn."""
    for seat in rollout.seats:
        policy = environment.ending_policy(seat.ending)
        seat.seed = seat.key.seed(environment.seed)
        seat.masked = policy == "mask" or seat.state is RolloutState.LOST
        fixed = isinstance(policy, int | float)
        seat.credit = None if fixed or seat.score is None else environment.credit(seat)


class _OpenMember:
    """A member among those that are open; it is left once, also by a task that never began."""

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
