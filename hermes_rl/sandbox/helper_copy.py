"""Make the files of one sandbox equal to the files of another, by the helpers of both; this module runs there (see
`helper`).

Both were made from the same configuration. The target lists its files (`inventory`), the source sends the differences
(`send`), and the target applies them (`take`), through pipes: no data is held in between, and the host reads none of
it. A file counts as unchanged if mode, size and time of change are the same and that time is before the sandbox's
start, as for unmodified files of an image: no program can choose a time of change. Read-only mounts, file systems that
the kernel makes up, and files that the user of the sandboxes may not change, are left unchanged. Sockets, devices and
extended attributes are not copied.
"""

from __future__ import annotations

import errno
import posix
import stat
import time

from hermes_rl.sandbox.helper_files import OPEN_FLAGS, remove, write_all
from hermes_rl.sandbox.wire import encode_number, pack, unpack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from hermes_rl.sandbox.helper_files import Answer

MOST = 1_000_000
"""Maximum files and directories of a sandbox that are copied."""
CHUNK = 1 << 16
BEFORE = time.time_ns() - 1_000_000_000
"""Nanoseconds since 1970; an earlier change was not made in this sandbox. Changes of both sandboxes within one tick of
the kernel's clock, some milliseconds, have the same time.
"""
MADE_UP = (b"proc", b"sysfs", b"cgroup", b"cgroup2", b"devpts", b"mqueue", b"devtmpfs")
"""Kinds of file systems that the kernel makes up."""
END, GONE, FOLDER, FILE, LINK, TWIN, FIFO = b"end", b"gone", b"folder", b"file", b"link", b"twin", b"fifo"


class Pipe:
    """One end of a pipe of records, each a message of `wire`, some followed by the bytes of a file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.pending = b""

    def put(self, *fields: bytes) -> None:
        self.pending += pack(list(fields))
        if len(self.pending) > CHUNK:
            self.flush()

    def flush(self) -> None:
        pending, self.pending = self.pending, b""
        write_all(self.fd, pending)

    def get(self) -> list[bytes]:
        """Return the next record; raises `OSError` if the pipe has ended without one."""
        size = int.from_bytes(self.exactly(4), "big")
        return unpack(size.to_bytes(4, "big") + self.exactly(size))[0]

    def exactly(self, size: int) -> bytes:
        while len(self.pending) < size:
            more = posix.read(self.fd, CHUNK)
            if not more:
                raise OSError(errno.EPROTO, "The other sandbox has not sent all of its files")
            self.pending += more
        data, self.pending = self.pending[:size], self.pending[size:]
        return data


# ------------------------------------------------------------------ the files of a sandbox


def _mount_points() -> dict[bytes, bool]:
    """Return the mount points, each with True if the content belongs to the sandbox."""
    fd, text = posix.open(b"/proc/self/mountinfo", posix.O_RDONLY | posix.O_CLOEXEC), b""
    try:
        while more := posix.read(fd, CHUNK):
            text += more
    finally:
        posix.close(fd)
    points = {}
    for line in text.splitlines():
        fields = line.split(b" ")
        point = fields[4]
        for code, letter in ((b"\\040", b" "), (b"\\011", b"\t"), (b"\\012", b"\n"), (b"\\134", b"\\")):
            point = point.replace(code, letter)
        kind = fields[fields.index(b"-") + 1]
        points[point] = b"rw" in fields[5].split(b",") and kind not in MADE_UP
    return points


def _walk_files(top: bytes, opened: list[tuple[bytes, int]]) -> Iterator[tuple[bytes, posix.stat_result]]:
    """Yield all files of the sandbox below `top`, each directory before its content: path from there, and status.

    Directories without permissions for their owner are opened, and added to `opened` with their permissions.
    """
    top, points, count = top.rstrip(b"/"), _mount_points(), 0
    inner_mounts = (
        point for point, is_own in points.items() if is_own and point.startswith(top + b"/") and point != b"/"
    )
    pending = [top, *filter(_is_real_folder, inner_mounts)]
    while pending:
        folder = pending.pop()
        try:
            names = _list_names(folder or b"/", opened)
        except PermissionError:
            continue
        for name in names:
            path = folder + b"/" + name
            if path in points:
                continue
            count += 1
            if count > MOST:
                raise OSError(errno.E2BIG, f"More than {MOST} files")
            info = posix.lstat(path)
            yield path[len(top) + 1 :], info
            if stat.S_ISDIR(info.st_mode):
                pending.append(path)


def _is_real_folder(path: bytes) -> bool:
    try:
        return stat.S_ISDIR(posix.lstat(path).st_mode)
    except OSError:
        return False


def _list_names(folder: bytes, opened: list[tuple[bytes, int]]) -> list[bytes]:
    if not posix.access(folder, posix.R_OK | posix.X_OK):
        mode = stat.S_IMODE(posix.lstat(folder).st_mode)
        posix.chmod(folder, mode | 0o700)
        opened.append((folder, mode))
    return posix.listdir(folder)


def _close_folders(opened: list[tuple[bytes, int]]) -> None:
    for folder, mode in reversed(opened):
        posix.chmod(folder, mode)


def _fingerprint_of(info: posix.stat_result) -> tuple[bytes, bytes, bytes]:
    return encode_number(info.st_mode), encode_number(info.st_size), encode_number(info.st_ctime_ns)


def inventory(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Write the inventory: top; a pipe, which gets a record of each file."""
    pipe, opened = Pipe(fds[0]), []  # type: tuple[Pipe, list[tuple[bytes, int]]]
    try:
        for path, info in _walk_files(fields[0], opened):
            pipe.put(path, *_fingerprint_of(info))
    finally:
        _close_folders(opened)
    pipe.put(END)
    pipe.flush()
    return [], b"", []


# ------------------------------------------------------------------ the source


def send(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Send the differences: top; a pipe with the inventory of the target, and one that gets the changes."""
    top, inventory, pipe = fields[0].rstrip(b"/"), Pipe(fds[0]), Pipe(fds[1])
    target_fingerprints = {}
    while len(record := inventory.get()) > 1:
        target_fingerprints[record[0]] = tuple(record[1:])
    opened: list[tuple[bytes, int]] = []
    try:
        source_files = list(_walk_files(fields[0], opened))
        for path in sorted(target_fingerprints.keys() - {path for path, _ in source_files}):
            pipe.put(GONE, path)
        twins: dict[tuple[int, int], bytes] = {}
        for path, info in source_files:
            first = twins.setdefault((info.st_dev, info.st_ino), path) if info.st_nlink > 1 else path
            if info.st_ctime_ns > BEFORE or target_fingerprints.get(path) != _fingerprint_of(info):
                _send_file(pipe, top, path, info, b"" if stat.S_ISDIR(info.st_mode) or first == path else first)
    finally:
        _close_folders(opened)
    pipe.put(END)
    pipe.flush()
    return [], b"", []


def _send_file(pipe: Pipe, top: bytes, path: bytes, info: posix.stat_result, twin: bytes) -> None:
    mode, full = info.st_mode, top + b"/" + path
    status = [
        encode_number(stat.S_IMODE(mode)),
        encode_number(info.st_uid),
        encode_number(info.st_gid),
        encode_number(info.st_mtime_ns),
    ]
    if twin:
        pipe.put(TWIN, path, twin)
    elif stat.S_ISREG(mode):
        try:
            fd = _open_any(full, stat.S_IMODE(mode))
        except PermissionError:
            return  # a file that the user of the sandbox may not read is unchanged
        try:
            pipe.put(FILE, path, *status, encode_number(info.st_size))
            pipe.flush()
            _send_content(pipe.fd, fd, info.st_size)
        finally:
            posix.close(fd)
    elif stat.S_ISDIR(mode):
        pipe.put(FOLDER, path, *status)
    elif stat.S_ISLNK(mode):
        pipe.put(LINK, path, posix.readlink(full))
    elif stat.S_ISFIFO(mode):
        pipe.put(FIFO, path, *status)


def _open_any(path: bytes, mode: int) -> int:
    """Open a file, even one without permissions for its owner."""
    flags = posix.O_RDONLY | posix.O_NOFOLLOW | OPEN_FLAGS
    try:
        return posix.open(path, flags)
    except PermissionError:
        posix.chmod(path, mode | 0o400)
        try:
            return posix.open(path, flags)
        finally:
            posix.chmod(path, mode)


def _send_content(to: int, fd: int, size: int) -> None:
    """Write `size` bytes of a file into a pipe; the missing bytes of a file that has become shorter are zeros."""
    offset = 0
    while offset < size:
        sent = posix.sendfile(to, fd, offset, min(size - offset, 1 << 24))
        if not sent:
            write_all(to, bytes(size - offset))
            return
        offset += sent


# ------------------------------------------------------------------ the target


def take(fields: list[bytes], payload: bytes, fds: list[int]) -> Answer:
    """Apply the changes: top; a pipe with the changes."""
    target = Target(fields[0].rstrip(b"/"), Pipe(fds[0]))
    while (record := target.pipe.get())[0] != END:
        target.change(*record)
    # Changes in a directory change its times, and a closed one accepts none: so directories come last, the inner ones
    # first.
    for path, status in reversed(target.folders):
        if _is_real_folder(path):
            _set_status(path, status)
    return [], b"", []


class Target:
    """Files to make equal to the files of another sandbox."""

    def __init__(self, top: bytes, pipe: Pipe) -> None:
        self.top, self.pipe = top, pipe
        self.folders: list[tuple[bytes, list[bytes]]] = []
        """Directories that get their status at the end."""

    def change(self, kind: bytes, path: bytes, *status: bytes) -> None:
        """Apply one change, unless the user of the sandbox may not make it."""
        full, fd, is_applied = self.top + b"/" + path, -1, True
        try:
            if kind != FOLDER or not _is_real_folder(full):
                self.clear(full)
            if kind == FOLDER:
                self.make_folder(full, list(status))
            elif kind == FILE:
                fd = posix.open(full, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | OPEN_FLAGS, 0o600)
            elif kind == LINK:
                posix.symlink(status[0], full)
            elif kind == TWIN:
                posix.link(self.top + b"/" + status[0], full, follow_symlinks=False)
            elif kind == FIFO:
                posix.mkfifo(full, 0o600)
        except PermissionError:
            is_applied = False
        if kind == FILE:
            self.fill(fd, int(status[4]))
        if is_applied and kind in (FILE, FIFO):
            _set_status(full, list(status))

    def make_folder(self, path: bytes, status: list[bytes]) -> None:
        if not _is_real_folder(path):
            posix.mkdir(path, 0o700)
        self.folders.append((path, status))

    def fill(self, fd: int, size: int) -> None:
        """Write the bytes that come next, and close the file; -1 is none. Zeros stay holes, which take no space."""
        try:
            self.write(fd, size)
        finally:
            if fd >= 0:
                posix.close(fd)

    def write(self, fd: int, size: int) -> None:
        remaining = size
        while remaining:
            data = self.pipe.pending[:remaining] or posix.read(self.pipe.fd, min(remaining, CHUNK))
            if not data:
                raise OSError(errno.EPROTO, "The other sandbox has not sent all of a file")
            self.pipe.pending = self.pipe.pending[len(data) :]
            remaining -= len(data)
            if fd >= 0 and data.strip(b"\0"):
                write_all(fd, data)
            elif fd >= 0:
                posix.lseek(fd, len(data), 1)
        if fd >= 0:
            posix.ftruncate(fd, size)

    def clear(self, path: bytes) -> None:
        """Remove `path`, and make its parent directory writable."""
        folder = path.rpartition(b"/")[0] or b"/"
        if not _is_real_folder(folder):
            return  # it was removed with a directory further above
        if not posix.access(folder, posix.W_OK | posix.X_OK):
            info = posix.lstat(folder)
            status = stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns
            self.folders.append((folder, [encode_number(each) for each in status]))
            posix.chmod(folder, stat.S_IMODE(info.st_mode) | 0o700)
        try:
            remove([path], b"", [])
        except FileNotFoundError:
            return


def _set_status(path: bytes, status: list[bytes]) -> None:
    """Give a file its owner, mode and time, as far as this user may."""
    mode, uid, gid, mtime = map(int, status[:4])
    info = posix.lstat(path)
    try:
        if (info.st_uid, info.st_gid) != (uid, gid):
            posix.chown(path, uid, gid, follow_symlinks=False)
    except PermissionError:
        pass  # an owner whom this user cannot name has made nothing there
    try:
        posix.chmod(path, mode)
        posix.utime(path, ns=(mtime, mtime))
    except PermissionError:
        pass


OPERATIONS = {b"inventory": inventory, b"send": send, b"take": take}
