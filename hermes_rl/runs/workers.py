"""Worker processes: rollouts of one run, played on more cores than one process of Python can use.

The run stays the only one that decides and writes. It sends a worker the key of a rollout, and gets back the line that
the record is to have. Owns the processes: starting them, choosing one for a rollout, replacing one that died, and their
end. A dead worker costs what it was playing, which another plays again as the same attempt, since nothing of it was
recorded. `hermes_rl.runs.worker` is what runs in them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from math import ceil
from typing import Any, TypeVar

from hermes_rl.agent.result import ManagedState
from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, RunError, UserError
from hermes_rl.rollouts.admission import Admission, DescriptorShare, admission, processor_seconds
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.runs.frames import BUFFER, Opening, framed, received
from hermes_rl.runs.store import Line, reward_of, rollout_of, rollout_record
from hermes_rl.spec.model import Mode, Spec
from hermes_rl.threads import one_at_a_time
from hermes_rl.tokens.transcript import packed, unpacked

T = TypeVar("T")

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from hermes_rl.runs.worker import main
main(int(sys.argv[2]))
"""
"""What a worker runs; its arguments are the places of modules, as this process has them, and the number of a socket."""
START = 600.0
"""Seconds that a worker may take to start: it loads the spec's code and its tokenizer."""
SILENT = 300.0
"""Seconds without a word after which a worker has stopped; it speaks several times a second."""
CLOSING = 30.0
"""Seconds that a worker has to release its sandboxes; it gives itself less."""
EXIT = 5.0
"""Seconds that a process takes, at most, to be gone once its socket is closed or it is killed."""
DEATHS = 3
"""Workers that may die while they have one and the same rollout; as many times all of them before they have played."""
LARGE = 1 << 16
"""Bytes of an answer from which on it is read in a thread."""
SAME = 30.0
"""Seconds in which the same words of several workers are told once."""
ANSWER = b'{"id": '
"""How an answer to a request begins; everything else that a worker says is short."""


@dataclass(frozen=True)
class DeadWorkers:
    """Workers that died, and rollouts that were played again because of it."""

    processes: int = 0
    rollouts: int = 0

    @property
    def words(self) -> str:
        """In words."""
        return f"workers that died: {self.processes} (rollouts played again because of it: {self.rollouts})"

    def record(self) -> dict[str, int]:
        """For `run.json`."""
        return {"died": self.processes, "rollouts": self.rollouts}


class _DiedError(Exception):
    """The worker that was asked has died."""


@asynccontextmanager
async def open_workers(
    spec: Spec,
    mode: Mode,
    number: int,
    compiled: CompiledSpec,
    environ: Mapping[str, str] | None,
    note: Callable[[str], None],
) -> AsyncIterator[Workers | None]:
    """Start so many workers, and end them afterwards; None for one, which is this process itself.

    Raises:
        UserError, RunError: what a worker found wrong with the spec, or they cannot be started.
    """
    if number == 1:
        yield None
        return
    level = logging.getLogger("hermes_rl").getEffectiveLevel()
    artifacts = compiled.artifact_folder
    openings = [Opening(spec, mode, environ, n, number, artifacts, SILENT, level) for n in range(number)]
    workers = Workers(openings, compiled, note)
    try:
        await workers.start()
        yield workers
    finally:
        await workers.close()


def require_shares(spec: Spec, number: int) -> None:
    """Refuse servers that take fewer calls at a time than there are workers: each has a part of them.

    Raises:
        UserError: which server.
    """
    for role, servers in spec.servers.items():
        for server in servers:
            if server.max_concurrency < number:
                raise UserError(
                    f"servers.{role}.max_concurrency is {server.max_concurrency}, and each of {number} workers needs a "
                    "part of it: use fewer workers"
                )


class _Process:
    """One worker process: what it was asked and has not answered, and what it last said of itself.

    Args:
        opening: what it is told first.
        heard: gets what it says beside its answers.
    """

    def __init__(self, opening: Opening, heard: Callable[[_Process, dict[str, Any]], None]) -> None:
        self.opening = opening
        self.ready = False
        self.error: UserError | RunError | RuntimeError | None = None
        """What it found wrong when it started."""
        self.asked: dict[int, asyncio.Future[bytes]] = {}
        """Requests without an answer; one that was cancelled is among them until its work has ended."""
        self.finished = 0
        """Requests that it has answered."""
        self.waiting = 0
        self.descriptors = 0
        self.phases: Counter[str] = Counter()
        self.seconds = 0.0
        """Of processor time."""
        self.retries: Counter[str] = Counter()
        self.lost = 0
        """Requests that it had not answered when it died."""
        self.ended = ""
        """How it ended, in words."""
        self._heard = heard
        self._closed = False
        self._numbers = count()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def name(self) -> str:
        return f"worker {self.opening.number + 1} of {self.opening.count}"

    async def live(self) -> None:
        """Start the process and listen to it until it ends, however it does."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-c", PROGRAM, json.dumps(sys.path), str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the run, which then ends its workers
                )  # fmt: skip
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=BUFFER)
            self.tell(self.opening)
            if self._closed:
                self.kill()
            while (message := await _within(SILENT if self.ready else START, received(reader))) is not None:
                self._take(message)
        except TimeoutError:
            self.ended = "it said nothing any more"
        except OSError as error:
            self.ended = f"it could not be started: {error}"
        finally:
            ours.close()
            await self._end()
            self.fail(_DiedError())

    async def ask(self, *request: Any) -> bytes:
        """Return the answer; where the wait is cancelled, so is the work. Raises `_DiedError`."""
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.asked[number] = answer
        self.tell((number, *request))
        try:
            return await answer
        except asyncio.CancelledError:
            self.tell((number, "cancel"))
            raise

    def tell(self, message: Any) -> None:
        """Send it a message, as long as it listens."""
        if self._writer is not None and not self._closed and not self._writer.is_closing():
            self._writer.write(framed(pickle.dumps(message)))

    def fail(self, error: Exception) -> None:
        """Let everybody who waits for an answer have an error."""
        pending = [answer for answer in self.asked.values() if not answer.done()]
        self.lost += len(pending)
        for answer in pending:
            answer.set_exception(error)

    def close(self) -> None:
        """Let it release what it has and end; `live` returns then. One that is still starting has nothing."""
        if self.ready and self._writer is not None and not self._writer.is_closing():
            with suppress(OSError):
                self._writer.write_eof()
        else:
            self.kill()
        self._closed = True

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _take(self, message: bytes) -> None:
        """Hand an answer to whoever waits for it. Only its first bytes are looked at: it may be large."""
        if message.startswith(ANSWER):
            answer = self.asked.pop(int(message[len(ANSWER) : message.index(b",")]))
            self.finished += 1
            if not answer.done():
                answer.set_result(message)
            return
        said = json.loads(message)
        self.waiting, self.descriptors = said.get("waiting", self.waiting), said.get("descriptors", self.descriptors)
        self.seconds = said.get("cpu", self.seconds)
        self.phases = Counter(said.get("phases", self.phases))
        self.ready = self.ready or "ready" in said
        if "raised" in said:
            self.error = _error(*said["raised"])
        self._heard(self, said)

    async def _end(self) -> None:
        """See to it that the process is gone, and find out how it ended."""
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        try:
            await _within(EXIT, self._process.wait())
        except TimeoutError:
            self.kill()
            await self._process.wait()
        status = self._process.returncode or 0
        self.ended = self.ended or (f"it ended with status {status}" if status >= 0 else _killed(-status))


class Workers:
    """The workers of a run; it answers `hermes_rl.rollouts.runner.Elsewhere` and `rollouts.admission.Calls`.

    Args:
        openings: what each of them is told.
        compiled: the environment as this process has it.
        note: where the user is told what happens.
    """

    def __init__(self, openings: Sequence[Opening], compiled: CompiledSpec, note: Callable[[str], None]) -> None:
        self._compiled, self._note = compiled, note
        self._living = [_Process(opening, self._heard) for opening in openings]
        self._lives: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        """Why the workers cannot go on."""
        self._fixed = self._closing = False
        self._in_vain = 0
        """Workers that died, one after the other, before they had finished anything."""
        self._died = self._replayed = 0
        self._seconds_of_dead = 0.0
        self._retries_of_dead: Counter[str] = Counter()
        self._told: dict[str, float] = {}

    async def start(self) -> None:
        """Wait until all of them can play.

        Raises:
            UserError, RunError: what one of them found wrong.
        """
        self._lives = [asyncio.create_task(self._keep(place)) for place in range(len(self._living))]
        while not all(process.ready for process in self._living):
            await self._change()

    async def close(self) -> None:
        """End them, with what they are playing, and wait until what they held is released."""
        self._closing = True
        for process in self._living:
            process.close()
        try:
            if self._lives:
                await asyncio.wait(self._lives, timeout=CLOSING)
        finally:
            for process in self._living:
                process.kill()
        await asyncio.gather(*self._lives)

    # ------------------------------------------------------------------ for the runner

    async def play(self, key: RolloutKey, split: str) -> Rollout:
        """Play one attempt.

        Raises:
            UserError, RunError: what ends a run that plays by itself too, or workers die again and again.
        """
        said, size = await self._answered(f"rollout {key.id}", "play", key, split)
        rollout = await _off_the_loop(size, lambda: rollout_of(said["line"], key))
        rollout.line, rollout.no_tokens = said["line"], said.get("no_tokens")
        if "tokens" in said and rollout.result is not None:
            sequences = [unpacked(one) for one in said["tokens"]]
            rollout.result.managed_state = ManagedState(lambda: sequences)
        return rollout

    async def compare(self, rollouts: list[Rollout]) -> None:
        """Add the rewards that need the whole group. Raises Failure."""
        keys = [one.key for one in rollouts]
        members = await one_at_a_time(lambda: [(one.key, _told_of(one)) for one in rollouts])
        said, _ = await self._answered(f"the comparison of group {keys[0].group}", "compare", members)
        for rollout, values in zip(rollouts, said["rewards"], strict=True):
            rollout.rewards.update({name: reward_of(value) for name, value in values.items()})
        if "failed" in said:
            ending, detail = said["failed"]
            raise Failure(detail, ending=Ending(ending))

    # ------------------------------------------------------------------ for admission

    def admission(self, concurrency: int | None) -> Admission:
        """Return what says whether another rollout may begin, whichever of them plays it."""
        return admission(concurrency, self, used=self._processor_seconds, descriptors=_Shared(self))

    def fix(self) -> None:
        """Give the servers as many calls at a time as they may have, whatever they say."""
        self._fixed = True
        for process in self._living:
            if process.ready:
                process.tell((0, "fix"))

    @property
    def waiting(self) -> int:
        """Calls that wait for a place at the policy's servers; while some do, further calls bring nothing."""
        return sum(process.waiting for process in self._living)

    @property
    def descriptors(self) -> int:
        """How many descriptors the one has open that has most."""
        return max(process.descriptors for process in self._living)

    def __len__(self) -> int:
        return len(self._living)

    @property
    def phases(self) -> Counter[str]:
        """What the rollouts that are played are at."""
        return sum((process.phases for process in self._living), Counter())

    def _processor_seconds(self) -> float:
        return processor_seconds() + self._seconds_of_dead + sum(process.seconds for process in self._living)

    # ------------------------------------------------------------------ for the user

    @property
    def retries(self) -> Counter[str]:
        """Calls that were sent again, by the role of the server."""
        found = Counter(self._retries_of_dead)
        for process in self._living:
            found.update(process.retries)
        return found

    @property
    def lost(self) -> DeadWorkers:
        """What dead workers have cost."""
        return DeadWorkers(self._died, self._replayed)

    def _heard(self, process: _Process, said: dict[str, Any]) -> None:
        if "log" in said:
            name, level, text = said["log"]
            logging.getLogger(name).log(level, "%s: %s", process.name, text)
        elif "note" in said:
            self._pass_on(said["note"])
        elif "ready" in said:
            if self._fixed:
                process.tell((0, "fix"))
            self._changed.set()

    def _pass_on(self, text: str) -> None:
        """Tell the user what a worker said; all of them find out that a server is down."""
        now = time.monotonic()
        if now - self._told.get(text, -SAME) >= SAME:
            self._note(text)
        self._told = {one: told for one, told in self._told.items() if now - told < SAME} | {text: now}

    # ------------------------------------------------------------------ asking them, and keeping them alive

    async def _answered(self, what: str, *request: Any) -> tuple[dict[str, Any], int]:
        """Return an answer and its size; that of another worker where the one that was asked dies."""
        process = None
        for _ in range(DEATHS):
            while not (ready := [one for one in self._living if one.ready]):
                await self._change()
            process = min(ready, key=lambda one: len(one.asked))
            if self._error is not None:
                raise self._error
            try:
                message = await process.ask(*request)
            except _DiedError:
                continue
            said = await _off_the_loop(len(message), lambda: json.loads(message))  # noqa: B023 - done before the next
            process.retries = Counter(said["retries"])
            for name, digests in said.get("images", {}).items():
                self._compiled.images.setdefault(name, set()).update(digests)
            if "raised" in said:
                raise _error(*said["raised"])
            return said, len(message)
        assert process is not None
        raise RunError(
            f"{DEATHS} workers died one after the other while they had {what} ({process.ended}). What it does may take "
            "the worker with it; what is complete is kept"
        )

    async def _change(self) -> None:
        """Wait until another worker is ready. Raises what keeps all of them from going on."""
        if self._error is None:
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error

    async def _keep(self, place: int) -> None:
        """Keep a worker at this place; whatever goes wrong with that ends the run, which would wait for ever."""
        try:
            await self._replace(place)
        except Exception as error:  # noqa: BLE001 - carried to those who wait
            self._give_up(error)

    async def _replace(self, place: int) -> None:
        """Let a worker live at this place, and another one whenever it dies."""
        while True:
            process = self._living[place]
            await process.live()
            if self._closing or self._error is not None:
                return
            self._in_vain = 0 if process.finished else self._in_vain + 1
            if process.error is not None:
                self._give_up(process.error)
                return
            if self._in_vain >= DEATHS * len(self._living):
                self._give_up(
                    RunError(
                        f"{self._in_vain} workers ended one after the other before they had played anything (the last: "
                        f"{process.ended}). What is complete is kept; without workers the same command goes on"
                    )
                )
                return
            self._died += 1
            self._replayed += process.lost
            self._seconds_of_dead += process.seconds
            self._retries_of_dead.update(process.retries)
            again = f", and the {process.lost} rollouts that it had are played again" if process.lost else ""
            self._note(f"{process.name} has died ({process.ended}): another takes its place{again}")
            self._living[place] = _Process(process.opening, self._heard)

    def _give_up(self, error: Exception) -> None:
        self._error = error
        self._changed.set()
        for process in self._living:
            process.fail(error)


class _Shared:
    """Whether the file descriptors that each worker may open carry another rollout."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._share = DescriptorShare(used=lambda: workers.descriptors)

    def carry(self, open_rollouts: int) -> bool:
        return self._share.carry(ceil(open_rollouts / len(self._workers)))


async def _within(seconds: float, work: Awaitable[T]) -> T:
    async with asyncio.timeout(seconds):
        return await work


async def _off_the_loop(size: int, work: Callable[[], T]) -> T:
    return await one_at_a_time(work) if size >= LARGE else work()


def _told_of(rollout: Rollout) -> Line:
    """Return what a worker needs to compare a rollout: its record, with the tokens that it does not hold."""
    line = rollout_record(rollout)
    state = rollout.result.managed_state if rollout.result is not None else None
    if line["sequences"] is None and isinstance(state, ManagedState):
        line["sequences"] = [packed(one) for one in state.sequences()]
    return line


def _killed(number: int) -> str:
    memory = ", perhaps because the memory was used up" if number == signal.SIGKILL else ""
    return f"it was ended by {signal.Signals(number).name}{memory}"


def _error(kind: str, text: str) -> UserError | RunError | RuntimeError:
    """Return what a worker raised as this process raises it."""
    if kind == "bug":
        return RuntimeError(f"in a worker: {text}")
    return UserError(text) if kind == "user" else RunError(text)
