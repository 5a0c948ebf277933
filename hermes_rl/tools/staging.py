"""Put files of a reward into the sandbox: files that they replace are moved away, and restored afterwards.

No file is written through or left at a path that the agent prepared: a file, directory, FIFO or symlink at the target
is moved away first, and so is a symlink among the directories above it, except for symlinks that belong to the system.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import uuid
from dataclasses import dataclass

from hermes_rl.sandbox.base import FileInfo, Sandbox
from hermes_rl.terminal_text import escape_controls

log = logging.getLogger(__name__)


SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "opt", "proc", "root", "run", "sbin"}
    | {"srv", "sys", "tmp", "usr", "var"}
)
"""Directories of the root in which symlinks belong to the system, such as /var/run."""


@dataclass(frozen=True)
class _Placed:
    """A file of the reward at `path`; `aside` is the temporary path of the agent's file."""

    path: str
    aside: str | None = None


class Staging:
    """Files in place for one reward, in the order in which they were put there."""

    def __init__(self) -> None:
        self._placed: list[_Placed] = []
        self._opened: list[tuple[str, int]] = []
        """Directories whose permissions were changed to allow access, and their former permissions."""
        self._aside: str | None = None

    @property
    def empty(self) -> bool:
        return not self._placed

    async def write(self, sandbox: Sandbox, path: str, data: bytes, mode: int | None = None) -> None:
        """Put a file at `path`, whatever exists there."""
        await self.clear(sandbox, path)
        await sandbox.write_file(sandbox.resolve(path), data, 0o644 if mode is None else mode)

    async def clear(self, sandbox: Sandbox, path: str) -> None:
        """Move away whatever exists at `path`."""
        full = sandbox.resolve(path)
        await self._folders(sandbox, posixpath.dirname(full))
        await self._clear(sandbox, full)

    async def make_dir(self, sandbox: Sandbox, path: str) -> None:
        """Put a directory at `path`; an existing one stays with its content."""
        await self._folders(sandbox, sandbox.resolve(path))

    async def restore(self, sandbox: Sandbox) -> None:
        """Remove the files that were put in place, and restore the previous files."""
        while self._placed:
            placed = self._placed.pop()
            try:
                if await sandbox.stat_or_none(placed.path, follow=False) is not None:
                    await sandbox.remove(placed.path)
                if placed.aside is not None:
                    await sandbox.rename(placed.aside, placed.path)
            except OSError as error:
                log.warning(
                    "sandbox %s: %s could not be restored: %s",
                    sandbox.id,
                    escape_controls(placed.path),
                    escape_controls(str(error)),
                )
        for path, mode in reversed(self._opened):
            with contextlib.suppress(OSError):  # a process that ran meanwhile may have removed it
                await sandbox.set_mode(path, mode)
        self._opened.clear()
        await self._forget(sandbox)

    async def keep(self, sandbox: Sandbox) -> None:
        """Leave the files that were put in place, and delete the files that they replaced."""
        self._placed.clear()
        self._opened.clear()
        await self._forget(sandbox)

    async def _forget(self, sandbox: Sandbox) -> None:
        if self._aside is not None:
            aside, self._aside = self._aside, None
            with contextlib.suppress(OSError):  # this path is not read any more
                await sandbox.remove(aside)

    async def _folders(self, sandbox: Sandbox, folder: str) -> None:
        """Make `folder` and its parents real directories."""
        path = ""
        for name in folder.strip("/").split("/") if folder != "/" else ():
            path = f"{path}/{name}"
            info = await sandbox.stat_or_none(path, follow=False)
            if info is None:
                await sandbox.make_dir(path)
                self._placed.append(_Placed(path))
            elif info.kind != "directory" and (info.kind != "symlink" or _is_owned(sandbox, path)):
                await self._clear(sandbox, path)
                await sandbox.make_dir(path)
            elif info.kind == "directory" and _is_owned(sandbox, path):
                await self._open(sandbox, path, info)

    async def _open(self, sandbox: Sandbox, path: str, info: FileInfo) -> None:
        """Make a directory writable for its owner."""
        if info.mode & 0o700 != 0o700:
            await sandbox.set_mode(path, info.mode | 0o700)
            self._opened.append((path, info.mode))

    async def _clear(self, sandbox: Sandbox, path: str) -> None:
        """Make room at `path`: files of the reward are deleted, other files are moved away."""
        info = await sandbox.stat_or_none(path, follow=False)
        if any(placed.path == path for placed in self._placed):
            if info is not None:
                await sandbox.remove(path)
            return
        aside = None
        if info is not None:
            if self._aside is None:
                # Next to the home: on its file system, so that renaming works, but not among the agent's files.
                folder = posixpath.join(posixpath.dirname(sandbox.home), f".aside-{uuid.uuid4().hex[:12]}")
                await sandbox.make_dir(folder)
                self._aside = folder
            aside = f"{self._aside}/{len(self._placed)}"
            if info.kind == "directory":
                await self._open(sandbox, path, info)  # a directory without permissions cannot be moved
            await sandbox.rename(path, aside)
        self._placed.append(_Placed(path, aside))


def _is_owned(sandbox: Sandbox, path: str) -> bool:
    """Return True in the agent's home or working directory, and everywhere else outside system directories."""
    inside = any(f"{path}/".startswith(f"{top.rstrip('/')}/") for top in (sandbox.home, sandbox.workdir))
    return inside or path.split("/")[1] not in SYSTEM
