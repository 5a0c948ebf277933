"""Processes that a sandbox's helper started, as the host sees them.

Owns the pipes of one process, its end, and `BackgroundProcess` over them. Starting it is the sandbox's."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Awaitable, Callable

from hermes_rl.sandbox.base import BackgroundProcess, Conversation, OutputBuffer, PipeReader
from hermes_rl.sandbox.launcher import pipe

READ_SECONDS = 60.0
"""How long a process may leave its standard input unread before writing to it is given up."""


def output_pipe() -> tuple[int, int]:
    """Reading and writing end of a pipe that the agent, who may be another user, can open anew as /dev/stdout."""
    reader, writer = pipe()
    os.fchmod(reader, 0o622)
    return reader, writer


class Job:
    """One process from the request to start it until it has ended and its output is read.

    With `stdout`, a descriptor that becomes the job's to close, standard output goes there and is not kept.
    """

    def __init__(
        self, number: int, output_limit: int, *, merge_stderr: bool = False, stdout: int | None = None
    ) -> None:
        self.number = number
        self.pid = 0
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.stdout = OutputBuffer(output_limit)
        self.stderr = OutputBuffer(output_limit)
        self._readers: list[PipeReader] = []
        out = self._pipe(self.stdout) if stdout is None else stdout
        self.writers = [out, out]
        """Descriptors that become its standard output and standard error."""
        if not merge_stderr:
            try:
                self.writers[1] = self._pipe(self.stderr)
            except BaseException:
                self.close()
                raise
        self.hang_up: Callable[[], None] | None = None
        """Ends a conversation with it, once the sandbox is gone."""

    def _pipe(self, buffer: OutputBuffer) -> int:
        reader, writer = output_pipe()
        try:
            self._readers.append(PipeReader(reader, buffer))
        except BaseException:
            os.close(reader)
            os.close(writer)
            raise
        return writer

    def close_writers(self) -> None:
        """The helper has them now; ours would keep the pipes from ever ending."""
        writers, self.writers = set(self.writers), []
        for fd in writers:
            os.close(fd)

    def end(self, code: int) -> None:
        """It has ended: what it wrote is in the pipes, what its children go on to write is not its own."""
        for reader in self._readers:
            reader.drain()
            reader.ignore()
        if not self.ended.done():
            self.ended.set_result(code)

    def close(self) -> None:
        self.close_writers()
        for reader in self._readers:
            reader.close()

    @property
    def reading(self) -> bool:
        """True while something holds the writing end of a pipe."""
        return any(reader.open for reader in self._readers)


class HelperProcess(BackgroundProcess):
    """A background process; its writing end of standard input is a pipe of its own."""

    def __init__(self, job: Job, stdin: int, signal: Callable[[int, int], Awaitable[None]]) -> None:
        self.pid = job.pid
        self._job = job
        self._stdin: int | None = stdin
        self._signal = signal
        os.set_blocking(stdin, False)
        job.ended.add_done_callback(lambda _: self.release())

    def poll(self) -> int | None:
        return self._job.ended.result() if self._job.ended.done() else None

    def output(self) -> bytes:
        return self._job.stdout.value()

    @property
    def truncated(self) -> bool:
        return self._job.stdout.dropped > 0

    async def wait(self, timeout: float | None = None) -> int | None:
        done, _ = await asyncio.wait([self._job.ended], timeout=timeout)
        return self._job.ended.result() if done else None

    async def write_stdin(self, data: bytes) -> None:
        view, moved = memoryview(data), time.monotonic()
        while view:
            if self._stdin is None:
                raise BrokenPipeError("its standard input is closed")
            try:
                view = view[os.write(self._stdin, view) :]
                moved = time.monotonic()
            except BlockingIOError:
                if time.monotonic() - moved > READ_SECONDS:
                    raise TimeoutError(errno.ETIMEDOUT, "the process does not read its standard input") from None
                await asyncio.sleep(0.01)

    async def close_stdin(self) -> None:
        self.release()

    async def kill(self, signal: int = 9) -> None:
        if self.poll() is None:
            await self._signal(self._job.number, signal)

    def release(self) -> None:
        """Close our end of its standard input."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None


# ---------------------- A process that the host talks to over one socket, which is its standard input and output

CHUNK = 1 << 16


class HelperConversation(Conversation):
    """See `Conversation`. Made by `open`; belongs to one event loop."""

    def __init__(
        self,
        job: Job,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        kill: Callable[[], Awaitable[None]],
    ) -> None:
        self.pid = job.pid
        self._job = job
        self._reader = reader
        self._writer = writer
        self._kill = kill

    @classmethod
    async def open(cls, job: Job, ours: socket.socket, kill: Callable[[], Awaitable[None]]) -> HelperConversation:
        """The conversation of a started job; `ours` is the other end of its standard input and output."""
        reader, writer = await asyncio.open_connection(sock=ours)
        job.hang_up = writer.transport.abort
        # A child that outlives it may hold its end of the socket: what was written stays readable, no more comes.
        job.ended.add_done_callback(lambda _: _shut(ours))
        return cls(job, reader, writer, kill)

    async def read(self) -> bytes:
        try:
            return await self._reader.read(CHUNK)
        except ConnectionError:
            return b""  # it ended without reading what we wrote, or the sandbox is gone

    async def write(self, data: bytes) -> None:
        if self._writer.transport.is_closing():
            raise BrokenPipeError("the process has ended")
        self._writer.write(data)
        await self._writer.drain()

    def poll(self) -> int | None:
        return self._job.ended.result() if self._job.ended.done() else None

    def errors(self) -> bytes:
        return self._job.stderr.value()

    async def close(self) -> None:
        self._writer.transport.abort()
        if self.poll() is None:
            await self._kill()


def _shut(ours: socket.socket) -> None:
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)
