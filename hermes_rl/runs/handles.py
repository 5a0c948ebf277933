"""`WorkerHandle`: one worker as the run sees it, whether it is a process of this machine or an actor of a Ray cluster.

Owns which requests it has not answered, and what it last said of itself. How a request gets to it is up to the
subclass: `ProcessHandle` of `worker_process`, `ActorHandle` of `cluster`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any, NamedTuple, TypeVar

from hermes_rl.errors import RunError, UserError
from hermes_rl.rollouts.admission import usable_cores
from hermes_rl.runs.player import error_of
from hermes_rl.tools.artifacts import TakenArtifact

T = TypeVar("T")

START = 600.0
"""Seconds that a worker may take to start: it loads the spec's code and its tokenizer."""
SILENT = 300.0
"""Seconds without a word after which a worker has stopped; it speaks several times a second."""
CLOSING = 30.0
"""Seconds that a worker has to release its sandboxes; it gives itself less."""
RELEASE = 10.0
"""Seconds that whoever gives up a rollout waits for its sandbox to be released."""


class DiedError(Exception):
    """The worker that was asked has died."""


class WorkerAnswer(NamedTuple):
    """What a worker answers: JSON, and where artifacts came with it, the function that gets them; it blocks."""

    message: bytes
    artifacts: Callable[[], Mapping[str, TakenArtifact]] | None = None


class WorkerHandle(ABC):
    """One worker: what it was asked and has not answered, and what it last said of itself.

    `name` is what the user reads of it, and `heard` gets what it says beside its answers.
    """

    def __init__(self, name: str, heard: Callable[[WorkerHandle, Mapping[str, Any]], None]) -> None:
        self.name = name
        self.placed = True
        """Whether it has somewhere to run; on a cluster it may have to wait for that."""
        self.ready = self.closed = False
        self.error: UserError | RunError | RuntimeError | None = None
        """What it found wrong when it started."""
        self.asked: dict[int, asyncio.Future[WorkerAnswer]] = {}
        """Requests without an answer; one that was cancelled is among them until its work has ended."""
        self.finished = 0
        """Requests that it has answered."""
        self.waiting: Counter[str] = Counter()
        """Calls that wait for a place at the servers of a policy, by its number; see `Player`."""
        self.descriptors = 0
        self.phases: Counter[str] = Counter()
        self.seconds = 0.0
        """Of processor time."""
        self.free = 1.0
        """Share of its machine's memory that is free."""
        self.machine, self.cores = "", usable_cores()
        """Where it runs, and how many cores there are for all workers of that machine."""
        self.retries: Counter[str] = Counter()
        self.lost = 0
        """Rollouts that it had not answered when it died, and that somebody waited for."""
        self.ended = ""
        """How it ended, in words."""
        self._heard = heard
        self._numbers = count(1)
        self._wanted: set[int] = set()
        """The numbers of rollouts that somebody waits for."""

    @abstractmethod
    async def live(self) -> None:
        """Start the worker and listen to it until it ends, however it does."""

    @abstractmethod
    def tell(self, number: int, what: str, *given: Any) -> None:
        """Send it a request of that number (`Player.answer`), or, with 0, what needs no answer (`Player.hear`)."""

    @abstractmethod
    def close(self) -> None:
        """Let it release what it has and end; `live` returns then. One that is still starting has nothing."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    def make_room(self) -> None:
        """Let it end although it may be at work, which others do again."""
        self.closed, self.ended = True, "it made room for workers of another environment"
        self.fail(DiedError())
        self.close()

    async def ask(self, what: str, *given: Any) -> WorkerAnswer:
        """Return the answer; where the wait is cancelled, so is the work, and it is released. Raises `DiedError`."""
        number = next(self._numbers)
        answer: asyncio.Future[WorkerAnswer] = asyncio.get_running_loop().create_future()
        self.asked[number] = answer
        if what == "play":
            self._wanted.add(number)
        self.tell(number, what, *given)
        try:
            await asyncio.wait((answer,))
        except asyncio.CancelledError:
            self._wanted.discard(number)
            if what != "told":  # which holds nothing
                self.tell(0, "cancel", number)
                await asyncio.wait((answer,), timeout=RELEASE)
            raise
        finally:
            self._wanted.discard(number)
            if not answer.cancel():
                answer.exception()  # nobody else may look at it
        return answer.result()

    def fail(self, error: Exception) -> None:
        """Let everybody who waits for an answer have an error."""
        self.lost += len(self._wanted)
        for answer in self.asked.values():
            if not answer.done():
                answer.set_exception(error)

    def _answered(self, number: int, answer: WorkerAnswer) -> None:
        asked = self.asked.pop(number)
        self.finished += 1
        if not asked.done():
            asked.set_result(answer)

    def _said(self, said: Mapping[str, Any]) -> None:
        self.waiting, self.phases = Counter(said.get("waiting", self.waiting)), Counter(said.get("phases", self.phases))
        self.descriptors = said.get("descriptors", self.descriptors)
        self.seconds, self.free = said.get("cpu", self.seconds), said.get("free", self.free)
        self.ready = self.ready or "ready" in said
        if "raised" in said:
            self.error = error_of(*said["raised"])
        self._heard(self, said)


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Wait that long; raises TimeoutError."""
    async with asyncio.timeout(seconds):
        return await work
