"""What a bubblewrap sandbox has as its files: the system of this machine, read-only, or an image of its own.

Owns bubblewrap's arguments for either. Limits, namespaces and starting are `bubblewrap`'s.

`SystemRoot` is one sized tmpfs with home, working directory and /tmp. Everything of the system that an agent might
want to replace (/usr, /bin, /lib, /etc, …) is a read-only mount of its own, which even the owner of the folder above
it can neither rename nor remove.

`ImageRoot` lays a sized tmpfs over the image's files, so that the agent may change all of them and nothing of it
stays. bubblewrap takes the folder for changes from outside of the sandbox, so a first bubblewrap makes a place
with just that tmpfs and the image, and a second one, inside of it, makes the sandbox.
"""

from __future__ import annotations

import os
import posixpath
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.sandbox.bundle import boot_argv, helper_bundle, own_python, system_python
from hermes_rl.sandbox.bwrap_binary import Bwrap, find_bwrap
from hermes_rl.sandbox.descriptors import memory_file
from hermes_rl.sandbox.helper_sandbox import Descriptors
from hermes_rl.sandbox.images import ready_image
from hermes_rl.sandbox.packages import PACKAGES, package_folder
from hermes_rl.sandbox.runtime import RUNTIME_FOLDER, runtime_argv, runtime_folder

HOME = "/home/user"
UID = 1000
"""User and group inside."""
SHARED_MEMORY = 64 << 20
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
USER_LINE = f"user:x:{UID}:{UID}::{HOME}:/bin/sh\n"


class Root(ABC):
    """The files of one sandbox."""

    python: str
    """The interpreter for which the helper is compiled."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    """Where the agent's commands are looked for."""
    bwrap: Bwrap
    workdir: str
    digest: str | None = None
    """See `Sandbox.image_digest`; known once it is prepared."""

    def prepare(self) -> None:
        """What takes long, once per process; called in a thread. May raise `UserError`."""
        helper_bundle(self.python)

    @abstractmethod
    def options(self, descriptors: Descriptors, disk: int, *, network: bool) -> Iterator[str]:
        """The arguments of the bubblewrap that makes the sandbox."""

    @abstractmethod
    def boot(self, descriptors: Descriptors) -> list[str]:
        """The command that runs the helper inside."""

    def around(self, executable: str, disk: int) -> list[str]:
        """What to start in front of that bubblewrap's own command line."""
        return ["bwrap"]


class SystemRoot(Root):
    """The system of this machine, read-only."""

    def __init__(self, workdir: str | None, packages: tuple[str, ...] = ()) -> None:
        self.workdir = _workdir(workdir, (*READ_ONLY, PACKAGES) if packages else READ_ONLY)
        self.packages = packages
        self.bwrap = find_bwrap()
        system = system_python()
        self.python = system or own_python()
        self.python_prefix = None if system else lent_prefix(self.python)
        if self.python_prefix is not None:
            self.path += f":{self.python_prefix}/bin"
        if packages:
            self.path = f"{PACKAGES}/bin:{self.path}"

    def prepare(self) -> None:
        super().prepare()
        if self.packages:
            self._package_folder = package_folder(self.packages)

    def options(self, descriptors: Descriptors, disk: int, *, network: bool) -> Iterator[str]:
        yield from ("--size", str(disk), "--tmpfs", "/")
        for path in SYSTEM:
            if Path(path).exists():
                # A link such as /bin becomes a mount too, so that nobody inside can put another in its place.
                yield from ("--ro-bind", str(Path(path).resolve()), path)
        yield from _devices()
        yield from ("--perms", "1777", "--dir", "/tmp", "--dir", "/run", "--dir", "/var", "--symlink", "../tmp")
        yield from ("/var/tmp", "--dir", HOME, "--dir", self.workdir)
        yield from self._etc(descriptors, network=network)
        if self.python_prefix is not None:
            yield from ("--ro-bind", self.python_prefix, self.python_prefix)
        if self.packages:
            yield from ("--ro-bind", str(self._package_folder), PACKAGES)

    def boot(self, descriptors: Descriptors) -> list[str]:
        return boot_argv(self.python, descriptors.control, descriptors.code)

    def _etc(self, descriptors: Descriptors, *, network: bool) -> Iterator[str]:
        yield from ("--size", str(1 << 20), "--tmpfs", "/etc")
        for name in ETC:
            if Path("/etc", name).exists():
                yield from ("--ro-bind", str(Path("/etc", name).resolve()), f"/etc/{name}")
        files = {
            "/etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:{UID}:{UID}::{HOME}:/bin/bash\n",
            "/etc/group": f"root:x:0:\nuser:x:{UID}:\n",
            **_names(network=network),
        }
        for path, text in files.items():
            yield from ("--perms", "0444", "--file", _text(descriptors, text), path)
        yield from ("--remount-ro", "/etc")


class ImageRoot(Root):
    """The files of an image, each changed one in a layer of the sandbox's own."""

    def __init__(self, image: str, workdir: str | None) -> None:
        self.image = image
        self.workdir = _workdir(workdir, ("/proc", "/dev", RUNTIME_FOLDER))
        self.bwrap = find_bwrap(overlay=True)
        self.python = system_python() or own_python()

    def prepare(self) -> None:
        super().prepare()
        image = ready_image(self.image)
        self._folder, self.digest = image.folder, image.digest
        self._runtime = runtime_folder(self.python)

    def options(self, descriptors: Descriptors, disk: int, *, network: bool) -> Iterator[str]:
        yield from ("--overlay-src", "/image", "--overlay", "/scratch/upper", "/scratch/work", "/")
        yield from _devices()
        yield from ("--ro-bind", "/runtime", RUNTIME_FOLDER)
        yield from ("--perms", "1777", "--dir", "/tmp", "--dir", HOME, "--dir", self.workdir)
        for path, text in _names(network=network).items():
            yield from ("--perms", "0644", "--file", _text(descriptors, text), path)
        accounts = _own_file(self._folder, "etc/passwd")
        if f":x:{UID}:" not in accounts:
            yield from ("--perms", "0644", "--file", _text(descriptors, accounts + USER_LINE), "/etc/passwd")

    def boot(self, descriptors: Descriptors) -> list[str]:
        return runtime_argv(self._runtime, descriptors.control, descriptors.code)

    def around(self, executable: str, disk: int) -> list[str]:
        argv = ["bwrap", "--unshare-user", "--die-with-parent", "--dev-bind", "/proc", "/proc", "--dev", "/dev"]
        for path in SYSTEM:
            if Path(path).exists():
                argv += ["--ro-bind", str(Path(path).resolve()), path]
        argv += ["--ro-bind", str(self._folder), "/image", "--ro-bind", str(self._runtime), "/runtime"]
        argv += ["--dir", "/tmp", "--size", str(disk), "--tmpfs", "/scratch", "--dir", "/scratch/upper"]
        return [*argv, "--dir", "/scratch/work", "--chdir", "/", "--", executable]


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


def _devices() -> Iterator[str]:
    yield from ("--proc", "/proc", "--dev", "/dev", "--size", str(SHARED_MEMORY), "--perms", "1777")
    yield from ("--tmpfs", "/dev/shm", "--remount-ro", "/dev")


def _names(*, network: bool) -> dict[str, str]:
    """The files that tell what a name means."""
    files = {"/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n", "/etc/hostname": "sandbox\n"}
    if network:
        files["/etc/resolv.conf"] = Path("/etc/resolv.conf").read_text("utf-8")
    return files


def _text(descriptors: Descriptors, text: str) -> str:
    return str(descriptors.add(memory_file(text.encode(), "etc")))


def _own_file(folder: Path, name: str) -> str:
    """A file of an image, where it is one and no link to a file of this machine."""
    path = folder / name
    if path.is_symlink() or path.parent.is_symlink() or not path.is_file():
        return ""
    return path.read_text("utf-8", "replace")


def _workdir(workdir: str | None, closed: tuple[str, ...]) -> str:
    path = posixpath.normpath(posixpath.join(HOME, workdir or ""))
    if path == "/" or any(path == top or path.startswith(top + "/") for top in closed):
        raise UserError(f"sandbox.workdir {workdir!r} belongs to the system, which is read-only")
    return path
