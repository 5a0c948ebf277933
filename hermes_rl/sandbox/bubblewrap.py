"""The default sandbox: bubblewrap with all namespaces, and our helper as its first process.

Owns what a sandbox of this kind can see and use, that is bubblewrap's arguments and the limits. Whether
bubblewrap works on this machine at all is `probe`.

Inside there is one sized tmpfs with home, working directory and /tmp. Everything of the system that an
agent might want to replace (/usr, /bin, /lib, /etc, …) is a read-only mount of its own, which even the owner
of the folder above it can neither rename nor remove.
"""

from __future__ import annotations

import asyncio
import functools
import os
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.sandbox.bundle import boot_argv, memory_file, own_python, system_python
from hermes_rl.sandbox.bwrap_binary import find_bwrap
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.sandbox.helper_sandbox import Descriptors, HelperSandbox
from hermes_rl.sandbox.launcher import Program

HOME = "/home/user"
UID = 1000
"""User and group inside."""
OUTER_UID = 65534
"""Who we become before we start bubblewrap as root: limits on processes do not bind the host's user 0."""

GIB = 1 << 30
DEFAULTS = {"memory": 4 * GIB, "processes": 256, "disk": 1 * GIB, "open_files": 1024}
SHARED_MEMORY = 64 << 20
ADDRESS_SPACE_SPARE = 16 * GIB
"""Virtual machines reserve far more addresses than they use; V8 takes 10 GiB for one WebAssembly memory."""
SMALLEST = {"memory": 32 << 20, "processes": 4, "disk": 1 << 16, "open_files": 32}
"""With less the helper itself could not run."""

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC = (
    "alternatives",
    "ca-certificates.conf",
    "fonts",
    "ld.so.cache",
    "localtime",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "perl",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)
"""What programs need of /etc; nothing here is a secret."""
READ_ONLY = (*SYSTEM, "/etc", "/proc", "/dev")


class BubblewrapSandbox(HelperSandbox):
    """See `Sandbox`; `network: true` shares the host's network, everything else is the sandbox's own."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.home = HOME
        self.workdir = _workdir(config.workdir)
        self.limits = _limits(config)
        self.bwrap = find_bwrap()
        system = system_python()
        self.python = system or own_python()
        self.python_prefix = None if system else lent_prefix(self.python)

    async def start(self) -> None:
        await asyncio.to_thread(_check_once)
        await super().start()

    @property
    def enforced(self) -> Mapping[str, str]:
        return {
            "memory": "per process",
            "processes": "per sandbox",
            "disk": "sized tmpfs",
            "open_files": "per process",
        }

    def environment(self) -> dict[str, str]:
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        if self.python_prefix:
            path += f":{self.python_prefix}/bin"
        return {
            "PATH": path,
            "HOME": HOME,
            "USER": "user",
            "LOGNAME": "user",
            "SHELL": self.shell,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
        }

    def rlimits(self) -> dict[str, int]:
        memory = self.limits["memory"]
        return {
            "RLIMIT_CORE": 0,
            "RLIMIT_DATA": memory,
            "RLIMIT_AS": memory + ADDRESS_SPACE_SPARE,
            "RLIMIT_FSIZE": self.limits["disk"],
            "RLIMIT_NPROC": self.limits["processes"],
            "RLIMIT_NOFILE": self.limits["open_files"],
        }

    def program(self, descriptors: Descriptors) -> Program:
        as_root = os.geteuid() == 0
        executable, env = self.bwrap.by_descriptor(descriptors.add) if as_root else (self.bwrap.path, {})
        argv = [
            "bwrap",
            *namespace_options(network=bool(self.config.network)),
            *self._root(),
            *self._etc(descriptors),
            *self._python(),
            "--chdir",
            "/",
            "--",
            *boot_argv(self.python, descriptors.control, descriptors.code),
        ]
        uid = OUTER_UID if as_root else None
        return Program(argv, executable, descriptors.all(), descriptors.stderr, uid, env)

    def _root(self) -> Iterator[str]:
        yield from ("--size", str(self.limits["disk"]), "--tmpfs", "/")
        for path in SYSTEM:
            if Path(path).exists():
                # A link such as /bin becomes a mount too, so that nobody inside can put another in its place.
                yield from ("--ro-bind", str(Path(path).resolve()), path)
        yield from ("--proc", "/proc", "--dev", "/dev")
        yield from (
            "--size",
            str(SHARED_MEMORY),
            "--perms",
            "1777",
            "--tmpfs",
            "/dev/shm",
            "--remount-ro",
            "/dev",
        )
        yield from (
            "--perms",
            "1777",
            "--dir",
            "/tmp",
            "--dir",
            "/run",
            "--dir",
            "/var",
            "--symlink",
            "../tmp",
        )
        yield from ("/var/tmp", "--dir", HOME, "--dir", self.workdir)

    def _etc(self, descriptors: Descriptors) -> Iterator[str]:
        yield from ("--size", str(1 << 20), "--tmpfs", "/etc")
        for name in ETC:
            if Path("/etc", name).exists():
                yield from ("--ro-bind", str(Path("/etc", name).resolve()), f"/etc/{name}")
        for path, text in self._own_files().items():
            fd = descriptors.add(memory_file(text.encode(), "etc"))
            yield from ("--perms", "0444", "--file", str(fd), path)
        yield from ("--remount-ro", "/etc")

    def _own_files(self) -> dict[str, str]:
        files = {
            "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:{UID}:{UID}::{HOME}:/bin/bash\n",
            "/etc/group": f"root:x:0:\nuser:x:{UID}:\n",
            "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
            "/etc/hostname": "sandbox\n",
        }
        if self.config.network:
            files["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_text("utf-8")
        return files

    def _python(self) -> Iterator[str]:
        if self.python_prefix is not None:
            yield from ("--ro-bind", self.python_prefix, self.python_prefix)


def lent_prefix(python: str) -> str:
    """The folder of a Python outside of the system, to be shown to sandboxes; raises where that cannot be."""
    prefix = Path(python).parent.parent
    open_to_all = all(folder.stat().st_mode & 0o001 for folder in (prefix, *prefix.parents))
    if os.geteuid() == 0 and not open_to_all:
        raise UserError(
            f"the sandbox needs a Python that others than root may run, and there is none in /usr (only {python}); "
            "install the system's python3, or run as another user"
        )
    return str(prefix)


def namespace_options(*, network: bool) -> Iterator[str]:
    """The part of bubblewrap's arguments that needs the kernel's consent."""
    yield from ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    if not network:
        yield "--unshare-net"
    yield from ("--disable-userns", "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv")
    yield from ("--cap-drop", "ALL", "--hostname", "sandbox", "--uid", str(UID), "--gid", str(UID))


@functools.cache
def _check_once() -> None:
    """Say what to do where bubblewrap cannot work; a failure is no result, so that it is asked again."""
    from hermes_rl.sandbox.probe import require_bubblewrap

    require_bubblewrap()


def _workdir(workdir: str | None) -> str:
    path = posixpath.normpath(posixpath.join(HOME, workdir or ""))
    if path == "/" or any(path == top or path.startswith(top + "/") for top in READ_ONLY):
        raise UserError(f"sandbox.workdir {workdir!r} belongs to the system, which is read-only")
    return path


def _limits(config: SandboxConfig) -> dict[str, int]:
    """The limits in force: what is asked for, else the defaults; raises `UserError` where that cannot be."""
    asked = config.limits
    if asked.cpu is not None and not asked.best_effort:
        raise UserError(
            "sandbox.limits.cpu cannot be enforced by bubblewrap; leave it out, or set limits.best_effort: true"
        )
    found = {name: getattr(asked, name) or default for name, default in DEFAULTS.items()}
    for name, least in SMALLEST.items():
        if found[name] < least:
            raise UserError(f"sandbox.limits.{name} is {found[name]}; a sandbox needs at least {least}")
    return found
