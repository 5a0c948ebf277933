"""A sandbox whose first process is the helper: one object with parts.

`HelperSandbox` owns the life of the sandbox (start, close) and its files; each file operation is one request to
the helper, and large files travel as descriptors, never through a shell or a text encoding. Its parts own the rest:

- `channel.Connection`: the connection to the helper, and the cause of its end;
- `jobs.Processes`: commands, background processes and conversations;
- `shell_server.WaitingShell`: the commands of the agent's terminal;
- an `Isolation`, one class for each backend: starts, isolates and ends the first process.

::

    start   isolation.start ─► first process, helper ─► connect ─► init ─► files and setup of the configuration
    run     command ─► Processes.run ─► Connection.ask("spawn") … "exit" ─► result
    close   Connection.end ─► Isolation.end, Processes.end ─► Isolation.close waits until all is gone
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import cast

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import (
    LIST_LIMIT,
    OUTPUT_LIMIT,
    PYTHON,
    READ_LIMIT,
    BackgroundProcess,
    CommandResult,
    Conversation,
    FileInfo,
    Kind,
    Sandbox,
    SandboxConfig,
)
from hermes_rl.sandbox.channel import Answer, Connection, ConnectionLoss, Diagnosis
from hermes_rl.sandbox.jobs import SCRIPT_FD, Command, Processes
from hermes_rl.sandbox.launcher import IN_THREAD, LocalProcess, in_memory, pipe
from hermes_rl.sandbox.listener import Message, ReportListener
from hermes_rl.sandbox.proxy import ENVIRONMENT, PORT, Proxy
from hermes_rl.sandbox.shell_server import BASH, PROGRAM, SCRIPT_LIMIT, WaitingShell, may_wait
from hermes_rl.sandbox.wire import FRAME_LIMIT
from hermes_rl.threads import done_in_thread, run_exclusively
from hermes_rl.values import system_bytes

INLINE_FILE_BYTES = FRAME_LIMIT // 2
"""Maximum bytes of a file that are sent in the request itself."""
LISTED_AT_ONCE = 1000
"""Entries of a directory from which they are parsed in a thread."""
NO_CORE = 1
"""Limit of core files that prevents all of them: with 0 the kernel still runs a handler to which it pipes the core."""


CUT_OFF = (errno.EPIPE, errno.EPROTO)
"""Errors of one end of a copy if the other has failed, whose error is the reason."""
SHELLS = (BASH, "/bin/sh")
"""Shells that run commands, the better one first."""
COMMANDS = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Default search path of commands."""
COMMAND_VARIABLES = {"USER": "user", "LOGNAME": "user", "LANG": "C.UTF-8", "TERM": "dumb"}
"""Environment variables of every command on this machine's system."""


class Isolation(ABC):
    """Starts and ends the first process of one sandbox, and isolates it from this machine."""

    start_seconds = 30.0
    """Maximum seconds until the helper responds, once everything that it needs to start exists."""
    home: str
    workdir: str
    image_digest: str | None = None
    """See `Sandbox.image_digest`."""
    python: Sequence[str] = PYTHON
    """See `Sandbox.python`."""
    top = "/"
    """Directory that contains all private files of the sandbox."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.id = uuid.uuid4().hex[:12]
        hosts = config.network if isinstance(config.network, tuple) else ()
        self.proxy = Proxy(hosts) if hosts else None
        """The only way of the sandbox to a network, if the spec lists hosts."""

    @property
    @abstractmethod
    def enforced(self) -> Mapping[str, str]:
        """See `Sandbox.enforced`."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id of the started program on this machine."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Return the variables that every command has; known once it is started."""

    @abstractmethod
    async def start(self, sandbox: HelperSandbox) -> None:
        """Start the first process and call `sandbox.connect` with the helper's socket.

        If it fails or is cancelled, `close` ends everything that it has started.
        """

    def end(self) -> None:
        """Start to end everything, without waiting. The helper's socket is closed already."""
        return

    @abstractmethod
    async def close(self) -> None:
        """End everything and wait until it is gone; raises `SandboxFailure` if something cannot be ended."""

    async def diagnose(self, loss: ConnectionLoss) -> Diagnosis:
        """Find out why the helper is gone, or silent, although it was not ended by the host.

        Called only if commands of the agent have run: without them it is an infrastructure failure. Without a proof the
        agent counts as the cause, since a failing agent would choose a rollout that is not graded.
        """
        return Diagnosis()

    def killed_by_others(self) -> bool:
        """Return True if the kernel killed a process of this sandbox, within its limit, because others used all
        memory.
        """
        return False

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Limit the start to `start_seconds`."""
        try:
            async with asyncio.timeout(self.start_seconds):
                yield
        except TimeoutError:
            raise SandboxFailure(f"the sandbox did not start within {self.start_seconds:.0f} s") from None


class LocalIsolation(Isolation):
    """An isolation whose first process belongs to this machine."""

    process: LocalProcess

    @property
    def pid(self) -> int:
        return self.process.pid

    def end(self) -> None:
        self.process.reap()


class HelperSandbox(Sandbox):
    """See `Sandbox`. One object belongs to one event loop."""

    shell = "/bin/sh"
    has_shell = True
    """False if the image has no shell."""

    def __init__(self, config: SandboxConfig, isolation: Isolation) -> None:
        super().__init__(config)
        self.isolation = isolation
        self.id, self.home, self.workdir = isolation.id, isolation.home, isolation.workdir
        self.connection = Connection(isolation.diagnose, self._on_exit, self._on_end)
        self._processes = Processes(self.connection)
        self.waiting_shell: WaitingShell | None = None
        """Waiting shell, or None if the shell of this sandbox cannot wait."""
        self._variables: dict[str, str] = {}
        self._expiry: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ life

    @property
    def enforced(self) -> Mapping[str, str]:
        return self.isolation.enforced

    @property
    def alive(self) -> bool:
        return self.connection.alive

    @property
    def killed_by_agent(self) -> bool:
        return self.connection.killed_by_agent

    @property
    def pid(self) -> int:
        """Process id on this machine of the program that was started."""
        return self.isolation.pid

    async def connect(
        self, control: socket.socket, rlimits: Mapping[str, int], *, system_calls: bytes = b"", folder: str = ""
    ) -> None:
        """Take over the helper's socket, and let it prepare its process before any command of the agent runs.

        It applies the resource limits and the filter on system calls to itself, and so to all its children. It makes
        `folder`, and removes it at its end.
        """
        self.connection.open(control)
        limits = [system_bytes(f"{name}={value}") for name, value in rlimits.items()]
        fields = (system_bytes(folder), system_bytes(":".join(SHELLS)), *limits)
        answer = (await self.connection.ask("init", *fields, payload=system_calls)).fields
        self.has_shell = bool(answer)
        if answer:
            self.shell = os.fsdecode(answer[0])
        if self.isolation.proxy is not None:
            await self.isolation.proxy.listen(await self.listen(PORT))

    async def listen(self, port: int) -> socket.socket:
        """Return a socket that listens on the sandbox's loopback."""
        return socket.socket(fileno=(await self.connection.ask("listen", str(port).encode())).fds[0])

    async def start(self) -> None:
        try:
            await self._isolate()
            proxy = ENVIRONMENT if self.isolation.proxy is not None else {}
            self._variables = {**self.isolation.environment(), **proxy, "SHELL": self.shell, **self.config.env}
            if may_wait(self.shell, self._variables):
                waiting = self._command([BASH, "-c", PROGRAM])
                self.waiting_shell = WaitingShell(self.connection, self._processes, waiting)
            if self.config.image is not None and self.has_shell:
                await self._try_shell()
            await self.prepare()
        except BaseException:  # on cancellation too: the caller has no sandbox to close
            await self.close()
            raise
        self.connection.exposed = True
        if self.config.lifetime is not None:
            self._expiry = asyncio.get_running_loop().call_later(self.config.lifetime, self._expire)

    async def _isolate(self) -> None:
        """Start the helper; no command has run yet."""
        try:
            await self.isolation.start(self)
        except OSError as error:
            raise SandboxFailure(f"the sandbox did not start: {error}") from error
        self.home, self.workdir = self.isolation.home, self.isolation.workdir
        self.image_digest, self.python = self.isolation.image_digest, self.isolation.python

    async def _try_shell(self) -> None:
        """Run the image's shell before the agent does: a failure would count as the agent's."""
        tried = await self.run([self.shell, "-c", ":"])
        if tried.exit_code:
            raise self.unusable_image(f"has a {self.shell} that cannot run ({tried.output.strip()[:200]})")

    def unusable_image(self, problem: str) -> SandboxFailure:
        return SandboxFailure(f"the image {self.config.image} {problem}, which runs commands; choose another image")

    def blame_agent(self) -> None:
        self.connection.killed_by_agent = True

    async def kill_all(self, *, agent_done: bool = True) -> None:
        await self._check_memory()
        if agent_done and self._expiry is not None:
            self._expiry.cancel()
        await self.end_shells()
        if (await self.connection.ask("killall", *self._processes.stopped())).fields == [b"left"]:
            self.connection.mark_lost(ConnectionLoss.SILENT, "processes of the sandbox cannot be killed")
            raise await self.connection.failure()

    async def close(self) -> None:
        self.connection.end("the sandbox is closed")
        try:
            if self.isolation.proxy is not None:
                await self.isolation.proxy.close()
            await self.connection.diagnosed()  # which needs what is left of the sandbox
        finally:
            await self.isolation.close()

    def _on_end(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self.isolation.end()
        self._processes.end()
        if self.waiting_shell is not None:
            self.waiting_shell.end()

    def _on_exit(self, request_id: int, code: int) -> None:
        if self.waiting_shell is None or not self.waiting_shell.on_exit(request_id, code):
            self._processes.on_exit(request_id, code)

    def _expire(self) -> None:
        # The agent causes a command that runs past the end; the reason for which an idle sandbox waited is unknown
        # here.
        busy = self._processes.running or (self.waiting_shell is not None and self.waiting_shell.running)
        self.expired = not busy and self.alive
        self.connection.end(f"the sandbox's lifetime of {self.config.lifetime} s is over", by_agent=busy)

    # ------------------------------------------------------------------ commands

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
        helper_command = self._command(command, cwd, env)
        seconds = self.config.timeout if timeout is None else timeout
        result = await self._processes.run(helper_command, stdin, seconds, output_limit, merge_stderr=merge_stderr)
        await self._check_memory(result)
        return result

    async def run_heard(self, command: str, *, timeout: float) -> tuple[CommandResult, list[Message] | None]:
        helper_command = self._command(command)
        with ReportListener() as listener:
            result = await self._processes.run(
                helper_command, None, timeout, OUTPUT_LIMIT, merge_stderr=True, report=listener.theirs
            )
            messages = listener.collect_messages()
            return result, None if listener.overflow else messages

    async def run_reporting(
        self, script: str, state: str, *, timeout: float | None = None, output_limit: int = OUTPUT_LIMIT
    ) -> CommandResult:
        if self.waiting_shell is not None:
            seconds = self.config.timeout if timeout is None else timeout
            result = await self.waiting_shell.run(script, state, seconds, output_limit)
            if result is not None:
                await self._check_memory(result)
                return result
        return await super().run_reporting(script, state, timeout=timeout, output_limit=output_limit)

    async def _check_memory(self, result: CommandResult | None = None) -> None:
        """Give the sandbox up if memory that others used has killed one of its processes: the effects are not the
        agent's.

        A command that succeeded does not indicate this, so the check follows other commands, and the end.
        """
        if (result is None or result.exit_code != 0) and self.isolation.killed_by_others():
            self.connection.end("the memory of this machine's sandboxes together was used up")
            raise await self.connection.failure()

    async def end_shells(self) -> None:
        if self.waiting_shell is not None:
            self.waiting_shell.retire()

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> BackgroundProcess:
        return await self._processes.spawn(self._command(command, None, env), output_limit)

    async def converse(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> Conversation:
        return await self._processes.converse(self._command(command, cwd, env), keep=keep)

    def _command(
        self, command: str | Sequence[str], cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> Command:
        """Return the command for the helper; a script that is too long for an argument is passed as a file."""
        workdir, variables = self.resolve(cwd or "."), {**self._variables, **(env or {})}
        if not isinstance(command, str):
            return Command(command, workdir, variables)
        if not self.has_shell:
            raise self.unusable_image(f"has no {self.shell}")
        script = system_bytes(command)
        if len(script) <= SCRIPT_LIMIT:
            return Command([self.shell, "-c", command], workdir, variables)
        return Command([self.shell, f"/dev/fd/{SCRIPT_FD}"], workdir, variables, script)

    # ------------------------------------------------------------------ files

    async def _ask(
        self, operation: str, path: str, *fields: bytes, payload: bytes = b"", fds: Sequence[int] = ()
    ) -> Answer:
        """Make a request about the file at `path`; as in a local call, an `OSError` has its name."""
        try:
            encoded_path = system_bytes(self.resolve(path))
            return await self.connection.ask(operation, encoded_path, *fields, payload=payload, fds=fds)
        except OSError as error:
            error.filename = path
            raise

    async def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        answer = await self._ask("read", path, str(limit).encode())
        if not answer.fds:
            if len(answer.payload) > limit:
                raise OSError(errno.EFBIG, "File too large", path)
            return answer.payload
        # The reader must close the descriptor: a thread still reads after a cancellation.
        read = partial(_read_and_close, answer.fds[0], limit)
        return await done_in_thread(read) if os.fstat(answer.fds[0]).st_size >= IN_THREAD else read()

    async def control_group(self, file: str) -> str:
        """Return the content of a file of the sandbox's control groups, by its path below /sys/fs/cgroup."""
        return (await self.connection.ask("control group", file.encode())).payload.decode("ascii", "replace").strip()

    async def write_file(self, path: str, data: bytes, mode: int | None = None) -> None:
        bits = b"" if mode is None else str(mode).encode()
        if len(data) <= INLINE_FILE_BYTES:
            await self._ask("write", path, bits, payload=data)
            return
        fd = await in_memory(data)
        try:
            await self._ask("write", path, bits, fds=[fd])
        finally:
            os.close(fd)

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        return _file_info(*(await self._ask("stat", path, b"1" if follow else b"0")).fields)

    async def list_dir(self, path: str, *, limit: int = LIST_LIMIT) -> list[FileInfo]:
        fields = (await self._ask("list", path, str(limit).encode())).fields
        return _file_infos(fields) if len(fields) <= 5 * LISTED_AT_ONCE else await run_exclusively(_file_infos, fields)

    async def set_mode(self, path: str, mode: int) -> None:
        await self._ask("chmod", path, str(mode).encode())

    async def make_dir(self, path: str) -> None:
        await self._ask("mkdir", path)

    async def remove(self, path: str) -> None:
        await self._ask("remove", path)

    async def rename(self, source: str, target: str) -> None:
        await self._ask("rename", source, system_bytes(self.resolve(target)))

    async def copy_files(self, target: Sandbox) -> None:
        assert isinstance(target, HelperSandbox), "both are made by the same backend"
        with contextlib.ExitStack() as ends:
            (inventory_fd, listing), (sent, sending) = pipe(), pipe()
            for end in (inventory_fd, listing, sent, sending):
                ends.callback(os.close, end)
            requests = [
                asyncio.ensure_future(each)
                for each in (
                    target._ask("inventory", target.isolation.top, fds=[listing]),
                    self._ask("send", self.isolation.top, fds=[inventory_fd, sending]),
                    target._ask("take", target.isolation.top, fds=[sent]),
                )
            ]
            await asyncio.sleep(0)  # each request was sent with copies, and the originals would keep the pipes open
        failed = [
            each for each in await asyncio.gather(*requests, return_exceptions=True) if isinstance(each, Exception)
        ]
        for error in sorted(failed, key=lambda error: isinstance(error, OSError) and error.errno in CUT_OFF):
            raise error


def _file_infos(fields: Sequence[bytes]) -> list[FileInfo]:
    return sorted(starmap(_file_info, zip(*[iter(fields)] * 5, strict=True)))  # by name: no two have the same


def _file_info(name: bytes, kind: bytes, size: bytes, mode: bytes, mtime: bytes) -> FileInfo:
    return FileInfo(os.fsdecode(name), cast("Kind", kind.decode()), int(size), int(mode), float(mtime))


def _read_and_close(fd: int, limit: int) -> bytes:
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")  # reading anything else may block
        # Read in one call if the size is as reported: joining chunks would block all other threads.
        data = os.pread(fd, min(info.st_size, limit) + 1, 0)
        while len(data) <= limit and (more := os.pread(fd, 1 << 22, len(data))):
            data += more
        if len(data) > limit:
            raise OSError(errno.EFBIG, "File too large")
        return data
    finally:
        os.close(fd)
