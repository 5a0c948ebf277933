"""Calling reward functions: what they ask for by name, off the event loop, failures kept as failures.

A reward names its parameters: `item`, `result`, `ctx`, `state`, `group`, any server role, and its own keyword
arguments. It runs in a worker thread with an event loop of its own, so neither a sync nor an async reward can
hold up other rollouts, and `ctx` may be used without await in both.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import traceback
import typing
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import Failure, RewardFailure, UserError

CONTEXT = frozenset({"item", "result", "ctx", "state", "group"})
"""Parameter names that mean something of the rollout, never an argument of the spec."""

CEILING = 3600.0
"""Seconds after which a reward that does not return is given up as failed, so that a run cannot hang on it."""


@functools.cache
def _pool() -> ThreadPoolExecutor:
    # Rewards mostly wait for the sandbox or a judge; the threads are created as needed.
    return ThreadPoolExecutor(max_workers=64, thread_name_prefix="hermes-rl-reward")


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
            UserError: it is not callable, or its annotations cannot be resolved.
        """
        try:
            parameters = inspect.signature(function).parameters
            hints = typing.get_type_hints(function)
        except (TypeError, ValueError, NameError) as error:
            raise UserError(f"reward {name!r}: its signature cannot be read: {error}") from error
        return cls(name, function, parameters, hints)

    @property
    def group_level(self) -> bool:
        """True where it judges all rollouts of a group together and returns a list."""
        return "group" in self.parameters

    @property
    def uses_context(self) -> bool:
        """True where it may touch the sandbox."""
        return "ctx" in self.parameters or self.open

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

        unknown = [key for key in given if key not in self.parameters and not self.open]
        if unknown:
            known = ", ".join(name for name in self.parameters if name not in CONTEXT) or "none"
            raise UserError(f"reward {self.name!r} takes no argument {unknown[0]!r}; its arguments: {known}")
        return {key: coerce(value, self.hints[key]) if key in self.hints else value for key, value in given.items()}


async def call_reward(reward: RewardFunction, arguments: Mapping[str, Any]) -> tuple[object, float]:
    """Run a reward in a worker thread; returns what it returned and its wall time in seconds.

    Raises:
        Failure: the reward raised. A `Failure` of its own (a judge, a sandbox) keeps its cause; anything else
            becomes a `RewardFailure` that ends with the place in the reward's code.
    """
    started = time.perf_counter()
    loop = asyncio.get_running_loop()
    job = functools.partial(_run, reward.function, dict(arguments))
    try:
        returned = await asyncio.wait_for(loop.run_in_executor(_pool(), job), CEILING)
    except Failure:
        raise
    except TimeoutError as error:
        raise RewardFailure(f"reward {reward.name!r} timed out") from error
    except Exception as error:
        raise RewardFailure(f"reward {reward.name!r} raised {_place(error)}") from error
    return returned, time.perf_counter() - started


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    returned = function(**arguments)
    if inspect.isawaitable(returned):
        return asyncio.run(asyncio.wait_for(_settle(returned), CEILING))
    return returned


async def _settle(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
