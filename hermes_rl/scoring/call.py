"""Calling reward functions: what they ask for by name, off the event loop, failures kept as failures.

A reward names its parameters: `item`, `result`, `ctx`, `state`, `group`, any server role, and its own keyword
arguments. It runs in a worker thread with an event loop of its own, so neither a sync nor an async reward can
hold up other rollouts, and `ctx` may be used without await in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import Failure, RewardFailure, UserError
from hermes_rl.plugins import place_of
from hermes_rl.scoring.value import Score
from hermes_rl.spec.model.scoring import INJECTED
from hermes_rl.threads import Places, in_thread

CONTEXT = INJECTED
"""Parameter names that mean something of the rollout or the run, never an argument of the spec."""

CEILING = 3600.0
"""Seconds after which a reward that does not return is given up as failed, so that a run cannot hang on it."""


AT_ONCE = 256
"""Rewards that run at the same time; they mostly wait for the sandbox or a judge."""

_places = Places(AT_ONCE)


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward and what its signature says."""

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]

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
        """The spec's arguments, already rendered, coerced to the annotations.

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
    """The annotations that can be resolved; those imported for type checkers only are left out."""
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
            job = in_thread(functools.partial(_run, reward, dict(arguments), after))
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
