"""Rewards of a spec: finding them, calling them, and grading a rollout and then its group.

The grader owns the order (gates first, then the order of the file; rewards that compare a group once all its members
have ended) and what each reward is offered. A failure leaves as an exception; the caller keeps what was computed before
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple, Protocol, TypeVar

from hermes_rl.errors import AgentFault, Failure, HermesRLError, RewardFailure, UserError
from hermes_rl.foreign.pool import POOL, EndedError, ForeignError, NotCarriedError, OvertimeError, ProcessPool
from hermes_rl.foreign.stand_ins import LIVING
from hermes_rl.plugins import Code, did_you_mean, load_object, place_of
from hermes_rl.scoring.value import RewardValue, Score, Weighting, combine, interpret, of_plain, require_gate, total
from hermes_rl.shipped import published_rewards, shipped_rewards
from hermes_rl.spec.model import INJECTED
from hermes_rl.threads import OverlongError, PerLoopSemaphore, Turns, done_in_thread, in_steps, in_thread
from hermes_rl.tools.rollout_process import RolloutProcess
from hermes_rl.values import own_copy

# ---------------------------------------------------------------------------------------------- Finding a reward
# A shipped name, ``/abs/file.py:function``, ``package.module:function``, ``atropos:<name>``, or a name that a
# package publishes in the entry-point group ``hermes_rl.rewards``. Shipped names win over published ones.


def find_reward(name: str, fn: str | None, others: Collection[str] = ()) -> RewardFunction:
    """Load the reward that the spec calls `name`; without `fn` the name itself is looked up.

    `others` are names of the spec's other rewards, one of which an option may have meant. Raises `UserError` where
    there is no such reward, or its code cannot be loaded.
    """
    reference = fn or name
    if reference.startswith("atropos:"):
        registry = "hermes_rl.env.registry_rewards:named"  # by name: the core does not know Atropos
        wanted = reference.removeprefix("atropos:")
        return RewardFunction.of(name, load_object(registry)(wanted), Code.of(registry)._replace(finds=wanted))
    if ":" in reference:
        return RewardFunction.of(name, load_object(reference), Code.of(reference))
    shipped = shipped_rewards()
    if reference in shipped:
        reference = f"{shipped[reference]}:{reference}"
        function = RewardFunction.of(name, load_object(reference), Code.of(reference))
        # One that names the state calls code of the spec, whose seconds nobody here knows.
        unbounded = function.asks or function.limit is not None or "state" in function.parameters
        return function if unbounded else replace(function, limit=SHIPPED_SECONDS)
    published = published_rewards()
    points = [point for point in published if point.name == reference]
    if points:
        return RewardFunction.of(name, _load(points), Code(points[0].module, points[0].attr))
    known = {*shipped, *(point.name for point in published)}
    hint = did_you_mean(reference, {*known, *others})
    there = hint or f" (there are: {', '.join(sorted(known))}; your own: fn: file.py:function)"
    raise UserError(f"there is no reward {reference!r}{there}")


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
# arguments. It runs in a process of its own (`hermes_rl.foreign`), so that neither what it does nor what the agent has
# written can hold up other rollouts; `ctx` may be used without await, in async rewards too. Code that no other process
# can find, and that of which the spec says `isolate: none`, runs in a thread with an event loop of its own.

log = logging.getLogger(__name__)

PURE_SECONDS = 300.0
"""Seconds that a reward may take which looks at what was said alone; a spec's `timeout` takes its place."""
SHIPPED_SECONDS = 1.5
"""Seconds that a reward that comes along may take over what was said."""
CEILING = 3600.0
"""Seconds that a reward may take which asks a sandbox or a model."""

HELD_AT_MOST = 300.0
"""Seconds that a reward which is awaited on the run's own loop may hold it, while everybody else waits."""

AT_ONCE = 256
"""Rewards that run at the same time; they mostly wait for the sandbox or a judge."""

_places = PerLoopSemaphore(AT_ONCE)

CONNECTIONS = (
    "aiohttp.",
    "httpx.",
    "httpcore.",
    "requests.",
    "urllib3.",
    "openai.",
    "anthropic.",
    "grpc.",
    "botocore.",
)
"""Beginnings of the names of exceptions that say that somebody else could not be reached."""
ASKED_WRONGLY = frozenset(
    {"builtins.ValueError", "httpx.InvalidURL", "httpx.UnsupportedProtocol"}
    | {"openai.BadRequestError", "openai.UnprocessableEntityError", "anthropic.BadRequestError"}
)
"""Exceptions of the same packages that say that nobody can be asked this, such as an address that is none."""
UNREADABLE = "json.decoder.JSONDecodeError"
"""A service has answered with something else, which is its own doing."""
CONNECTION_KINDS = {"builtins.ConnectionError", "builtins.TimeoutError", "socket.gaierror", "ssl.SSLError"}


T = TypeVar("T")


@dataclass(frozen=True)
class RewardFunction:
    """A loaded reward and what its signature says."""

    name: str
    function: Callable[..., Any]
    parameters: Mapping[str, inspect.Parameter]
    hints: Mapping[str, Any]
    code: Code | None = None
    """Where another process finds it; None where it runs in the runner."""
    timeout: float | None = None
    """Seconds that it may take; None: by what it looks at."""
    limit: float | str | None = None
    """What `takes_at_most` says of it; None where nobody does."""
    pool: ProcessPool = field(default=POOL, compare=False, repr=False)
    """Where its process comes from, unless it runs in that of a state."""
    on_loop: bool = False
    """Whether it is awaited on the loop that calls it, as what it uses was made there; one that is not async is not."""
    turns: Turns = field(default_factory=Turns, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, function: Callable[..., Any], code: Code | None = None) -> RewardFunction:
        """Read the signature of `function`, which other processes find as `code`. Raises `UserError` where it is not
        callable."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError) as error:
            raise UserError(f"reward {name!r}: its signature cannot be read: {error}") from error
        code = None if getattr(function, "in_runner", False) else code
        limit = getattr(function, "limit", None)
        return cls(name, function, parameters, _hints(function, parameters), code, limit=limit)

    @property
    def group_for(self) -> str | None:
        """The argument without which it judges each rollout of a group by itself; None where it always takes all."""
        return getattr(self.function, "group_for", None)

    @property
    def asks(self) -> bool:
        """Whether it may look into a sandbox, or ask a model by its role."""
        return self.uses_context or "roles" in self.parameters

    def seconds(self, arguments: Mapping[str, Any]) -> float:
        """Return how long a call with these arguments may take."""
        if self.timeout is not None:
            return self.timeout
        if isinstance(self.limit, str):
            return float(arguments.get(self.limit, self.parameters[self.limit].default))
        asks = self.asks or any(type(value) in LIVING for value in arguments.values())
        return self.limit or (CEILING if asks else PURE_SECONDS)

    @property
    def group_level(self) -> bool:
        """True where it takes the rollouts of a group and returns a list."""
        return "group" in self.parameters

    @property
    def uses_context(self) -> bool:
        """True where it may touch the sandbox."""
        return "ctx" in self.parameters

    @property
    def open(self) -> bool:
        """True where it takes any keyword argument."""
        return any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())

    @property
    def apart(self) -> bool:
        """Whether it runs in a process of its own."""
        return self.code is not None

    def own(self, value: Any) -> Any:
        """Return a row or a result that the reward may change, as it is carried or copied: nobody else's is changed."""
        if self.apart:
            return value
        return value.copied() if hasattr(value, "copied") else own_copy(value)

    def wanted(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Of what the rollout offers (context, roles), that which the signature names."""
        return {name: value for name, value in available.items() if name in self.parameters}

    @property
    def needed(self) -> list[str]:
        """Parameters without a default."""
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        return [key for key, each in self.parameters.items() if each.default is each.empty and each.kind in kinds]

    def require_takes(self, written: Collection[str], roles: Collection[str]) -> None:
        """Refuse, before anything is played or judged, arguments with which the function cannot be called. Raises
        `UserError` where the function does not take an argument, or needs another one."""
        for key in written:
            if key in INJECTED or (key not in self.parameters and not self.open):
                known = ", ".join(name for name in self.parameters if name not in INJECTED) or "none"
                raise UserError(f"reward {self.name!r} takes no argument {key!r}; its arguments: {known}")
        for key in self.needed:
            if key not in written and key not in INJECTED and key not in roles:
                raise UserError(
                    f"reward {self.name!r} needs {key!r}: give it under args (--set rewards.{self.name}.args.{key}=…; "
                    "with another fn, the args of before are gone)"
                )

    def arguments(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Return the spec's arguments, already rendered, coerced to the annotations. Raises `UserError` where a value
        does not fit."""
        from hermes_rl.spec.templates import coerce

        return {key: coerce(value, self.hints[key]) if key in self.hints else value for key, value in written.items()}


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
    """Run a reward, and `after` behind it; returns what it returned and its wall time in seconds.

    Raises:
        Failure: the reward raised. A `Failure` of its own (a judge, a sandbox) keeps its cause; anything else
            becomes a `RewardFailure` that ends with the place in the reward's code, whose `__cause__` is what was
            raised, or an `EndedError` where it took too long or ended its process. What is the policy's doing (it
            killed its sandbox, it left what no reward can read) is no failure but the value 0.
        UserError: the reward says that the user's input is wrong.
    """
    started, passed = time.perf_counter(), dict(arguments)
    seconds = reward.seconds(passed)
    async with _places.here():
        if reward.code is not None:
            returned = await _apart(reward, reward.code, passed, seconds, after)
            return returned, time.perf_counter() - started
        try:
            # A thread that does not outlive the program: a reward that hangs must not hold up its end.
            here = partial(_here, reward, passed, seconds, after)
            job = _on_loop(reward, passed, seconds) if reward.on_loop else reward.turns.call(here)
            # Not `wait_for`, which can lose a cancellation that comes in the moment in which the reward returns.
            async with asyncio.timeout(seconds):
                returned = await job
        except TimeoutError as error:
            raise RewardFailure(f"reward {reward.name!r} did not return within {seconds:g} s") from error
    return returned, time.perf_counter() - started


async def _apart(
    reward: RewardFunction, code: Code, arguments: dict[str, Any], seconds: float, after: Callable[[], None] | None
) -> object:
    """Run a reward in a process."""
    state, call = arguments.get("state"), reward.pool.call
    try:
        if isinstance(state, RolloutProcess):
            if state.held.ended is not None:
                raise AgentFault(f"the process of its state {state.held.ended}")
            call = state.held.call
        try:
            read = partial(of_plain, reward.name)
            return await call(code, arguments, "hermes_rl.scoring.value:plain", seconds, read)
        finally:
            if after is not None:
                await done_in_thread(after)
    except asyncio.CancelledError:
        raise
    except NotCarriedError as error:
        raise RewardFailure(f"reward {reward.name!r} {error}") from None
    except (HermesRLError, ForeignError, EndedError) as error:
        return _of_error(reward, error)
    except OSError as error:  # on the way to the process: nobody's doing but ours, so no cause is named
        raise RewardFailure(f"reward {reward.name!r} could not be called: {error}") from None


async def _on_loop(reward: RewardFunction, arguments: dict[str, Any], seconds: float) -> object:
    """Await a reward on this loop; where it is not async, a thread runs it, and what it returns may be awaited."""
    function = reward.function
    try:
        if inspect.iscoroutinefunction(function):
            returned = function(**arguments)
        else:
            returned = await reward.turns.call(partial(function, **arguments))
        while inspect.isawaitable(returned):
            debugged = asyncio.get_running_loop().get_debug()  # then a loop refuses threads that stand in for its own
            work = _awaited(returned)
            returned = await (work if debugged else in_steps(work, seconds, HELD_AT_MOST))
        return returned
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return _of_error(reward, error)
    except OverlongError as error:
        raise RewardFailure(f"reward {reward.name!r} {error}") from error
    except BaseException as error:  # noqa: BLE001 - told by `_of_error`: as it is, SystemExit would end the main loop
        return _of_error(reward, error)


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _here(
    reward: RewardFunction, arguments: dict[str, Any], seconds: float, after: Callable[[], None] | None
) -> object:
    """Run a reward in this thread."""
    try:
        try:
            returned = reward.function(**arguments)
            return asyncio.run(_settle(returned, seconds)) if inspect.isawaitable(returned) else returned
        finally:
            if after is not None:
                after()
    except BaseException as error:  # noqa: BLE001 - told by `_of_error`: as it is, SystemExit would end the main loop
        return _of_error(reward, error)


def _of_error(reward: RewardFunction, error: BaseException) -> object:
    """Return what is graded where a reward raised; raises what says that it is not."""
    match error:
        case AgentFault():
            return Score(0.0, reason=str(error))
        case Failure() if error.ending.graded:
            # The agent's own commands killed the sandbox: what it was to leave there is not there.
            return Score(0.0, reason=error.detail)
        case Failure() | UserError():
            raise error
        case ForeignError():
            raise RewardFailure(f"reward {reward.name!r} raised {error}") from error
        case EndedError():
            raise RewardFailure(f"reward {reward.name!r} {error}") from error
    raise RewardFailure(f"reward {reward.name!r} raised {place_of(error, reward.function)}") from error


async def _settle(awaitable: Awaitable[Any], seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable


# ------------------------------------------------------------------------- Whose doing it is that a reward fails
# An exception says what happened and not whose doing it was. So it is asked by trying: the same call again, which tells
# what happens by chance; then the same call over an answer that says nothing special, in a sandbox that no agent has
# seen. Where that works, what the agent has written or left is the cause, and it is graded; where it does not, the
# reward, the row or a service that it needs is, and nobody can be graded by it.

ANSWERS = ("", "0", "yes", "{}")
"""What is answered in the agent's place; before them, texts of the row."""
FROM_ROW = 6
"""Texts of the row that are tried: what is expected is often among them."""
LONGEST_ANSWER = 200
MORE = " (further ones are in the run's log alone)"
BLAMED = "{}; with another answer it works, so this is what the agent has brought about"


def plain_answers(item: Mapping[str, Any]) -> list[str]:
    """Return answers to try in the place of an agent's."""
    texts = [str(value) for value in item.values() if isinstance(value, str | int | float)]
    return [*[text for text in texts if len(text) <= LONGEST_ANSWER][:FROM_ROW], *ANSWERS]


def of_others(failure: RewardFailure) -> bool:
    """Whether a reward failed since somebody could not be reached, or says itself that it has failed."""
    cause = failure.__cause__
    if cause is None:
        return True
    kinds = cause.kinds if isinstance(cause, ForeignError) else [_kind(kind) for kind in type(cause).__mro__]
    if not ASKED_WRONGLY.isdisjoint(kinds) and UNREADABLE not in kinds:
        return False
    return any(kind in CONNECTION_KINDS or kind.startswith(CONNECTIONS) for kind in kinds)


def _kind(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ------------------------------------------------------------------------------------------------------- Grading


class Restorable(Protocol):
    """What the grader needs of a `ToolContext`: files that a reward lays down go away after it, and a clean sandbox."""

    def restore(self) -> None: ...

    def untouched(self) -> AbstractContextManager[Restorable]: ...


@dataclass(frozen=True)
class GradedReward:
    """One reward of a spec: the function, how it counts, its arguments before rendering."""

    function: RewardFunction
    weighting: Weighting
    args: Mapping[str, Any] = field(default_factory=dict)
    fresh: bool = False
    """It looks into a new sandbox with the artifacts laid in, not into the rollout's own."""
    seats: tuple[str, ...] | None = None
    """Names of the seats that it pays; None: all."""
    shares: Mapping[str, float] | None = None
    """By seat, the factor of what it gives for the first of them; None: it is called for each seat that it pays."""
    steps: str | None = None
    """How its values for the steps of a rollout become one; None where it looks at the whole rollout alone."""

    def pays(self, seat: str) -> bool:
        """Whether it counts for the rollouts of a seat; each does where one agent plays."""
        return not seat or self.seats is None or seat in self.seats

    def is_called_for(self, seat: str) -> bool:
        """Whether it is called with the result of a seat: of each that it pays, or of the first that has a factor."""
        return self.pays(seat) and (self.shares is None or seat == next(iter(self.shares)))

    @property
    def name(self) -> str:
        return self.weighting.name

    @property
    def group_level(self) -> bool:
        """True where all members of a group have to be there, so that it can judge them together."""
        needed = self.function.group_for
        return self.function.group_level and (needed is None or self.args.get(needed) is not None)

    @property
    def place(self) -> str:
        """Where the spec asks for it, or for that by which it becomes group-level."""
        needed = self.function.group_for
        return f"rewards.{self.name}" if needed is None else f"rewards.{self.name}.args.{needed}"


Render = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
"""(arguments with templates, columns of the row) → arguments."""

Machines = Callable[[GradedReward], AbstractAsyncContextManager[Restorable | None]]
"""The sandbox that a reward looks into, there for as long as it runs; None for one that does not look."""


class GradedSeat(NamedTuple):
    """What one seat of an episode has played, the sandboxes that its rewards look into, and where their values go."""

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
    blames: bool = True
    """Ask whose doing it is that a reward fails; False where each failure is to be told, whoever brought it about."""
    combine: str = "sum"
    """What `score.combine` says."""
    _seen: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False, repr=False)
    """The lowest and the highest value that each reward has given to a rollout so far, by its name."""

    _failed: set[str] = field(default_factory=set, compare=False, repr=False)
    """Names of rewards that some agent has made fail."""

    def __post_init__(self) -> None:
        for reward in self.rewards:
            reward.function.require_takes(reward.args, {*self.roles, "policy"})
            if reward.steps is not None and reward.group_level:
                raise UserError(f"reward {reward.name!r} compares the members of a group, and they have other steps")
            if reward.shares is not None and reward.group_level:
                raise UserError(
                    f"reward {reward.name!r} compares the members of a group, so that each seat has values of its own: "
                    "name its seats in a list"
                )
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
    def of_steps(self) -> tuple[GradedReward, ...]:
        """Those that look at each step, in file order."""
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
        """Call the per-rollout rewards in order, each value put into `values` as soon as it is known.

        `machines` is None where the sandbox is gone and no reward that is called looks into it; `only` are their names,
        None is all. Those that look at steps find the number of the present one, from 0, as `step` in their row. Raises
        `Failure` where a reward failed; `values` keeps those before it.
        """
        for reward in self.ordered:
            if reward.group_level or (only is not None and reward.name not in only):
                continue
            row = item if reward.steps is None else {**item, "step": step}
            async with machines(reward) if machines is not None else nullcontext() as ctx:
                values[reward.name] = await self._graded(reward, row, result, ctx, {"state": state})

    async def grade_seats(self, item: Mapping[str, Any], seats: Sequence[GradedSeat], state: Any) -> None:
        """Call the per-rollout rewards in order, each for the seats that it pays.

        They are offered `seats`, the results by seat, and `paid`, what earlier rewards have given: by seat, then by
        name. Raises `Failure` where a reward failed; the seats' values keep those before it.
        """
        results = {seat.name: seat.result for seat in seats}
        for reward in self.ordered:
            if reward.group_level:
                continue
            for seat in (seat for seat in seats if reward.is_called_for(seat.name)):
                paid = {each.name: {name: value_of.value for name, value_of in each.values.items()} for each in seats}
                offered = {"state": state, "seats": results, "paid": paid}
                async with seat.machines(reward) as ctx:
                    value = await self._graded(reward, item, seat.result, ctx, offered)
                for other in seats:
                    if reward.shares is None and other is seat:
                        other.values[reward.name] = value
                    elif reward.shares is not None and other.name in reward.shares:
                        other.values[reward.name] = value.times(reward.shares[other.name], turns=other is seat)

    async def _graded(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        result: Any,
        ctx: Restorable | None,
        offered: Mapping[str, Any],
    ) -> RewardValue:
        """Call a reward for one rollout; where what the agent brought about is in its way, that is graded."""
        call = partial(self._called, reward, item, also=offered)
        for last in (False, True):
            try:
                value = await call(result, ctx)
                break
            except RewardFailure as failure:
                if not self.blames or of_others(failure):
                    raise
                # What lost its process may be the victim of others, for want of memory; overtime would come again.
                if last or isinstance(failure.__cause__, OvertimeError):
                    return await self._blamed(failure, reward, call, item, result, ctx)
        if value.value is not None:
            low, high = self._seen.get(reward.name, (value.value, value.value))
            self._seen[reward.name] = min(low, value.value), max(high, value.value)
        return value

    async def _blamed(
        self,
        failure: RewardFailure,
        reward: GradedReward,
        call: Callable[..., Awaitable[RewardValue]],
        item: Mapping[str, Any],
        result: Any,
        ctx: Restorable | None,
    ) -> RewardValue:
        """Return the value of a rollout whose agent has made the reward fail; raises the failure where it has not."""
        if isinstance(failure.__cause__, OvertimeError) and reward.function.limit is not None:
            return self._worst(reward, failure.detail)
        answers = plain_answers(item)
        looks = reward.function.uses_context and ctx is not None
        if looks or isinstance(failure.__cause__, EndedError):
            answers = answers[:1]  # each may take as long again
        async with _untouched(ctx if looks else None) as clean:
            for answer in answers:
                try:
                    await call(result.answering(answer), clean, answer=answer)
                except RewardFailure as same:
                    if of_others(same):
                        raise failure from same
                else:
                    return self._worst(reward, BLAMED.format(failure.detail))
        # What it looks at may never be there unless an agent has worked; others' agents have, where it has graded them.
        if (looks or "state" in reward.function.parameters) and reward.name in self._seen:
            return self._worst(reward, BLAMED.format(failure.detail))
        raise failure

    def _worst(self, reward: GradedReward, reason: str) -> RewardValue:
        """Return what an agent gets that made a reward fail: nothing, or the worst that another agent has got."""
        # The first is for whoever wrote the reward, who may not have thought of such an answer.
        first = reward.name not in self._failed
        self._failed.add(reward.name)
        log.log(logging.WARNING if first else logging.INFO, "%s%s", reason, MORE if first else "")
        low, high = self._seen.get(reward.name, (0.0, 1.0))
        return RewardValue(max(high, 1.0) if reward.weighting.weight < 0 else min(low, 0.0), reason=reason)

    async def _called(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        result: Any,
        ctx: Restorable | None,
        *,
        also: Mapping[str, Any],
        answer: str | None = None,
    ) -> RewardValue:
        """Call a reward. `also` is what it may name beside; with an `answer` all seats have said that instead."""
        own = reward.function.own(item)
        offered = {"item": own, "result": reward.function.own(result), "ctx": ctx, **also, **self._roles}
        if "seats" in reward.function.parameters and "seats" in also:
            seats = {name: seat if answer is None else seat.answering(answer) for name, seat in also["seats"].items()}
            offered["seats"] = {name: reward.function.own(seat) for name, seat in seats.items()}
        offered |= {"group": [offered["result"]]} if reward.function.group_level else {}
        # What it laid down goes away in the same thread: ToolContext waits for this loop.
        restore = ctx.restore if reward.function.uses_context and ctx is not None else None
        returned, seconds = await call_reward(reward.function, self._arguments(reward, own, offered), after=restore)
        if reward.function.group_level:
            (returned,) = _per_member(reward.name, returned, 1)
        return _read(reward, returned, seconds, result.turns_used)

    async def grade_group(
        self,
        item: Mapping[str, Any],
        results: Sequence[Any],
        values: Sequence[dict[str, RewardValue]],
        only: Container[str] | None = None,
        seats: Mapping[str, Sequence[Any]] | None = None,
    ) -> None:
        """Call the group-level rewards (those named `only`); `values[i]` receives those of rollout *i*.

        `seats` are the results of all seats by name, where the rollouts are one seat's of several. Raises `Failure`
        where a reward failed, or did not return one value per rollout.
        """
        for reward in self.ordered:
            if not reward.group_level or (only is not None and reward.name not in only):
                continue
            for slot, value in zip(values, await self._compared(reward, item, results, seats), strict=True):
                slot[reward.name] = value

    async def _compared(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        results: Sequence[Any],
        seats: Mapping[str, Sequence[Any]] | None,
    ) -> list[RewardValue]:
        """Call a reward that compares; a member whose agent is in its way has the worst value, the others theirs."""
        try:
            return await self._called_together(reward, item, results, seats)
        except RewardFailure as failure:
            if not self.blames or of_others(failure):
                raise
            first = failure
        plain = [result.answering("") for result in results]
        if seats is not None:
            seats = {name: [result.answering("") for result in own] for name, own in seats.items()}
        blamed: dict[int, RewardFailure] = {}
        for index in range(len(results)):
            try:
                mixed = [*plain[:index], results[index], *plain[index + 1 :]]
                await self._called_together(reward, item, mixed, seats)
            except RewardFailure as failure:
                blamed[index] = failure
        if not blamed or len(blamed) == len(results):
            raise first
        others = [plain[index] if index in blamed else result for index, result in enumerate(results)]
        values = await self._called_together(reward, item, others, seats)
        return [
            self._worst(reward, BLAMED.format(blamed[index].detail)) if index in blamed else value
            for index, value in enumerate(values)
        ]

    async def _called_together(
        self,
        reward: GradedReward,
        item: Mapping[str, Any],
        results: Sequence[Any],
        seats: Mapping[str, Sequence[Any]] | None,
    ) -> list[RewardValue]:
        own = reward.function.own(item)
        offered = {"item": own, "group": [reward.function.own(result) for result in results], **self._roles}
        if seats is not None and "seats" in reward.function.parameters:
            offered["seats"] = {name: [reward.function.own(each) for each in played] for name, played in seats.items()}
        returned, seconds = await call_reward(reward.function, self._arguments(reward, own, offered))
        members = _per_member(reward.name, returned, len(results))
        return [
            _read(reward, value, seconds, result.turns_used) for value, result in zip(members, results, strict=True)
        ]

    def score(self, values: Mapping[str, RewardValue], seat: str = "") -> float:
        """Return the score of a rollout, of this seat if there are several, whose rewards are known; see `combine`."""
        weightings = [reward.weighting for reward in self.rewards if reward.pays(seat)]
        return combine(weightings, values, self.clamp, self.combine)

    def credit(self, values: Mapping[str, RewardValue]) -> tuple[float, ...] | None:
        """Return the weighted sum of what rewards give to each turn; None where none does, or the score is no sum."""
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
        """Each role by its name, and all of them as `roles` for rewards that are told which to ask."""
        return {**self.roles, "roles": self.roles}

    def _arguments(self, reward: GradedReward, item: Mapping[str, Any], offered: Mapping[str, Any]) -> dict[str, Any]:
        function = reward.function
        passed = function.arguments(self.render(reward.args, item))
        missing = [name for name in function.needed if name not in passed and name not in offered]
        if missing:
            raise UserError(f"reward {reward.name!r} needs {missing[0]!r}: this context is not offered here")
        return {**function.wanted(offered), **passed}


def _read(reward: GradedReward, returned: object, seconds: float, turns: int) -> RewardValue:
    try:
        value = interpret(reward.name, returned, seconds, turns)
        if reward.weighting.gate and value.value is not None:
            require_gate(reward.name, value.value)
        return value
    except RewardFailure as failure:  # no words of the reward's own: whose doing it is can be asked
        raise RewardFailure(failure.detail) from failure


@asynccontextmanager
async def _untouched(ctx: Restorable | None) -> AsyncIterator[Restorable | None]:
    """Open a sandbox that no agent has seen, for a reward that looks into one; None for any other."""
    if ctx is None:
        yield None
        return
    clean = ctx.untouched()
    try:
        yield await in_thread(clean.__enter__)
    finally:
        await in_thread(partial(clean.__exit__, None, None, None))


def _per_member(name: str, returned: object, size: int) -> Sequence[object]:
    if isinstance(returned, str | bytes) or not isinstance(returned, Sequence) or len(returned) != size:
        returned_kind = f"{len(returned)} values" if isinstance(returned, list | tuple) else type(returned).__name__
        raise RewardFailure(
            f"group-level reward {name!r} must return a list with one value per rollout ({size}), not {returned_kind}"
        )
    return returned
