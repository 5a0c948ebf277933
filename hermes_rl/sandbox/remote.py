"""Machines of hermes-agent's backends: ssh, modal, daytona, singularity.

Owns the `Sandbox` over a machine that only runs commands (`remote_link`): each operation is a script for its bash and
coreutils (`remote_scripts`). What such a machine cannot do is refused before it starts: conversations with a process,
limits that its backend has not, and a network that is closed.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import os
import posixpath
import time
import uuid
from collections.abc import Awaitable, Mapping, Sequence
from typing import Literal, cast

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox import remote_scripts as scripts
from hermes_rl.sandbox.base import (
    LIST_LIMIT,
    OUTPUT_LIMIT,
    READ_LIMIT,
    TIMEOUT_EXIT_CODE,
    BackgroundProcess,
    CommandResult,
    FileInfo,
    Sandbox,
)
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.sandbox.remote_jobs import RemoteProcess, parts
from hermes_rl.sandbox.remote_link import SMALL, Link
from hermes_rl.sandbox.remote_machines import Machine, machine

MARK = "HERMES_RL_SANDBOX"
JOB = "HERMES_RL_JOB"
INLINE = 20_000
"""Bytes of a command that go in as an argument; a longer one goes in as a file."""
PIECE = 12 << 20
"""Bytes of a file that are sent together."""
FILE_SECONDS = 600.0
LISTING = 64 << 20
"""Characters of a folder's listing."""


class RemoteSandbox(Sandbox):
    """See `Sandbox`. One object belongs to one event loop."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.id = uuid.uuid4().hex[:12]
        self.machine: Machine = machine(config)
        self._box = f"/tmp/hermes-rl-{self.id}"
        self.home = self.workdir = f"{self._box}/home"
        self._link = Link()
        self._over = ""
        """Why it is gone, where that was our doing."""
        self._jobs = 0
        self._processes: list[RemoteProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = 0
        self._killed_by_agent = False
        self._expiry: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------ life

    @property
    def enforced(self) -> Mapping[str, str]:
        asked = self.config.limits.requested()
        return {name: "by the machine" for name in asked if name in self.machine.limits}

    @property
    def alive(self) -> bool:
        return self._link.open and not self._over

    @property
    def killed_by_agent(self) -> bool:
        return self._killed_by_agent

    async def start(self) -> None:
        try:
            farewell, _ = scripts.command(scripts.KILL, named=f"{MARK}={self.id}", signal="9", folder=self._box)
            await self._link.start(self.config.backend, self.machine.arguments, farewell, self.config.environ)
            await self._prepare()
        except BaseException:
            await self.close()
            raise
        if self.config.lifetime is not None:
            self._expiry = asyncio.get_running_loop().call_later(self.config.lifetime, self._expire)

    def _expire(self) -> None:
        # As in every sandbox: a command that runs past the end is the agent's doing, waiting is somebody else's.
        self._killed_by_agent = self._running > 0 or any(process.poll() is None for process in self._processes)
        self._over = f"the sandbox's lifetime of {self.config.lifetime} s is over"
        self._later(self.close())

    async def kill_all(self) -> None:
        await self._ask(scripts.KILL, named=f"{MARK}={self.id}", signal="9", folder="")

    async def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        for process in self._processes:
            process.end()
        self._processes.clear()
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()
        await self._link.close()

    async def _prepare(self) -> None:
        home, workdir = self.home if self.machine.shared else "", self.config.workdir or ""
        # One way there and back for all: each takes a quarter of a second.
        words = await self._ask(scripts.PLACE, home=home, workdir=workdir)
        with scripts.reading():
            self.home = base64.b64decode("".join(words)).decode()
        self.workdir = posixpath.normpath(posixpath.join(self.home, workdir))
        await self.furnish()

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
        began, seconds = time.perf_counter(), self.config.timeout if timeout is None else timeout
        job = self._next_job()
        given = "/dev/null"
        if stdin is not None:
            given = f"{self._box}/{job}.i"
            await self.write_file(given, stdin)
        self._running += 1
        try:
            words = await self._ask(
                scripts.RUN,
                None,
                seconds,
                2 * encoded(output_limit),
                **await self._values(job, command, cwd, env, output_limit),
                input=given,
                seconds=str(seconds),
                apart="" if merge_stderr else "1",
            )
        except asyncio.CancelledError:
            self._later(self._kill(job, 9))
            raise
        except OSError as error:
            message = f"cannot start the command: working directory: {error.strerror}\n".encode()
            return CommandResult(127 if error.errno == errno.ENOENT else 126, message, message)
        finally:
            self._running -= 1
        with scripts.reading():
            code, (stdout, truncated), (stderr, _) = int("".join(words[:1])), parts(words[1:4]), parts(words[4:])
        duration = time.perf_counter() - began
        timed_out = code == 137 and duration >= seconds
        exit_code = TIMEOUT_EXIT_CODE if timed_out else code
        return CommandResult(exit_code, stdout, stderr, timed_out, truncated, duration)

    async def spawn(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        output_limit: int = OUTPUT_LIMIT,
    ) -> BackgroundProcess:
        job = self._next_job()
        values = await self._values(job, command, cwd, env, output_limit)
        words = await self._ask(scripts.SPAWN, **values)
        with scripts.reading():
            pid = int("".join(words))

        async def ask(script: bytes, data: bytes | None = None, **more: str) -> list[str]:
            kept = {name: values[name] for name in ("box", "limit", "head", "tail")}
            return await self._ask(script, data, 60.0, encoded(output_limit), **{**kept, **more})

        process = RemoteProcess(pid, job, ask, self._kill)
        self._processes.append(process)
        return process

    async def _values(
        self,
        job: str,
        command: str | Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | None,
        limit: int,
    ) -> dict[str, str | list[str]]:
        argv = ["bash", "-c", command] if isinstance(command, str) else list(command)
        if isinstance(command, str) and len(command) > INLINE:
            argv = ["bash", f"{self._box}/{job}.s"]
            await self.write_file(argv[1], os.fsencode(command))
        own = {"HOME": self.home, "TERM": "dumb", MARK: self.id, JOB: f"{self.id}-{job}"}
        variables = [f"{name}={value}" for name, value in {**own, **self.config.env, **(env or {})}.items()]
        head = limit * 2 // 5
        limits = {"limit": str(limit), "head": str(head), "tail": str(limit - head)}
        place = {"box": self._box, "job": job, "cwd": self.resolve(cwd or ".")}
        return {**place, **limits, "argv": argv, "vars": variables}

    def _next_job(self) -> str:
        self._jobs += 1
        return str(self._jobs)

    async def _kill(self, job: str, signal: int) -> None:
        await self._ask(scripts.KILL, named=f"{JOB}={self.id}-{job}", signal=str(signal), folder="")

    def _later(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------------ files

    async def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        words = await self._at(path, scripts.READ, most=encoded(limit), limit=str(limit))
        with scripts.reading():
            return await asyncio.to_thread(base64.b64decode, "".join(words))

    async def write_file(self, path: str, data: bytes, mode: int | None = None) -> None:
        kept = "" if mode is None else f"{mode:o}"
        for at in range(0, max(len(data), 1), self.machine.piece or PIECE):
            piece = data[at : at + (self.machine.piece or PIECE)]
            await self._at(path, scripts.WRITE, piece, mode=kept, more="1" if at else "")

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        words = await self._at(path, scripts.STAT, follow="1" if follow else "")
        kinds = {0o100000: "file", 0o040000: "directory", 0o120000: "symlink"}
        with scripts.reading():
            raw, size, mtime = words
            mode = int(raw, 16)
            kind = cast(Literal["file", "directory", "symlink", "other"], kinds.get(mode & 0o170000, "other"))
            return FileInfo(posixpath.basename(self.resolve(path)), kind, int(size), mode & 0o7777, float(mtime))

    async def list_dir(self, path: str, *, limit: int = LIST_LIMIT) -> list[FileInfo]:
        words = await self._at(path, scripts.LIST, most=LISTING)
        with scripts.reading():
            fields = base64.b64decode("".join(words)).split(b"\0")[:-1]
            if len(fields) > 5 * limit:
                raise OSError(errno.E2BIG, f"More than {limit} entries", path)
            entries = [_info(fields[at : at + 5]) for at in range(0, len(fields), 5)]
        return sorted(entries, key=lambda info: info.name)

    async def set_mode(self, path: str, mode: int) -> None:
        await self._at(path, scripts.CHMOD, mode=f"{mode:o}")

    async def make_dir(self, path: str) -> None:
        await self._at(path, scripts.MKDIR)

    async def remove(self, path: str) -> None:
        await self._at(path, scripts.REMOVE)

    async def rename(self, source: str, target: str) -> None:
        await self._at(source, scripts.RENAME, q=self.resolve(target))

    async def _at(
        self, path: str, script: bytes, data: bytes | None = None, *, most: int = SMALL, **values: str
    ) -> list[str]:
        try:
            return await self._ask(script, data, FILE_SECONDS, most, p=self.resolve(path), **values)
        except OSError as error:
            error.filename = path
            raise

    async def _ask(
        self,
        script: bytes,
        data: bytes | None = None,
        seconds_to_wait: float = 60.0,
        most: int = SMALL,
        /,
        **values: str | list[str],
    ) -> list[str]:
        text, mark = scripts.command(script, **values)
        given = None if data is None else (await asyncio.to_thread(base64.b64encode, data)).decode()
        try:
            return scripts.answer(await self._link.execute(text, given, seconds_to_wait, most), mark)
        except SandboxFailure as failure:
            raise self.gone(self._over) if self._over else failure from None


def encoded(limit: int) -> int:
    """Characters of an answer that holds as many bytes."""
    return limit * 4 // 3 + SMALL


def _info(fields: list[bytes]) -> FileInfo:
    name, kind, size, mode, mtime = fields
    kinds = {b"f": "file", b"d": "directory", b"l": "symlink"}
    known = cast(Literal["file", "directory", "symlink", "other"], kinds.get(kind, "other"))
    return FileInfo(os.fsdecode(name), known, int(size), int(mode, 8), float(mtime))
