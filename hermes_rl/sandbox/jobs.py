"""Processes that the helper of a sandbox starts for the host: foreground commands, background ones, conversations.

`Processes` owns all processes of one sandbox: it starts them, waits for them within their time, and forgets none, even
if its caller is cancelled. `Job` owns the pipes and the end of one. The meaning of a command (its shell, directory and
variables) belongs to the sandbox; the helper inside starts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from signal import SIGCONT, SIGKILL

from hermes_rl.sandbox.base import (
    KILLED_EXIT_CODE,
    TIMEOUT_EXIT_CODE,
    BackgroundProcess,
    CommandResult,
    Conversation,
    OutputBuffer,
    PipeReader,
)
from hermes_rl.sandbox.channel import Connection
from hermes_rl.sandbox.launcher import copy_of, in_memory, pipe, socket_pair
from hermes_rl.sandbox.listener import REPORT_FD
from hermes_rl.values import system_bytes

KILL_SECONDS = 5.0
"""Seconds to wait for a killed command."""
ERRORS_LIMIT = 1 << 16
"""Maximum bytes of standard error that are stored for a conversation."""
SCRIPT_FD = 9
LEFT_PIPES = 64
"""Pipes of ended commands that stay open for their children; beyond this number, the oldest are closed."""
READ_SECONDS = 60.0
"""Seconds for which a process may leave its standard input unread before writing to it fails."""


def output_pipe() -> tuple[int, int]:
    """Return the ends of a pipe that the agent, who may be another user, can reopen as /dev/stdout."""
    reader, writer = pipe()
    os.fchmod(reader, 0o622)
    return reader, writer


@dataclass(frozen=True)
class Command:
    """A command for the helper: only the program's path is left to look up."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    script: bytes | None = None
    """Content of the program's descriptor `SCRIPT_FD`."""


class Job:
    """One process, from the request to start it until it has ended and its output is read.

    With `stdout`, a descriptor that then belongs to the job, standard output goes there and is not stored.
    """

    def __init__(
        self, request_id: int, output_limit: int, *, merge_stderr: bool = False, stdout: int | None = None
    ) -> None:
        self.request_id = request_id
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
            except BaseException:  # the first pipe exists, and the caller has nothing to close
                self.close()
                raise
        self.hang_up: Callable[[], None] | None = None
        """Ends a conversation with it when the sandbox is gone."""
        self.keep = False
        """True if it is stopped when the agent's processes are killed."""
        self.stopped = False

    def _pipe(self, buffer: OutputBuffer) -> int:
        reader, writer = output_pipe()
        try:
            self._readers.append(PipeReader(reader, buffer))
        except BaseException:  # only this method knows both ends
            os.close(reader)
            os.close(writer)
            raise
        return writer

    def close_writers(self) -> None:
        """Close the host's writing ends, which the helper has now: they would prevent the end of the pipes."""
        writers, self.writers = set(self.writers), []
        for fd in writers:
            os.close(fd)

    def end(self, code: int) -> None:
        """Read its output, which is in the pipes by now. Later output of its children does not belong to it."""
        for reader in self._readers:
            reader.drain()
            reader.ignore()
        if not self.ended.done():
            self.ended.set_result(code)

    def close(self) -> None:
        self.close_writers()
        for reader in self._readers:
            reader.close()

    def list_open_readers(self) -> list[PipeReader]:
        """Return the pipes whose writing end is still held."""
        return [reader for reader in self._readers if reader.open]


class HelperProcess(BackgroundProcess):
    """A background process; its standard input is a separate pipe."""

    def __init__(self, job: Job, stdin: int, signal: Callable[[int, int], None]) -> None:
        self.pid, self.ended = job.pid, job.ended
        self._job = job
        self._stdin: int | None = stdin
        self._signal = signal
        os.set_blocking(stdin, False)
        job.ended.add_done_callback(lambda _: self.release())

    def output(self) -> bytes:
        return self._job.stdout.value()

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
            self._signal(self._job.request_id, signal)

    def release(self) -> None:
        """Close the host's end of its standard input."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None


CHUNK = 1 << 16


class HelperConversation(Conversation):
    """See `Conversation`. One socket is the process's standard input and output."""

    def __init__(
        self,
        job: Job,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        signal: Callable[[int, int], None],
    ) -> None:
        self._job = job
        self._reader = reader
        self._writer = writer
        self._signal = signal

    async def read(self) -> bytes:
        try:
            return await self._reader.read(CHUNK)
        except ConnectionError:
            return b""  # it ended without reading its input, or the sandbox is gone

    async def write(self, data: bytes) -> None:
        if self._writer.transport.is_closing():
            raise BrokenPipeError("the process has ended")
        if self._job.stopped:
            self._job.stopped = False
            self._signal(self._job.request_id, SIGCONT)
        self._writer.write(data)
        await self._writer.drain()

    def poll(self) -> int | None:
        return self._job.ended.result() if self._job.ended.done() else None

    def errors(self) -> bytes:
        return self._job.stderr.value()

    async def close(self) -> None:
        self._writer.transport.abort()
        if self.poll() is None:
            self._signal(self._job.request_id, SIGKILL)


def _shut_down(host_end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        host_end.shutdown(socket.SHUT_RDWR)


class Processes:
    """All processes that the host has started in one sandbox."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._jobs: dict[int, Job] = {}
        self._leftover_readers: list[PipeReader] = []
        """Pipes of ended processes that their children still hold; further data is dropped."""

    @property
    def running(self) -> bool:
        return bool(self._jobs)

    async def run(
        self,
        command: Command,
        stdin: bytes | None,
        timeout: float,
        output_limit: int,
        *,
        merge_stderr: bool,
        report: socket.socket | None = None,
    ) -> CommandResult:
        """See `Sandbox.run`; `report`, which is closed here once it is handed over, becomes `REPORT_FD`."""
        started_at = time.perf_counter()
        job = Job(self._connection.next_number(), output_limit, merge_stderr=merge_stderr)
        source: int | None = None
        try:
            source = await in_memory(stdin) if stdin is not None else None
            try:
                await self._start(job, command, source, report)
            except OSError as error:
                message = f"cannot start the command: {error.strerror}\n".encode()
                return CommandResult(127 if error.errno == errno.ENOENT else 126, message, message)
            code = await self._end_of(job, timeout)
            if not self._connection.alive:
                raise await self._connection.failure()
            return CommandResult(
                TIMEOUT_EXIT_CODE if code is None else code,
                job.stdout.value(),
                job.stderr.value(),
                timed_out=code is None,
                truncated=job.stdout.dropped > 0,
                duration=time.perf_counter() - started_at,
            )
        finally:
            if source is not None:
                os.close(source)
            self._forget(job)

    async def spawn(self, command: Command, output_limit: int) -> BackgroundProcess:
        """See `Sandbox.spawn`."""
        job = Job(self._connection.next_number(), output_limit, merge_stderr=True)
        with ExitStack() as unfinished:
            unfinished.callback(self._forget, job)
            reader, writer = pipe()
            unfinished.callback(os.close, writer)
            try:
                await self._start(job, command, reader)
            finally:
                os.close(reader)
            unfinished.pop_all()
        job.ended.add_done_callback(lambda _: self._forget(job))
        return HelperProcess(job, writer, self.signal)

    async def converse(self, command: Command, *, keep: bool = False) -> Conversation:
        """See `Sandbox.converse`."""
        request_id = self._connection.next_number()
        host_end, theirs = socket_pair()
        with theirs, ExitStack() as unfinished:
            unfinished.callback(host_end.close)
            job = Job(request_id, ERRORS_LIMIT, stdout=copy_of(theirs.fileno()))
            unfinished.callback(self._forget, job)
            job.keep = keep
            await self._start(job, command, theirs.fileno())
            job.ended.add_done_callback(lambda _: self._forget(job))
            reader, writer = await asyncio.open_connection(sock=host_end)
            job.hang_up = writer.transport.abort
            # A child that outlives it may hold its end of the socket: written data stays readable, no more comes.
            job.ended.add_done_callback(lambda _: _shut_down(host_end))
            unfinished.pop_all()
        return HelperConversation(job, reader, writer, self.signal)

    def stopped(self) -> list[bytes]:
        """Return the numbers of the processes to keep, which are stopped from now on."""
        kept_jobs = [job for job in self._jobs.values() if job.keep]
        for job in kept_jobs:
            job.stopped = True
        return [str(job.request_id).encode() for job in kept_jobs]

    async def execute(self, request_id: int, command: Command, targets: Mapping[int, int]) -> int:
        """Let the helper start a program with the host's descriptors at these targets; return its process id."""
        pairs = ",".join(f"{target}:{index}" for index, target in enumerate(targets))
        answer = await self._connection.ask(
            "spawn",
            system_bytes(command.cwd),
            pairs.encode(),
            str(len(command.argv)).encode(),
            *map(system_bytes, command.argv),
            *(system_bytes(f"{name}={value}") for name, value in command.env.items()),
            fds=list(targets.values()),
            request=request_id,
        )
        return int(answer.fields[0])

    def signal(self, request_id: int, signal: int) -> None:
        """Send a signal to the process group of the process that this request has started."""
        self._connection.tell("kill", str(request_id).encode(), str(signal).encode())

    def on_exit(self, request_id: int, code: int) -> None:
        """Handle the helper's report that a process has ended."""
        job = self._jobs.get(request_id)
        if job is not None:
            job.end(code)

    def end(self) -> None:
        """Release everything that runs: the sandbox is gone."""
        for job in self._jobs.values():
            job.end(KILLED_EXIT_CODE)
            job.close()
            if job.hang_up is not None:
                job.hang_up()
        for reader in self._leftover_readers:
            reader.close()
        self._jobs.clear()
        self._leftover_readers.clear()

    async def _start(self, job: Job, command: Command, stdin: int | None, report: socket.socket | None = None) -> None:
        targets = {1: job.writers[0], 2: job.writers[1]}
        if report is not None:
            targets[REPORT_FD] = report.fileno()
        if stdin is not None:
            targets[0] = stdin
        try:
            if command.script is not None:
                targets[SCRIPT_FD] = await in_memory(command.script)
            self._jobs[job.request_id] = job
            job.pid = await self.execute(job.request_id, command, targets)
        finally:
            job.close_writers()
            if report is not None:
                report.close()
            if SCRIPT_FD in targets:
                os.close(targets[SCRIPT_FD])

    async def _end_of(self, job: Job, timeout: float) -> int | None:
        """Return the exit code; None if it exceeded its time and was killed."""
        await asyncio.wait([job.ended], timeout=timeout)
        if job.ended.done():
            return job.ended.result()
        self.signal(job.request_id, 9)
        await asyncio.wait([job.ended], timeout=KILL_SECONDS)
        return None

    def _forget(self, job: Job) -> None:
        """Release a job without a caller. One that still runs was cancelled, so it is killed."""
        self._jobs.pop(job.request_id, None)
        if job.ended.done() and self._connection.alive:
            # If they were closed, a signal would end processes that continue to write there.
            readers = [reader for reader in self._leftover_readers if reader.open] + job.list_open_readers()
            for reader in readers[:-LEFT_PIPES]:
                reader.close()
            self._leftover_readers = readers[-LEFT_PIPES:]
            return
        if not job.ended.done():
            self.signal(job.request_id, 9)
        job.close()
