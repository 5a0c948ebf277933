"""Rewards of a spec: finding them, calling them, and grading a rollout and then its group.

The grader owns the order (gates first, then the order of the file; rewards that compare a group once all its members
have ended) and what each reward is offered. A failure leaves as an exception; the caller keeps what was computed before
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import inspect
import time
import typing
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from hermes_rl.errors import Failure, RewardFailure, UserError
from hermes_rl.plugins import did_you_mean, load_object, place_of
from hermes_rl.scoring.value import RewardValue, Score, Weighting, combine, interpret, total
from hermes_rl.shipped import published_rewards, shipped_rewards
from hermes_rl.spec.model import INJECTED
from hermes_rl.threads import PerLoopSemaphore, Turns

# ---------------------------------------------------------------------------------------------- Finding a reward
# A shipped name, ``/abs/file.py:function``, ``package.module:function``, ``atropos:<name>``, or a name that a
# package publishes in the entry-point group ``hermes_rl.rewards``. Shipped names win over published ones.


def find_reward(name: str, fn: str | None) -> RewardFunction:
    """Load the reward that the spec calls `name`; without `fn` the name itself is looked up.

    Raises:
        UserError: there is no such reward, or its code cannot be loaded.
    """
    reference = fn or name
    if reference.startswith("atropos:"):
        named = load_object("hermes_rl.env.registry_rewards:named")  # by name: the core does not know Atropos
        return RewardFunction.of(name, named(reference.removeprefix("atropos:")))
    if ":" in reference:
        return RewardFunction.of(name, load_object(reference))
    shipped = shipped_rewards()
    if reference in shipped:
        return RewardFunction.of(name, load_object(f"{shipped[reference]}:{reference}"))
    published = published_rewards()
    points = [point for point in published if point.name == reference]
    if points:
        return RewardFunction.of(name, _load(points))
    known = {*shipped, *(point.name for point in published)}
    raise UserError(
        f"there is no reward {reference!r}{did_you_mean(reference, known)} "
        f"(there are: {', '.join(sorted(known))}; your own: fn: file.py:function)"
    )


def _load(points: list[EntryPoint]) -> Any:
    point = points[0]
    if len(points) > 1:
        raise UserError(
            f"two packages publish the reward {point.name!r}: {point.value} and {points[1].value}; "
            "name the one you mean as package.module:function"
        )
    try:
        return point.load()
    except Exception as error:
        raise UserError(f"reward {point.name!r} of an installed package ({point.value}): {error}") from error


# ---------------------------------------------------------------------------------------------- Calling a reward
# A reward names its parameters: `item`, `result`, `ctx`, `state`, `group`, any server role, and its own keyword
# arguments. It runs in a worker thread with an event loop of its own, so neither a sync nor an async reward can
# hold up other rollouts, and `ctx` may be used without await in both.

CONTEXT = INJECTED
"""Parameter names that mean something of the rollout or the run, never an argument of the spec."""

CEILING = 3600.0
"""Seconds after which a reward that does not return is given up as failed, so that a run cannot hang on it."""


AT_ONCE = 256
"""Rewards that run at the same time; they mostly wait for the sandbox or a judge."""

_places = PerLoopSemaphore(AT_ONCE)


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward and what its signature says."""

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    turns: Turns = field(default_factory=Turns, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, function: Callable[..., Any]) -> RewardFunction:
        """Read the signature of `function`.

        Raises:
            UserError: it is not callable.
        """
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise UserError(f"reward {name!r}: its signature cannot be read: {error}") from error
        return cls(name, function, parameters, _hints(function, parameters))

    @property
    def group_level(self) -> bool:
        """True where it judges all rollouts of a group together and returns a list."""
        return "group" in self.parameters

    @property
    def uses_context(self) -> bool:
        """True where it may touch the sandbox."""
        return "ctx" in self.parameters

    @property
    def open(self) -> bool:
        """True where it takes any keyword argument."""
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    def wanted(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Of what the rollout offers (context, roles), that which the signature names."""
        return {name: value for name, value in available.items() if name in self.parameters}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec's arguments, already rendered, coerced to the annotations.

        Raises:
            UserError: an argument that the function does not take, or a value that does not fit.
        """
        from hermes_rl.spec.templates import coerce

        unknown = [key for key in given if key in CONTEXT or (key not in self.parameters and not self.open)]
        if unknown:
            known = ", ".join(name for name in self.parameters if name not in CONTEXT) or "none"
            raise UserError(f"reward {self.name!r} takes no argument {unknown[0]!r}; its arguments: {known}")
        return {key: coerce(value, self.hints[key]) if key in self.hints else value for key, value in given.items()}


def _hints(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the annotations that can be resolved; those imported for type checkers only are left out."""
    names = getattr(inspect.unwrap(function), "__globals__", {})
    hints: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.annotation is not parameter.empty:
            holder = type("holder", (), {"__annotations__": {name: parameter.annotation}})
            with contextlib.suppress(NameError, AttributeError, TypeError, SyntaxError):
                hints |= typing.get_type_hints(holder, names, include_extras=True)
    return hints


async def call_reward(
    reward: RewardFunction, arguments: Mapping[str, Any], after: Callable[[], None] | None = None
) -> tuple[object, float]:
    """Run a reward in a worker thread, and `after` behind it; returns what it returned and its wall time in seconds.

    Raises:
        Failure: the reward raised. A `Failure` of its own (a judge, a sandbox) keeps its cause; anything else
            becomes a `RewardFailure` that ends with the place in the reward's code. One that is the policy's
            doing (it killed its sandbox) is no failure but the value 0.
        UserError: the reward says that the user's input is wrong.
    """
    started = time.perf_counter()
    try:
        # A thread of its own that does not outlive the program: a reward that hangs must not hold up its end.
        async with _places.here():
            job = reward.turns.call(functools.partial(_run, reward, dict(arguments), after))
            # Not `wait_for`, which can lose a cancellation that comes in the moment in which the reward returns.
            async with asyncio.timeout(CEILING):
                returned = await job
    except TimeoutError as error:
        raise RewardFailure(f"reward {reward.name!r} did not return within {CEILING:g} s") from error
    return returned, time.perf_counter() - started


def _run(reward: RewardFunction, arguments: dict[str, Any], after: Callable[[], None] | None) -> Any:
    try:
        try:
            returned = reward.function(**arguments)
            return asyncio.run(_settle(returned)) if inspect.isawaitable(returned) else returned
        finally:
            if after is not None:
                after()
    except Failure as failure:
        if not failure.ending.graded:
            raise
        # The agent's own commands killed the sandbox: what it was to leave there is not there.
        return Score(0.0, reason=failure.detail)
    except UserError:
        raise
    except BaseException as error:
        # SystemExit, StopIteration and CancelledError too: as they are, they would end or hang the main loop.
        raise RewardFailure(f"reward {reward.name!r} raised {place_of(error, reward.function)}") from error


async def _settle(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(CEILING):
        return await awaitable


# ------------------------------------------------------------------------------------------------------- Grading


class Restorable(Protocol):
    """What the grader needs of a `ToolContext`: files that a reward lays down go away after it."""

    def restore(self) -> None: ...


@dataclass(frozen=True)
class GradedReward:
    """One reward of a spec: the function, how it counts, its arguments before rendering."""

    function: RewardFunction
    weighting: Weighting
    args: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False
    """It looks into a new sandbox with the artifacts laid in, not into the rollout's own."""

    @property
    def name(self) -> str:
        return self.weighting.name


Render = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""(arguments with templates, columns of the row) → arguments."""

Machines = Callable[[GradedReward], AbstractAsyncContextManager[Restorable | None]]
"""The sandbox that a reward looks into, there for as long as it runs; None for one that does not look."""


@dataclass(frozen=True)
class Grader:
    """The rewards of a spec, ready to be called for any rollout.

    `roles` are the servers by role name, offered to rewards that name them.
    """

    rewards: tuple[GradedReward, ...]
    render: Render
    clamp: tuple[float, float] | None = None
    roles: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for reward in self.rewards:
            if reward.function.group_level and reward.function.uses_context:
                raise UserError(
                    f"reward {reward.name!r} takes both `group` and `ctx`; a group-level reward runs after the "
                    "sandboxes are gone: compute what it needs in a reward of weight 0"
                )

    @property
    def ordered(self) -> tuple[GradedReward, ...]:
        """Gates first, otherwise in file order."""
        return tuple(sorted(self.rewards, key=lambda reward: not reward.weighting.gate))

    @property
    def has_group_rewards(self) -> bool:
        return any(reward.function.group_level for reward in self.rewards)

    async def grade_rollout(
        self,
        item: Mapping[str, Any],
        result: Any,
        machines: Machines | None,
        state: Any,
        values: dict[str, RewardValue],
        only: Container[str] | None = None,
    ) -> None:
        """Call the per-rollout rewards in order, each value put into `values` as soon as it is known.

        `machines` is None where the sandbox is gone and no reward that is called looks into it; `only` are their names,
        None is all.

        Raises:
            Failure: a reward failed; `values` keeps those before it.
        """
        for reward in self.ordered:
            if reward.function.group_level or (only is not None and reward.name not in only):
                continue
            own = copy.deepcopy(item)  # a reward that changes its row must not change anybody else's
            async with machines(reward) if machines is not None else nullcontext() as ctx:
                offered = {"item": own, "result": result, "ctx": ctx, "state": state, **self._roles}
                arguments = self._arguments(reward, own, offered)
                # What it laid down goes away in the same thread: ToolContext waits for this loop.
                restore = ctx.restore if reward.function.uses_context and ctx is not None else None
                returned, seconds = await call_reward(reward.function, arguments, after=restore)
            values[reward.name] = interpret(reward.name, returned, seconds, result.turns_used)

    async def grade_group(
        self,
        item: Mapping[str, Any],
        results: Sequence[Any],
        values: Sequence[dict[str, RewardValue]],
        only: Container[str] | None = None,
    ) -> None:
        """Call the group-level rewards (those named `only`); `values[i]` receives those of rollout *i*.

        Raises:
            Failure: a reward failed, or did not return one value per rollout.
        """
        for reward in self.ordered:
            if not reward.function.group_level or (only is not None and reward.name not in only):
                continue
            own = copy.deepcopy(item)
            offered = {"item": own, "group": list(results), **self._roles}
            returned, seconds = await call_reward(reward.function, self._arguments(reward, own, offered))
            members = _per_member(reward.name, returned, len(results))
            for slot, value, result in zip(values, members, results, strict=True):
                slot[reward.name] = interpret(reward.name, value, seconds, result.turns_used)

    def score(self, values: Mapping[str, RewardValue]) -> float:
        """Return the score of a rollout whose rewards are all known; see `combine`."""
        return combine([reward.weighting for reward in self.rewards], values, self.clamp)

    def credit(self, values: Mapping[str, RewardValue]) -> tuple[float, ...] | None:
        """Return the weighted sum of what rewards give to each turn; None where none does."""
        given = [
            [reward.weighting.weight * turn for turn in value.per_turn]
            for reward in self.rewards
            if not reward.weighting.gate and (value := values.get(reward.name)) is not None and value.per_turn
        ]
        return tuple(map(total, zip(*given, strict=True))) if given else None

    @property
    def _roles(self) -> dict[str, Any]:
        """Each role by its name, and all of them as `roles` for rewards that are told which to ask."""
        return {**self.roles, "roles": self.roles}

    def _arguments(self, reward: GradedReward, item: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
        function = reward.function
        given = function.arguments(self.render(reward.args, item))
        missing = [
            name
            for name, parameter in function.parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            and name not in given
            and name not in offered
        ]
        if missing:
            kind = "this context is not offered here" if missing[0] in CONTEXT else "give it under args"
            raise UserError(f"reward {reward.name!r} needs {missing[0]!r}: {kind}")
        return {**function.wanted(offered), **given}


def _per_member(name: str, returned: object, size: int) -> Sequence[object]:
    if isinstance(returned, str | bytes) or not isinstance(returned, Sequence) or len(returned) != size:
        found = f"{len(returned)} values" if isinstance(returned, list | tuple) else type(returned).__name__
        raise RewardFailure(
            f"group-level reward {name!r} must return a list with one value per rollout ({size}), not {found}"
        )
    return returned
