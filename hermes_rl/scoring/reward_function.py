"""Find reward functions by name, and call them in the runner, in a pool of processes, or in a separate process."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
import typing
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, NoReturn, TypeVar

from hermes_rl.errors import AgentFault, Failure, HermesRLError, RewardFailure, UserError
from hermes_rl.plugins import Code, did_you_mean, load_object, place_of
from hermes_rl.scoring.reward_value import of_plain
from hermes_rl.servers.usage import calls_while_awaited
from hermes_rl.shipped import published_rewards, shipped_rewards
from hermes_rl.spec.reward_rules import require
from hermes_rl.spec.sections.rewards import INJECTED
from hermes_rl.threads import CallThrottle, OverlongError, PerLoopSemaphore, done_in_thread, run_interleaved
from hermes_rl.tools.rollout_process import RolloutProcess
from hermes_rl.user_code.failures import EndedError, ForeignError, NotCarriedError
from hermes_rl.user_code.pool import POOL, OwnProcess, ProcessPool
from hermes_rl.user_code.proxies import LIVING
from hermes_rl.values import deep_copy

# ---------------------------------------------------------------------------------------------- Finding a reward
# A shipped name, ``/abs/file.py:function``, ``package.module:function``, ``atropos:<name>``, or a name that a
# package publishes in the entry-point group ``hermes_rl.rewards``. Shipped names win over published ones.


def find_reward(name: str, fn: str | None, others: Collection[str] = ()) -> RewardFunction:
    """Load the reward that the spec calls `name`; without `fn`, the name itself is looked up.

    Args:
        others: names of the spec's other rewards, for suggestions.

    Raises:
        UserError: there is no such reward, or its code cannot be loaded.
    """
    reference = fn or name
    if reference.startswith("atropos:"):
        registry = "hermes_rl.env.registry_rewards:load_reward"  # by name: the core does not depend on Atropos
        atropos_name = reference.removeprefix("atropos:")
        return RewardFunction.from_function(
            name, load_object(registry)(atropos_name), Code.from_ref(registry)._replace(finds=atropos_name)
        )
    if ":" in reference:
        return RewardFunction.from_function(name, load_object(reference), Code.from_ref(reference))
    shipped = shipped_rewards()
    if reference in shipped:
        reference = f"{shipped[reference]}:{reference}"
        function = RewardFunction.from_function(name, load_object(reference), Code.from_ref(reference))
        # A reward that names the state calls code of the spec, whose duration is unknown.
        unbounded = function.asks or function.limit is not None or "state" in function.parameters
        return function if unbounded else replace(function, limit=SHIPPED_SECONDS)
    published = published_rewards()
    points = [point for point in published if point.name == reference]
    if points:
        return RewardFunction.from_function(name, _load_reward(points), Code(points[0].module, points[0].attr))
    reward_names = {*shipped, *(point.name for point in published)}
    hint = did_you_mean(reference, {*reward_names, *others})
    suggestion = hint or f" (there are: {', '.join(sorted(reward_names))}; your own: fn: file.py:function)"
    raise UserError(f"there is no reward {reference!r}{suggestion}")


def _load_reward(points: list[EntryPoint]) -> Any:
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
# arguments. It runs in a separate process (`hermes_rl.user_code`), so that neither its code nor the agent's text can
# block other rollouts; `ctx` may be used without await, in async rewards too. Code that no other process can find, and
# code with `isolate: none` in the spec, runs in a thread with a separate event loop.

log = logging.getLogger(__name__)

PURE_SECONDS = 300.0
"""Timeout in seconds of a reward that uses only messages; a spec's `timeout` replaces it."""
SHIPPED_SECONDS = 1.5
"""Timeout in seconds of a shipped reward that uses only messages."""
CEILING = 3600.0
"""Timeout in seconds of a reward that uses a sandbox or a model."""

HELD_AT_MOST = 300.0
"""Maximum seconds for which a reward awaited on the run's own loop may block it."""

AT_ONCE = 256
"""Maximum number of concurrent rewards; they mostly wait for the sandbox or a judge."""

_reward_slots = PerLoopSemaphore(AT_ONCE)

T = TypeVar("T")


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward and the properties of its signature."""

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    code: Code | None = None
    """Location from which another process can load it; None if it runs in the runner."""
    timeout: float | None = None
    """Timeout in seconds; None: the default for its parameters."""
    limit: float | str | None = None
    """Limit declared with `takes_at_most`, or None."""
    pool: ProcessPool = field(default=POOL, compare=False, repr=False)
    """Pool of its process, unless it runs in the state's process."""
    on_loop: bool = False
    """True if an async reward is awaited on the calling loop, because it uses objects created there."""
    turns: CallThrottle = field(default_factory=CallThrottle, compare=False, repr=False)

    @classmethod
    def from_function(cls, name: str, function: Callable[..., Any], code: Code | None = None) -> RewardFunction:
        """Read the signature of `function`, which other processes load as `code`.

        Raises:
            UserError: it is not callable.
        """
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise UserError(f"reward {name!r}: its signature cannot be read: {error}") from error
        code = None if getattr(function, "in_runner", False) else code
        limit = getattr(function, "limit", None)
        return cls(name, function, parameters, _type_hints(function, parameters), code, limit=limit)

    @property
    def group_for(self) -> str | None:
        """Argument without which it grades each rollout of a group separately; None if it always takes the group."""
        return getattr(self.function, "group_for", None)

    @property
    def asks(self) -> bool:
        """True if it may use a sandbox, or call a model by its role."""
        return self.uses_context or "roles" in self.parameters

    def seconds(self, arguments: Mapping[str, Any]) -> float:
        """Return the timeout in seconds of a call with these arguments."""
        if self.timeout is not None:
            return self.timeout
        if isinstance(self.limit, str):
            return float(arguments.get(self.limit, self.parameters[self.limit].default))
        asks = self.asks or any(type(value) in LIVING for value in arguments.values())
        return self.limit or (CEILING if asks else PURE_SECONDS)

    @property
    def group_level(self) -> bool:
        """True if it takes the rollouts of a group and returns a list."""
        return "group" in self.parameters

    @property
    def uses_context(self) -> bool:
        """True if it may use the sandbox."""
        return "ctx" in self.parameters

    @property
    def open(self) -> bool:
        """True if it takes any keyword argument."""
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    @property
    def apart(self) -> bool:
        """True if it runs in a separate process."""
        return self.code is not None

    def copy_for_reward(self, value: Any) -> Any:
        """Return a row or result that the reward may change: copied here or in transit, so the original stays
        unchanged.
        """
        if self.apart:
            return value
        return value.copied() if hasattr(value, "copied") else deep_copy(value)

    def select_parameters(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return the offered values (context, roles) that the signature names."""
        return {name: value for name, value in available.items() if name in self.parameters}

    @property
    def needed(self) -> list[str]:
        """Parameters without a default."""
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        return [key for key, each in self.parameters.items() if each.default is each.empty and each.kind in kinds]

    def require_takes(self, written: Collection[str], roles: Collection[str]) -> None:
        """Check the argument names before anything is run or judged.

        Raises:
            UserError: the function does not take an argument, or needs another one.
        """
        for key in written:
            if key in INJECTED or (key not in self.parameters and not self.open):
                argument_names = ", ".join(name for name in self.parameters if name not in INJECTED) or "none"
                raise UserError(f"reward {self.name!r} takes no argument {key!r}; its arguments: {argument_names}")
        for key in self.needed:
            if key not in written and key not in INJECTED and key not in roles:
                raise UserError(
                    f"reward {self.name!r} needs {key!r}: give it under args (--set rewards.{self.name}.args.{key}=…; "
                    "with another fn, the args of before are gone)"
                )

    def arguments(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec's arguments, already rendered, coerced to the annotations.

        Raises:
            UserError: a value does not fit.
        """
        from hermes_rl.spec.templates import coerce

        arguments = {
            key: coerce(value, self.hints[key], location=f"rewards.{self.name}.args.{key}")
            if key in self.hints
            else value
            for key, value in written.items()
        }
        self.require_fitting(arguments)
        return arguments

    def require_fitting(self, arguments: Mapping[str, Any]) -> None:
        """Raise `UserError` if arguments do not go together; see `hermes_rl.scoring.reward_value.requires`."""
        if requirements := getattr(self.function, "requirements", ()):
            defaults = {key: each.default for key, each in self.parameters.items() if each.default is not each.empty}
            require(self.function.__name__, requirements, {**defaults, **arguments})


def _type_hints(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the annotations that can be resolved; those imported only for type checkers are omitted."""
    from hermes_rl.spec.argument_types import ARGUMENT_TYPES, BY_FUNCTION

    names = {**ARGUMENT_TYPES, **getattr(inspect.unwrap(function), "__globals__", {})}
    hints: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.annotation is not parameter.empty:
            holder = type("holder", (), {"__annotations__": {name: parameter.annotation}})
            with suppress(NameError, AttributeError, TypeError, SyntaxError):
                hints |= typing.get_type_hints(holder, names, include_extras=True)
    return hints | dict(BY_FUNCTION.get(getattr(function, "__name__", ""), {}))


async def call_reward(
    reward: RewardFunction,
    arguments: Mapping[str, Any],
    after: Callable[[], None] | None = None,
    *,
    fresh: bool = False,
) -> tuple[object, float]:
    """Run a reward, then `after`; return its value and its wall time in seconds. `fresh`: in a new process.

    Raises:
        Failure: the reward raised. A `Failure` that it raises (a judge, a sandbox) keeps its cause; others become a
            `RewardFailure` that ends with the location in the reward's code. Its `__cause__` is the original exception,
            or an `EndedError` if it took too long or ended its process.
        AgentFault: the policy caused it (it killed its sandbox, or left data that no reward can read).
        UserError: the reward reports that the user's input is invalid.
    """
    started, passed = time.perf_counter(), dict(arguments)
    seconds = reward.seconds(passed)
    async with _reward_slots.get_semaphore():
        if reward.code is not None:
            returned = await _call_in_process(reward, reward.code, passed, seconds, after, fresh=fresh)
            return returned, time.perf_counter() - started
        try:
            # A thread that does not outlive the program: a reward that hangs must not delay the exit.
            run_reward = partial(_run_in_thread, reward, passed, seconds, after)
            job = _await_on_loop(reward, passed, seconds) if reward.on_loop else reward.turns.call(run_reward)
            # Not `wait_for`, which can lose a cancellation that arrives at the moment when the reward returns.
            async with asyncio.timeout(seconds):
                with calls_while_awaited():
                    returned = await job
        except TimeoutError as error:
            raise RewardFailure(f"reward {reward.name!r} did not return within {seconds:g} s") from error
    return returned, time.perf_counter() - started


async def _call_in_process(
    reward: RewardFunction,
    code: Code,
    arguments: dict[str, Any],
    seconds: float,
    after: Callable[[], None] | None,
    *,
    fresh: bool,
) -> object:
    """Run a reward in a process."""
    state, held = arguments.get("state"), None
    try:
        try:
            target: ProcessPool | OwnProcess = reward.pool
            if isinstance(state, RolloutProcess):
                if state.held.ended is not None:
                    raise AgentFault(f"the process of its state {state.held.ended}")
                target = state.held
            elif fresh:
                target = held = await reward.pool.hold(code)
            read = partial(of_plain, reward.name)
            return await target.call(code, arguments, "hermes_rl.scoring.reward_value:to_builtin", seconds, read)
        finally:
            if held is not None:
                await held.close()
            if after is not None:
                await done_in_thread(after)
    except asyncio.CancelledError:
        raise
    except NotCarriedError as error:
        raise RewardFailure(f"reward {reward.name!r} {error}") from None
    except (HermesRLError, ForeignError, EndedError) as error:
        _raise_as_documented(reward, error)
    except OSError as error:  # on the way to the process: caused by infrastructure, so no cause is named
        raise RewardFailure(f"reward {reward.name!r} could not be called: {error}") from None


async def _await_on_loop(reward: RewardFunction, arguments: dict[str, Any], seconds: float) -> object:
    """Await a reward on this loop; one that is not async runs in a thread, and its result may be awaited."""
    function = reward.function
    try:
        if inspect.iscoroutinefunction(function):
            returned = function(**arguments)
        else:
            returned = await reward.turns.call(partial(function, **arguments))
        while inspect.isawaitable(returned):
            # a loop in debug mode accepts calls only from its own thread
            debugged = asyncio.get_running_loop().get_debug()
            work = _await_value(returned)
            returned = await (work if debugged else run_interleaved(work, seconds, HELD_AT_MOST))
        return returned
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        _raise_as_documented(reward, error)
    except OverlongError as error:
        raise RewardFailure(f"reward {reward.name!r} {error}") from error
    except BaseException as error:  # noqa: BLE001 - raised by `_raise_as_documented`: as it is, SystemExit would end the main loop
        _raise_as_documented(reward, error)


async def _await_value(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _run_in_thread(
    reward: RewardFunction, arguments: dict[str, Any], seconds: float, after: Callable[[], None] | None
) -> object:
    """Run a reward in this thread."""
    try:
        try:
            returned = reward.function(**arguments)
            return asyncio.run(_await_within(returned, seconds)) if inspect.isawaitable(returned) else returned
        finally:
            if after is not None:
                after()
    except BaseException as error:  # noqa: BLE001 - raised by `_raise_as_documented`: as it is, SystemExit would end the main loop
        _raise_as_documented(reward, error)


def _raise_as_documented(reward: RewardFunction, error: BaseException) -> NoReturn:
    """Raise the exception that `call_reward` documents for an error of a reward."""
    if isinstance(error, ForeignError) and error.claimed is not None:
        claimed, claimed.__cause__ = error.claimed, error
        error = claimed
    match error:
        case Failure() if error.stop_reason.graded:
            # The agent's own commands killed the sandbox, so the expected files are missing.
            raise AgentFault(error.detail) from error
        case AgentFault() | Failure() | UserError():
            raise error
        case ForeignError():
            raise RewardFailure(f"reward {reward.name!r} raised {error}") from error
        case EndedError():
            raise RewardFailure(f"reward {reward.name!r} {error}") from error
    raise RewardFailure(f"reward {reward.name!r} raised {place_of(error, reward.function)}") from error


async def _await_within(awaitable: Awaitable[Any], seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable
