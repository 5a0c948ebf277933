"""`Player`: the body of a worker, which plays rollouts for a run in another process and keeps nothing.

Owns the compiled spec of its process (sandboxes, clients of servers, tokenizer, the spec's own code), and the way of a
request to its answer. What is played, in which order, how often, and what is written, is up to the run. How requests
and answers travel is up to who has the player: a worker process (`worker`), or an actor of a Ray cluster (`cluster`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from hermes_rl.data.load import Split
from hermes_rl.errors import Failure, HermesRLError, RunError, UserError
from hermes_rl.rollouts.admission import free_memory, open_descriptors, processor_seconds
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder, Rollout, RolloutKey
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.rollouts.sandboxes import Keep
from hermes_rl.runs.exact import renderer_of, tokenizer_of
from hermes_rl.runs.store import Line, rollout_of, rollout_record
from hermes_rl.servers.client import metered
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.threads import one_at_a_time
from hermes_rl.tokens.transcript import packed

Tell: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Says something to the run beside the answers: `{"log": …}` or `{"note": …}`."""


@dataclass(frozen=True)
class Opening:
    """What a worker is told first. It holds keys, so it travels only where nobody else reads it.

    Attributes:
        spec: what is played.
        mode: in which mode the run is.
        environ: where the keys of servers are looked up; None: the worker's own environment.
        level: from which level on it sends what hermes_rl logs; by default as this process logs it.
    """

    spec: Spec
    mode: Mode
    environ: Mapping[str, str] | None
    level: int = field(default_factory=lambda: logging.getLogger("hermes_rl").getEffectiveLevel())


class Player:
    """Plays the rollouts that a run asks for, on one event loop.

    Args:
        opening: what is played.
        tell: gets what is logged, and what the user is to know.
        keep: keeps the artifacts of rollouts.
    """

    def __init__(self, opening: Opening, tell: Tell, keep: Keep | None) -> None:
        self._opening, self._tell, self._keep = opening, tell, keep
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._stack = AsyncExitStack()

    async def open(self) -> list[str] | None:
        """Get ready to play; returns what is wrong, as the run raises it again (`raised_of`), or None."""
        _log_to(self._tell, self._opening.level)
        try:
            spec = self._opening.spec
            self._compiled = await self._stack.enter_async_context(CompiledSpec(spec, self._opening.environ))
            encoder = await self._encoder(spec)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run tells it, once for all workers
            await self._stack.aclose()
            return raised_of(error)
        self._compiled.keep = self._keep
        for role in self._compiled.roles.values():
            role.tell(lambda text: self._tell({"note": text}))
        self._runners = {
            "train": RolloutRunner(self._compiled, split="train", encode=encoder.encode),
            "eval": RolloutRunner(self._compiled, split="eval"),
        }
        return None

    async def close(self) -> None:
        """Cancel what is played, and release everything."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    async def _encoder(self, spec: Spec) -> Encoder:
        return Encoder(None) if self._opening.mode == "evaluate" else await encoder_of(spec, "train")

    # ------------------------------------------------------------------ what the run asks for, and says

    def answer(self, number: int, what: Literal["play", "compare"], *given: Any) -> Coroutine[Any, Any, bytes]:
        """Begin what is asked for; returns what waits for the answer: JSON that begins with the request's number."""
        work = self._play(*given) if what == "play" else self._compare(*given)
        self._tasks[number] = asyncio.ensure_future(work)  # before anything else, so that it can be cancelled
        return self._answer(number, self._tasks[number])

    async def _answer(self, number: int, task: asyncio.Task[dict[str, Any]]) -> bytes:
        try:
            answer = await task
        except asyncio.CancelledError:
            answer = {}  # nobody waits for it; the run hears that its sandbox is released
        except Exception as error:  # noqa: BLE001 - carried to the run, which ends by it as if it were its own
            answer = {"raised": raised_of(error)}
        finally:
            del self._tasks[number]
        images, self._compiled.images = self._compiled.images, {}
        told = {"retries": self._retries(), "images": {name: sorted(digests) for name, digests in images.items()}}
        try:
            return await one_at_a_time(written, {"id": number, **told, **answer})
        except (TypeError, ValueError) as error:  # it cannot be written as JSON
            return written({"id": number, **told, "raised": raised_of(error)})

    def hear(self, what: Literal["fix", "share", "cancel"], *given: int) -> None:
        """Do what the run says and needs no answer to."""
        if what == "cancel":
            if given[0] in self._tasks:
                self._tasks[given[0]].cancel()
        elif what == "fix":
            self._compiled.policy.fix()
        else:
            for role in self._compiled.roles.values():
                role.share(*given)

    def condition(self) -> dict[str, Any]:
        """Return what the run's admission looks at."""
        return {
            "waiting": self._compiled.policy.waiting,
            "phases": sum((runner.phases for runner in self._runners.values()), Counter[str]()),
            "cpu": processor_seconds(),
            "descriptors": open_descriptors(),
            "free": free_memory(),
        }

    # ------------------------------------------------------------------ requests

    async def _play(self, key: RolloutKey, split: str) -> dict[str, Any]:
        rollout = await self._runners[split].attempt(key)
        return await one_at_a_time(self._told_of, rollout)

    def _told_of(self, rollout: Rollout) -> dict[str, Any]:
        line, result = rollout_record(rollout), rollout.result
        answer: dict[str, Any] = {"line": line, "no_tokens": rollout.no_tokens}
        if self._compiled.has_group_rewards and line["sequences"] is None and result is not None and result.transcript:
            # An evaluation records no tokens, and a reward that compares the group may look at them.
            answer["tokens"] = [packed(one) for one in result.transcript.sequences()]
        return answer

    async def _compare(self, packed_members: bytes) -> dict[str, Any]:
        members: list[tuple[RolloutKey, Line]] = await one_at_a_time(pickle.loads, packed_members)
        rollouts = [await one_at_a_time(rollout_of, line, key) for key, line in members]
        for rollout in rollouts:
            if rollout.result is not None:
                rollout.result.tool_schemas = list(members[0][1]["tools"] or ())
        failed: dict[str, Any] = {}
        with metered() as meter:
            try:
                await self._compiled.grade_group(rollouts)
            except Failure as failure:
                failed = {"failed": [str(failure.ending), failure.detail]}
        rewards = [{n: v.record() for n, v in one.rewards.items()} for one in rollouts]
        return {"rewards": rewards, "asked": meter.roles, **failed}

    def _retries(self) -> dict[str, int]:
        return {name: role.retries for name, role in self._compiled.roles.items() if role.retries}


async def encoder_of(spec: Spec, split: Split) -> Encoder:
    """Return what gives the rollouts of a split their tokens, with the policy's tokenizer."""
    name = tokenizer_of(spec)
    if name is None and not spec.servers["policy"][0].kind.embedded:
        return Encoder(None, "The policy names neither a model nor a tokenizer; set servers.policy.tokenizer")
    if spec.servers["policy"][0].kind.token_level:
        renderer = await asyncio.to_thread(renderer_of, spec)
        return Encoder(renderer.tokenizer)
    if split == "eval":
        return Encoder(None)
    return await asyncio.to_thread(Encoder.load, name)


def written(message: Mapping[str, Any]) -> bytes:
    """Return a message as JSON."""
    return json.dumps(message, allow_nan=False).encode()


def raised_of(error: Exception) -> list[str]:
    """Return what an exception is for the run: the user's mistake, an end of the run, or a bug with its traceback."""
    if isinstance(error, UserError):
        return ["user", str(error)]
    if isinstance(error, RunError):
        return ["run", str(error)]
    if isinstance(error, HermesRLError):
        return ["bug", f"{type(error).__name__}: {error}"]
    return ["bug", "".join(traceback.format_exception(error))]


def error_of(kind: str, text: str) -> UserError | RunError | RuntimeError:
    """Return what `raised_of` described, as the run raises it."""
    if kind == "bug":
        return RuntimeError(f"in a worker: {text}")
    return UserError(text) if kind == "user" else RunError(text)


def _log_to(tell: Tell, level: int) -> None:
    """Send what hermes_rl logs to the run, whose handlers it then passes."""
    loop, logger = asyncio.get_running_loop(), logging.getLogger("hermes_rl")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = {"log": [record.name, record.levelno, record.getMessage()]}
            with suppress(RuntimeError):  # the loop is closed: nobody hears it any more
                loop.call_soon_threadsafe(tell, message)

    logger.addHandler(Handler())
    logger.setLevel(level)
    logger.propagate = False
