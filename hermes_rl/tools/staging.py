"""Files that a reward puts into the sandbox: what they replace is set aside, and comes back afterwards.

Nothing that the agent planted is written through or kept in place: a file, folder, FIFO or symlink at the target is
moved away first, and so is a symlink among the folders above it, but for those that a system has of its own.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import uuid
from dataclasses import dataclass

from hermes_rl.sandbox.base import FileInfo, Sandbox
from hermes_rl.visible import visible

log = logging.getLogger(__name__)


SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "opt", "proc", "root", "run", "sbin"}
    | {"srv", "sys", "tmp", "usr", "var"}
)
"""Folders of the root in which symlinks are a system's own, such as /var/run."""


@dataclass(frozen=True)
class _Placed:
    """Something of ours at `path`; `aside` is where the agent's own is meanwhile."""

    path: str
    aside: str | None = None


class Staging:
    """What is in place for one reward, in the order in which it was put there."""

    def __init__(self) -> None:
        self._placed: list[_Placed] = []
        self._opened: list[tuple[str, int]] = []
        """Folders whose permissions were in the way, and what these were."""
        self._aside: str | None = None

    @property
    def empty(self) -> bool:
        return not self._placed

    async def write(self, sandbox: Sandbox, path: str, data: bytes, mode: int | None = None) -> None:
        """Put a file at `path`, whatever is there."""
        await self.clear(sandbox, path)
        await sandbox.write_file(sandbox.resolve(path), data, 0o644 if mode is None else mode)

    async def clear(self, sandbox: Sandbox, path: str) -> None:
        """Set aside whatever is at `path`."""
        full = sandbox.resolve(path)
        await self._folders(sandbox, posixpath.dirname(full))
        await self._clear(sandbox, full)

    async def make_dir(self, sandbox: Sandbox, path: str) -> None:
        """Put a folder at `path`; one that is there already stays with what is in it."""
        await self._folders(sandbox, sandbox.resolve(path))

    async def restore(self, sandbox: Sandbox) -> None:
        """Take away what was put in place, and bring back what was there before."""
        while self._placed:
            placed = self._placed.pop()
            try:
                if await sandbox.look(placed.path, follow=False) is not None:
                    await sandbox.remove(placed.path)
                if placed.aside is not None:
                    await sandbox.rename(placed.aside, placed.path)
            except OSError as error:
                log.warning(
                    "sandbox %s: %s could not be restored: %s", sandbox.id, visible(placed.path), visible(str(error))
                )
        for path, mode in reversed(self._opened):
            with contextlib.suppress(OSError):  # what ran meanwhile may have removed it
                await sandbox.set_mode(path, mode)
        self._opened.clear()
        await self._forget(sandbox)

    async def keep(self, sandbox: Sandbox) -> None:
        """Let what was put in place stay there, and what it has replaced go."""
        self._placed.clear()
        self._opened.clear()
        await self._forget(sandbox)

    async def _forget(self, sandbox: Sandbox) -> None:
        if self._aside is not None:
            aside, self._aside = self._aside, None
            with contextlib.suppress(OSError):  # nobody looks there any more
                await sandbox.remove(aside)

    async def _folders(self, sandbox: Sandbox, folder: str) -> None:
        """Make `folder` and those above it real folders."""
        path = ""
        for name in folder.strip("/").split("/") if folder != "/" else ():
            path = f"{path}/{name}"
            info = await sandbox.look(path, follow=False)
            if info is None:
                await sandbox.make_dir(path)
                self._placed.append(_Placed(path))
            elif info.kind != "directory" and (info.kind != "symlink" or _owned(sandbox, path)):
                await self._clear(sandbox, path)
                await sandbox.make_dir(path)
            elif info.kind == "directory" and _owned(sandbox, path):
                await self._open(sandbox, path, info)

    async def _open(self, sandbox: Sandbox, path: str, info: FileInfo) -> None:
        """Make a folder one that its owner may change."""
        if info.mode & 0o700 != 0o700:
            await sandbox.set_mode(path, info.mode | 0o700)
            self._opened.append((path, info.mode))

    async def _clear(self, sandbox: Sandbox, path: str) -> None:
        """Make room at `path`: what we put there goes, what was there is set aside."""
        info = await sandbox.look(path, follow=False)
        if any(placed.path == path for placed in self._placed):
            if info is not None:
                await sandbox.remove(path)
            return
        aside = None
        if info is not None:
            if self._aside is None:
                # Beside the home: on its file system, so that renaming works, but not among the agent's files.
                folder = posixpath.join(posixpath.dirname(sandbox.home), f".aside-{uuid.uuid4().hex[:12]}")
                await sandbox.make_dir(folder)
                self._aside = folder
            aside = f"{self._aside}/{len(self._placed)}"
            if info.kind == "directory":
                await self._open(sandbox, path, info)  # a closed folder cannot be moved
            await sandbox.rename(path, aside)
        self._placed.append(_Placed(path, aside))


def _owned(sandbox: Sandbox, path: str) -> bool:
    """Return True in the agent's home or working directory, and wherever else no system has folders of its own."""
    inside = any(f"{path}/".startswith(f"{top.rstrip('/')}/") for top in (sandbox.home, sandbox.workdir))
    return inside or path.split("/")[1] not in SYSTEM
