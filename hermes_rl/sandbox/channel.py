"""The host's end of the conversation with the helper inside a sandbox, on an asyncio event loop.

`Connection` owns the control socket: it numbers requests, matches answers, and reports when a process has ended or the
helper is gone, why that is, and whose doing it was. It uses no thread, so that one loop serves hundreds of sandboxes. A
helper may be frozen, starved or stuck in a system call, so no request waits for longer than `ANSWER_SECONDS`. The form
of a message is `wire`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import sandbox_gone
from hermes_rl.sandbox.launcher import copy_of, memory_file
from hermes_rl.sandbox.wire import FRAME_LIMIT, IN_FILE, LAST_PIECE, MAX_FDS, PIECE, number, pack, unpack

Frame = tuple[bytes, list[int]]

CROWDED_SECONDS, CROWDED_PAUSE = 10.0, 0.05
"""How long a message waits where the system passes on no more descriptors of this user, and between two tries."""
PIECES_LIMIT = (1 << 30) + FRAME_LIMIT
OF_THE_MACHINE = frozenset({errno.ETOOMANYREFS, errno.ENFILE})
"""Errors that a helper meets because of others on this machine: they are no answer to the agent, and never scored."""

ANSWER_SECONDS = 60.0
"""Seconds after which a helper that has not answered is given up. Copying the largest file takes a few."""


@dataclass(frozen=True)
class Answer:
    """What the helper answered; the descriptors are the receiver's to close."""

    fields: list[bytes]
    payload: bytes
    fds: list[int]


class Lost(Enum):
    """Why a conversation has ended that nobody ended."""

    ENDED = "the sandbox was lost"
    SILENT = "the sandbox did not answer"
    DESCRIPTORS = "this machine has no descriptors left for what goes to and from the sandbox"


@dataclass(frozen=True)
class Diagnosis:
    """What a backend finds out about the end of a helper that nobody has asked to end."""

    ours: bool = False
    """True where it is proven that commands of the agent did not cause it."""
    detail: str = ""
    """What has happened, where more is known than that the helper is gone."""


class Connection:
    """The conversation with one sandbox's helper, from before there is one until after its end.

    `diagnose` looks for the cause when the helper is lost. `on_exit` gets the number of a spawn and its exit code.
    `on_end` is called once, whatever the cause, and must not wait.
    """

    def __init__(
        self,
        diagnose: Callable[[Lost], Awaitable[Diagnosis]],
        on_exit: Callable[[int, int], None],
        on_end: Callable[[], None],
    ) -> None:
        self._diagnose, self._on_exit, self._on_end = diagnose, on_exit, on_end
        self._loop: asyncio.AbstractEventLoop
        self._socket: socket.socket | None = None
        """None before the conversation has begun, and after its end."""
        self._waiting: dict[int, tuple[asyncio.Future[Answer | None], float]] = {}
        """Requests in the order in which they were sent, each with the time by which it must be answered."""
        self._watch: asyncio.TimerHandle | None = None
        self._unsent: deque[Frame] = deque()
        self._crowded_until: float | None = None
        self._pieces = bytearray()
        self._last = 0
        self._diagnosing: asyncio.Task[None] | None = None
        self._ended = False
        self._why = "the sandbox is not started"
        self.exposed = False
        """True once commands of the agent, or those that grade them, may have run: before that, no loss is their
        doing."""
        self.killed_by_agent = False
        self.heard_at = 0.0
        """When the helper has said something last, in seconds since 1970."""

    @property
    def alive(self) -> bool:
        return self._socket is not None

    def open(self, control: socket.socket) -> None:
        """Begin the conversation over this socket, which is ours to close from now on."""
        try:
            if self._ended:
                raise sandbox_gone(self._why, by_agent=False)
            control.setblocking(False)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(control, self._receive)
        except BaseException:  # it was given to us, so that nobody else closes it
            control.close()
            raise
        self._socket = control

    def next_number(self) -> int:
        """Return the number of a request that is still to be made."""
        self._last += 1
        return self._last

    async def ask(
        self, operation: str, *fields: bytes, payload: bytes = b"", fds: Sequence[int] = (), request: int | None = None
    ) -> Answer:
        """Send a request and wait for its answer; raises the `OSError` that the helper met, and `SandboxFailure` where
        the sandbox is gone, or this machine cannot serve it.

        `fds` stay the caller's. `payload` and `fds` do not go together with fields beyond a datagram.
        """
        if self._socket is None:
            raise await self.failure()
        request = request if request is not None else self.next_number()
        future: asyncio.Future[Answer | None] = self._loop.create_future()
        self._send(pack([number(request), operation.encode(), *fields], payload), fds)
        if not self.alive:
            raise await self.failure()
        self._waiting[request] = future, self._loop.time() + ANSWER_SECONDS
        if self._watch is None:
            self._watch = self._loop.call_later(ANSWER_SECONDS, self._check_due)
        try:
            answer = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                given_up = future.result()
                _close(given_up.fds if given_up is not None else ())
            raise
        except OSError as error:
            if error.errno in OF_THE_MACHINE:
                raise SandboxFailure(f"this machine cannot serve the sandbox: {error.strerror}") from error
            raise
        finally:
            self._waiting.pop(request, None)
        if answer is None:
            raise await self.failure()
        return answer

    def tell(self, operation: str, *fields: bytes) -> None:
        """Send a request whose answer nobody waits for; does nothing once the sandbox is gone."""
        if self.alive:
            self._send(pack([number(self.next_number()), operation.encode(), *fields]), ())

    # ------------------------------------------------------------------ the end

    async def failure(self) -> SandboxFailure:
        """Return the failure that says why the sandbox is gone; waits until it is known whose doing that was."""
        await self.diagnosed()
        return sandbox_gone(self._why, by_agent=self.killed_by_agent)

    async def diagnosed(self) -> None:
        """Wait while the cause of a loss is looked for."""
        if self._diagnosing is not None:
            await asyncio.shield(self._diagnosing)

    def lose(self, why: Lost, what: str = "") -> None:
        """Give the helper up, and begin to look for the cause."""
        if not self._ended:
            self._diagnosing = asyncio.create_task(self._find_cause(why))
            self.end(what or why.value)

    async def _find_cause(self, why: Lost) -> None:
        if not self.exposed or why is Lost.DESCRIPTORS:
            return
        cause = await self._diagnose(why)
        self.killed_by_agent = not cause.ours
        self._why = cause.detail or self._why
        if self.killed_by_agent:
            self._why += ", by the doing of the agent's commands"

    def end(self, why: str, *, by_agent: bool = False) -> None:
        """End the conversation without waiting: with its socket the helper ends, and all processes with it."""
        if self._ended:
            return
        self._ended, self._why, self.killed_by_agent = True, why, by_agent
        if self._socket is not None:
            control, self._socket = self._socket, None
            with contextlib.suppress(RuntimeError):  # a loop that was closed first has forgotten its readers already
                self._loop.remove_reader(control)
                self._loop.remove_writer(control)
            control.close()
        if self._watch is not None:
            self._watch.cancel()
        for _, fds in self._unsent:
            _close(fds)
        self._unsent.clear()
        for future, _ in self._waiting.values():
            if not future.done() and not self._loop.is_closed():
                future.set_result(None)
        self._waiting.clear()
        self._on_end()

    # ------------------------------------------------------------------ sending

    def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        # Copies: the caller closes its own, maybe before a full socket lets the frame out.
        copies: list[int] = []
        try:
            if len(frame) > FRAME_LIMIT:
                copies.append(memory_file(frame, "frame"))
                frame = IN_FILE
            copies += map(copy_of, fds)
        except BaseException:  # the copies are known here alone
            _close(copies)
            raise
        self._unsent.append((frame, copies))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._socket is not None and self._unsent:
            frame, fds = self._unsent[0]
            try:
                socket.send_fds(self._socket, [frame], fds)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    self._loop.remove_writer(self._socket)
                    self._wait_for_room()
                else:
                    self.lose(Lost.ENDED)
                return
            self._crowded_until = None
            self._unsent.popleft()
            _close(fds)
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _wait_for_room(self) -> None:
        """Too many descriptors of this user are on their way; most arrive within moments."""
        now = self._loop.time()
        if self._crowded_until is None:
            self._crowded_until = now + CROWDED_SECONDS
        if now > self._crowded_until:
            self.lose(Lost.DESCRIPTORS)
        else:
            self._loop.call_later(CROWDED_PAUSE, self._flush)

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> None:
        while self._socket is not None:
            try:
                frame, fds, flags, _ = socket.recv_fds(
                    self._socket, FRAME_LIMIT + 4096, MAX_FDS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                frame, fds, flags = b"", [], 0
            if flags & socket.MSG_CTRUNC:
                # The kernel drops descriptors for which this process has no place, and delivers the rest.
                _close(fds)
                self.lose(Lost.DESCRIPTORS)
                return
            if not frame:
                self.lose(Lost.ENDED)
                return
            self.heard_at = time.time()
            if frame[:4] in (PIECE, LAST_PIECE) and not fds:
                self._pieces += memoryview(frame)[4:]
                if len(self._pieces) > PIECES_LIMIT:
                    self.lose(Lost.ENDED)
                    return
                if frame[:4] == PIECE:
                    continue
                frame, self._pieces = bytes(self._pieces), bytearray()
            try:
                self._dispatch(*_unfold(frame, fds))
            except (ValueError, IndexError, OSError):
                # This is no message of the helper's, so its process is not what was started.
                _close(fds)
                self.lose(Lost.ENDED)

    def _dispatch(self, frame: bytes, fds: list[int]) -> None:
        fields, payload = unpack(frame)
        if fields[0] == b"exit":
            self._on_exit(int(fields[1]), int(fields[2]))
            return
        future, _ = self._waiting.pop(int(fields[0]), (None, 0.0))
        if future is None or future.done():
            _close(fds)  # whoever asked was cancelled meanwhile
        elif fields[1] == b"ok":
            future.set_result(Answer(fields[2:], payload, fds))
        else:
            _close(fds)
            future.set_exception(OSError(int(fields[2]), fields[3].decode("utf-8", "replace")))

    def _check_due(self) -> None:
        """Give up a helper that has left a request without an answer for too long."""
        self._watch = None
        if not self._waiting:
            return
        due = next(iter(self._waiting.values()))[1]
        if due <= self._loop.time():
            self.lose(Lost.SILENT)
        else:
            self._watch = self._loop.call_at(due, self._check_due)


def _unfold(frame: bytes, fds: list[int]) -> Frame:
    """Return a message that came in a file, read from it.

    Raises:
        ValueError: it is no regular file, larger than a message may be, or has holes, which cost its sender no memory.
    """
    if frame != IN_FILE:
        return frame, fds
    first = fds.pop(0)
    try:
        info = os.fstat(first)
        if not stat.S_ISREG(info.st_mode) or info.st_size > min(PIECES_LIMIT, info.st_blocks * 512):
            raise ValueError("no message is in this file")
        return os.pread(first, info.st_size, 0), fds
    finally:
        os.close(first)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
