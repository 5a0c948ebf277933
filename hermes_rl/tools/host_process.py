"""Programs on the host with the interface of programs in a sandbox, for tool servers outside; and messages of one
line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from hermes_rl.sandbox.base import Conversation, OutputBuffer

CHUNK = 1 << 16
ERRORS_LIMIT = 1 << 16
LAST_WORDS_SECONDS = 1.0
"""Seconds for reading its standard error after its end; a child may keep it open."""
INHERITED = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TMPDIR", "USER")
"""Variables that such a program inherits from this process; keys are not among them."""


class HostProcess(Conversation):
    """See `Conversation`. Made by `start`; the leader of a separate process group."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process
        self._errors = OutputBuffer(ERRORS_LIMIT)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> HostProcess:
        """Start it in `cwd` with a few variables of this process and the variables of `env`; `OSError` if it cannot
        start.
        """
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=cwd, env={**inherited, **env}, process_group=0
        )
        return cls(process)

    async def read(self) -> bytes:
        assert self._process.stdout is not None
        return await self._process.stdout.read(CHUNK)

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.is_closing():
            raise BrokenPipeError("the process has ended")
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    def poll(self) -> int | None:
        return self._process.returncode

    def errors(self) -> bytes:
        return self._errors.value()

    async def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await asyncio.wait([self._listening], timeout=LAST_WORDS_SECONDS)
        self._listening.cancel()
        # Closing the transport before its end is known would hide that end from asyncio, which has no event for it.
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        # asyncio waits for the end of the pipes too, which never comes while they have no reader or a child holds them.
        self._process._transport.close()  # type: ignore[attr-defined]
        await self._process.wait()

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        while data := await self._process.stderr.read(CHUNK):
            self._errors.append(data)


class LineTooLongError(Exception):
    """A line has more bytes than the limit."""


async def lines_of(conversation: Conversation, limit: int) -> AsyncIterator[bytes]:
    """Yield the received lines, without their ends, until the process closes its output.

    Raises `LineTooLongError` for a line of more than `limit` bytes, which is never held in memory twice.
    """
    rest = bytearray()
    while data := await conversation.read():
        rest += data
        *lines, rest = rest.split(b"\n") if b"\n" in data else [rest]
        if max(len(rest), *map(len, lines), 0) > limit:
            raise LineTooLongError(f"a line of more than {limit} bytes")
        for line in lines:
            yield bytes(line)
