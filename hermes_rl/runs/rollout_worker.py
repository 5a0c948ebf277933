"""`RolloutWorker`: the body of a worker process, which runs rollouts for a run and stores nothing.

It owns the compiled spec of its process (sandboxes, clients of servers, tokenizer, the spec's user code), and handles
each request until its response. The run decides which rollouts run, in which order and how often, and writes all
files. The transport of requests and responses belongs to its owner: a worker process (`worker`), or an actor of a Ray
cluster (`cluster`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, TypeAlias

from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.data.load import Split
from hermes_rl.errors import Failure, HermesRLError, RunError, UserError
from hermes_rl.rollouts.admission import free_memory, open_descriptors, processor_seconds
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder, Rollout, RolloutKey
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.rollouts.sandboxes import Keep
from hermes_rl.rollouts.variables import named_variables
from hermes_rl.runs.renderer_check import renderer_of, tokenizer_of
from hermes_rl.runs.store import Line, rollout_of, rollout_record
from hermes_rl.servers.base import CALLABLE, POLICY, ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.policy import Policy, PolicyDescription, WeightUpdate
from hermes_rl.servers.usage import Meter
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.threads import end_tasks, run_exclusively
from hermes_rl.tokens.load import as_tokenizer
from hermes_rl.tokens.transcript import packed
from hermes_rl.values import write_json

Tell: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Sends a message to the run that answers no request: `{"log": …}` or `{"note": …}`."""
OWN = 0
"""Number of the spec's policy, among the numbers of other policies (`Policy.number`)."""
IDLE = 64
"""Policies that a worker keeps open without rollouts; each has connections and maybe a tokenizer."""


@dataclass(frozen=True)
class WorkerSetup:
    """First message to a worker. It holds keys, so it must travel only over private channels.

    Attributes:
        spec: the spec to run.
        mode: mode of the run; None: there is none, and each rollout comes with its `PlaySettings`.
        environ: the runner's variables, of which only `variables` are stored; None: the variables of this process.
        level: level from which hermes_rl's log records are sent to the run; by default the level of this process.
        won: scores of the first seats against each opponent so far; each worker continues the count separately.
        variables: the runner's variables that the spec names; they take precedence over the worker's variables.
    """

    spec: Spec
    mode: Mode | None
    environ: InitVar[Mapping[str, str] | None]
    level: int = field(default_factory=lambda: logging.getLogger("hermes_rl").getEffectiveLevel())
    won: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(init=False, repr=False)

    def __post_init__(self, environ: Mapping[str, str] | None) -> None:
        variables = named_variables(self.spec, os.environ if environ is None else environ)
        object.__setattr__(self, "variables", variables)


@dataclass(frozen=True)
class PlaySettings:
    """Settings of a rollout, if they are not the same for all rollouts.

    Attributes:
        options: options that bound and steer the loop.
        policy: the model that acts; None: the spec's policy.
        weight_update: last known update of that policy's weights.
    """

    options: LoopOptions
    policy: PolicyDescription | None = None
    weight_update: WeightUpdate | None = None


class _ActingPolicy:
    """A policy that acts in this worker, and the spec compiled with it; None is the spec's own policy."""

    def __init__(self, compiled: CompiledSpec, policy: Policy | None) -> None:
        self.compiled, self.policy = compiled, policy
        self.playing: list[RolloutRunner] = []
        """Runner of each rollout in which it acts."""
        self._encoder: Encoder | None = None
        self._loading = asyncio.Lock()

    @property
    def role(self) -> ModelClient:
        return self.compiled.policy

    async def encoder(self) -> Encoder:
        """Return the encoder of its rollouts; made once."""
        async with self._loading:
            if self._encoder is None:
                self._encoder = await encoder_with(self.policy, self.role.configs[0])
            return self._encoder


class RolloutWorker:
    """Runs the rollouts that a run requests, on one event loop; `keep` stores their artifacts."""

    def __init__(self, opening: WorkerSetup, tell: Tell, keep: Keep | None) -> None:
        self._opening, self._tell, self._keep = opening, tell, keep
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._stack = AsyncExitStack()
        self._meter = Meter()
        self._runners: dict[str, RolloutRunner] = {}
        """Runners of a run, by split."""
        self._acting: dict[int, _ActingPolicy] = {}
        """Acting policies by number; the last one was used last."""
        self._news: dict[int, WeightUpdate] = {}
        """Last weight update of each policy, by number: a later request may contain older information."""
        self._retries_of_gone = 0
        self._shared: tuple[int, int] | None = None
        self._fixed: set[int] = set()

    async def open(self) -> list[str] | None:
        """Get ready to run rollouts; return an error in the form in which the run raises it (`raised_of`), or None."""
        _log_to(self._tell, self._opening.level)
        try:
            spec = self._opening.spec
            environ = {**os.environ, **self._opening.variables}
            self._compiled = await self._stack.enter_async_context(CompiledSpec(spec, environ))
            if self._opening.mode is not None:
                evaluate = self._opening.mode == "evaluate"
                encoder = Encoder(None) if evaluate else await encoder_of(spec, "train")
                self._runners = {
                    "train": RolloutRunner(self._compiled, split="train", encoder=encoder),
                    "eval": RolloutRunner(self._compiled, split="eval"),
                }
        except Exception as error:  # noqa: BLE001 - whatever it is, the run tells it, once for all workers
            await self._stack.aclose()
            return raised_of(error)
        # The run's budgets must know of each call.
        self._stack.enter_context(self._meter.heard_by(lambda: self._tell({"usage": self._meter.record()})))
        self._compiled.keep = self._keep
        self._compiled.seating.won |= self._opening.won
        for role in self._compiled.roles.values():
            role.tell(self._note)
            role.count_by(self._meter)
        return None

    async def close(self) -> None:
        """Cancel running rollouts, and release everything, even if a part of that fails."""
        async with self._stack as stack:
            for acting in self._acting.values():
                stack.push_async_callback(acting.role.close)
            tasks = list(self._tasks.values())
            self._meter.close()  # rewards in threads outlive their rollouts
            await end_tasks(tasks)
            self._tell({"usage": self._meter.record()})

    def _note(self, text: str) -> None:
        self._tell({"note": text})

    # ------------------------------------------------------------------ requests and messages of the run

    def answer(
        self, request_id: int, kind: Literal["play", "compare", "told"], *args: Any
    ) -> Coroutine[Any, Any, bytes]:
        """Start handling a request; return the task that produces its JSON response, which starts with the request's
        number.
        """
        methods: Mapping[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]] = {
            "play": self._play,
            "compare": self._compare,
            "told": self._take_weights,
        }
        work = methods[kind](*args)
        with self._meter.counting():
            self._tasks[request_id] = asyncio.ensure_future(work)  # before anything else, so that it can be cancelled
        return self._answer(request_id, self._tasks[request_id])

    async def _answer(self, request_id: int, task: asyncio.Task[dict[str, Any]]) -> bytes:
        try:
            answer = await task
        except asyncio.CancelledError:
            answer = {}  # no caller waits for it; the run learns that its sandbox is released
            self._tell({"usage": self._meter.record()})  # its requests were sent
        except Exception as error:  # noqa: BLE001 - carried to the run, which ends by it as if it were its own
            answer = {"raised": raised_of(error)}
        finally:
            del self._tasks[request_id]
        images, self._compiled.images = self._compiled.images, {}
        used = {"retries": self._retries(), "usage": self._meter.record()}
        condition = {**used, "images": {name: sorted(digests) for name, digests in images.items()}}
        try:
            return await run_exclusively(write_json, {"id": request_id, **condition, **answer})
        except (TypeError, ValueError) as error:  # it cannot be written as JSON
            return write_json({"id": request_id, **condition, "raised": raised_of(error)})

    def hear(self, kind: Literal["fix", "share", "cancel", "told", "refuse"], *args: Any) -> None:
        """Handle a message of the run that needs no response."""
        if kind == "cancel":
            if args[0] in self._tasks:
                self._tasks[args[0]].cancel()
        elif kind == "told":
            self._take_updates(args[0])
        elif kind == "refuse":
            self._meter.close()
        elif kind == "fix":
            self._fixed.add(args[0])
            for role in self._roles_of(args[0]):
                role.fix()
        else:
            self._shared = args[0], args[1]
            for role in self._roles:
                role.share(*args)

    @property
    def _roles(self) -> list[ModelClient]:
        """All models that this worker calls."""
        others = [acting.role for policy_id, acting in self._acting.items() if policy_id != OWN]
        return [*self._compiled.roles.values(), *others]

    def _roles_of(self, policy_id: int) -> list[ModelClient]:
        """Return the client of a policy, if this worker has one."""
        if policy_id == OWN:
            return [role for name, role in self._compiled.roles.items() if name == POLICY]
        return [self._acting[policy_id].role] if policy_id in self._acting else []

    def condition(self) -> dict[str, Any]:
        """Return the values that the run's admission uses."""
        numbers = {OWN, *self._acting}
        waiting = {
            str(policy_id): role.waiting for policy_id in numbers for role in self._roles_of(policy_id) if role.waiting
        }
        runners = [*self._runners.values(), *(runner for acting in self._acting.values() for runner in acting.playing)]
        return {
            "waiting": waiting,
            "phases": sum((runner.phases for runner in runners), Counter[str]()),
            "cpu": processor_seconds(),
            "descriptors": open_descriptors(),
            "free": free_memory(),
        }

    # ------------------------------------------------------------------ requests

    async def _play(self, key: RolloutKey, split: str, settings: PlaySettings | None = None) -> dict[str, Any]:
        if settings is None:
            rollout = await self._runners[split].attempt(key)
        else:
            rollout = await self._play_with(settings, key, split)
        return await run_exclusively(self._update_versions, rollout)

    async def _play_with(self, settings: PlaySettings, key: RolloutKey, split: str) -> Rollout:
        policy_id = OWN if settings.policy is None else settings.policy.policy_id
        acting = self._acting.pop(policy_id, None) or self._acting_policy(settings.policy)
        self._acting[policy_id] = acting
        if settings.weight_update is not None and acting.policy is not None:
            acting.policy.take(settings.weight_update)
            acting.policy.take(self._news.get(policy_id, settings.weight_update))
        runner = RolloutRunner(acting.compiled, split=split, options=settings.options)
        acting.playing.append(runner)
        try:
            runner.encoder = await acting.encoder()
            return await runner.attempt(key)
        finally:
            acting.playing.remove(runner)
            await self._let_go()

    def _acting_policy(self, description: PolicyDescription | None) -> _ActingPolicy:
        """Create the acting policy from the description of a policy."""
        if description is None:
            return _ActingPolicy(self._compiled, None)
        policy = Policy.of_description(description)
        policy.role.tell(self._note)
        if self._shared is not None:
            policy.role.share(*self._shared)
        if description.policy_id in self._fixed:
            policy.role.fix()
        return _ActingPolicy(self._compiled.with_policy(policy.role), policy)

    async def _let_go(self) -> None:
        """Close the policies without rollouts, except the last few; an endpoint lives for one rollout."""
        idle = [policy_id for policy_id, acting in self._acting.items() if policy_id != OWN and not acting.playing]
        ended = {
            policy_id
            for policy_id in idle
            if (policy := self._acting[policy_id].policy) is not None and policy.captured
        }
        closing_ids = ended.union(idle[: max(0, len(idle) - IDLE)])
        for acting in [self._acting.pop(policy_id) for policy_id in closing_ids]:
            self._retries_of_gone += acting.role.retries
            await acting.role.close()
        for policy_id in closing_ids:
            self._news.pop(policy_id, None)

    def _take_updates(self, news_of: Mapping[int, WeightUpdate]) -> None:
        self._news |= news_of
        for policy_id, news in news_of.items():
            acting = self._acting.get(policy_id)
            if acting is not None and acting.policy is not None:
                acting.policy.take(news)

    async def _take_weights(self, news: Mapping[int, WeightUpdate]) -> dict[str, Any]:
        self._take_updates(news)
        return {}

    def _update_versions(self, rollout: Rollout) -> dict[str, Any]:
        line, result = rollout_record(rollout), rollout.result
        answer: dict[str, Any] = {"line": line, "no_tokens": rollout.no_tokens}
        if self._compiled.has_group_rewards and line["sequences"] is None and result is not None and result.transcript:
            # An evaluation records no tokens, and a reward that compares the group may look at them.
            answer["tokens"] = [packed(sequence) for sequence in result.transcript.sequences()]
        return answer

    async def _compare(self, packed_members: bytes) -> dict[str, Any]:
        members: list[tuple[RolloutKey, Line]] = await run_exclusively(pickle.loads, packed_members)
        rollouts = [await run_exclusively(rollout_of, line, key) for key, line in members]
        for rollout in rollouts:
            if rollout.result is not None:
                rollout.result.tool_schemas = list(members[0][1]["tools"] or ())
        answer: dict[str, Any] = {}
        with Meter(asyncio.current_task()).counting() as meter:
            try:
                await self._compiled.grade_group(rollouts)
            except Failure as failure:
                answer["failed"] = [str(failure.stop_reason), failure.detail]
        rewards = [{name: value.record() for name, value in rollout.rewards.items()} for rollout in rollouts]
        return {"rewards": rewards, "asked": meter.record(), **answer}

    def _retries(self) -> dict[str, int]:
        retries = Counter({name: role.retries for name, role in self._compiled.roles.items()})
        others = sum(acting.role.retries for policy_id, acting in self._acting.items() if policy_id != OWN)
        retries[POLICY] += others + self._retries_of_gone
        return {name: count for name, count in retries.items() if count}


async def encoder_of(spec: Spec, split: Split) -> Encoder:
    """Return the encoder that gives the rollouts of a split their tokens, with the policy's tokenizer."""
    name = tokenizer_of(spec)
    if name is None and not spec.servers["policy"][0].kind.embedded:
        return Encoder(None, "The policy names neither a model nor a tokenizer; set servers.policy.tokenizer")
    if spec.servers["policy"][0].kind.token_level:
        renderer = await asyncio.to_thread(renderer_of, spec)
        return Encoder(renderer.tokenizer)
    if split == "eval":
        return Encoder(None)
    return await asyncio.to_thread(Encoder.load, name)


async def encoder_with(policy: Policy | None, config: ServerConfig) -> Encoder:
    """Return the encoder for the rollouts of a policy, or of the spec's policy, whose (first) server is `config`."""
    if policy is not None and policy.captured:
        return Encoder(None, "the trainer captures the tokens at its endpoint")
    if policy is not None and policy.tokenizer is not None:
        return Encoder(await asyncio.to_thread(as_tokenizer, policy.tokenizer))
    if config.kind.embedded:
        return await asyncio.to_thread(Encoder.load, config.tokenizer)
    if config.kind.token_level:
        return Encoder(None, "nothing was sampled")  # otherwise its rollouts have tokens already
    name = config.tokenizer or ("" if config.type == CALLABLE else config.model)
    if not name:
        return Encoder(None, "the policy names neither a model nor a tokenizer")
    return await asyncio.to_thread(Encoder.load, name)


def raised_of(error: Exception) -> list[str]:
    """Return the kind and text of an exception for the run: a user's mistake, an end of the run, or a bug with its
    traceback.
    """
    if isinstance(error, UserError):
        return ["user", str(error)]
    if isinstance(error, RunError):
        return ["run", str(error)]
    if isinstance(error, HermesRLError):
        return ["bug", f"{type(error).__name__}: {error}"]
    return ["bug", "".join(traceback.format_exception(error))]


def error_of(kind: str, text: str) -> UserError | RunError | RuntimeError:
    """Return the exception that `raised_of` described, for the run to raise."""
    if kind == "bug":
        return RuntimeError(f"in a worker: {text}")
    return UserError(text) if kind == "user" else RunError(text)


def _log_to(tell: Tell, level: int) -> None:
    """Send what hermes_rl logs to the run, whose handlers it then passes."""
    loop, logger = asyncio.get_running_loop(), logging.getLogger("hermes_rl")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = {"log": [record.name, record.levelno, self.format(record)]}  # with its traceback
            with suppress(RuntimeError):  # the loop is closed: there is no receiver any more
                loop.call_soon_threadsafe(tell, message)

    logger.addHandler(Handler())
    logger.setLevel(level)
    logger.propagate = False
