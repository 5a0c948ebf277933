"""A sandbox whose first process is our helper: everything but how that process is started.

Owns the life of the sandbox on the host's side. Files and commands are in `helper_client` and
`helper_commands`; `bubblewrap` and `none` add what to start and how strongly it is fenced in.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox.bundle import helper_bundle
from hermes_rl.sandbox.channel import Answer, Channel, ChannelLostError, Lost
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.sandbox.descriptors import copy_of, memory_file, socket_pair
from hermes_rl.sandbox.helper_client import as_field
from hermes_rl.sandbox.helper_shell import HelperShell
from hermes_rl.sandbox.launcher import Child, Program, Remains, launcher

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
