"""The default sandbox: bubblewrap with all namespaces, and our helper as its first process.

Owns the limits and how it is started. What it has as files is `roots`, which system calls are refused `seccomp`,
limits on the sandbox as a whole `cgroup`, the way to a list of hosts `proxy`. Whether bubblewrap works on this machine
at all is `probe`.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import platform
import secrets
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox.bwrap_binary import namespace_options
from hermes_rl.sandbox.cgroup import DELEGATE, ControlGroup, Layout, find_layout
from hermes_rl.sandbox.channel import Lost
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.sandbox.descriptors import memory_file, pipe
from hermes_rl.sandbox.helper_sandbox import NO_CORE, Descriptors, HelperSandbox
from hermes_rl.sandbox.images import OUTER_UID, overlay_refused
from hermes_rl.sandbox.launcher import Program, Remains
from hermes_rl.sandbox.probe import require_bubblewrap
from hermes_rl.sandbox.proxy import ENVIRONMENT, PORT, Proxy
from hermes_rl.sandbox.roots import HOME, UID, ImageRoot, Root, SystemRoot
from hermes_rl.sandbox.seccomp import filter_program

GIB = 1 << 30
DEFAULTS = {"memory": 4 * GIB, "processes": 256, "disk": 1 * GIB, "open_files": 1024}
ADDRESS_SPACE_SPARE = 16 * GIB
"""Virtual machines reserve far more addresses than they use; V8 takes 10 GiB for one WebAssembly memory."""
KILLED = 128 + signal.SIGKILL
SMALLEST = {"memory": 32 << 20, "processes": 4, "disk": 1 << 16, "open_files": 32}
"""With less the helper itself could not run."""
FIRST_UID, UIDS = 0x70000000, 1 << 16
"""Users that no system gives to people, services or containers."""
_users = itertools.count(secrets.randbelow(UIDS))


class BubblewrapSandbox(HelperSandbox):
    """See `Sandbox`; `network: true` shares the host's network, everything else is the sandbox's own."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.root: Root = (
            ImageRoot(config.image, config.workdir) if config.image else SystemRoot(config.workdir, config.packages)
        )
        self.home = HOME
        self.workdir = self.root.workdir
        self.python = self.root.python
        self.limits = _limits(config, find_layout())
        self._filter = _filter()
        hosts = config.network if isinstance(config.network, tuple) else ()
        self._proxy = Proxy(hosts) if hosts else None
        layout = find_layout()
        self._group = ControlGroup(layout, self.id) if layout is not None else None
        self._info: int | None = None
        """Where bubblewrap tells what it has started, until somebody listens."""
        self._first = 0
        """Process 1 of the sandbox, as this machine numbers it; 0 until it is known."""
        self._used_up_memory = False

    async def boot(self) -> None:
        await asyncio.to_thread(_check_once)
        await asyncio.to_thread(self.root.prepare)
        self.image_digest = self.root.digest
        await super().boot()

    @property
    def enforced(self) -> Mapping[str, str]:
        groups = self._group.layout.parents if self._group is not None else {}
        found = {
            "memory": "per sandbox and per process" if "memory" in groups else "per process",
            "processes": "per sandbox",
            "disk": "sized tmpfs",
            "open_files": "per process",
        }
        return found | ({"cpu": "per sandbox"} if self.config.limits.cpu is not None and "cpu" in groups else {})

    def environment(self) -> dict[str, str]:
        return {
            "PATH": self.root.path,
            "HOME": HOME,
            "USER": "user",
            "LOGNAME": "user",
            "SHELL": self.shell,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **(ENVIRONMENT if self._proxy is not None else {}),
        }

    def rlimits(self) -> dict[str, int]:
        memory = self.limits["memory"]
        return {
            "RLIMIT_CORE": NO_CORE,
            "RLIMIT_DATA": memory,
            "RLIMIT_AS": memory + ADDRESS_SPACE_SPARE,
            "RLIMIT_FSIZE": self.limits["disk"],
            "RLIMIT_NPROC": self.limits["processes"],
            "RLIMIT_NOFILE": self.limits["open_files"],
            "RLIMIT_MEMLOCK": 8 << 20,
            "RLIMIT_RTPRIO": 0,
            "RLIMIT_NICE": 0,
            "RLIMIT_MSGQUEUE": 1 << 20,
            "RLIMIT_SIGPENDING": 4096,
        }

    def program(self, descriptors: Descriptors) -> Program:
        as_root = os.geteuid() == 0
        # By descriptor also for the second bubblewrap, which does not see where the program lies.
        by_descriptor = as_root or isinstance(self.root, ImageRoot)
        bwrap = self.root.bwrap
        executable, env = bwrap.by_descriptor(descriptors.add) if by_descriptor else (bwrap.path, {})
        disk, network = self.limits["disk"], self.config.network is True
        argv = [
            *self.root.around(executable, disk),
            *namespace_options(UID, network=network),
            *self._told(descriptors),
            *("--seccomp", str(descriptors.add(memory_file(self._filter, "seccomp")))),
            *self.root.options(descriptors, disk, network=network),
            "--chdir",
            "/",
            "--",
            *self.root.boot(descriptors),
        ]
        uid = (OUTER_UID if isinstance(self.root, ImageRoot) else own_uid()) if as_root else None
        return Program(argv, executable, descriptors.all(), descriptors.stderr, uid, env)

    async def initialise(self) -> None:
        # A group takes as long to enter as Python to start, so both are done at once.
        info, self._info = self._info, None
        entering = asyncio.create_task(asyncio.to_thread(self._enter, info))
        entering.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits
        await super().initialise()
        await asyncio.shield(entering)

    async def launched(self) -> None:
        if self._proxy is not None:
            answer = await self.ask("listen", str(PORT).encode())
            await self._proxy.listen(socket.socket(fileno=answer.fds[0]))

    def _told(self, descriptors: Descriptors) -> list[str]:
        """The arguments that make bubblewrap say which process it has started."""
        self._info, told = pipe()
        return ["--info-fd", str(descriptors.add(told))]

    def _enter(self, info: int | None) -> None:
        """Hear which process bubblewrap has started; put it into the group of the sandbox, if there are groups."""
        if info is None:
            return
        limits = self.limits
        # Files lie in memory and have a limit of their own; the helper is a process too.
        memory, processes = limits["memory"] + limits["disk"], limits["processes"] + 1
        try:
            with os.fdopen(info) as told:
                self._first = json.load(told)["child-pid"]
            if self._group is not None:
                self._group.enter(self._first, memory, processes, self.config.limits.cpu)
        except (OSError, ValueError) as error:
            raise SandboxFailure(f"the control group of the sandbox: {error}") from error

    async def proven_ours(self, why: Lost) -> bool:
        if why is Lost.SILENT:
            return stopped(self._first)  # from within, process 1 of a namespace cannot be stopped
        code = await self.burial()
        if code is None:
            return False
        # bubblewrap runs outside, where no command of the agent reaches it. From within, only a lack of memory gets
        # process 1 killed: everything else that kills it comes from outside.
        return code < 0 or (code == KILLED and not self._used_up_memory)

    async def released(self) -> None:
        if self._info is not None:
            os.close(self._info)
            self._info = None
        if self._proxy is not None:
            await self._proxy.close()

    def remains(self) -> Remains | None:
        return self._group

    def buried(self) -> None:
        if self._group is not None:
            self._used_up_memory = self._group.killed_for_memory()
            self._group.remove()

    def refused(self, said: str) -> UserError | None:
        return overlay_refused(said) if isinstance(self.root, ImageRoot) else None


def own_uid() -> int:
    """A user for one sandbox of a runner that is root: what the kernel counts per user, sandboxes then do not share.

    Where root itself has only a part of the users, such as in a container, all sandboxes have the same.
    """
    return FIRST_UID + next(_users) % UIDS if _has_users() else OUTER_UID


@functools.cache
def _has_users() -> bool:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= FIRST_UID and first + count >= FIRST_UID + UIDS:
            return True
    return False


def stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


@functools.cache
def _check_once() -> None:
    """Say what to do where bubblewrap cannot work; a failure is no result, so that it is asked again."""
    require_bubblewrap()


@functools.cache
def _filter() -> bytes:
    program = filter_program()
    if program is None:
        raise UserError(
            f"there is no filter on system calls for the processor {platform.machine()}, and bubblewrap is not used "
            "without one; choose another sandbox.backend"
        )
    return program


def _limits(config: SandboxConfig, layout: Layout | None) -> dict[str, int]:
    """The limits in force: what is asked for, else the defaults; raises `UserError` where that cannot be."""
    asked = config.limits
    if asked.cpu is not None and not asked.best_effort and (layout is None or "cpu" not in layout.parents):
        raise UserError(
            "sandbox.limits.cpu needs control groups, which cannot be made here: leave it out, set limits.best_effort: "
            f"true, or {DELEGATE}"
        )
    found = {name: getattr(asked, name) or default for name, default in DEFAULTS.items()}
    for name, least in SMALLEST.items():
        if found[name] < least:
            raise UserError(f"sandbox.limits.{name} is {found[name]}; a sandbox needs at least {least}")
    return found
