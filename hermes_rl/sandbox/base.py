"""The interface that every sandbox has, whatever its backend.

This module owns the configuration from which a sandbox is made (`SandboxConfig`), the abstract `Sandbox`,
`BackgroundProcess` and `Conversation`, the values that they return, and the bounded buffer for the output of commands.
Everything above (tools, rewards, `ToolContext`) acts on a rollout's sandbox only through this interface. The
implementation belongs to the backend's module; reading a configuration from a spec belongs to the spec.

Errors: a file that is missing, or of another kind than required, raises the `OSError` that a local call would raise
(`FileNotFoundError`, `IsADirectoryError`, …). A sandbox that is gone raises `SandboxFailure`, whose stop reason
(`stop_reason`) is the cause: `SANDBOX_KILLED` is caused by the agent, `SANDBOX_FAILURE` is an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import secrets
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Container, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, Self

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox.launcher import as_sandbox_failure
from hermes_rl.sandbox.listener import REPORT_FD, SIZE_LIMIT, Message, read_report_file
from hermes_rl.stop_reasons import StopReason

# -------------------------------------------------------------------------------- configuration of one rollout

BACKENDS = ("bubblewrap", "docker", "modal", "daytona", "ssh", "singularity", "none")
"""Every backend that a spec may name; `create_sandbox` reports which of them this version can run."""
ONE_ACCOUNT = frozenset({"ssh"})
"""Backends whose sandboxes are directories of one account, in which each agent has access to the others."""


DEFAULT_LIMITS = {"memory": 4 << 30, "processes": 256, "open_files": 1024}
"""Limits of every backend that isolates."""
RLIMITS = {"open_files": "RLIMIT_NOFILE"}
"""Limits per process: name of a limit → the kernel's name."""


@dataclass(frozen=True)
class ResourceLimits:
    """Limits on the agent's processes; None leaves the default of the backend in force.

    If the backend cannot enforce a limit that is set here, creating the sandbox fails, unless `best_effort`.
    """

    memory: int | None = None
    """Bytes."""
    processes: int | None = None
    """Total processes and threads of the sandbox."""
    disk: int | None = None
    """Total bytes of all files of the sandbox."""
    cpu: float | None = None
    """Processor cores."""
    open_files: int | None = None
    """Open files per process."""
    best_effort: bool = False
    """True to continue if a limit cannot be enforced."""

    def requested(self) -> tuple[str, ...]:
        """Return the names of the limits that are set."""
        names = (f.name for f in fields(self) if f.name != "best_effort")
        return tuple(name for name in names if getattr(self, name) is not None)

    def require_at_most(self, enforceable: Container[str], context: str) -> None:
        """Raise `UserError` for a limit that is set and cannot be enforced; not with `best_effort`."""
        for name in self.requested():
            if name not in enforceable and not self.best_effort:
                raise UserError(
                    f"sandbox.limits.{name} cannot be enforced {context}; leave it out, or set limits.best_effort: true"
                )


@dataclass(frozen=True)
class SandboxFile:
    """A file that is written into the sandbox before `setup`; a relative `to` is below the working directory."""

    to: str
    data: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class SandboxService:
    """A program from a separate image alongside the sandbox, which finds it under its name, and under `localhost`."""

    name: str
    image: str
    command: tuple[str, ...] = ()
    """Command; by default the command of the image."""
    env: Mapping[str, str] = field(default_factory=dict)
    files: tuple[SandboxFile, ...] = ()
    """Files with absolute paths in the service."""
    healthy: str | None = None
    """Shell command in the service, which succeeds once the service can be used; default: the check of the image."""


@dataclass(frozen=True)
class SandboxConfig:
    """Everything that a backend needs to start one sandbox."""

    backend: str = "bubblewrap"
    image: str | None = None
    workdir: str | None = None
    """Working directory inside the sandbox; None is the home directory, or the one of the image."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the small environment of the sandbox; nothing is inherited from the host."""
    packages: tuple[str, ...] = ()
    """Python packages, by their names for pip, that the sandbox sees read-only; bubblewrap and docker support them."""
    npm: tuple[str, ...] = ()
    """The same for npm, each with its version."""
    files: tuple[SandboxFile, ...] = ()
    setup: tuple[str, ...] = ()
    """Shell commands, run in order in the working directory; a non-zero exit code is an infrastructure failure."""
    services: tuple[SandboxService, ...] = ()
    """Services, started in this order, each when the one before is healthy; docker supports them."""
    known_hosts: str | None = None
    """File of the host keys that the backend ssh trusts; None: the keys that ssh knows on this machine."""
    accept_unknown_host: bool = False
    """True if the backend ssh trusts and remembers the key of an unknown host."""
    network: bool | tuple[str, ...] = False
    limits: ResourceLimits = ResourceLimits()
    timeout: float = 180.0
    """Seconds per command, unless the caller sets another timeout."""
    lifetime: float | None = None
    """Seconds after which the sandbox is killed; None is unlimited."""
    keep_processes: bool = False
    """True to leave the agent's processes running while rewards look at the sandbox."""
    environ: Mapping[str, str] | None = field(default=None, repr=False, compare=False)
    """Environment in which backends on other machines find their addresses and keys; None: the process's environment.
    It may hold secrets, so it is never shown, and no part of it gets into the sandbox.
    """

    def __post_init__(self) -> None:
        if self.services and self.backend in BACKENDS and self.backend != "docker":
            raise UserError(f"the sandbox backend {self.backend} starts no sandbox.services; docker does")


# -------------------------------------------------------------------------------- interface

OUTPUT_LIMIT = 1 << 20
"""Bytes of a command's output that are returned (head and tail) unless the caller sets another limit."""

LIST_LIMIT = 100_000
"""Maximum entries of a directory that `list_dir` returns."""

READ_LIMIT = 1 << 30
"""Maximum bytes that `read_file` returns: a sparse file of the agent must not fill the host's memory."""

STATE = "_HERMES_RL_STATE"
"""Variable in which a script of `run_reporting` finds its state."""

PYTHON = ("python3", "-I", "-S")
"""Command by which programs of hermes_rl run with the Python of a machine that has one."""

_REPORT = "exec 3>&2 2>&1; trap '{ pwd -P; export -p; echo .; } 2>/dev/null >&3' EXIT; "

TIMEOUT_EXIT_CODE = 124
"""Exit code of a command that exceeded its timeout, as in `timeout(1)`."""
KILLED_EXIT_CODE = 128 + signal.SIGKILL
"""Exit code of a process that SIGKILL has ended, as in a shell; also if its sandbox is gone."""
DEFAULT_IMAGE = "python:3.11-slim"
"""Default image of a sandbox, if a backend requires images."""
MARK = "HERMES_RL_SANDBOX"
"""Variable with the sandbox's id by which all of its processes are found, if nothing else distinguishes them."""


@dataclass(frozen=True)
class CommandResult:
    """Result of a command. A command killed by signal N has exit code 128 + N, as in a shell."""

    exit_code: int
    stdout: bytes
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False
    duration: float = 0.0

    @property
    def output(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")


Kind = Literal["file", "directory", "symlink", "other"]


class FileInfo(NamedTuple):
    """One entry of the sandbox's file system; a tuple, of which twenty thousand are created quickly."""

    name: str
    kind: Kind
    size: int
    mode: int
    mtime: float


class BackgroundProcess(ABC):
    """A process that continues in the sandbox after `spawn` has returned."""

    pid: int
    """Its process id inside the sandbox."""
    ended: asyncio.Future[int]
    """Future of its exit code."""

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self.ended.result() if self.ended.done() else None

    async def wait(self, timeout: float | None = None) -> int | None:
        """Wait until it ends; return None if `timeout` seconds passed first. It is not killed then."""
        done, _ = await asyncio.wait([self.ended], timeout=timeout)
        return self.ended.result() if done else None

    @abstractmethod
    def output(self) -> bytes:
        """Return its output so far, only head and tail if the output exceeds its limit."""

    @abstractmethod
    async def write_stdin(self, data: bytes) -> None:
        """Write to its standard input; raises `BrokenPipeError` if it has no reader any more."""

    @abstractmethod
    async def close_stdin(self) -> None:
        """Close its standard input, so that it reads an end of file."""

    @abstractmethod
    async def kill(self, signal: int = 9) -> None:
        """Send `signal` to its whole process group; does nothing once it has ended."""


class Conversation(ABC):
    """A process in the sandbox with which the host communicates over its standard input and output.

    Its output is not capped: a slow reader slows it down. Close it when done, in ``finally``.
    """

    @abstractmethod
    async def read(self) -> bytes:
        """Return its next standard output; empty once it has ended or closed it."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Write to its standard input, waiting while it does not read; raises `OSError` if it never will again."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""

    @abstractmethod
    def errors(self) -> bytes:
        """Return its standard error so far, head and tail."""

    @abstractmethod
    async def close(self) -> None:
        """End its process group and release it; may be called twice."""


def sandbox_gone(detail: str, *, by_agent: bool) -> SandboxFailure:
    """Return the failure to raise for a sandbox that does not exist any more."""
    return SandboxFailure(detail, stop_reason=StopReason.SANDBOX_KILLED if by_agent else StopReason.SANDBOX_FAILURE)


class Sandbox(ABC):
    """Sandbox of one rollout. Use it as ``async with``, or call `start` and, in ``finally``, `close`."""

    id: str
    workdir: str
    """Working directory, absolute; relative paths start here."""
    home: str
    """Home directory of the agent, absolute."""
    image_digest: str | None = None
    """Digest of its image as the backend reports it, known once it is started; None without an image."""
    python: Sequence[str] = PYTHON
    """Command of a Python without packages for programs of hermes_rl, known once it is started."""

    expired = False
    """True if its lifetime ended while nothing ran in it. The sandbox does not know the cause; see `blame_agent`."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config

    # ------------------------------------------------------------------ life

    def blame_agent(self) -> None:
        """Count the end of an idle sandbox as caused by its agent, which has used up the lifetime elsewhere."""
        return

    @property
    @abstractmethod
    def enforced(self) -> Mapping[str, str]:
        """The limits in force by name, each with how: ``{"disk": "sized tmpfs", …}``."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """True between `start` and the moment it is closed or lost."""

    @property
    @abstractmethod
    def killed_by_agent(self) -> bool:
        """True if it is gone because of the agent's commands."""

    @abstractmethod
    async def start(self) -> None:
        """Start it, write its files, run its setup.

        Raises `SandboxFailure` if that fails (with the tail of the output), `UserError` if this machine can never run
        it. A start that fails or is cancelled releases everything.
        """

    @abstractmethod
    async def kill_all(self, *, agent_done: bool = True) -> None:
        """Kill every process of the agent, daemons too; the sandbox and its files stay. See `converse` for other
        processes.

        `agent_done`: the agent has ended, and the commands of rewards have their limits instead of the lifetime.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release processes, descriptors, temporary files. May be called twice, and while being cancelled."""

    # ------------------------------------------------------------------ commands

    @abstractmethod
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
        """Run a command to its end: a string in a shell, a sequence without one.

        After `timeout` seconds (default: the configuration's) its process group is killed. Its background processes
        continue. A command that cannot be started has exit code 126 or 127.
        """

    async def run_reporting(
        self, script: str, state: str, *, timeout: float | None = None, output_limit: int = OUTPUT_LIMIT
    ) -> CommandResult:
        """Run a script of the agent in a shell that reports its directory and exported variables when it ends.

        The report is in ``stderr``: the output of ``pwd -P; export -p; echo .``; a shell that was killed or replaced
        reports nothing. Both outputs of the script are in ``stdout``. `STATE` has `state`, descriptor 3 is used.
        """
        return await self.run(
            _REPORT + script, env={STATE: state}, timeout=timeout, output_limit=output_limit, merge_stderr=False
        )

    async def run_heard(self, command: str, *, timeout: float) -> tuple[CommandResult, list[Message] | None]:
        """Run a shell command, and return the messages of its processes on descriptor `REPORT_FD`; None if there were
        too many.

        If the host shares no descriptors with the sandbox, they are written to a file there with a random name; any
        process there can write it.
        """
        path = f"/tmp/report-{secrets.token_hex(16)}"
        result = await self.run(f"exec {REPORT_FD}>>{path}\n{command}", timeout=timeout)
        try:
            data = await self.read_file(path, limit=SIZE_LIMIT)
            await self.remove(path)
        except OSError as error:
            return result, None if error.errno == errno.EFBIG else []
        return result, read_report_file(data)

    async def end_shells(self) -> None:
        """Stop using shells that the agent may have modified, even shells that stay alive: the agent has ended."""
        return

    @abstractmethod
    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> BackgroundProcess:
        """Start a command and return; its standard input is a pipe. Raises `OSError` if it cannot start."""

    async def converse(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> Conversation:
        """Start a process to communicate with, such as a tool server over stdio. Raises `OSError` if it cannot start.

        With `keep` it does not belong to the agent: `kill_all` stops it until it is written to. A backend that does not
        support this raises `UserError`.
        """
        raise UserError(
            f"sandbox backend {self.config.backend} cannot hold a conversation with a process, which a tool "
            "server over stdio and execute_code need; use bubblewrap or docker, or run the server elsewhere"
        )

    # ------------------------------------------------------------------ files

    @abstractmethod
    async def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        """Return the bytes of a regular file; raises `OSError` (EFBIG) when there are more than `limit`."""

    @abstractmethod
    async def write_file(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Write a complete file and make its parent directories; with `mode` None an existing file keeps its mode."""

    @abstractmethod
    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """Return the status of `path`; with `follow` False, of a symlink itself."""

    @abstractmethod
    async def list_dir(self, path: str, *, limit: int = LIST_LIMIT) -> list[FileInfo]:
        """Return the entries of a directory, sorted by name; symlinks are not followed.

        Raises `OSError` (E2BIG) if there are more than `limit`.
        """

    @abstractmethod
    async def set_mode(self, path: str, mode: int) -> None:
        """Change the permission bits of a file or directory; a symlink is followed."""

    @abstractmethod
    async def make_dir(self, path: str) -> None:
        """Make a directory and its parents; does nothing if it exists."""

    @abstractmethod
    async def remove(self, path: str) -> None:
        """Remove a file, a symlink, or a directory with everything in it."""

    @abstractmethod
    async def rename(self, source: str, target: str) -> None:
        """Rename within the sandbox; replaces a file at `target`."""

    async def copy_files(self, target: Sandbox) -> None:
        """Make the files of `target`, which is started and of the same configuration, equal to the files of this
        sandbox.

        Nothing may run here meanwhile. Raises `OSError` if files of the agent cannot be copied, and `UserError` if the
        backend does not support this.
        """
        raise UserError(f"sandbox backend {self.config.backend} cannot copy the files of a sandbox")

    # ------------------------------------------------------------------ shared

    async def stat_or_none(self, path: str, *, follow: bool = True) -> FileInfo | None:
        """Return the `stat` of `path`, or None if it does not exist."""
        try:
            return await self.stat(path, follow=follow)
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def walk(self, path: str, *, limit: int = LIST_LIMIT) -> AsyncIterator[tuple[str, FileInfo]]:
        """Yield everything below a directory with its path from there; symlinks are not followed.

        Raises `OSError` as `list_dir` does, which gets `limit`, and for a name that no file has.
        """
        pending = [""]
        while pending:
            subfolder = pending.pop()
            folder = f"{path}/{subfolder}" if subfolder else path
            for info in await self.list_dir(folder, limit=limit):
                if info.name in ("", ".", "..") or "/" in info.name or "\0" in info.name:
                    # Only if a backend lists files by programs of the image, which the agent may have replaced.
                    raise OSError(errno.EINVAL, f"no file can be named {info.name!r}", folder)
                below = f"{subfolder}/{info.name}" if subfolder else info.name
                yield below, info
                if info.kind == "directory":
                    pending.append(below)

    def resolve(self, path: str, cwd: str | None = None) -> str:
        """Return the absolute `path`: ``~`` is the home; a relative one starts at `cwd`, or else at `workdir`."""
        if path == "~" or path.startswith("~/"):
            path = self.home + path[1:]
        return posixpath.normpath(posixpath.join(self.workdir, cwd or "", path))

    async def prepare(self) -> None:
        """Write the configuration's files and run its setup commands; raises `SandboxFailure` if that fails."""
        for file in self.config.files:
            try:
                await self.write_file(file.to, file.data, file.mode)
            except OSError as error:
                raise SandboxFailure(f"file {file.to!r} cannot be written: {error.strerror}") from error
        for command in self.config.setup:
            result = await self.run(command)
            if result.exit_code != 0:
                tail = result.output[-2000:]
                raise SandboxFailure(f"setup command {command!r:.300} failed ({result.exit_code}): {tail}")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# -------------------------------------------------------------------------------- output
# A rollout with endless output must not take the memory or the event loop from the others: only the head and the tail
# of a long output are stored, and a command that floods is slowed down.

CHUNK = 1 << 16
BURST = 1 << 20
"""Bytes read from one pipe before the others get a pause of `PAUSE_SECONDS`."""
PAUSE_SECONDS = 0.01


class OutputBuffer:
    """The first 40 % and the last 60 % of a limit; the end of an output is more informative than its middle."""

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
        """Return everything, or head and tail with a line between them that gives the number of omitted bytes."""
        self._trim()
        if not self.dropped:
            return bytes(self._head + self._tail)
        note = f"\n[... {self.dropped} bytes of output omitted ...]\n".encode()
        return bytes(self._head) + note + bytes(self._tail)

    def _trim(self) -> None:
        excess = len(self._tail) - self._tail_limit
        if excess > 0:
            del self._tail[:excess]
            self.dropped += excess


class PipeReader:
    """The reading end of one pipe; the descriptor belongs to this object.

    Reads are on the event loop and must not block, so no sandbox may have this open file description (see `launcher`).
    """

    def __init__(self, fd: int, buffer: OutputBuffer) -> None:
        self._fd = fd
        self._buffer: OutputBuffer | None = buffer
        self._loop = asyncio.get_running_loop()
        self._burst = 0
        self._pause: asyncio.TimerHandle | None = None
        self.open = True
        os.set_blocking(fd, False)
        with as_sandbox_failure("this machine cannot watch a pipe"):
            self._loop.add_reader(fd, self._read)

    def drain(self) -> None:
        """Read the data that is in the pipe already; its writer has ended, but children of it may still write."""
        for _ in range(BURST // CHUNK):
            if not self.open or not self._take():
                return

    def into(self, buffer: OutputBuffer) -> None:
        """Append further data to another command's output."""
        self._buffer = buffer

    def abandoned(self) -> bool:
        """Return True if no process holds the writing end; call it after `drain` and `ignore`."""
        try:
            return os.read(self._fd, 1) == b""
        except BlockingIOError:
            return False

    def ignore(self) -> None:
        """Read and drop further data, so that a process that still writes is neither stopped nor recorded."""
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
        """Read once; return False if there is no more data for now, or ever."""
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
