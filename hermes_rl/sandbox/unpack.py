"""Unpack an untrusted archive into the working directory; runs as a separate process.

Owns the selection of entries that become files: directories, regular files, and links, which are not resolved. No file
is written through a link or outside the directory, devices and pipes are omitted, and everything belongs to the user
who runs this. It reads a tar stream, compressed or not, from standard input and needs only Python's modules. Started by
root, it gets the user to change to first.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import sys
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import IO, Any, cast

COMPRESSIONS = {
    rb"\x1f\x8b\x08": "gzip",
    rb"BZh[1-9]1AY": "bz2",
    rb"\xfd7zXZ\x00": "lzma",
    rb"\x28\xb5\x2f\xfd": "compression.zstd",
}
"""Start of a compressed stream → the module that reads it."""


LARGEST, MOST = 64 << 30, 5_000_000
"""Maximum bytes and entries of an image."""
SPARE = 1 << 30
"""Bytes of the disk that stay free; of a small one, a twentieth."""


class UnsafeArchiveError(Exception):
    """The archive requests something outside its directory."""


def unpack(archive: tarfile.TarFile) -> None:
    """Unpack into the working directory; raises `UnsafeArchiveError`."""
    size = 0
    for count, entry in enumerate(archive):
        path = _inner_path(entry.name)
        size += entry.size
        disk = os.statvfs(".")
        if size > LARGEST or count > MOST:
            raise UnsafeArchiveError(f"it has more than {LARGEST >> 30} GiB or {MOST:,} entries")
        if entry.size + min(SPARE, disk.f_blocks * disk.f_frsize // 20) > disk.f_bavail * disk.f_frsize:
            raise UnsafeArchiveError("the disk is full")
        if path == "." or not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
            continue
        _make_parents(path)
        _create_entry(archive, entry, path)


def _create_entry(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: str) -> None:
    """Create one entry, replacing an earlier one of the archive."""
    folder = os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114
    if entry.isdir():
        if not folder:
            _discard_file(path)
            os.mkdir(path)  # noqa: PTH102
        os.chmod(path, entry.mode & 0o777 | 0o700)  # noqa: PTH101
        return
    if folder:
        raise UnsafeArchiveError(f"{entry.name!r} would replace a directory")
    _discard_file(path)
    if entry.issym():
        os.symlink(entry.linkname, path)  # noqa: PTH211
    elif entry.islnk():
        _make_link(_inner_path(entry.linkname), path, entry.name)
    else:
        _write_file(archive, entry, path)


def _write_file(archive: tarfile.TarFile, entry: tarfile.TarInfo, path: str) -> None:
    source = archive.extractfile(entry)
    if source is None:
        raise UnsafeArchiveError(f"{entry.name!r} has no content")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
        os.fchmod(fd, entry.mode & 0o777 | 0o600)
        os.utime(fd, (entry.mtime, entry.mtime))


def _make_link(target: str, path: str, name: str) -> None:
    _make_parents(target)
    if not os.path.isfile(target) or os.path.islink(target):  # noqa: PTH113, PTH114
        raise UnsafeArchiveError(f"{name!r} is a hard link to something that is not a file of the archive")
    os.link(target, path, follow_symlinks=False)


def _discard_file(path: str) -> None:
    if os.path.lexists(path):
        os.unlink(path)  # noqa: PTH108


def _inner_path(name: str) -> str:
    parts = PurePosixPath(name).parts
    components = [part for part in parts if part not in ("/", "//", ".")]
    if ".." in components:
        raise UnsafeArchiveError(f"{name!r} leads out of the archive")
    return "/".join(components) or "."


def _make_parents(path: str) -> None:
    """Make the directories above `path`; one that the archive made a link would lead elsewhere, and is refused."""
    above = ""
    for part in path.split("/")[:-1]:
        above = f"{above}/{part}" if above else part
        if os.path.islink(above):  # noqa: PTH114
            raise UnsafeArchiveError(f"{path!r} lies below {above!r}, which is a link")
        if not os.path.isdir(above):  # noqa: PTH112
            os.mkdir(above, 0o755)  # noqa: PTH102


def drop_privileges(uid: int) -> None:
    """Drop the rights of root. Only now: that user may not be able to read the modules, which are loaded by now."""
    for name in COMPRESSIONS.values():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def content(stream: Any) -> IO[bytes]:
    """Return the tar stream in a stream that may be compressed, also in parts; a cut or damaged one raises."""
    start = stream.peek(8)
    for beginning, name in COMPRESSIONS.items():
        if re.match(beginning, start):
            return cast(IO[bytes], importlib.import_module(name).open(stream))
    return cast(IO[bytes], stream)


def main() -> None:
    if len(sys.argv) > 1:
        drop_privileges(int(sys.argv[1]))
    try:
        with content(sys.stdin.buffer) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            unpack(archive)
            while stream.read(1 << 20):  # checksums are at the end
                pass
    except (UnsafeArchiveError, tarfile.TarError, OSError, EOFError, ImportError, zlib.error) as error:
        sys.stderr.write(str(error))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
