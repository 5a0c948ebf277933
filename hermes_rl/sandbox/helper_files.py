"""File operations of the helper inside a sandbox; this module runs there, not on the host (see `helper`).

It reads, writes and lists by system calls, so that no shell can misread a name, and no file of the agent (a FIFO, a
device, an endless file) can make the helper wait. It does not open files that the kernel makes up: what it would find
in /proc describes itself, process 1, which no command of the agent may see or change. Errors are the `OSError` of the
system. Arguments and results are the fields of `wire`.
"""

# ruff: noqa: PTH123

from __future__ import annotations

import errno
import posix
import stat

from hermes_rl.sandbox.wire import FRAME_LIMIT, encode_number

OPEN_FLAGS = posix.O_NONBLOCK | posix.O_NOCTTY | posix.O_CLOEXEC

TYPE_CHECKING = False  # importing `typing` for it would cost more than all of the above
if TYPE_CHECKING:
    Answer = tuple[list[bytes], bytes, list[int]]
    """Fields, raw bytes, descriptors."""


KERNEL = (b"/proc", b"/sys")
KERNEL_FILE_ERROR = "Files of the kernel are not for this tool; look at /proc and /sys with a command"


def _refuse_kernel(path: bytes) -> None:
    # An object without a path, such as a pipe or a file in memory, is reached by a link in /proc alone, and called
    # "pipe:[12]".
    has_path = path.startswith(b"/") and not path.startswith(b"/memfd:")
    if not has_path or any(path == top or path.startswith(top + b"/") for top in KERNEL):
        raise OSError(errno.EACCES, KERNEL_FILE_ERROR)


def _open_checked(path: bytes, flags: int, mode: int = 0o644) -> int:
    """Open a file that is not the kernel's; the opened file is checked, so that no link and no race leads to one."""
    fd = posix.open(path, flags | OPEN_FLAGS, mode)
    try:
        _refuse_kernel(posix.readlink(b"/proc/self/fd/%d" % fd))
    except BaseException:  # the caller never gets this descriptor
        posix.close(fd)
        raise
    return fd


def _refuse_folder(path: bytes) -> None:
    """Refuse a path in a directory of the kernel, even through links."""
    _refuse_kernel(path)
    folder = path.rpartition(b"/")[0] or b"/"
    if is_folder(folder):
        posix.close(_open_checked(folder, posix.O_PATH))


def _open_path(path: bytes, flags: int, mode: int = 0o644) -> int:
    _refuse_folder(path)
    return _open_checked(path, flags, mode)


def _open_regular(path: bytes, flags: int, mode: int = 0o644) -> tuple[int, posix.stat_result]:
    """Open a regular file, and no other kind of file that may be at `path`."""
    fd = _open_path(path, flags, mode)
    info = posix.fstat(fd)
    if stat.S_ISREG(info.st_mode):
        return fd, info
    posix.close(fd)
    code = errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL
    raise OSError(code, "Is a directory" if code == errno.EISDIR else "Not a regular file")


def is_folder(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(posix.stat(path).st_mode)
    except OSError:
        return False


def read(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Read a file: path, limit → the bytes of a small file, or a descriptor of a large one."""
    fd, info = _open_regular(fields[0], posix.O_RDONLY)
    try:
        if info.st_size > int(fields[1]):
            raise OSError(errno.EFBIG, f"File too large ({info.st_size} bytes)")
        if info.st_size > FRAME_LIMIT // 2:
            return [], b"", [posix.dup(fd)]
        return [], posix.read(fd, FRAME_LIMIT // 2 + 1), []
    finally:
        posix.close(fd)


def write(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Write a file: path, mode or empty; the bytes, or a descriptor of a file that holds them."""
    path, mode = fields[0], fields[1]
    _refuse_kernel(path)
    _make_folders(path.rpartition(b"/")[0] or b"/")
    fd, info = _open_regular(path, posix.O_WRONLY | posix.O_CREAT)
    try:
        if info.st_size:
            posix.ftruncate(fd, 0)
        if fds:
            _copy_content(fds[0], fd)
        else:
            write_all(fd, payload)
        if mode:
            posix.fchmod(fd, int(mode))
    finally:
        posix.close(fd)
    return [], b"", []


def _copy_content(source: int, target: int) -> None:
    offset = 0
    while True:
        sent = posix.sendfile(target, source, offset, 1 << 24)
        if not sent:
            return
        offset += sent


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[posix.write(fd, view) :]


def _file_entry(name: bytes, info: posix.stat_result) -> list[bytes]:
    kinds = ((stat.S_ISREG, b"file"), (stat.S_ISDIR, b"directory"), (stat.S_ISLNK, b"symlink"))
    kind = next((word for test, word in kinds if test(info.st_mode)), b"other")
    mtime = repr(info.st_mtime).encode()
    return [name, kind, encode_number(info.st_size), encode_number(stat.S_IMODE(info.st_mode)), mtime]


def status(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Return a status: path, "1" to follow a symlink → its entry."""
    fd = _open_path(fields[0], posix.O_PATH | (0 if fields[1] == b"1" else posix.O_NOFOLLOW))
    try:
        return _file_entry(fields[0].rpartition(b"/")[2], posix.fstat(fd)), b"", []
    finally:
        posix.close(fd)


def list_folder(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """List a directory: path, limit → its entries, five fields each."""
    entry_fields: list[bytes] = []
    max_fields = 5 * int(fields[1])
    fd = _open_path(fields[0], posix.O_RDONLY | posix.O_DIRECTORY)
    try:
        with posix.scandir(b"/proc/self/fd/%d" % fd) as entries:
            for entry in entries:
                if len(entry_fields) >= max_fields:
                    raise OSError(errno.E2BIG, f"More than {max_fields // 5} entries")
                try:
                    entry_fields += _file_entry(entry.name, entry.stat(follow_symlinks=False))
                except FileNotFoundError:
                    continue  # another process removed it meanwhile
        return entry_fields, b"", []
    finally:
        posix.close(fd)


def make_folder(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    _refuse_kernel(fields[0])
    _make_folders(fields[0])
    return [], b"", []


def _make_folders(path: bytes) -> None:
    """Make a directory, and its missing parents; an existing one is not an error."""
    missing = [path]
    while (above := missing[-1].rstrip(b"/").rpartition(b"/")[0]) and not posix.access(above, posix.F_OK):
        missing.append(above)
    for folder in reversed(missing):
        try:
            posix.mkdir(folder)
        except OSError:
            if not is_folder(folder):
                raise


def set_mode(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Set a mode: path, permission bits."""
    _refuse_folder(fields[0])
    posix.chmod(fields[0], int(fields[1]))
    return [], b"", []


def rename(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    for path in fields[:2]:
        _refuse_folder(path)
    posix.rename(fields[0], fields[1])
    return [], b"", []


def remove(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Remove a path: a file, a symlink, or a directory with everything in it."""
    _refuse_folder(fields[0])
    if not stat.S_ISDIR(posix.lstat(fields[0]).st_mode):
        posix.unlink(fields[0])
        return [], b"", []
    pending = [fields[0]]
    while pending:
        folders = _empty_folder(pending[-1])
        if folders:
            pending += folders
        else:
            posix.rmdir(pending.pop())
    return [], b"", []


def _empty_folder(folder: bytes) -> list[bytes]:
    """Remove all files of a directory and return its subdirectories.

    They belong to this user, so permissions can be changed.
    """
    if not posix.access(folder, posix.R_OK | posix.W_OK | posix.X_OK):
        posix.chmod(folder, 0o700)
    with posix.scandir(folder) as entries:
        children = list(entries)
    for entry in children:
        if not entry.is_dir(follow_symlinks=False):
            posix.unlink(entry.path)
    return [entry.path for entry in children if entry.is_dir(follow_symlinks=False)]


def control_group(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Read a file below /sys/fs/cgroup → its content; only for the host, which names no file that an agent has
    chosen. A volume of an image may be mounted there, with files that claim other limits.
    """
    fd = posix.open(b"/sys/fs/cgroup/" + fields[0], posix.O_RDONLY | OPEN_FLAGS)
    try:
        if _mount_kind(fd) not in (b"cgroup", b"cgroup2"):
            raise OSError(errno.EINVAL, "Not a control group")
        return [], posix.read(fd, 4096), []
    finally:
        posix.close(fd)


def _mount_kind(fd: int) -> bytes:
    """Return the kind of file system of an open file."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        mount = next(line.split()[1] for line in file if line.startswith(b"mnt_id:"))
    with open("/proc/self/mountinfo", "rb") as file:
        return next(line.partition(b" - ")[2].split()[0] for line in file if line.split()[0] == mount)


OPERATIONS = {
    b"control group": control_group,
    b"read": read,
    b"write": write,
    b"stat": status,
    b"list": list_folder,
    b"mkdir": make_folder,
    b"chmod": set_mode,
    b"rename": rename,
    b"remove": remove,
}
