"""Host's end of the connection to the helper inside a sandbox, on an asyncio event loop.

`Connection` owns the control socket: it numbers requests, matches responses, and reports when a process has ended or
the helper is gone, with the reason, and if the agent caused it. It uses no thread, so that one loop serves hundreds of
sandboxes. A helper may be frozen, starved or stuck in a system call, so no request waits longer than `ANSWER_SECONDS`.
The format of messages belongs to `wire`.
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
from functools import partial

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import sandbox_gone
from hermes_rl.sandbox.launcher import copy_of, memory_file
from hermes_rl.sandbox.wire import FRAME_LIMIT, IN_FILE, LAST_PIECE, MAX_FDS, PIECE, encode_number, pack, unpack
from hermes_rl.threads import start_in_thread

Frame = tuple[bytes, list[int]]

CROWDED_SECONDS, CROWDED_PAUSE = 10.0, 0.05
"""Seconds that a message waits if the system passes on no more descriptors of this user, and between two tries."""
FRAMES_AT_ONCE = 100
"""Messages that are received before other tasks of the event loop have their turn."""
PIECES_LIMIT = (1 << 30) + FRAME_LIMIT
READ_HERE = 1 << 20
"""Bytes of a message that are read on the event loop, at most."""
OF_THE_MACHINE = frozenset({errno.ETOOMANYREFS, errno.ENFILE})
"""Errors of a helper caused by other processes on this machine: they are not a result for the agent, and never
scored.
"""

ANSWER_SECONDS = 60.0
"""Seconds after which a helper that has not responded counts as lost. Copying the largest file takes a few."""


@dataclass(frozen=True)
class Answer:
    """Response of the helper; the receiver must close the descriptors."""

    fields: list[bytes]
    payload: bytes
    fds: list[int]


class ConnectionLoss(Enum):
    """Reason for an unexpected end of a connection."""

    ENDED = "the sandbox was lost"
    SILENT = "the sandbox did not answer"
    DESCRIPTORS = "this machine has no descriptors left for connections to the sandbox"


@dataclass(frozen=True)
class Diagnosis:
    """Findings of a backend about the unexpected end of a helper."""

    is_infrastructure_failure: bool = False
    """True if it is proven that commands of the agent did not cause it."""
    detail: str = ""
    """Description of the event, if more is known than that the helper is gone."""


class Connection:
    """Connection to one sandbox's helper, from before it exists until after its end.

    `diagnose` looks for the cause when the helper is lost. `on_exit` gets the number of a spawn and its exit code.
    `on_end` is called once, whatever the cause, and must not wait.
    """

    def __init__(
        self,
        diagnose: Callable[[ConnectionLoss], Awaitable[Diagnosis]],
        on_exit: Callable[[int, int], None],
        on_end: Callable[[], None],
    ) -> None:
        self._diagnose, self._on_exit, self._on_end = diagnose, on_exit, on_end
        self._loop: asyncio.AbstractEventLoop
        self._socket: socket.socket | None = None
        """Socket; None before the connection has started, and after its end."""
        self._waiting: dict[int, tuple[asyncio.Future[Answer | None], float]] = {}
        """Requests in the order in which they were sent, each with the time by which it must be answered."""
        self._watch: asyncio.TimerHandle | None = None
        self._unsent: deque[Frame] = deque()
        self._crowded_until: float | None = None
        self._partial_frame = bytearray()
        self._last = 0
        self._diagnosing: asyncio.Task[None] | None = None
        self._ended = False
        self._end_reason = "the sandbox is not started"
        self.exposed = False
        """True once commands of the agent, or commands that grade them, may have run: before that, they cause no
        loss.
        """
        self.killed_by_agent = False
        self.heard_at = 0.0
        """Time of the helper's last message, in seconds since 1970."""

    @property
    def alive(self) -> bool:
        return self._socket is not None

    def open(self, control: socket.socket) -> None:
        """Start the connection over this socket, which it then owns."""
        try:
            if self._ended:
                raise sandbox_gone(self._end_reason, by_agent=False)
            control.setblocking(False)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(control, self._receive)
        except BaseException:  # this method owns the socket, so no other code closes it
            control.close()
            raise
        self._socket = control

    def next_number(self) -> int:
        """Return the number of the next request."""
        self._last += 1
        return self._last

    async def ask(
        self, operation: str, *fields: bytes, payload: bytes = b"", fds: Sequence[int] = (), request: int | None = None
    ) -> Answer:
        """Send a request and wait for its response; raises the `OSError` of the helper, and `SandboxFailure` if the
        sandbox is gone, or this machine cannot serve it.

        `fds` stay the caller's. `payload` and `fds` cannot be combined with fields beyond a datagram.
        """
        if self._socket is None:
            raise await self.failure()
        request = request if request is not None else self.next_number()
        future: asyncio.Future[Answer | None] = self._loop.create_future()
        self._send(pack([encode_number(request), operation.encode(), *fields], payload), fds)
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
                _close_all(given_up.fds if given_up is not None else ())
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
        """Send a request whose response is ignored; does nothing once the sandbox is gone."""
        if self.alive:
            self._send(pack([encode_number(self.next_number()), operation.encode(), *fields]), ())

    # ------------------------------------------------------------------ the end

    async def failure(self) -> SandboxFailure:
        """Return the failure with the reason why the sandbox is gone; waits until the cause is known."""
        await self.diagnosed()
        return sandbox_gone(self._end_reason, by_agent=self.killed_by_agent)

    async def diagnosed(self) -> None:
        """Wait while the cause of a loss is being determined."""
        if self._diagnosing is not None:
            await asyncio.shield(self._diagnosing)

    def mark_lost(self, loss: ConnectionLoss, description: str = "") -> None:
        """Give the helper up, and start to look for the cause."""
        if not self._ended:
            self._diagnosing = asyncio.create_task(self._find_cause(loss))
            self.end(description or loss.value)

    async def _find_cause(self, loss: ConnectionLoss) -> None:
        if not self.exposed or loss is ConnectionLoss.DESCRIPTORS:
            return
        cause = await self._diagnose(loss)
        self.killed_by_agent = not cause.is_infrastructure_failure
        self._end_reason = cause.detail or self._end_reason
        if self.killed_by_agent:
            self._end_reason += ", by the doing of the agent's commands"

    def end(self, reason: str, *, by_agent: bool = False) -> None:
        """End the connection without waiting: with its socket the helper ends, and all processes with it."""
        if self._ended:
            return
        self._ended, self._end_reason, self.killed_by_agent = True, reason, by_agent
        if self._socket is not None:
            control, self._socket = self._socket, None
            with contextlib.suppress(RuntimeError):  # a loop that was closed first has forgotten its readers already
                self._loop.remove_reader(control)
                self._loop.remove_writer(control)
            control.close()
        if self._watch is not None:
            self._watch.cancel()
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        for future, _ in self._waiting.values():
            if not future.done() and not self._loop.is_closed():
                future.set_result(None)
        self._waiting.clear()
        self._on_end()

    # ------------------------------------------------------------------ sending

    def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        # Copies: the caller closes its descriptors, maybe before a full socket sends the frame.
        copies: list[int] = []
        try:
            if len(frame) > FRAME_LIMIT:
                copies.append(memory_file(frame, "frame"))
                frame = IN_FILE
            copies += map(copy_of, fds)
        except BaseException:  # only this method knows the copies
            _close_all(copies)
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
                    self.mark_lost(ConnectionLoss.ENDED)
                return
            self._crowded_until = None
            self._unsent.popleft()
            _close_all(fds)
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _wait_for_room(self) -> None:
        """Wait until fewer descriptors of this user are in transit; most arrive within moments."""
        now = self._loop.time()
        if self._crowded_until is None:
            self._crowded_until = now + CROWDED_SECONDS
        if now > self._crowded_until:
            self.mark_lost(ConnectionLoss.DESCRIPTORS)
        else:
            self._loop.call_later(CROWDED_PAUSE, self._flush)

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> None:
        for _ in range(FRAMES_AT_ONCE):
            if self._socket is None or not self._receive_frame(self._socket):
                return

    def _receive_frame(self, control: socket.socket) -> bool:
        """Receive one message; return False if there is none for now, or the connection is lost."""
        try:
            frame, fds, flags, _ = socket.recv_fds(control, FRAME_LIMIT + 4096, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            frame, fds, flags = b"", [], 0
        if flags & socket.MSG_CTRUNC:
            # The kernel drops descriptors for which this process has no slot, and delivers the rest.
            _close_all(fds)
            self.mark_lost(ConnectionLoss.DESCRIPTORS)
            return False
        if not frame:
            self.mark_lost(ConnectionLoss.ENDED)
            return False
        self.heard_at = time.time()
        if frame[:4] in (PIECE, LAST_PIECE) and not fds:
            self._partial_frame += memoryview(frame)[4:]
            if len(self._partial_frame) > PIECES_LIMIT:
                self.mark_lost(ConnectionLoss.ENDED)
                return False
            if frame[:4] == PIECE:
                return True
            frame, self._partial_frame = bytes(self._partial_frame), bytearray()
        if frame == IN_FILE and fds and os.fstat(fds[0]).st_size > READ_HERE:
            self._read_in_thread(control, fds)
            return False
        self._take(partial(_unfold_frame, frame, fds), fds)
        return True

    def _take(self, unfold: Callable[[], Frame], fds: Sequence[int]) -> None:
        """Dispatch the message that `unfold` returns."""
        try:
            self._dispatch(*unfold())
        except (ValueError, IndexError, OSError):
            # This message is not the helper's, so its process is not the one that was started.
            _close_all(fds)
            self.mark_lost(ConnectionLoss.ENDED)

    def _read_in_thread(self, control: socket.socket, fds: list[int]) -> None:
        """Read a message of up to `PIECES_LIMIT` bytes in a thread; the next ones wait, so only one is in memory."""
        self._loop.remove_reader(control)

        def take(done: asyncio.Future[Frame]) -> None:
            self._take(done.result, fds)
            if self._socket is not None:
                self._loop.add_reader(control, self._receive)

        start_in_thread(partial(_unfold_frame, IN_FILE, fds)).add_done_callback(take)

    def _dispatch(self, frame: bytes, fds: list[int]) -> None:
        fields, payload = unpack(frame)
        if fields[0] == b"exit":
            self._on_exit(int(fields[1]), int(fields[2]))
            return
        future, _ = self._waiting.pop(int(fields[0]), (None, 0.0))
        if future is None or future.done():
            _close_all(fds)  # the caller was cancelled meanwhile
        elif fields[1] == b"ok":
            future.set_result(Answer(fields[2:], payload, fds))
        else:
            _close_all(fds)
            future.set_exception(OSError(int(fields[2]), fields[3].decode("utf-8", "replace")))

    def _check_due(self) -> None:
        """Give up a helper that has not responded to a request for too long."""
        self._watch = None
        if not self._waiting:
            return
        due = next(iter(self._waiting.values()))[1]
        if due <= self._loop.time():
            self.mark_lost(ConnectionLoss.SILENT)
        else:
            self._watch = self._loop.call_at(due, self._check_due)


def _unfold_frame(frame: bytes, fds: list[int]) -> Frame:
    """Return a message that came in a file, read from it.

    Raises:
        ValueError: it is not a regular file, larger than a message may be, or has holes, which cost its sender no
            memory.
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


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
