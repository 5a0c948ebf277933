"""A worker: a process that plays rollouts for a run in another process, and keeps nothing.

Owns the compiled spec of its process (sandboxes, clients of servers, tokenizer, the spec's own code), and the way of a
request to its answer. What is played, in which order, how often, and what is written, is up to the run
(`hermes_rl.runs.workers`). It ends with its run: when the other end of its socket is closed, it releases what it has.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import select
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from hermes_rl.errors import Failure, HermesRLError, RunError, UserError
from hermes_rl.rollouts.admission import LOOK, open_descriptors, processor_seconds
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder, Rollout, RolloutKey
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.runs.frames import BUFFER, Opening, framed, received
from hermes_rl.runs.opening import encoder_of
from hermes_rl.runs.process import rare_full_collections
from hermes_rl.runs.store import Line, rollout_of, rollout_record
from hermes_rl.spec.model import Spec
from hermes_rl.threads import one_at_a_time
from hermes_rl.tokens.transcript import packed

GRACE = 20.0
"""Seconds that a worker has to release its sandboxes when its run is gone."""


def main(descriptor: int) -> None:
    """Play for the run at the other end of this socket until it is closed; the entry point of the process."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # a sandbox that held it would keep the run's end open
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    with rare_full_collections():
        asyncio.run(_serve(connection))


def _end_with(descriptor: int) -> None:
    """End this process some time after the other end was closed, even where its event loop has stopped."""
    waiting = select.poll()
    waiting.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    waiting.poll()
    time.sleep(GRACE)
    os._exit(1)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER)
    opening = await received(reader)
    if opening is not None:
        given: Opening = pickle.loads(opening)
        await _Worker(given, reader, writer).work()


class _Worker:
    def __init__(self, opening: Opening, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._opening, self._reader, self._writer = opening, reader, writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gone = False

    async def work(self) -> None:
        _log_to(self._tell, self._opening.level)
        async with AsyncExitStack() as stack:
            try:
                spec = part_of(self._opening.spec, self._opening.number, self._opening.count)
                compiled = await stack.enter_async_context(CompiledSpec(spec, self._opening.environ))
                self._open(compiled, await self._encoder(spec))
            except Exception as error:  # noqa: BLE001 - whatever it is, the run tells it, once for all workers
                await self._send({"raised": _raised(error)})
                return
            await self._send({"ready": True})
            telling = asyncio.create_task(self._tell_how_it_does(compiled))
            try:
                while (message := await received(self._reader)) is not None:
                    self._take(*pickle.loads(message))
            finally:
                tasks = [telling, *self._tasks.values()]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _encoder(self, spec: Spec) -> Encoder:
        return Encoder(None) if self._opening.mode == "evaluate" else await encoder_of(spec, "train")

    def _open(self, compiled: CompiledSpec, encoder: Encoder) -> None:
        self._compiled = compiled
        compiled.artifact_folder = self._opening.artifacts
        for role in compiled.roles.values():
            role.tell(lambda text: self._tell({"note": text}))
        self._runners = {
            "train": RolloutRunner(compiled, split="train", encode=encoder.encode),
            "eval": RolloutRunner(compiled, split="eval"),
        }

    # ------------------------------------------------------------------ requests

    def _take(self, number: int, what: str, *given: Any) -> None:
        if what == "fix":
            self._compiled.policy.fix()
            return
        if what == "cancel":
            if number in self._tasks:
                self._tasks[number].cancel()
            return
        work: Callable[..., Awaitable[dict[str, Any]]] = self._play if what == "play" else self._compare
        self._tasks[number] = asyncio.create_task(self._answer(number, partial(work, *given)))
        self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number))

    async def _answer(self, number: int, work: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        try:
            answer = await work()
        except asyncio.CancelledError:
            answer = {}  # nobody waits for it; the run hears that its sandbox is released
        except Exception as error:  # noqa: BLE001 - carried to the run, which ends by it as if it were its own
            answer = {"raised": _raised(error)}
        images, self._compiled.images = self._compiled.images, {}
        told = {"retries": self._retries(), "images": {name: sorted(digests) for name, digests in images.items()}}
        try:
            await self._send({"id": number, **told, **answer}, large=True)
        except (TypeError, ValueError) as error:  # it cannot be written as JSON, or is too long
            await self._send({"id": number, **told, "raised": _raised(error)})

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

    async def _compare(self, members: list[tuple[RolloutKey, Line]]) -> dict[str, Any]:
        rollouts = [await one_at_a_time(rollout_of, line, key) for key, line in members]
        for rollout in rollouts:
            if rollout.result is not None:
                rollout.result.tool_schemas = list(members[0][1]["tools"] or ())
        failed: dict[str, Any] = {}
        try:
            await self._compiled.grade_group(rollouts)
        except Failure as failure:
            failed = {"failed": [str(failure.ending), failure.detail]}
        return {"rewards": [{n: v.record() for n, v in one.rewards.items()} for one in rollouts], **failed}

    # ------------------------------------------------------------------ what the run is told

    async def _tell_how_it_does(self, compiled: CompiledSpec) -> None:
        """Tell again and again what the run's admission looks at; the run hears by it that this worker lives."""
        while not self._gone:
            # The kernel ends a process that does not come here any more: code that never lets go of the interpreter
            # would outlive a run that was killed.
            signal.setitimer(signal.ITIMER_REAL, self._opening.silent)
            used = {"cpu": processor_seconds(), "descriptors": open_descriptors()}
            phases = sum((runner.phases for runner in self._runners.values()), Counter[str]())
            await self._send({"waiting": compiled.policy.waiting, "phases": phases, **used})
            await asyncio.sleep(LOOK)

    def _retries(self) -> dict[str, int]:
        return {name: role.retries for name, role in self._compiled.roles.items() if role.retries}

    async def _send(self, message: Mapping[str, Any], *, large: bool = False) -> None:
        data = await one_at_a_time(_written, message) if large else _written(message)
        if not self._gone:
            self._writer.write(framed(data))
            try:
                await self._writer.drain()
            except ConnectionError:
                self._gone = True  # the end of the socket is noticed where it is read

    def _tell(self, message: Mapping[str, Any]) -> None:
        if not self._gone:
            self._writer.write(framed(_written(message)))


def part_of(spec: Spec, number: int, count: int) -> Spec:
    """Return the spec with that part of each server's calls at a time that one of several workers takes."""
    servers = {
        role: tuple(
            one.model_copy(
                update={"max_concurrency": one.max_concurrency * (number + 1) // count
                        - one.max_concurrency * number // count}
            )
            for one in those
        )
        for role, those in spec.servers.items()
    }  # fmt: skip
    return spec.model_copy(update={"servers": servers})


def _written(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, allow_nan=False).encode()


def _raised(error: Exception) -> list[str]:
    """Return what an exception is for the run: the user's mistake, an end of the run, or a bug with its traceback."""
    if isinstance(error, UserError):
        return ["user", str(error)]
    if isinstance(error, RunError):
        return ["run", str(error)]
    if isinstance(error, HermesRLError):
        return ["bug", f"{type(error).__name__}: {error}"]
    return ["bug", "".join(traceback.format_exception(error))]


def _log_to(tell: Callable[[Mapping[str, Any]], None], level: int) -> None:
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
