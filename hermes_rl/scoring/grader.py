"""Grade a rollout, and then its group.

The grader owns the order (gates first, then the order of the file; rewards that compare a group once all its members
have ended), the values offered to each reward, and the decision who caused a failure. A failure is raised as an
exception; the caller keeps the values computed before it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

from hermes_rl.errors import AgentFault, Failure, RewardFailure, ServerFailure, UserError
from hermes_rl.scoring.reward_function import RewardFunction, call_reward
from hermes_rl.scoring.reward_value import RewardValue, Weighting, combine, interpret, require_value, total
from hermes_rl.spec.reward_rules import unplayable
from hermes_rl.spec.templates import TemplateError
from hermes_rl.user_code.failures import EndedError, ForeignError, OvertimeError

log = logging.getLogger(__name__)

# ----------------------------------------------------------------------------- Who caused the failure of a reward
# The type of an exception does not show who caused it: a reply may contain an address at which no server listens. So
# the same reward runs on other replies, in a sandbox, a state and a process that no agent has used. If it works there
# and still fails on the agent's reply, the policy caused the failure. If it fails there too, infrastructure did. One of
# the other replies is the address of a running server: rewards that fetch cited addresses may fail on all others.

ANSWERS = ("", "0", "yes", "{}")
"""Replies that replace the agent's, after the solution's and texts of the row."""
FROM_ROW = 6
"""Number of texts of the row that are tried: the expected answer is often among them."""
LONGEST_ANSWER, LONGEST_REQUEST = 200, 65_536
MORE = " (further ones are in the run's log alone)"
BLAMED = "{}; it works without what the agent has said and left, which caused this"


@asynccontextmanager
async def _serve_page() -> AsyncIterator[str]:
    """Serve a page on loopback, and yield its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(LONGEST_REQUEST)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


def probe_answers(item: Mapping[str, Any]) -> list[str]:
    """Return replies to try instead of an agent's."""
    texts = [str(value) for value in item.values() if isinstance(value, str | int | float)]
    return [*[text for text in texts if len(text) <= LONGEST_ANSWER][:FROM_ROW], *ANSWERS]


# ------------------------------------------------------------------------------------------------------- Grading


class Restorable(Protocol):
    """Interface of a `ToolContext` for the grader: files written by a reward are removed after it."""

    def restore(self) -> None: ...


@dataclass(frozen=True)
class GradedReward:
    """One reward of a spec: the function, how it counts, its arguments before rendering."""

    function: RewardFunction
    weighting: Weighting
    args: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False
    """If True, the reward uses a new sandbox with a copy of the artifacts instead of the rollout's sandbox."""
    seats: tuple[str, ...] | None = None
    """Names of the seats whose score it affects; None: all."""
    shares: Mapping[str, float] | None = None
    """Factor of its value by seat, called for the first of them; None: it is called for each seat that it affects."""
    steps: str | None = None
    """How its values for the steps of a rollout are combined; None if it grades only the whole rollout."""
    range: tuple[float, float] | None = None
    """Minimum and maximum value; None: the range that the function declares, else 0 and 1."""

    def pays(self, seat: str) -> bool:
        """Return True if it counts for the rollouts of a seat; always for a single agent."""
        return not seat or self.seats is None or seat in self.seats

    def is_called_for(self, seat: str) -> bool:
        """Return True if it is called with the result of a seat: each that it affects, or the first with a factor."""
        return self.pays(seat) and (self.shares is None or seat == next(iter(self.shares)))

    @property
    def name(self) -> str:
        return self.weighting.name

    @property
    def bounds(self) -> tuple[float, float]:
        """Minimum and maximum value."""
        declared = (0.0, 1.0) if self.weighting.gate else getattr(self.function.function, "range", (0.0, 1.0))
        return self.range or declared

    @property
    def group_level(self) -> bool:
        """True if it needs all members of a group to grade them together."""
        needed = self.function.group_for
        return self.function.group_level and (needed is None or self.args.get(needed) is not None)

    @property
    def spec_key(self) -> str:
        """Key of the spec that requests it, or the argument that makes it group-level."""
        needed = self.function.group_for
        return f"rewards.{self.name}" if needed is None else f"rewards.{self.name}.args.{needed}"


Render = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""(arguments with templates, columns of the row) → arguments."""

Machines = Callable[[GradedReward], AbstractAsyncContextManager[Restorable | None]]
"""Opens the sandbox that a reward uses, for the duration of its call; None for a reward without a sandbox."""


Trial = Callable[[Mapping[str, Any], bool], AbstractAsyncContextManager[tuple[Restorable | None, Any]]]
"""(row, solved) → a sandbox and a state that no agent has used; `solved`: after the solution's calls."""


@asynccontextmanager
async def _try_nothing(item: Mapping[str, Any], solved: bool) -> AsyncIterator[tuple[None, None]]:
    yield None, None


class GradedSeat(NamedTuple):
    """Result of one seat of an episode, the sandboxes of its rewards, and the target of their values."""

    name: str
    result: Any
    machines: Machines
    values: dict[str, RewardValue]


@dataclass(frozen=True)
class Grader:
    """The rewards of a spec, ready to be called for any rollout.

    `roles` are the servers by role name, offered to rewards that name them.
    """

    rewards: tuple[GradedReward, ...]
    render: Render
    clamp: tuple[float, float] | None = None
    roles: Mapping[str, Any] = field(default_factory=dict)
    trial: Trial = _try_nothing
    solution: Callable[[Mapping[str, Any]], str] | None = None
    """Returns the last message of a row's solution; None if the spec has no solution."""
    blames: bool = True
    """If True, determine who caused the failure of a reward; if False, report each failure."""
    combine: str = "sum"
    """Value of `score.combine`."""
    _reported: set[str] = field(default_factory=set, compare=False, repr=False)
    """Names of rewards for which a failure, or a value outside the range, was reported."""

    def __post_init__(self) -> None:
        for reward in self.rewards:
            reward.function.require_takes(reward.args, {*self.roles, "policy"})
            problem = unplayable(
                reward.name,
                compares=reward.group_level,
                looks=reward.function.uses_context,
                of_steps=reward.steps is not None,
                shares=reward.shares is not None,
            )
            if problem is not None:
                raise UserError(problem)

    @property
    def ordered(self) -> tuple[GradedReward, ...]:
        """Rewards in call order: gates first, otherwise in file order."""
        return tuple(sorted(self.rewards, key=lambda reward: not reward.weighting.gate))

    @property
    def of_steps(self) -> tuple[GradedReward, ...]:
        """Rewards that grade each step, in file order."""
        return tuple(reward for reward in self.rewards if reward.steps is not None)

    @property
    def has_group_rewards(self) -> bool:
        return any(reward.group_level for reward in self.rewards)

    async def grade_rollout(
        self,
        item: Mapping[str, Any],
        result: Any,
        machines: Machines | None,
        state: Any,
        values: dict[str, RewardValue],
        only: Container[str] | None = None,
        step: int = 0,
    ) -> None:
        """Call the per-rollout rewards in order, storing each value in `values` immediately.

        Args:
            machines: opens sandboxes; None if the sandbox no longer exists and no called reward uses it.
            only: names of the rewards to call; None: all.
            step: number of the current step, from 0, which rewards for steps find as `step` in their row.

        Raises:
            Failure: a reward failed; `values` keeps the earlier ones.
        """
        for reward in self.ordered:
            if reward.group_level or (only is not None and reward.name not in only):
                continue
            row = item if reward.steps is None else {**item, "step": step}
            async with machines(reward) if machines is not None else nullcontext() as ctx:
                values[reward.name] = await self._grade_one(reward, row, result, ctx, {"state": state})

    async def grade_seats(self, item: Mapping[str, Any], seats: Sequence[GradedSeat], state: Any) -> None:
        """Call the per-rollout rewards in order, each for the seats that it affects.

        They are offered `seats`, the results by seat, and `paid`, the values of earlier rewards by seat and name.

        Raises:
            Failure: a reward failed; the seats' values keep the earlier ones.
        """
        results = {seat.name: seat.result for seat in seats}
        for reward in self.ordered:
            if reward.group_level:
                continue
            for seat in (seat for seat in seats if reward.is_called_for(seat.name)):
                paid = {each.name: {name: value_of.value for name, value_of in each.values.items()} for each in seats}
                offered = {"state": state, "seats": results, "paid": paid}
                async with seat.machines(reward) as ctx:
                    value = await self._grade_one(reward, item, seat.result, ctx, offered)
                for other in seats:
                    if reward.shares is None and other is seat:
                        other.values[reward.name] = value
                    elif reward.shares is not None and other.name in reward.shares:
                        other.values[reward.name] = value.times(reward.shares[other.name], turns=other is seat)

    async def _grade_one(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        result: Any,
        ctx: Restorable | None,
        offered: Mapping[str, Any],
    ) -> RewardValue:
        """Call a reward for one rollout. If the policy caused a failure, the value is the low end of the range."""
        call = partial(self._call_reward, reward, item, also=offered)
        try:
            return await call(result, ctx)
        except AgentFault as fault:
            return self._lowest_value(reward, str(fault))
        except (Failure, UserError) as failure:
            if not self._to_be_tried(failure):
                raise
            problem = failure
        overtime = isinstance(problem.__cause__, OvertimeError)
        if overtime and reward.function.limit is not None:
            return self._lowest_value(reward, str(problem))
        if not await self._works_elsewhere(reward, item, result, offered, problem):
            raise problem
        try:
            if not overtime:  # it would take as long again
                return await call(result, ctx, fresh=True)
        except (AgentFault, Failure, UserError) as retry_error:
            if not isinstance(retry_error, AgentFault) and not self._to_be_tried(retry_error):
                raise
        return self._lowest_value(reward, BLAMED.format(problem))

    def _to_be_tried(self, failure: Failure | UserError) -> bool:
        """Return True if an experiment must show who caused a failure.

        The runner's sandboxes and judges have already made theirs. Reward code that claims such a failure has not.
        """
        claimed = isinstance(failure.__cause__, ForeignError)
        return self.blames and (claimed or isinstance(failure, RewardFailure | ServerFailure | UserError))

    async def _works_elsewhere(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        result: Any,
        offered: Mapping[str, Any],
        failure: Failure | UserError,
    ) -> bool:
        """Return True if a reward works on another reply, where no agent has run."""
        parameters = reward.function.parameters.keys()
        looks, asks = not parameters.isdisjoint({"state", "ctx"}), not parameters.isdisjoint({"roles", *self.roles})
        answers = probe_answers(item)
        if self.solution is not None:
            with suppress(UserError):  # a template that does not work for this row
                answers.insert(0, self.solution(item))
        if looks or asks or isinstance(failure.__cause__, EndedError):  # each may take as long again
            answers = [answers[0], ANSWERS[0]]
        async with _serve_page() as address:
            answers = [ANSWERS[1]] if isinstance(failure, ServerFailure) else [*answers, address]
            for solved in (False, True) if looks and self.solution is not None else (False,):
                with suppress(Failure, UserError):  # such an environment cannot be created
                    async with self.trial(item, solved) if looks else nullcontext((None, None)) as (ctx, state):
                        also = {**offered, "state": state}
                        for answer in answers:
                            probe_result = result.answering(answer)
                            with suppress(Failure, UserError):
                                with suppress(AgentFault):  # it works, and gives its lowest value
                                    await self._call_reward(
                                        reward, item, probe_result, ctx, also=also, answer=answer, fresh=True
                                    )
                                return True
        return False

    def _lowest_value(self, reward: GradedReward, reason: str) -> RewardValue:
        """Return the value of a reward that the policy made fail: the end of the range that lowers the score."""
        self._log_once(reward.name, reason)
        return RewardValue(reward.bounds[reward.weighting.weight < 0], reason=reason)

    def _log_once(self, reward: str, message: str) -> None:
        """Log a message; the first one of a reward is a warning to its author, who may not expect such a reply."""
        first = reward not in self._reported
        self._reported.add(reward)
        log.log(logging.WARNING if first else logging.INFO, "%s%s", message, MORE if first else "")

    def _read_value(self, reward: GradedReward, returned: object, seconds: float, turns: int) -> RewardValue:
        """Convert a reward's return value for one rollout, clamped to its range; an `AgentFault` gives the low end."""
        if isinstance(returned, AgentFault):
            return self._lowest_value(reward, str(returned))
        try:
            value = interpret(reward.name, returned, seconds, turns)
            if reward.weighting.counts:
                require_value(reward.weighting, value)
        except RewardFailure as failure:  # not raised by the reward itself, so the cause is found by experiment
            raise RewardFailure(failure.detail) from failure
        bounded = value.within(*reward.bounds)
        if bounded is not value:
            low, high = reward.bounds
            if getattr(reward.function.function, "written", False):
                wrong = f"{reward.name}: {value.value:g} was written, which is not from {low:g} to {high:g}"
                return self._lowest_value(reward, wrong)
            key = f"rewards.{reward.name}.range"
            self._log_once(key, f"{key}: clamped {value.value:g} to [{low:g}, {high:g}], which the key may change")
        return bounded

    async def _call_reward(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        result: Any,
        ctx: Restorable | None,
        *,
        also: Mapping[str, Any],
        answer: str | None = None,
        fresh: bool = False,
    ) -> RewardValue:
        """Call a reward, in a `fresh` process if requested.

        Args:
            also: further values that it may name.
            answer: reply that replaces the replies of all seats.
        """
        reward_item = reward.function.copy_for_reward(item)
        offered = {
            "item": reward_item,
            "result": reward.function.copy_for_reward(result),
            "ctx": ctx,
            **also,
            **self._roles,
        }
        if "seats" in reward.function.parameters and "seats" in also:
            seats = {name: seat if answer is None else seat.answering(answer) for name, seat in also["seats"].items()}
            offered["seats"] = {name: reward.function.copy_for_reward(seat) for name, seat in seats.items()}
        offered |= {"group": [offered["result"]]} if reward.function.group_level else {}
        # Its files are removed in the same thread: ToolContext waits for this loop.
        restore = ctx.restore if reward.function.uses_context and ctx is not None else None
        with _name_reward(reward):
            arguments = self._arguments(reward, reward_item, offered)
            returned, seconds = await call_reward(reward.function, arguments, restore, fresh=fresh)
        if reward.function.group_level:
            (returned,) = _per_member(reward.name, returned, 1)
        return self._read_value(reward, returned, seconds, result.turns_used).timed(seconds)

    async def grade_group(
        self,
        item: Mapping[str, Any],
        results: Sequence[Any],
        values: Sequence[dict[str, RewardValue]],
        only: Container[str] | None = None,
        seats: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Call the group-level rewards (those named `only`); `values[i]` receives the values of rollout *i*.

        Args:
            seats: results of all seats by name, if the rollouts belong to one of several seats.

        Raises:
            Failure: a reward failed, or did not return one value per rollout.
        """
        for reward in self.ordered:
            if not reward.group_level or (only is not None and reward.name not in only):
                continue
            for slot, value in zip(values, await self._compare_group(reward, item, results, seats), strict=True):
                slot[reward.name] = value

    async def _compare_group(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        results: Sequence[Any],
        seats: Mapping[str, Sequence[Any]] | None,
    ) -> list[RewardValue]:
        """Call a reward that compares a group; a member whose agent makes it fail gets the lowest value."""
        try:
            return await self._called_together(reward, item, results, seats)
        except (AgentFault, Failure, UserError) as failure:
            if not isinstance(failure, AgentFault) and not self._to_be_tried(failure):
                raise
            first: Exception = failure
        empty_results = [result.answering("") for result in results]
        if seats is not None:
            seats = {name: [result.answering("") for result in seat_results] for name, seat_results in seats.items()}
        try:
            values = await self._called_together(reward, item, empty_results, seats)
        except (AgentFault, Failure, UserError):
            raise (RewardFailure(str(first)) if isinstance(first, AgentFault) else first) from None
        blamed: dict[int, Exception] = {}
        for index in range(len(results)):
            try:
                mixed = [*empty_results[:index], results[index], *empty_results[index + 1 :]]
                await self._called_together(reward, item, mixed, seats)
            except (AgentFault, Failure, UserError) as failure:
                blamed[index] = failure
        # Some may fail only together. Then one that fails with those before it is blamed, and no other.
        fitting = [index for index in range(len(results)) if index not in blamed]
        others = list(empty_results)
        for part in (fitting, *([index] for index in fitting)):
            mixed = [results[index] if index in part else other for index, other in enumerate(others)]
            try:
                values, others = await self._called_together(reward, item, mixed, seats), mixed
            except (AgentFault, Failure, UserError) as failure:
                blamed |= {index: failure for index in part if part is not fitting}
                continue
            if part is fitting:
                break
        return [
            self._lowest_value(reward, BLAMED.format(blamed[index])) if index in blamed else value
            for index, value in enumerate(values)
        ]

    async def _called_together(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        results: Sequence[Any],
        seats: Mapping[str, Sequence[Any]] | None,
    ) -> list[RewardValue]:
        reward_item = reward.function.copy_for_reward(item)
        offered = {
            "item": reward_item,
            "group": [reward.function.copy_for_reward(result) for result in results],
            **self._roles,
        }
        if seats is not None and "seats" in reward.function.parameters:
            offered["seats"] = {
                name: [reward.function.copy_for_reward(each) for each in played] for name, played in seats.items()
            }
        with _name_reward(reward):
            returned, seconds = await call_reward(reward.function, self._arguments(reward, reward_item, offered))
        members = _per_member(reward.name, returned, len(results))
        return [
            self._read_value(reward, value, seconds, result.turns_used).timed(seconds)
            for value, result in zip(members, results, strict=True)
        ]

    def score(self, values: Mapping[str, RewardValue], seat: str = "") -> float:
        """Return the score of a rollout from its rewards, for this seat if there are several; see `combine`."""
        weightings = [reward.weighting for reward in self.rewards if reward.pays(seat)]
        return combine(weightings, values, self.clamp, self.combine)

    def credit(self, values: Mapping[str, RewardValue]) -> tuple[float, ...] | None:
        """Return the weighted sum of per-turn rewards, or None if there are none or the score is not a sum."""
        if self.combine != "sum":
            return None
        weighed = [
            [reward.weighting.weight * turn for turn in value.per_turn]
            for reward in self.rewards
            if not reward.weighting.gate and (value := values.get(reward.name)) is not None and value.per_turn
        ]
        return tuple(map(total, zip(*weighed, strict=True))) if weighed else None

    @property
    def _roles(self) -> dict[str, Any]:
        """Each role by name, and all of them as `roles`, for rewards whose arguments name a role."""
        return {**self.roles, "roles": self.roles}

    def _arguments(self, reward: GradedReward, item: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
        function = reward.function
        passed = function.arguments(self.render(reward.args, item))
        missing = [name for name in function.needed if name not in passed and name not in offered]
        if missing:
            raise UserError(f"reward {reward.name!r} needs {missing[0]!r}: this context is not offered here")
        return {**function.select_parameters(offered), **passed}


@contextmanager
def _name_reward(reward: GradedReward) -> Iterator[None]:
    """Add the name of the reward to an error of the user's input."""
    spec_key = f"rewards.{reward.name}"
    try:
        yield
    except TemplateError as error:
        if not error.location.startswith(spec_key):
            error.location = f"{spec_key}.{error.location}".removesuffix(".")
        raise
    except UserError as error:
        raise TemplateError(str(error), location=spec_key) from error.__cause__


def _per_member(name: str, returned: object, size: int) -> Sequence[object]:
    if isinstance(returned, str | bytes) or not isinstance(returned, Sequence) or len(returned) != size:
        returned_kind = f"{len(returned)} values" if isinstance(returned, list | tuple) else type(returned).__name__
        raise RewardFailure(
            f"group-level reward {name!r} must return a list with one value per rollout ({size}), not {returned_kind}"
        )
    return returned
