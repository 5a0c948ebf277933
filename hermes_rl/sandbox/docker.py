"""A container of a Docker engine, with our helper as its first process.

Owns the sandbox's life: the image, meeting the helper, removal, and whose doing its end was. What the container may is
`docker_container`. The helper is the same as in bubblewrap, under a Python of its own that the container is lent
read-only, so an image needs nothing but `/bin/sh`. It reaches us through a socket in a shared folder (`docker_door`),
which carries descriptors: a command costs what it costs in bubblewrap, not an `exec` of the engine, and files go
through byte by byte. When a runner dies, the helper ends, and its container stops with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import posixpath
import signal
import socket
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.bundle import helper_bundle, own_python, system_python
from hermes_rl.sandbox.channel import Channel, Lost
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.sandbox.descriptors import memory_file
from hermes_rl.sandbox.docker_container import Container, shared_folder
from hermes_rl.sandbox.docker_door import DOOR_FOLDER, Door, boot_code
from hermes_rl.sandbox.docker_engine import Engine, EngineError
from hermes_rl.sandbox.docker_leftovers import remove_leftovers
from hermes_rl.sandbox.helper_sandbox import NO_CORE, Descriptors, HelperSandbox
from hermes_rl.sandbox.launcher import Program
from hermes_rl.sandbox.proxy import ENVIRONMENT, PORT, Proxy
from hermes_rl.sandbox.runtime import RUNTIME_FOLDER, runtime_folder, runtime_python
from hermes_rl.sandbox.seccomp import filter_program

IMAGE = "python:3.11-slim"
"""The image of a sandbox that names none."""
AT_ONCE = 8
"""Containers of one event loop that are started together; an engine that is asked for more gets slower, not faster."""
JUDGE_SECONDS = 10.0
KILLED = 128 + signal.SIGKILL
REMOVE_PAUSES = (0.2, 1.0, 3.0)
"""Seconds before each further try to remove a container; an engine may still be busy with its end."""

log = logging.getLogger(__name__)

_starts: WeakKeyDictionary[asyncio.AbstractEventLoop, _Starts] = WeakKeyDictionary()


class _Starts:
    """What the sandboxes of one event loop share while they start."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(AT_ONCE)
        self.first = asyncio.Lock()
        self.pulling = asyncio.Lock()
        self.checked: set[str] = set()
        """Sockets of engines that have answered, and whose leftovers are removed."""


class DockerSandbox(HelperSandbox):
    """See `Sandbox`; `network: true` is the engine's default network, behind its address translation."""

    start_seconds = 120.0

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.engine = Engine()
        self.image = config.image or IMAGE
        self.python = system_python() or own_python()
        self.home = "/root"
        self.workdir = config.workdir or "/"
        self.container = Container(self.engine, f"hermes-rl-{self.id}", self.image, config)
        self._described: Mapping[str, Any] = {}
        self._proxy = Proxy(config.network) if isinstance(config.network, tuple) and config.network else None
        self._creating: asyncio.Task[None] | None = None
        self._removing: asyncio.Task[None] | None = None
        self._judging: asyncio.Task[None] | None = None
        self._first_process = 0

    # ------------------------------------------------------------------ what a backend says

    @property
    def enforced(self) -> Mapping[str, str]:
        return self.container.enforced()

    @property
    def pid(self) -> int:
        if not self._first_process:
            raise self.lost()
        return self._first_process

    def program(self, descriptors: Descriptors) -> Program:
        raise NotImplementedError("the engine starts the container")

    def environment(self) -> dict[str, str]:
        given = dict(entry.partition("=")[::2] for entry in self._described.get("Env") or ())
        own = {"HOME": self.home, "SHELL": self.shell, "TERM": "dumb"}
        return {"LANG": "C.UTF-8", **given, **own, **(ENVIRONMENT if self._proxy is not None else {})}

    def rlimits(self) -> dict[str, int]:
        return {"RLIMIT_CORE": NO_CORE, "RLIMIT_NOFILE": self.container.limits["open_files"]}

    def filter(self) -> bytes:
        # Laid over the engine's own, which leaves to the agent's processes what process 1 may use of the processor.
        return filter_program() or b""

    # ------------------------------------------------------------------ life

    async def boot(self) -> None:
        starts = _starts.setdefault(asyncio.get_running_loop(), _Starts())
        try:
            code = await asyncio.to_thread(helper_bundle, self.python)
            runtime = await asyncio.to_thread(runtime_folder, self.python)
            self._made_of = code, runtime
            async with starts.places:
                await self._ready(starts)
                await super().boot()
        except (EngineError, OSError) as error:
            raise SandboxFailure(f"the sandbox did not start: {error}") from error

    async def launched(self) -> None:
        if self._proxy is not None:
            answer = await self.ask("listen", str(PORT).encode())
            await self._proxy.listen(socket.socket(fileno=answer.fds[0]))
        await self._settle_in()

    async def released(self) -> None:
        if self._proxy is not None:
            await self._proxy.close()
        if self._removing is None and self._creating is not None:
            self._removing = asyncio.create_task(self._remove(self._creating))
        if self._removing is not None:
            # Goes on where whoever waits for it is cancelled.
            await asyncio.shield(self._removing)

    async def proven_ours(self, why: Lost) -> bool:
        """True where the engine is lost, the container was paused, or it was killed while it had memory left."""
        try:
            async with asyncio.timeout(JUDGE_SECONDS):
                if why is not Lost.SILENT:
                    await self.engine.wait(self.container.name)  # the engine hears of it later than we do
                state = ((await self.engine.inspect(self.container.name)) or {}).get("State") or {}
        except (SandboxFailure, EngineError, TimeoutError):
            return True
        if state.get("OOMKilled"):
            self._why = "the container's memory was used up"
            return False
        if why is Lost.SILENT:
            return not state or bool(state.get("Paused"))
        self._why = f"the container was lost (exit code {state.get('ExitCode')}; {state.get('Error') or '-'})"
        return not state or state.get("ExitCode") == KILLED

    async def _remove(self, creating: asyncio.Task[None]) -> None:
        await asyncio.gather(creating, return_exceptions=True)
        if self._judging is not None:
            await asyncio.wait([self._judging])
        name = self.container.name
        for pause in (*REMOVE_PAUSES, None):
            try:
                await self.engine.remove(name)
            except SandboxFailure as error:
                # Without its engine the container still stops, as its first process does; the next run removes it.
                log.warning("the container %s was not removed: %s", name, error)
            except EngineError as error:
                if pause is not None:
                    await asyncio.sleep(pause)
                    continue
                await self._leave(error)
            return

    async def _leave(self, error: EngineError) -> None:
        """The engine cannot remove the container: harmless where it does not run, else an error."""
        name = self.container.name
        try:
            running = (((await self.engine.inspect(name)) or {}).get("State") or {}).get("Running")
        except EngineError:
            running = True
        if running:
            raise SandboxFailure(f"the container {name} is closed and still runs: {error}")
        log.warning("the container %s has ended and cannot be removed, which the next run tries again: %s", name, error)

    # ------------------------------------------------------------------ starting

    async def _ready(self, starts: _Starts) -> None:
        """The engine answers, and has the image."""
        async with starts.first:
            if self.engine.socket not in starts.checked:
                await self.engine.check()
                await remove_leftovers(self.engine)
                starts.checked.add(self.engine.socket)
        found = await self.engine.image(self.image)
        if found is None:
            async with starts.pulling:
                found = await self.engine.image(self.image)
                if found is None:
                    await self.engine.pull(self.image)
                    found = await self.engine.image(self.image)
        if found is None:
            raise SandboxFailure(f"the engine has no image {self.image}, although it was pulled")
        self._described = found.get("Config") or {}
        # An image that was built here has an id and no digest of a registry.
        self.image_digest = next(iter(found.get("RepoDigests") or ()), found.get("Id"))

    async def _boot(self) -> None:
        door = await asyncio.to_thread(Door)
        shown = shared_folder(self._made_of[1], RUNTIME_FOLDER), shared_folder(door.folder, DOOR_FOLDER)
        try:
            self._creating = asyncio.create_task(self.container.start(self._command(), *shown))
            await asyncio.shield(self._creating)
            await self._meet(door)
        finally:
            door.close()
        await self.initialise()

    def _command(self) -> list[str]:
        return [*runtime_python(self._made_of[1]), boot_code()]

    async def _meet(self, door: Door) -> None:
        """The helper has come through the door, or its container has ended before."""
        code = memory_file(self._made_of[0], "helper")
        entering = asyncio.create_task(door.enter(code))
        ending = asyncio.create_task(self.engine.wait(self.container.name))
        try:
            await asyncio.wait([entering, ending], return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                said = await self.engine.logs(self.container.name)
                raise SandboxFailure(f"the container ended at its start ({ending.result()}): {said or 'no message'}")
            control, self._first_process = entering.result()
            self._channel = Channel(control, self.on_exit, self._on_lost)
        finally:
            os.close(code)
            for task in (entering, ending):
                task.cancel()
            await asyncio.gather(entering, ending, return_exceptions=True)

    async def _settle_in(self) -> None:
        """Home and working directory: the image's own, made where they are not there."""
        self.home = await self._own_home()
        own = self._described.get("WorkingDir") or "/"
        start = self.home if own == "/" else own
        self.workdir = posixpath.normpath(posixpath.join(start, self.config.workdir or ""))
        for folder in (self.home, self.workdir):
            try:
                await self.make_dir(folder)
            except OSError as error:
                raise SandboxFailure(f"{folder} cannot be made as the image's user: {error.strerror}") from error

    async def _own_home(self) -> str:
        user = str(self._described.get("User") or "root").partition(":")[0]
        with contextlib.suppress(OSError):
            lines = (await self.read_file("/etc/passwd")).decode("utf-8", "replace").splitlines()
            for fields in (line.split(":") for line in lines):
                if len(fields) > 5 and user in (fields[0], fields[2]) and fields[5].startswith("/"):
                    return fields[5]
        return "/root" if user in ("root", "0") else "/tmp"
