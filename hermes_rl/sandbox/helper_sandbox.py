"""A sandbox whose first process is our helper: everything but how that process is started.

Owns the life of the sandbox on the host's side. Files and commands are in `helper_client` and
`helper_commands`; `bubblewrap` and `none` add what to start and how strongly it is fenced in."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import re
import socket
import stat
import subprocess
import sys
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox.base import (
    LIST_LIMIT,
    OUTPUT_LIMIT,
    READ_LIMIT,
    TIMEOUT_EXIT_CODE,
    BackgroundProcess,
    CommandResult,
    Conversation,
    FileInfo,
    OutputBuffer,
    Sandbox,
    SandboxConfig,
)
from hermes_rl.sandbox.channel import Answer, Channel, ChannelLostError, Lost
from hermes_rl.sandbox.jobs import HelperConversation, HelperProcess, Job
from hermes_rl.sandbox.launcher import Child, Program, Remains, copy_of, launcher, memory_file, pipe, socket_pair
from hermes_rl.sandbox.shell_server import PROGRAM, ShellServer, room_for_one_more
from hermes_rl.sandbox.wire import FRAME_LIMIT

# ---------------------------- The helper's code in the form in which it is handed to the Python inside a sandbox
# Owns choosing that Python and compiling the helper for it, once per interpreter: compiling at every start
# would cost a third of the time that a sandbox takes to start.

MODULES = ("wire", "helper_files", "helper_system", "helper")
SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")

BOOT = """
import marshal, os, sys
for name, code in marshal.loads(os.pread(int(sys.argv[2]), 1 << 22, 0)):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()
"""

_COMPILE = """
import marshal, sys
sources = eval(sys.stdin.read())
compiled = [(name, compile(source, name, "exec", dont_inherit=True)) for name, source in sources]
sys.stdout.buffer.write(marshal.dumps(compiled))
"""


@functools.cache
def helper_bundle(python: str) -> bytes:
    """The helper's modules, compiled by `python`; starts that interpreter when first asked for it."""
    folder = Path(__file__).parent
    sources = [(f"hermes_rl.sandbox.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in MODULES]
    try:
        done = subprocess.run(
            [python, "-I", "-S", "-X", "utf8", "-c", _COMPILE],
            input=repr(sources).encode(),
            capture_output=True,
            env={},
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailure(f"{python} cannot compile the sandbox helper: {error}") from error
    if done.returncode != 0:
        tail = done.stderr.decode("utf-8", "replace")[-500:]
        raise SandboxFailure(f"{python} cannot compile the sandbox helper: {tail}")
    return done.stdout


def boot_argv(python: str, control: int, code: int) -> list[str]:
    """The command that runs the helper with its socket and its code at these descriptors."""
    return [python, "-I", "-S", "-c", BOOT, str(control), str(code)]


def system_python() -> str | None:
    """A Python that is part of the system folders which every sandbox sees anyway."""
    for path in SYSTEM_PYTHONS:
        if os.access(path, os.X_OK) and os.path.realpath(path).startswith("/usr/"):
            return path
    return None


def own_python() -> str:
    """The interpreter that this program runs under, outside of any virtual environment."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(base if base.exists() else Path(sys.executable).resolve())


# ------------------------------------- The file operations of a sandbox, asked of the helper that runs inside it
# Owns turning the interface's file methods into requests. Large files travel as descriptors of files in
# memory or of the file itself, never through a shell or a text encoding.

INLINE = FRAME_LIMIT // 2
IN_THREAD = 1 << 20
"""Bytes from which copying is left to a thread."""
LISTED_AT_ONCE = 1000
"""Entries of a folder from which understanding them is left to a thread."""


def as_field(text: str) -> bytes:
    """A path, an argument or a variable as the system takes it; `ValueError` where it cannot be one."""
    data = os.fsencode(text)
    if b"\0" in data:
        raise ValueError("embedded null byte")
    return data


class HelperFiles(Sandbox):
    """The file half of a sandbox with a helper."""

    @abstractmethod
    async def ask(
        self,
        operation: str,
        *fields: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
        request: int | None = None,
    ) -> Answer:
        """One request to the helper; raises `SandboxFailure` when the sandbox is gone."""

    @abstractmethod
    def lost(self) -> SandboxFailure:
        """The failure that tells why the sandbox is not there."""

    def _path(self, path: str) -> bytes:
        return as_field(self.resolve(path))

    async def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        with _named(path):
            answer = await self.ask("read", self._path(path), str(limit).encode())
        if not answer.fds:
            if len(answer.payload) > limit:
                raise OSError(errno.EFBIG, "File too large", path)
            return answer.payload
        try:
            return await _read_all(answer.fds[0], limit)
        finally:
            os.close(answer.fds[0])

    async def write_file(self, path: str, data: bytes, mode: int | None = None) -> None:
        fields = (self._path(path), b"" if mode is None else str(mode).encode())
        with _named(path):
            if len(data) <= INLINE:
                await self.ask("write", *fields, payload=data)
                return
            fd = await in_memory(data)
            try:
                await self.ask("write", *fields, fds=[fd])
            finally:
                os.close(fd)

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        with _named(path):
            answer = await self.ask("stat", self._path(path), b"1" if follow else b"0")
        return _info(answer.fields)

    async def list_dir(self, path: str, *, limit: int = LIST_LIMIT) -> list[FileInfo]:
        with _named(path):
            answer = await self.ask("list", self._path(path), str(limit).encode())
        if len(answer.fields) <= 5 * LISTED_AT_ONCE:
            return _entries(answer.fields)
        return await asyncio.to_thread(_entries, answer.fields)

    async def set_mode(self, path: str, mode: int) -> None:
        with _named(path):
            await self.ask("chmod", self._path(path), str(mode).encode())

    async def make_dir(self, path: str) -> None:
        with _named(path):
            await self.ask("mkdir", self._path(path))

    async def remove(self, path: str) -> None:
        with _named(path):
            await self.ask("remove", self._path(path))

    async def rename(self, source: str, target: str) -> None:
        with _named(source):
            await self.ask("rename", self._path(source), self._path(target))


async def in_memory(data: bytes) -> int:
    """A descriptor of a file in memory with `data`; a large one is filled in a thread."""
    if len(data) < IN_THREAD:
        return memory_file(data)
    filling = asyncio.ensure_future(asyncio.to_thread(memory_file, data))
    try:
        return await asyncio.shield(filling)
    except asyncio.CancelledError:
        # The thread goes on, and then nobody else knows of its descriptor.
        filling.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(filling: asyncio.Future[int]) -> None:
    if not filling.cancelled() and filling.exception() is None:
        os.close(filling.result())


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Put the path into the `OSError` of a request, as a local call would."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


def _entries(fields: Sequence[bytes]) -> list[FileInfo]:
    found = [_info(fields[i : i + 5]) for i in range(0, len(fields), 5)]
    return sorted(found, key=lambda info: info.name)


def _info(fields: Sequence[bytes]) -> FileInfo:
    kind = cast(Literal["file", "directory", "symlink", "other"], fields[1].decode())
    return FileInfo(os.fsdecode(fields[0]), kind, size=int(fields[2]), mode=int(fields[3]), mtime=float(fields[4]))


async def _read_all(fd: int, limit: int) -> bytes:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file")  # reading anything else may block
    if info.st_size < IN_THREAD:
        return _read(fd, limit)
    # The thread has a descriptor of its own: when we are cancelled, ours is closed while it still reads.
    return await asyncio.to_thread(_read_and_close, copy_of(fd), limit)


def _read_and_close(fd: int, limit: int) -> bytes:
    try:
        return _read(fd, limit)
    finally:
        os.close(fd)


def _read(fd: int, limit: int) -> bytes:
    # In one piece where the size is as told: copying pieces together would hold up all other threads.
    data = os.pread(fd, min(os.fstat(fd).st_size, limit) + 1, 0)
    while len(data) <= limit and (more := os.pread(fd, 1 << 22, len(data))):
        data += more
    if len(data) > limit:
        raise OSError(errno.EFBIG, "File too large")
    return data


# ---------------------------------------------------- Running commands in a sandbox through the helper inside it
# Owns foreground and background processes: what a command becomes, its time, its output, and that nothing
# of it is forgotten when the caller is cancelled.

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


# ----------------------------------------------- Commands of the agent through a shell that waits in the sandbox
# Owns when there is such a shell, which commands it gets, and that none is used which the agent could have touched once
# the agent has ended. Everything that it does not get runs in a new shell, as `Sandbox.run_reporting` has it.

BASH = "/bin/bash"
OWN_PROCESS = re.compile(r"\$\{?[!#]?\$|BASH_EXECUTION_STRING")
"""What a command sees of its shell's own process: for ``$$`` that would be the one that waits, and always the same."""
STEERS = re.compile(
    "BASH.*|ENV|SHELLOPTS|POSIXLY_CORRECT|PROMPT_COMMAND|PS4|TMOUT|IFS|GLOBIGNORE|FUNCNEST|EXECIGNORE|REPLY|RANDOM"
    "|SRANDOM|SECONDS|LINENO|SHLVL|OPT(ARG|IND|ERR)|_"
)
"""Names of variables that mean something to bash itself; BASH_FUNC_name%% is an exported function."""
START_SECONDS = 10.0
NOT_STARTED = CommandResult(126, b"cannot start the command: Resource temporarily unavailable\n")


class HelperShell(HelperCommands):
    """The half of a sandbox with a helper that belongs to the terminal."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._server: ShellServer | None = None
        self._retired: set[ShellServer] = set()
        """They get no more commands, but still run, or something that they have left holds their pipe."""
        self._serves = True
        self._asked_of: SandboxConfig | None = None
        self._is_steered = False

    async def run_reporting(
        self, script: str, state: str, *, timeout: float | None = None, output_limit: int = OUTPUT_LIMIT
    ) -> CommandResult:
        server = await self._idle_server(script)
        if server is not None:
            began, output = time.perf_counter(), OutputBuffer(output_limit)
            if server.begin(as_field(script), as_field(state), output):
                code = await self._end_of_command(
                    server, self.config.timeout if timeout is None else timeout, output_limit
                )
                return _result(server, code, output, time.perf_counter() - began)
            self._drop(server)
        return await super().run_reporting(script, state, timeout=timeout, output_limit=output_limit)

    async def end_shells(self) -> None:
        self._serves = False
        if self._server is not None:
            self._drop(self._server)

    @property
    def working(self) -> bool:
        return super().working or (self._server is not None and not self._server.idle)

    def on_exit(self, number: int, code: int) -> None:
        server = next((one for one in (self._server, *self._retired) if one is not None and one.number == number), None)
        if server is None:
            super().on_exit(number, code)
            return
        server.end(code)
        server.gone()
        self._drop(server)

    def end_jobs(self) -> None:
        super().end_jobs()
        if self._server is not None:
            self._retired.add(self._server)
            self._server = None
        for server in self._retired:
            server.close()
        self._retired.clear()

    async def _idle_server(self, script: str) -> ShellServer | None:
        """The shell that waits, started where there is none; None where this script is not for it."""
        if (
            not self._serves
            or self._steered()
            or self.shell != BASH
            or len(script) > SCRIPT_LIMIT
            or OWN_PROCESS.search(script)
        ):
            return None
        if self._server is None and room_for_one_more():
            await self._start_server()
        return self._server if self._server is not None and self._server.idle else None

    def _steered(self) -> bool:
        """Whether a variable of the sandbox changes how a new shell begins or reads, which one that waits would not.

        Asked when it counts: a sandbox from the pool learns its variables after it was made.
        """
        if self._asked_of is not self.config:
            self._asked_of = self.config
            self._is_steered = any(STEERS.fullmatch(name) for name in (*self.environment(), *self.config.env))
        return self._is_steered

    async def _start_server(self) -> None:
        number, started = self.channel().next_number(), False
        server = self._server = ShellServer(number, lambda: self._interrupt(number))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._exec(number, [BASH, "-c", PROGRAM], server.inherited())
                started = True
                self._serves = await server.ready()
        except OSError:
            self._serves = False  # a new shell will say why
        finally:
            if not started:
                server.gone()
            if not server.idle:
                self._drop(server)

    async def _end_of_command(self, server: ShellServer, timeout: float, report_limit: int) -> int | None:
        try:
            code = await server.ended(timeout, report_limit)
            if not self.alive:
                await self.judged()
                raise self.lost()
            return code
        finally:
            if not server.idle:
                self._drop(server)

    def _interrupt(self, number: int) -> None:
        self.channel().tell("interrupt", str(number).encode())

    def _drop(self, server: ShellServer) -> None:
        """No more commands for this one. What it runs is killed, what its commands have left runs on."""
        if self._server is server:
            self._server = None
        self._interrupt(server.number)
        self.channel().tell("kill", str(server.number).encode(), b"9")
        server.retire()
        self._retired = {left for left in (*self._retired, server) if not left.released}


def _result(server: ShellServer, code: int | None, output: OutputBuffer, duration: float) -> CommandResult:
    if code is None and not server.timed_out:
        return NOT_STARTED
    return CommandResult(
        TIMEOUT_EXIT_CODE if server.timed_out or code is None else code,
        output.value(),
        server.report,
        timed_out=server.timed_out,
        truncated=output.dropped > 0,
        duration=duration,
    )


# -------------------------------------------------------------------------------- helper_sandbox

OF_THE_MACHINE = frozenset({errno.ETOOMANYREFS, errno.ENFILE})
"""Errors that a sandbox's helper meets because of others on this machine: no answer to the agent, and never scored."""
NO_CORE = 1
"""The limit of core files that stops all of them: with 0 the kernel still runs a handler that it pipes the core to."""


@dataclass
class Descriptors:
    """What the first process inherits; all are closed on the host's side once it is started."""

    control: int
    code: int
    stderr: int
    more: list[int] = field(default_factory=list)

    def add(self, fd: int) -> int:
        self.more.append(fd)
        return fd

    def all(self) -> list[int]:
        return [self.control, self.code, self.stderr, *self.more]

    def close(self) -> None:
        for fd in self.all():
            os.close(fd)


class HelperSandbox(HelperShell):
    """See `Sandbox`. One object belongs to one event loop."""

    python: str
    """The interpreter that runs the helper."""
    start_seconds = 30.0
    """How long it may take until the helper answers."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.id = uuid.uuid4().hex[:12]
        self._channel: Channel | None = None
        self._launched: Future[Child] | None = None
        self._buried: Future[int | None] | None = None
        self._killed_by_agent = False
        self._judging: asyncio.Task[None] | None = None
        self._furnished = False
        """True from when the agent's commands, or those that grade them, may run."""
        self._over = False
        self._why = "the sandbox is not started"
        self._expiry: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ what a backend says

    @abstractmethod
    def program(self, descriptors: Descriptors) -> Program:
        """What to start so that the helper runs with its socket and its code."""

    def rlimits(self) -> dict[str, int]:
        """Resource limits that the helper puts on itself, and so on everything after it."""
        return {}

    def filter(self) -> bytes:
        """A filter on system calls that the helper puts on itself; empty where whoever starts it does so."""
        return b""

    def folder(self) -> str:
        """A folder that the helper removes at its end; empty is none."""
        return ""

    async def launched(self) -> None:
        """The first process is there, and nothing of the agent runs yet."""

    async def released(self) -> None:
        """All processes are gone, or about to be where `close` was cancelled."""

    def remains(self) -> Remains | None:
        """What knows all processes of the sandbox, whatever has become of the first; None: their descent has to do."""
        return None

    def buried(self) -> None:
        """All processes are gone; called in the launcher's thread, also where nobody waits any more."""

    def refused(self, said: str) -> UserError | None:
        """What the user can do about a start that failed with this message; None: it is worth another try."""
        return None

    async def proven_ours(self, why: Lost) -> bool:
        """The helper is gone, or silent, although we did not end it: can we prove that this was not the agent's doing?

        Asked only where commands of the agent have run: without them it is ours. Without a proof it is the agent's,
        since a rollout that is not graded is what a failing agent would choose.
        """
        return False

    # ------------------------------------------------------------------ life

    @property
    def alive(self) -> bool:
        return self._channel is not None and self._channel.open

    @property
    def killed_by_agent(self) -> bool:
        return self._killed_by_agent

    @property
    def pid(self) -> int:
        """Process id on the host of the program that was started."""
        if self._launched is None:
            raise self.lost()
        return self._launched.result().pid

    async def boot(self) -> None:
        """The first half of `start`: all that does not depend on files, setup, environment and times."""
        try:
            async with asyncio.timeout(self.start_seconds):
                await self._boot()
        except TimeoutError:
            await self.close()
            raise SandboxFailure(f"the sandbox did not start within {self.start_seconds:.0f} s") from None
        except OSError as error:
            await self.close()
            raise SandboxFailure(f"the sandbox did not start: {error}") from error
        except BaseException:
            await self.close()
            raise

    async def start(self) -> None:
        if not self.alive:
            await self.boot()
        try:
            await self._prepare()
        except BaseException:
            await self.close()
            raise
        self._furnished = True
        if self.config.lifetime is not None:
            self._expiry = asyncio.get_running_loop().call_later(self.config.lifetime, self._expire)

    async def kill_all(self) -> None:
        await self.end_shells()
        if (await self.ask("killall")).fields == [b"left"]:
            self._lose("processes of the sandbox cannot be killed", Lost.SILENT)
            await self.judged()
            raise self.lost()

    async def close(self) -> None:
        self._shut("the sandbox is closed")
        try:
            if self._buried is not None:
                # What is left to do is done by the launcher's thread, whether somebody waits for it or not.
                await asyncio.shield(asyncio.wrap_future(self._buried))
        finally:
            await self.released()

    def channel(self) -> Channel:
        if self._channel is None:
            raise self.lost()
        return self._channel

    def _open_channel(self) -> Channel:
        if self._channel is None or not self._channel.open:
            raise ChannelLostError
        return self._channel

    def lost(self) -> SandboxFailure:
        """The failure that tells why it is not there."""
        return self.gone(self._why)

    async def ask(
        self,
        operation: str,
        *fields: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
        request: int | None = None,
    ) -> Answer:
        try:
            return await self._open_channel().ask(operation, *fields, payload=payload, fds=fds, request=request)
        except ChannelLostError:
            await self.judged()
            raise self.lost() from None
        except OSError as error:
            if error.errno in OF_THE_MACHINE:
                raise SandboxFailure(f"this machine cannot serve the sandbox: {error.strerror}") from error
            raise

    def _shut(self, why: str) -> None:
        """End everything without waiting: with its socket the helper ends, and all processes with it."""
        if self._over:
            return
        self._over = True
        self._why = why
        if self._expiry is not None:
            self._expiry.cancel()
        if self._channel is not None:
            self._channel.close()
        if self._launched is not None:
            self._buried = launcher().bury(self._launched, self.remains())
            self._buried.add_done_callback(lambda _: self.buried())
        self.end_jobs()

    async def judged(self) -> None:
        if self._judging is not None:
            await asyncio.shield(self._judging)

    def _on_lost(self, why: Lost) -> None:
        self._lose(why.value, why)

    def _lose(self, what: str, why: Lost) -> None:
        """Give the sandbox up, and find out whose doing that is."""
        if not self._over:
            self._judging = asyncio.create_task(self._judge(why))
            self._shut(what)

    async def _judge(self, why: Lost) -> None:
        if not self._furnished or why is Lost.DESCRIPTORS:
            return
        self._killed_by_agent = not await self.proven_ours(why)
        if self._killed_by_agent:
            self._why = f"{self._why}, by the doing of the agent's commands"

    async def burial(self) -> int | None:
        """The exit status of the program that was started, once it and all other processes of the sandbox have ended.

        None where it is not known, or something does not end.
        """
        if self._buried is None:
            return None
        try:
            return await asyncio.shield(asyncio.wrap_future(self._buried))
        except SandboxFailure:
            return None  # `close` says it

    def _expire(self) -> None:
        # A command that runs past the end is the agent's doing; an idle sandbox waited for somebody else.
        self._killed_by_agent = self.working
        self._shut(f"the sandbox's lifetime of {self.config.lifetime} s is over")

    # ------------------------------------------------------------------ starting

    async def _boot(self) -> None:
        bundle = await asyncio.to_thread(helper_bundle, self.python)
        with ExitStack() as given, ExitStack() as own:
            ours, theirs = socket_pair(socket.SOCK_SEQPACKET)
            given.callback(ours.close)
            given.callback(theirs.close)
            stderr = memory_file(b"", "stderr")
            own.callback(os.close, stderr)
            code = memory_file(bundle, "helper")
            given.callback(os.close, code)
            descriptors = Descriptors(theirs.fileno(), code, copy_of(stderr))
            theirs.detach()
            given.pop_all()
            await self._launch(descriptors, ours)
            await self._initialise(stderr)

    async def _launch(self, descriptors: Descriptors, ours: socket.socket) -> None:
        try:
            self._channel = Channel(ours, self.on_exit, self._on_lost)
            program = self.program(descriptors)
        except BaseException:
            if self._channel is None:
                ours.close()
            descriptors.close()
            raise
        self._launched = launcher().launch(program)
        # Also when we are cancelled: the launcher needs them until the program is started.
        self._launched.add_done_callback(lambda _: descriptors.close())
        try:
            await asyncio.shield(asyncio.wrap_future(self._launched))
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxFailure(f"{program.executable} cannot be started: {error}") from error

    async def _initialise(self, stderr: int) -> None:
        try:
            await self.initialise()
        except SandboxFailure as failure:
            said = os.pread(stderr, 4096, 0).decode("utf-8", "replace").strip()
            raise self.refused(said) or SandboxFailure(f"the sandbox did not start: {said or failure}") from None

    async def initialise(self) -> None:
        """Tell the helper what it has to know before anything of the agent runs."""
        limits = [as_field(f"{name}={value}") for name, value in self.rlimits().items()]
        await self.ask("init", as_field(self.folder()), *limits, payload=self.filter())
        await self.launched()

    async def _prepare(self) -> None:
        if await self._exists("/bin/bash"):
            self.shell = "/bin/bash"
        else:
            self.has_shell = await self._exists(self.shell)
        await self.furnish()

    async def _exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except OSError:
            return False
        return True
