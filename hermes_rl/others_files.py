"""Read untrusted files: run directories, task directories, and other files from unknown sources.

Such a directory may contain links to files of this host, pipes without a writer, endless devices, and files of any
size. Therefore only this module opens its files: no link is followed, only regular files are opened, and the size is
limited. Files that a spec or an option names are opened here too, but through links.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TypeVar

from hermes_rl.errors import UserError
from hermes_rl.values import replace_surrogates

T = TypeVar("T")
LARGEST = 64 << 20
"""Maximum bytes of a file that is read completely, unless its reader has another limit."""
MOST_FILES = 50_000
LARGEST_DIRECTORY = 1 << 30
"""Maximum number of files and directories below a directory that is read completely, and bytes of its files."""
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class RefusedFileError(UserError):
    """A file that is not read: it is not a regular file, it is reached through a link, or it is too large."""


def open_file(path: Path, top: Path | None = None) -> BufferedReader:
    """Open a regular file for reading, without following a link.

    Args:
        path: path of the file.
        top: a directory above the file, which may be a link itself. None: the file's own directory.

    Raises:
        RefusedFileError: the path or a directory between `top` and it is a link, or it is not a regular file.
        OSError: same as for `open`, if there is no such file or it must not be read.
    """
    top = path.parent if top is None else top
    names = path.relative_to(top).parts if path.is_relative_to(top) else ()
    if not names or ".." in names:
        raise RefusedFileError(f"{path}: is not below {top}")
    with ExitStack() as opened:
        directory = os.open(top, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.callback(os.close, directory)
        try:
            for name in names[:-1]:
                directory = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                opened.callback(os.close, directory)
            # A pipe would wait for a writer, and a terminal would become this program's.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            descriptor = os.open(names[-1], flags, dir_fd=directory)
        except OSError as error:
            if error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and _has_link(top, names[:-1])):
                raise RefusedFileError(
                    f"{path}: is a link or inside a linked directory; links are not followed"
                ) from None
            if error.errno == errno.ENXIO:
                raise RefusedFileError(f"{path}: is a socket or a device, not a file") from None
            raise
        opened.callback(os.close, descriptor)
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise RefusedFileError(f"{path}: is {_kind(mode)}; expected a file")
        return open(os.dup(descriptor), "rb")  # noqa: PTH123 - the caller closes it


def read_file(path: Path, top: Path | None = None, limit: int = LARGEST) -> bytes:
    """Return the bytes of a regular file; see `open_file`.

    Raises:
        RefusedFileError: as in `open_file`, or there are more than `limit` bytes.
    """
    with open_file(path, top) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(min(limit, max(size, LARGEST)) + 1)  # space for as many bytes is reserved
    if len(data) > limit:
        raise RefusedFileError(f"{path}: has more than {limit} bytes, and is not read")
    return data


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file that a spec or an option names; links are followed.

    Raises:
        OSError: it is not a regular file, or as for `open`; the error contains the reason.
    """
    return _through_links(path, open_file)


def read_regular(path: Path, limit: int = LARGEST) -> bytes:
    """Return the bytes of a file, as for `open_regular`; raises OSError too if there are more than `limit`."""
    return _through_links(path, partial(read_file, limit=limit))


def _through_links(path: Path, read: Callable[[Path], T]) -> T:
    real = Path(os.path.realpath(path))
    try:
        return read(real)
    except RefusedFileError as error:
        raise OSError(errno.EINVAL, str(error).removeprefix(f"{real}: "), str(path)) from None


def append_to(path: Path) -> FileIO:
    """Open a regular file or a new one, through links, to append to it; raises OSError as `open_regular` does."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, f"is {_kind(path.stat().st_mode)}; expected a file", str(path))
    flags = os.O_NONBLOCK | os.O_NOCTTY
    return open(path, "ab", buffering=0, opener=lambda name, mode: os.open(name, mode | flags, 0o666))


def read_text(path: Path, top: Path | None = None, limit: int = LARGEST) -> str:
    """Return a regular file as text; see `read_file`. Raises `RefusedFileError` too if it is not UTF-8."""
    try:
        return read_file(path, top, limit).decode()
    except UnicodeDecodeError as error:
        raise RefusedFileError(f"{path}: is not UTF-8 (byte {error.start})") from None


def is_file(path: Path, top: Path | None = None) -> bool:
    """Return True if `open_file` would open a path."""
    try:
        open_file(path, top).close()
    except (OSError, RefusedFileError):
        return False
    return True


def list_below(directory: Path, top: Path, is_excluded: Callable[[Path], bool] | None = None) -> dict[Path, int]:
    """Return the paths below a directory in order, with `st_mode` of each, without following a link.

    Paths for which `is_left_out` returns True are omitted and do not count, but paths below them may be included.

    Raises:
        RefusedFileError: the directory is not below `top`, or is reached through a link; a name is not UTF-8; there are
            more than `MOST_FILES`, or more than `LARGEST_DIRECTORY` bytes in them.
        OSError: there is no such directory or it must not be read.
    """
    names = directory.relative_to(top).parts if directory.is_relative_to(top) else ("..",)
    if ".." in names or _has_link(top, names):
        raise RefusedFileError(f"{directory}: is a link or inside a linked directory; links are not followed")
    modes, pending, size = dict[Path, int](), [directory], 0
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                path, status = Path(entry.path), entry.stat(follow_symlinks=False)
                pending += [path] if stat.S_ISDIR(status.st_mode) else []
                if is_excluded is not None and is_excluded(path):
                    continue
                modes[path] = status.st_mode
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
                if not entry.name.isascii() and replace_surrogates(entry.name) != entry.name:
                    raise RefusedFileError(f"{path}: its name is not UTF-8")
                if len(modes) > MOST_FILES or size > LARGEST_DIRECTORY:
                    limits = f"{MOST_FILES} files, or than {LARGEST_DIRECTORY >> 30} GiB in them"
                    raise RefusedFileError(f"{directory}: has more than {limits}, and is not read")
    return dict(sorted(modes.items()))


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "not a regular file")


def _has_link(top: Path, names: tuple[str, ...]) -> bool:
    """Return True if one of the directories below `top` is a link."""
    directories = (top.joinpath(*names[:count]) for count in range(1, len(names) + 1))
    return any(directory.is_symlink() for directory in directories)
