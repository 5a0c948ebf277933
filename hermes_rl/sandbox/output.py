"""What commands write, read from pipes on the event loop and kept within a limit.

Owns keeping the head and the tail of too much output, and slowing down a command that floods: one rollout
that prints without end must take neither the memory nor the event loop from the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

from hermes_rl.sandbox.descriptors import ours

CHUNK = 1 << 16
BURST = 1 << 20
"""Bytes read from one pipe before the others get a pause of `PAUSE_SECONDS`."""
PAUSE_SECONDS = 0.01


class OutputBuffer:
    """The first 40 % and the last 60 % of a limit; the end of an output tells more than its middle."""

    def __init__(self, limit: int) -> None:
        self._head_limit = limit * 2 // 5
        self._tail_limit = limit - self._head_limit
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def append(self, data: bytes) -> None:
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        if len(self._tail) > 2 * self._tail_limit + CHUNK:
            self._trim()

    def value(self) -> bytes:
        """Everything, or head and tail with a line between them that says how much is missing."""
        self._trim()
        if not self.dropped:
            return bytes(self._head + self._tail)
        note = f"\n[... {self.dropped} bytes of output left out ...]\n".encode()
        return bytes(self._head) + note + bytes(self._tail)

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            del self._tail[:excess]
            self.dropped += excess


class PipeReader:
    """The reading end of one pipe. The descriptor is its own to close.

    Reads are on the event loop and must not block, so no sandbox may have this open file description (`descriptors`).
    """

    def __init__(self, fd: int, buffer: OutputBuffer) -> None:
        self._fd = fd
        self._buffer: OutputBuffer | None = buffer
        self._loop = asyncio.get_running_loop()
        self._burst = 0
        self._pause: asyncio.TimerHandle | None = None
        self.open = True
        os.set_blocking(fd, False)
        with ours("this machine cannot watch a pipe"):
            self._loop.add_reader(fd, self._read)

    def drain(self) -> None:
        """Take what is in the pipe already; its writer has ended, but children of it may still write."""
        for _ in range(BURST // CHUNK):
            if not self.open or not self._take():
                return

    def into(self, buffer: OutputBuffer) -> None:
        """From now on it is the output of another command."""
        self._buffer = buffer

    def abandoned(self) -> bool:
        """True when nobody holds the writing end; asked after `drain`, while nothing of it is kept any more."""
        try:
            return os.read(self._fd, 1) == b""
        except BlockingIOError:
            return False

    def ignore(self) -> None:
        """From now on read and forget, so that who still writes is neither stopped nor remembered."""
        self._buffer = None

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        if self._pause is not None:
            self._pause.cancel()
        # A loop that was closed first has forgotten its readers already.
        with contextlib.suppress(RuntimeError):
            self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        self._take()
        if self.open and self._burst >= BURST:
            self._burst = 0
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._fd, self._read)

    def _take(self) -> bool:
        """Read once; False when there is nothing more for now, or ever."""
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.close()
            return False
        self._burst += len(data)
        if self._buffer is not None:
            self._buffer.append(data)
        return True
