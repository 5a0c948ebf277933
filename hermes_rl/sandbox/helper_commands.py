"""Running commands in a sandbox through the helper inside it.

Owns foreground and background processes: what a command becomes, its time, its output, and that nothing
of it is forgotten when the caller is cancelled.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from hermes_rl.errors import UserError
from hermes_rl.sandbox.base import OUTPUT_LIMIT, TIMEOUT_EXIT_CODE, BackgroundProcess, CommandResult, Conversation
from hermes_rl.sandbox.channel import Channel
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.sandbox.conversation import HelperConversation
from hermes_rl.sandbox.descriptors import copy_of, pipe, socket_pair
from hermes_rl.sandbox.helper_client import HelperFiles, as_field, in_memory
from hermes_rl.sandbox.jobs import HelperProcess, Job

KILL_SECONDS = 5.0
SCRIPT_LIMIT = 100_000
"""Bytes of a script that go in as an argument (the kernel takes 128 KiB); a longer one goes in as a file."""
SCRIPT_FD = 9
ERRORS_LIMIT = 1 << 16
"""Bytes of standard error that are kept of a process that is talked to."""
LOST_EXIT_CODE = 137


class HelperCommands(HelperFiles):
    """The commands half of a sandbox with a helper."""

    shell = "/bin/sh"
    has_shell = True
    """False where the image came without a shell."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._jobs: dict[int, Job] = {}
        self._left: list[Job] = []
        """Ended, but with children that still hold the pipes."""

    @abstractmethod
    def channel(self) -> Channel:
        """The conversation with the helper, which may be over; raises `SandboxFailure` before there is one."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Variables that every command has."""

    @property
    def working(self) -> bool:
        """True while something runs that the host has started."""
        return bool(self._jobs)

    async def judged(self) -> None:
        """Come back when it is known whose doing the end of the sandbox was."""

    async def run(
        self,
        command: str | Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        output_limit: int = OUTPUT_LIMIT,
        merge_stderr: bool = True,
    ) -> CommandResult:
        began = time.perf_counter()
        number = self.channel().next_number()
        source = await in_memory(stdin) if stdin is not None else None
        job: Job | None = None
        try:
            job = Job(number, output_limit, merge_stderr=merge_stderr)
            try:
                await self._start(job, command, cwd, env, source)
            except OSError as error:
                return _not_started(error)
            code = await self._end_of(job, self.config.timeout if timeout is None else timeout)
            if not self.alive:
                await self.judged()
                raise self.lost()
            return CommandResult(
                TIMEOUT_EXIT_CODE if code is None else code,
                job.stdout.value(),
                job.stderr.value(),
                timed_out=code is None,
                truncated=job.stdout.dropped > 0,
                duration=time.perf_counter() - began,
            )
        finally:
            if source is not None:
                os.close(source)
            if job is not None:
                self._forget(job)

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> BackgroundProcess:
        number = self.channel().next_number()
        reader, writer = pipe()
        job: Job | None = None
        try:
            job = Job(number, output_limit, merge_stderr=True)
            await self._start(job, command, cwd, env, reader)
        except BaseException:
            os.close(writer)
            if job is not None:
                self._forget(job)
            raise
        finally:
            os.close(reader)
        job.ended.add_done_callback(lambda _: self._forget(job))
        return HelperProcess(job, writer, self._signal)

    async def converse(
        self, command: str | Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Conversation:
        number = self.channel().next_number()
        ours, theirs = socket_pair()
        job: Job | None = None
        try:
            job = Job(number, ERRORS_LIMIT, stdout=copy_of(theirs.fileno()))
            await self._start(job, command, cwd, env, theirs.fileno())
            job.ended.add_done_callback(lambda _: self._forget(job))
            return await HelperConversation.open(job, ours, lambda: self._signal(job.number, 9))
        except BaseException:
            ours.close()
            if job is not None:
                self._forget(job)
            raise
        finally:
            theirs.close()

    def on_exit(self, number: int, code: int) -> None:
        """The helper says that a process has ended."""
        job = self._jobs.get(number)
        if job is not None:
            job.end(code)

    def end_jobs(self) -> None:
        """The sandbox is gone, and with it everything that ran."""
        for job in [*self._jobs.values(), *self._left]:
            job.end(LOST_EXIT_CODE)
            job.close()
            if job.hang_up is not None:
                job.hang_up()
        self._jobs.clear()
        self._left.clear()

    async def _start(
        self,
        job: Job,
        command: str | Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | None,
        stdin: int | None,
    ) -> None:
        argv, script = self._argv(command)
        targets = {1: job.writers[0], 2: job.writers[1]}
        if stdin is not None:
            targets[0] = stdin
        try:
            if script is not None:
                targets[SCRIPT_FD] = await in_memory(script)
            self._jobs[job.number] = job
            job.pid = await self._exec(job.number, argv, targets, cwd, env)
        finally:
            job.close_writers()
            if SCRIPT_FD in targets:
                os.close(targets[SCRIPT_FD])

    async def _exec(
        self,
        number: int,
        argv: Sequence[str],
        targets: Mapping[int, int],
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> int:
        """Have the helper start a program with our descriptors at these targets; its process id."""
        variables = {**self.environment(), **self.config.env, **(env or {})}
        pairs = ",".join(f"{target}:{index}" for index, target in enumerate(targets))
        answer = await self.ask(
            "spawn",
            as_field(self.resolve(cwd or ".")),
            pairs.encode(),
            str(len(argv)).encode(),
            *(as_field(argument) for argument in argv),
            *(as_field(f"{name}={value}") for name, value in variables.items()),
            fds=list(targets.values()),
            request=number,
        )
        return int(answer.fields[0])

    def _argv(self, command: str | Sequence[str]) -> tuple[list[str], bytes | None]:
        """The arguments of a command, and its script where that is too long for an argument."""
        if not isinstance(command, str):
            return list(command), None
        if not self.has_shell:
            raise UserError(f"the image of the sandbox has no {self.shell}, which runs commands; choose another image")
        script = as_field(command)
        if len(script) <= SCRIPT_LIMIT:
            return [self.shell, "-c", command], None
        return [self.shell, f"/dev/fd/{SCRIPT_FD}"], script

    async def _end_of(self, job: Job, timeout: float) -> int | None:
        """The exit code; None when it ran past its time and was killed."""
        await asyncio.wait([job.ended], timeout=timeout)
        if job.ended.done():
            return job.ended.result()
        await self._signal(job.number, 9)
        await asyncio.wait([job.ended], timeout=KILL_SECONDS)
        return None

    async def _signal(self, number: int, signal: int) -> None:
        self.channel().tell("kill", str(number).encode(), str(signal).encode())

    def _forget(self, job: Job) -> None:
        """Nobody waits for this job any more. One that still runs was cancelled: kill it."""
        self._jobs.pop(job.number, None)
        self._left = [left for left in self._left if left.reading]
        if job.ended.done() and job.reading and self.alive:
            self._left.append(job)
            return
        if not job.ended.done() and self.alive:
            self.channel().tell("kill", str(job.number).encode(), b"9")
        job.close()


def _not_started(error: OSError) -> CommandResult:
    message = f"cannot start the command: {error.strerror}\n".encode()
    return CommandResult(127 if error.errno == errno.ENOENT else 126, message, message)
