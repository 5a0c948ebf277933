"""A process that the host talks to over one socket, which is its standard input and output."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from hermes_rl.sandbox.base import Conversation
from hermes_rl.sandbox.jobs import Job

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
