"""`WorkerHandle`: one worker as the run sees it, a process of this machine or an actor of a Ray cluster.

Owns its pending requests and its last reported condition. The subclass owns the transport: `ProcessHandle`, whose
process runs `worker`, or `ActorHandle` of `cluster`.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hermes_rl.errors import RunError, UserError
from hermes_rl.rollouts.admission import usable_cores
from hermes_rl.runs.rollout_worker import WorkerSetup, error_of
from hermes_rl.runs.worker import BUFFER, framed, received
from hermes_rl.servers.usage import Usage
from hermes_rl.threads import acquire_in_thread
from hermes_rl.tools.artifacts import TakenArtifact
from hermes_rl.user_code.fork_server import FORK_SERVER, StartedProcess

T = TypeVar("T")

START = 600.0
"""Seconds that a worker may take to start: it loads the spec's code and its tokenizer."""
SILENT = 300.0
"""Seconds without a message after which a worker counts as stopped; it sends several messages per second."""
CLOSING = 30.0
"""Seconds that a worker has to release its sandboxes; its internal limit is shorter."""
RELEASE = 10.0
"""Seconds to wait for the sandbox of an abandoned rollout to be released."""
PRELOAD = ("aiohttp", "tokenizers", "hermes_rl.tools.toolsets.file", "hermes_rl.tools.toolsets.terminal")
"""Modules that most workers import when they start, in addition to `worker`."""
EXIT = 5.0
"""Maximum seconds that a process takes to exit once its socket is closed or it is killed."""
ANSWER = b'{"id": '
"""Start of the message that answers a request; all other messages of a worker are short."""


Heard: TypeAlias = Callable[["WorkerHandle", Mapping[str, Any]], None]
"""Receives the messages of a worker that do not answer a request."""


class DiedError(Exception):
    """The worker that was asked has died."""


class WorkerAnswer(NamedTuple):
    """Response of a worker: JSON, and the function that gets the artifacts if there are any; that function blocks."""

    message: bytes
    artifacts: Callable[[], Mapping[str, TakenArtifact]] | None = None


class WorkerHandle(ABC):
    """One worker: its pending requests and its last reported condition.

    `name` is the name that messages show to the user.
    """

    def __init__(self, name: str, on_message: Heard) -> None:
        self.name = name
        self.placed = True
        """True if the worker has a node to run on; on a cluster it may have to wait for one."""
        self.ready = self.closed = False
        self.error: UserError | RunError | RuntimeError | None = None
        """Error that the worker reported when it started."""
        self.pending_requests: dict[int, asyncio.Future[WorkerAnswer]] = {}
        """Requests without an answer; one that was cancelled is among them until its work has ended."""
        self.finished = 0
        """Requests that it has answered."""
        self.waiting: Counter[str] = Counter()
        """Calls that wait for a slot at the servers of a policy, by the number of the policy; see `Player`."""
        self.descriptors = 0
        self.phases: Counter[str] = Counter()
        self.seconds = 0.0
        """Used processor time in seconds."""
        self.free = 1.0
        """Share of its machine's memory that is free."""
        self.machine, self.cores = "", usable_cores()
        """Machine of the worker, and number of cores for all workers of that machine."""
        self.location = name
        """Description of the location to exclude if workers cannot run there."""
        self.retries: Counter[str] = Counter()
        self.usage: dict[str, Usage] = {}
        """Use of models by role that the run's meter has counted."""
        self.unanswered_rollouts = 0
        """Awaited rollouts that it had not answered when it died."""
        self.ended = ""
        """Description of how the worker ended."""
        self._on_message = on_message
        self._numbers = count(1)
        self._awaited_ids: set[int] = set()
        """Numbers of the rollouts that a caller still awaits."""

    @abstractmethod
    async def live(self) -> None:
        """Start the worker and listen to it until it ends, however it does."""

    @abstractmethod
    def send(self, request_id: int, kind: str, *args: Any) -> None:
        """Send a request with this number (`Player.answer`), or, with 0, a message that needs no response
        (`Player.hear`).
        """

    @abstractmethod
    def close(self) -> None:
        """Let the worker release its resources and end; `live` then returns.

        A worker that is still starting has none.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the worker immediately."""

    def make_room(self) -> None:
        """End the worker even if it is busy; other workers run its rollouts again."""
        self.closed, self.ended = True, "it made room for workers of another environment"
        self.fail(DiedError())
        self.close()

    async def ask(self, kind: str, *args: Any) -> WorkerAnswer:
        """Return the response; cancelling the wait cancels the work, and its resources are released.

        Raises `DiedError`.
        """
        request_id = next(self._numbers)
        answer: asyncio.Future[WorkerAnswer] = asyncio.get_running_loop().create_future()
        self.pending_requests[request_id] = answer
        if kind == "play":
            self._awaited_ids.add(request_id)
        self.send(request_id, kind, *args)
        try:
            await asyncio.wait((answer,))
        except asyncio.CancelledError:
            self._awaited_ids.discard(request_id)
            if kind != "told":  # which holds nothing
                self.send(0, "cancel", request_id)
                await asyncio.wait((answer,), timeout=RELEASE)
            raise
        finally:
            self._awaited_ids.discard(request_id)
            if not answer.cancel():
                answer.exception()  # no other code may look at it
        return answer.result()

    def fail(self, error: Exception) -> None:
        """Raise an error in all callers that wait for a response."""
        self.unanswered_rollouts += len(self._awaited_ids)
        for answer in self.pending_requests.values():
            if not answer.done():
                answer.set_exception(error)

    def _answered(self, request_id: int, answer: WorkerAnswer) -> None:
        future = self.pending_requests.pop(request_id)
        self.finished += 1
        if not future.done():
            future.set_result(answer)

    def _take_news(self, news: Mapping[str, Any]) -> None:
        self.waiting, self.phases = Counter(news.get("waiting", self.waiting)), Counter(news.get("phases", self.phases))
        self.descriptors = news.get("descriptors", self.descriptors)
        self.seconds, self.free = news.get("cpu", self.seconds), news.get("free", self.free)
        self.ready = self.ready or "ready" in news
        if "raised" in news:
            self.error = error_of(*news["raised"])
        self._on_message(self, news)


async def wait_for(seconds: float, work: Awaitable[T]) -> T:
    """Await `work` for at most `seconds`. Raises `TimeoutError`."""
    async with asyncio.timeout(seconds):
        return await work


class ProcessHandle(WorkerHandle):
    """One worker process, which receives `opening` first, and stores artifacts of sandboxes in the directory
    `artifacts`.
    """

    def __init__(self, opening: WorkerSetup, artifacts: Path | None, name: str, on_message: Heard) -> None:
        super().__init__(name, on_message)
        self._opening, self._artifacts = opening, artifacts
        self._process: StartedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def live(self) -> None:
        parent_end, theirs = socket.socketpair()
        try:
            with theirs:
                start = partial(
                    FORK_SERVER.start,
                    "hermes_rl.runs.worker:main",
                    theirs.fileno(),
                    name="hermes-worker",
                    preload=PRELOAD,
                    linger=CLOSING,
                    may_start=True,
                )
                self._process = await acquire_in_thread(start, StartedProcess.release)
            reader, self._writer = await asyncio.open_connection(sock=parent_end, limit=BUFFER)
            self._write((self._opening, self._artifacts, SILENT))
            if self.closed:
                self.kill()
            while (message := await wait_for(SILENT if self.ready else START, received(reader))) is not None:
                self._take(message)
        except TimeoutError:
            self.ended = "it said nothing any more"
        except OSError as error:
            self.ended = f"it could not be started: {error}"
        except ValueError as error:
            self.ended = f"it sent a message that cannot be read: {error}"
        finally:
            parent_end.close()
            await self._end()
            self.fail(DiedError())

    def send(self, request_id: int, kind: str, *args: Any) -> None:
        self._write((request_id, kind, *args))

    def close(self) -> None:
        if self.ready and self._writer is not None and not self._writer.is_closing():
            with suppress(OSError):
                self._writer.write_eof()
        else:
            self.kill()
        self.closed = True

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _write(self, message: Any) -> None:
        """Send a message, as long as it listens."""
        if self._writer is not None and not self.closed and not self._writer.is_closing():
            self._writer.write(framed(pickle.dumps(message)))

    def _take(self, message: bytes) -> None:
        """Hand a response to its caller. Only its first bytes are read here: it may be large.

        Raises `ValueError` if something else than `worker` wrote the message.
        """
        if not message.startswith(ANSWER):
            if not isinstance(news := json.loads(message), dict):
                raise ValueError("no object")
            self._take_news(news)
            return
        request_id = int(message[len(ANSWER) : message.index(b",")])
        if request_id not in self.pending_requests:
            raise ValueError(f"there is no request {request_id}")
        self._answered(request_id, WorkerAnswer(message))

    async def _end(self) -> None:
        """Ensure that the process is gone, and find out how it ended."""
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        try:
            status = await wait_for(EXIT, self._process.ended())
        except TimeoutError:
            self.kill()
            status = await self._process.ended()
        self._process.release()
        how = f"ended with status {status}"
        if status < 0:
            memory = ", perhaps because the memory was used up" if -status == signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-status).name}{memory}"
        self.ended = self.ended or f"it {how}"
