"""The host's end of the conversation with a sandbox's helper, on an asyncio event loop.

Owns the control socket: numbering requests, matching answers, telling when a process has ended or the
helper is gone. No thread is used, so that one loop serves hundreds of sandboxes. A helper may be frozen, starved or
stuck in a system call, so no request waits for longer than `ANSWER_SECONDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hermes_rl.sandbox.launcher import copy_of, memory_file
from hermes_rl.sandbox.wire import FRAME_LIMIT, IN_FILE, LAST_PIECE, MAX_FDS, PIECE, number, pack, unpack

Frame = tuple[bytes, list[int]]

CROWDED_SECONDS, CROWDED_PAUSE = 10.0, 0.05
"""How long a message waits where the system passes on no more descriptors of this user, and how often it is tried."""
PIECES_LIMIT = (1 << 30) + FRAME_LIMIT

ANSWER_SECONDS = 60.0
"""Seconds after which a helper that has not answered is given up. Copying the largest file takes a few."""


@dataclass(frozen=True)
class Answer:
    """What the helper answered; the descriptors are the receiver's to close."""

    fields: list[bytes]
    payload: bytes
    fds: list[int]


class ChannelLostError(Exception):
    """The helper is gone, or the channel was closed."""


class Lost(Enum):
    """Why a channel ended that nobody closed."""

    ENDED = "the sandbox was lost"
    SILENT = "the sandbox did not answer"
    DESCRIPTORS = "this machine has no descriptors left for what goes to and from the sandbox"


class Channel:
    """One control socket. `on_exit(job, code)` and `on_lost(why)` are called on the loop."""

    def __init__(
        self, control: socket.socket, on_exit: Callable[[int, int], None], on_lost: Callable[[Lost], None]
    ) -> None:
        control.setblocking(False)
        self._socket = control
        self._loop = asyncio.get_running_loop()
        self._on_exit, self._on_lost = on_exit, on_lost
        self._waiting: dict[int, tuple[asyncio.Future[Answer], float]] = {}
        """Requests in the order in which they were sent, each with the time by which it must be answered."""
        self._watch: asyncio.TimerHandle | None = None
        self._unsent: deque[Frame] = deque()
        self._crowded_until: float | None = None
        self._pieces = bytearray()
        self._last = 0
        self.open = True
        self._loop.add_reader(control, self._receive)

    def next_number(self) -> int:
        self._last += 1
        return self._last

    async def ask(
        self,
        operation: str,
        *fields: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
        request: int | None = None,
    ) -> Answer:
        """Send a request and wait for its answer; raises the `OSError` that the helper met.

        `fds` stay the caller's. `payload` and `fds` do not go together with fields beyond a datagram.
        """
        if not self.open:
            raise ChannelLostError
        request = request if request is not None else self.next_number()
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._send(pack([number(request), operation.encode(), *fields], payload), fds)
        if not self.open:
            raise ChannelLostError
        self._waiting[request] = future, self._loop.time() + ANSWER_SECONDS
        if self._watch is None:
            self._watch = self._loop.call_later(ANSWER_SECONDS, self._look)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                _close(future.result().fds)
            raise
        finally:
            self._waiting.pop(request, None)

    def tell(self, operation: str, *fields: bytes) -> None:
        """Send a request whose answer nobody waits for."""
        if self.open:
            self._send(pack([number(self.next_number()), operation.encode(), *fields]), ())

    def close(self) -> None:
        """End the conversation; what still waits is told that the helper is gone."""
        if not self.open:
            return
        self.open = False
        self._loop_call(self._loop.remove_reader)
        self._loop_call(self._loop.remove_writer)
        self._socket.close()
        if self._watch is not None:
            self._watch.cancel()
        for _, fds in self._unsent:
            _close(fds)
        self._unsent.clear()
        for future, _ in self._waiting.values():
            if not future.done() and not self._loop.is_closed():
                future.set_exception(ChannelLostError())
        self._waiting.clear()

    # ------------------------------------------------------------------ sending

    def _send(self, frame: bytes, fds: Sequence[int]) -> None:
        # Copies: the caller closes its own, maybe before a full socket lets the frame out.
        copies: list[int] = []
        try:
            if len(frame) > FRAME_LIMIT:
                copies.append(memory_file(frame, "frame"))
                frame = IN_FILE
            copies += map(copy_of, fds)
        except BaseException:
            _close(copies)
            raise
        self._unsent.append((frame, copies))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._unsent:
            frame, fds = self._unsent[0]
            try:
                socket.send_fds(self._socket, [frame], fds)
            except BlockingIOError:
                self._loop.add_writer(self._socket, self._flush)
                return
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    self._wait_for_places()
                else:
                    self._lose(Lost.ENDED)
                return
            self._crowded_until = None
            self._unsent.popleft()
            _close(fds)
        self._loop.remove_writer(self._socket)

    def _wait_for_places(self) -> None:
        """Too many descriptors of this user are on their way; most arrive within moments."""
        self._loop.remove_writer(self._socket)
        now = self._loop.time()
        if self._crowded_until is None:
            self._crowded_until = now + CROWDED_SECONDS
        if now > self._crowded_until:
            self._lose(Lost.DESCRIPTORS)
        else:
            self._loop.call_later(CROWDED_PAUSE, self._try_again)

    def _try_again(self) -> None:
        if self.open:
            self._flush()

    # ------------------------------------------------------------------ receiving

    def _receive(self) -> None:
        while self.open:
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
                self._lose(Lost.DESCRIPTORS)
                return
            if not frame:
                self._lose(Lost.ENDED)
                return
            if frame[:4] in (PIECE, LAST_PIECE) and not fds:
                self._pieces += memoryview(frame)[4:]
                if len(self._pieces) > PIECES_LIMIT:
                    self._lose(Lost.ENDED)
                    return
                if frame[:4] == PIECE:
                    continue
                frame, self._pieces = bytes(self._pieces), bytearray()
            try:
                self._dispatch(*_unfold(frame, fds))
            except (ValueError, IndexError, OSError):
                # This is no message of the helper's, so its process is not what was started.
                _close(fds)
                self._lose(Lost.ENDED)

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

    def _look(self) -> None:
        """Give up a helper that has left a request without an answer for too long."""
        self._watch = None
        if not self._waiting:
            return
        due = next(iter(self._waiting.values()))[1]
        if due <= self._loop.time():
            self._lose(Lost.SILENT)
        else:
            self._watch = self._loop.call_at(due, self._look)

    def _lose(self, why: Lost) -> None:
        self.close()
        self._on_lost(why)

    def _loop_call(self, function: Callable[[socket.socket], object]) -> None:
        # A loop that was closed first has forgotten its readers already.
        with contextlib.suppress(RuntimeError):
            function(self._socket)


def _unfold(frame: bytes, fds: list[int]) -> Frame:
    """A message that came in a file, read from it."""
    if frame != IN_FILE:
        return frame, fds
    first = fds.pop(0)
    try:
        return os.pread(first, os.fstat(first).st_size, 0), fds
    finally:
        os.close(first)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
