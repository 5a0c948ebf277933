"""Descriptors that the host makes for a sandbox: files in memory, pipes, pairs of sockets, copies.

Owns that a machine which has none left is our failure. The same `OSError` from inside a sandbox would be an answer to
the agent, so it must not look like one.

Whatever is handed into a sandbox is an open file description that the agent can change: whether it blocks, whom it
signals, where it stands. So the host reads and waits only at descriptions that no sandbox has. `reopened` makes
another description of the same pipe, to be handed in instead of the host's own.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from hermes_rl.errors import SandboxFailure


@contextmanager
def ours(what: str) -> Iterator[None]:
    """Turn an `OSError` inside of the block into a failure of this machine."""
    try:
        yield
    except OSError as error:
        raise SandboxFailure(f"{what}: {error.strerror or error}") from error


def memory_file(data: bytes, name: str = "data") -> int:
    """A descriptor of an unnamed file in memory that holds `data`, at its start."""
    with _new_file(name) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


def fixed_file(size: int, name: str) -> int:
    """A descriptor of an unnamed file in memory of zeros, which nobody can make larger or smaller."""
    with _new_file(name, os.MFD_ALLOW_SEALING) as fd:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@contextmanager
def _new_file(name: str, flags: int = 0) -> Iterator[int]:
    """A new file in memory, which is closed where the block does not end well."""
    with ours("this machine cannot make a file in memory"), ExitStack() as unfinished:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
        unfinished.callback(os.close, fd)
        yield fd
        unfinished.pop_all()


def pipe() -> tuple[int, int]:
    """Reading and writing end."""
    with ours("this machine cannot make a pipe"):
        return os.pipe2(os.O_CLOEXEC)


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets of the family AF_UNIX."""
    with ours("this machine cannot make a pair of sockets"):
        return socket.socketpair(socket.AF_UNIX, kind)


def copy_of(fd: int) -> int:
    """Another descriptor of the same open file description."""
    with ours("this machine cannot copy a descriptor"):
        return os.dup(fd)


def reopened(fd: int, flags: int) -> int:
    """A descriptor of the same pipe with an open file description of its own."""
    with ours("this machine cannot open a pipe anew"):
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)
