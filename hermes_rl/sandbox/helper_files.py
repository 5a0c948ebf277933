"""The file operations of the helper inside a sandbox; this module runs there, not on the host (see `helper`).

It reads, writes and lists by system calls, so that no name can be misread by a shell, and nothing that the agent plants
(a FIFO, a device, an endless file) can make the helper wait. Errors are the `OSError` that the system gives. Arguments
and results are the fields of `wire`.
"""

# ruff: noqa: PTH101, PTH103, PTH104, PTH106, PTH108, PTH116, PTH119, PTH120

from __future__ import annotations

import errno
import os
import stat

from hermes_rl.sandbox.wire import FRAME_LIMIT, number

OPEN_FLAGS = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

TYPE_CHECKING = False  # importing `typing` for it would cost more than all of the above
if TYPE_CHECKING:
    Answer = tuple[list[bytes], bytes, list[int]]
    """Fields, raw bytes, descriptors."""


def _regular(path: bytes, flags: int, mode: int = 0o644) -> tuple[int, os.stat_result]:
    """Open a regular file, and nothing else that may be at `path`."""
    fd = os.open(path, flags | OPEN_FLAGS, mode)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode):
        return fd, info
    os.close(fd)
    code = errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL
    raise OSError(code, "Is a directory" if code == errno.EISDIR else "Not a regular file")


def read(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """path, limit → the bytes of a small file, or a descriptor of a large one."""
    fd, info = _regular(fields[0], os.O_RDONLY)
    try:
        if info.st_size > int(fields[1]):
            raise OSError(errno.EFBIG, f"File too large ({info.st_size} bytes)")
        if info.st_size > FRAME_LIMIT // 2:
            return [], b"", [os.dup(fd)]
        return [], os.read(fd, FRAME_LIMIT // 2 + 1), []
    finally:
        os.close(fd)


def write(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """path, mode or empty; the bytes, or a descriptor of a file that holds them."""
    path, mode = fields[0], fields[1]
    os.makedirs(os.path.dirname(path) or b"/", exist_ok=True)
    fd, info = _regular(path, os.O_WRONLY | os.O_CREAT)
    try:
        if info.st_size:
            os.ftruncate(fd, 0)
        if fds:
            _copy(fds[0], fd)
        else:
            write_all(fd, payload)
        if mode:
            os.fchmod(fd, int(mode))
    finally:
        os.close(fd)
    return [], b"", []


def _copy(source: int, target: int) -> None:
    offset = 0
    while True:
        sent = os.sendfile(target, source, offset, 1 << 24)
        if not sent:
            return
        offset += sent


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _entry(name: bytes, info: os.stat_result) -> list[bytes]:
    kinds = ((stat.S_ISREG, b"file"), (stat.S_ISDIR, b"directory"), (stat.S_ISLNK, b"symlink"))
    kind = next((word for test, word in kinds if test(info.st_mode)), b"other")
    mtime = repr(info.st_mtime).encode()
    return [name, kind, number(info.st_size), number(stat.S_IMODE(info.st_mode)), mtime]


def status(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """path, "1" to follow a symlink → its entry."""
    follow = fields[1] == b"1"
    return _entry(os.path.basename(fields[0]), os.stat(fields[0], follow_symlinks=follow)), b"", []


def list_folder(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """path, limit → the entries of a folder, five fields each."""
    found: list[bytes] = []
    most = 5 * int(fields[1])
    with os.scandir(fields[0]) as entries:
        for entry in entries:
            if len(found) >= most:
                raise OSError(errno.E2BIG, f"More than {most // 5} entries")
            try:
                found += _entry(entry.name, entry.stat(follow_symlinks=False))
            except FileNotFoundError:
                continue  # removed by somebody else while we looked
    return found, b"", []


def make_folder(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    os.makedirs(fields[0], exist_ok=True)
    return [], b"", []


def set_mode(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """path, permission bits."""
    os.chmod(fields[0], int(fields[1]))
    return [], b"", []


def rename(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    os.rename(fields[0], fields[1])
    return [], b"", []


def remove(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """path of a file, a symlink, or a folder, which goes with everything in it."""
    if not stat.S_ISDIR(os.lstat(fields[0]).st_mode):
        os.unlink(fields[0])
        return [], b"", []
    pending = [fields[0]]
    while pending:
        folders = _empty(pending[-1])
        if folders:
            pending += folders
        else:
            os.rmdir(pending.pop())
    return [], b"", []


def _empty(folder: bytes) -> list[bytes]:
    """Remove what is no folder; the folders that are left. Permissions that forbid it are those of our own files."""
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        found = list(entries)
    for entry in found:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
    return [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]


OPERATIONS = {
    b"read": read,
    b"write": write,
    b"stat": status,
    b"list": list_folder,
    b"mkdir": make_folder,
    b"chmod": set_mode,
    b"rename": rename,
    b"remove": remove,
}
