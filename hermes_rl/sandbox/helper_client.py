"""The file operations of a sandbox, asked of the helper that runs inside it.

Owns turning the interface's file methods into requests. Large files travel as descriptors of files in
memory or of the file itself, never through a shell or a text encoding.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, cast

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import LIST_LIMIT, READ_LIMIT, FileInfo, Sandbox
from hermes_rl.sandbox.channel import Answer
from hermes_rl.sandbox.descriptors import copy_of, memory_file
from hermes_rl.sandbox.wire import FRAME_LIMIT

INLINE = FRAME_LIMIT // 2
IN_THREAD = 1 << 20
"""Bytes from which copying is left to a thread."""
LISTED_AT_ONCE = 1000
"""Entries of a folder from which understanding them is left to a thread."""


def as_field(text: str) -> bytes:
    """A path, an argument or a variable as the system takes it; `ValueError` where it cannot be one."""
    data = os.fsencode(text)
    if b"\0" in data:
        raise ValueError("embedded null byte")
    return data


class HelperFiles(Sandbox):
    """The file half of a sandbox with a helper."""

    @abstractmethod
    async def ask(
        self,
        operation: str,
        *fields: bytes,
        payload: bytes = b"",
        fds: Sequence[int] = (),
        request: int | None = None,
    ) -> Answer:
        """One request to the helper; raises `SandboxFailure` when the sandbox is gone."""

    @abstractmethod
    def lost(self) -> SandboxFailure:
        """The failure that tells why the sandbox is not there."""

    def _path(self, path: str) -> bytes:
        return as_field(self.resolve(path))

    async def read_file(self, path: str, *, limit: int = READ_LIMIT) -> bytes:
        with _named(path):
            answer = await self.ask("read", self._path(path), str(limit).encode())
        if not answer.fds:
            if len(answer.payload) > limit:
                raise OSError(errno.EFBIG, "File too large", path)
            return answer.payload
        try:
            return await _read_all(answer.fds[0], limit)
        finally:
            os.close(answer.fds[0])

    async def write_file(self, path: str, data: bytes, mode: int | None = None) -> None:
        fields = (self._path(path), b"" if mode is None else str(mode).encode())
        with _named(path):
            if len(data) <= INLINE:
                await self.ask("write", *fields, payload=data)
                return
            fd = await in_memory(data)
            try:
                await self.ask("write", *fields, fds=[fd])
            finally:
                os.close(fd)

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        with _named(path):
            answer = await self.ask("stat", self._path(path), b"1" if follow else b"0")
        return _info(answer.fields)

    async def list_dir(self, path: str, *, limit: int = LIST_LIMIT) -> list[FileInfo]:
        with _named(path):
            answer = await self.ask("list", self._path(path), str(limit).encode())
        if len(answer.fields) <= 5 * LISTED_AT_ONCE:
            return _entries(answer.fields)
        return await asyncio.to_thread(_entries, answer.fields)

    async def set_mode(self, path: str, mode: int) -> None:
        with _named(path):
            await self.ask("chmod", self._path(path), str(mode).encode())

    async def make_dir(self, path: str) -> None:
        with _named(path):
            await self.ask("mkdir", self._path(path))

    async def remove(self, path: str) -> None:
        with _named(path):
            await self.ask("remove", self._path(path))

    async def rename(self, source: str, target: str) -> None:
        with _named(source):
            await self.ask("rename", self._path(source), self._path(target))


async def in_memory(data: bytes) -> int:
    """A descriptor of a file in memory with `data`; a large one is filled in a thread."""
    if len(data) < IN_THREAD:
        return memory_file(data)
    filling = asyncio.ensure_future(asyncio.to_thread(memory_file, data))
    try:
        return await asyncio.shield(filling)
    except asyncio.CancelledError:
        # The thread goes on, and then nobody else knows of its descriptor.
        filling.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(filling: asyncio.Future[int]) -> None:
    if not filling.cancelled() and filling.exception() is None:
        os.close(filling.result())


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Put the path into the `OSError` of a request, as a local call would."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


def _entries(fields: Sequence[bytes]) -> list[FileInfo]:
    found = [_info(fields[i : i + 5]) for i in range(0, len(fields), 5)]
    return sorted(found, key=lambda info: info.name)


def _info(fields: Sequence[bytes]) -> FileInfo:
    kind = cast(Literal["file", "directory", "symlink", "other"], fields[1].decode())
    return FileInfo(os.fsdecode(fields[0]), kind, size=int(fields[2]), mode=int(fields[3]), mtime=float(fields[4]))


async def _read_all(fd: int, limit: int) -> bytes:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file")  # reading anything else may block
    if info.st_size < IN_THREAD:
        return _read(fd, limit)
    # The thread has a descriptor of its own: when we are cancelled, ours is closed while it still reads.
    return await asyncio.to_thread(_read_and_close, copy_of(fd), limit)


def _read_and_close(fd: int, limit: int) -> bytes:
    try:
        return _read(fd, limit)
    finally:
        os.close(fd)


def _read(fd: int, limit: int) -> bytes:
    # In one piece where the size is as told: copying pieces together would hold up all other threads.
    data = os.pread(fd, min(os.fstat(fd).st_size, limit) + 1, 0)
    while len(data) <= limit and (more := os.pread(fd, 1 << 22, len(data))):
        data += more
    if len(data) > limit:
        raise OSError(errno.EFBIG, "File too large")
    return data
