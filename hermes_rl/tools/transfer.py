"""Copying folders between this machine and a sandbox, byte by byte and without a shell."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

from hermes_rl.sandbox.base import Sandbox
from hermes_rl.tools.staging import Staging


async def upload_tree(sandbox: Sandbox, staging: Staging, local: Path, remote: str, *, replace: bool = False) -> int:
    """Copy a folder into the sandbox with the permissions of its files; the number of files."""
    if replace:
        await staging.clear(sandbox, remote)
    await staging.make_dir(sandbox, remote)
    count = 0
    for path in await asyncio.to_thread(_inside, local):
        target = f"{remote}/{path.relative_to(local)}"
        content = await asyncio.to_thread(_content, path)
        if content is None:
            await staging.make_dir(sandbox, target)
        else:
            await staging.write(sandbox, target, *content)
            count += 1
    return count


async def download_tree(sandbox: Sandbox, remote: str, local: Path) -> int:
    """Copy a folder out of the sandbox, regular files and folders only; the number of files."""
    entries = await sandbox.list_dir(remote)
    await asyncio.to_thread(local.mkdir, parents=True, exist_ok=True)
    count = 0
    for info in entries:
        source = f"{sandbox.resolve(remote)}/{info.name}"
        if info.kind == "directory":
            count += await download_tree(sandbox, source, local / info.name)
        elif info.kind == "file":
            data = await sandbox.read_file(source)
            await asyncio.to_thread((local / info.name).write_bytes, data)
            count += 1
    return count


def _inside(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "Not a directory", str(folder))
    return sorted(folder.rglob("*"))


def _content(path: Path) -> tuple[bytes, int] | None:
    """Bytes and permissions of a file; None for a folder."""
    if path.is_dir():
        return None
    return path.read_bytes(), path.stat().st_mode & 0o777
