"""Root file systems for bubblewrap: a directory, or an archive that is unpacked once into a cache.

This module finds them, and ensures that their files belong to the agent's user outside the sandbox: only then can the
agent change its copy. A directory of another user (for root always, whose sandboxes run as another user) is copied into
the cache for that. The cache is never changed; sandboxes write into a layer above it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hermes_rl.errors import UserError
from hermes_rl.repositories.cache import cache_home
from hermes_rl.sandbox.launcher import isolated, own_python

OUTER_UID = 65534
"""User id on the host of root's sandboxes."""
Feed = Callable[[Path, IO[bytes]], None]
"""Writes the content of a path into a pipe, as a tar stream."""
MOST_NAME = 300
"""Maximum characters of an image's name in a message."""
ZSTANDARD = b"\x28\xb5\x2f\xfd"


def cache_folder() -> Path:
    """Return the directory of unpacked images and similar data between runs; see `cache_home`.

    Raises `UserError` if root's sandboxes run as a user who may not enter the directory.
    """
    folder = cache_home()
    closed = [above for above in folder.parents if above.exists() and not above.stat().st_mode & 0o001]
    if os.geteuid() == 0 and closed:
        raise UserError(f"sandboxes of root run as another user, who may not enter {closed[0]}: set XDG_CACHE_HOME")
    return folder


def open_to_all(folder: Path) -> bool:
    """Return True if every user may enter a directory."""
    return all(each.stat().st_mode & 0o001 for each in (folder, *folder.parents))


@functools.cache
def _lock_of(source: str) -> threading.Lock:
    return threading.Lock()


def ready_image(source: str) -> Image:
    """Return an image whose directory can be mounted below a sandbox; blocks while it is unpacked.

    Raises `UserError` if there is no such directory or archive, or the archive cannot be used.
    """
    path = Path(source)
    try:
        stamp = path.stat()
        if not (stat.S_ISREG(stamp.st_mode) or stat.S_ISDIR(stamp.st_mode)):
            raise ValueError("it is neither a file nor a folder")
        with _lock_of(source):
            return _ready_image(path.resolve(), stamp.st_mtime_ns, stamp.st_size, stamp.st_ino)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        problem = error.strerror if isinstance(error, OSError) else str(error)
        file = error.filename if isinstance(error, OSError) else None
        location = f" ({file})" if file is not None and str(file) != source else ""
        raise UserError(
            f"sandbox.image {source[:MOST_NAME]}: {problem}{location}; for bubblewrap it is a folder or an archive "
            "(tar, "
            "tar.gz, tar.xz, tar.zst) with an unpacked root file system, all of which this user can read"
        ) from error


@dataclass(frozen=True)
class Image:
    """An image; `digest` is ``sha256:`` and the hash of an archive's bytes, or ``files:`` and the hash of a directory
    listing.

    A listing has names, sizes, permissions and times: reading gigabytes at each start would cost more than its benefit.
    """

    folder: Path
    digest: str


@functools.cache
def _ready_image(path: Path, *stamp: int) -> Image:
    """Return the image; with another `stamp` an archive of the same name is another image."""
    if path.is_dir():
        digest = _digest_of_folder(path)
        if path.stat().st_uid == (os.geteuid() or OUTER_UID):
            return Image(path, f"files:{digest}")
        return Image(_cached_image(digest, path, _pack_folder), f"files:{digest}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Image(_cached_image(digest, path, _stream_archive), f"sha256:{digest}")


def _cached_image(digest: str, source: Path, feed: Feed) -> Path:
    return cached(f"images/{digest[:32]}", lambda target: _unpack_confined(target, feed, source))


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return a directory of the cache; `make` creates it if it does not exist, once for all processes."""
    final = cache_folder() / name
    if final.is_dir():
        return final
    _make_folder(final.parent)
    with (final.parent / f".{final.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.is_dir():
            partial = final.with_name(f".{final.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                make(partial)
            except BaseException:  # Also on Ctrl-C: leave no partial image in the cache
                shutil.rmtree(partial, ignore_errors=True)
                raise
            partial.rename(final)
    return final


def _make_folder(folder: Path) -> None:
    """Make a directory and its parents; the user of root's sandboxes may enter them, whatever root's umask is."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    if os.geteuid() == 0:
        folder.chmod(0o755)


def _unpack_confined(target: Path, feed: Feed, source: Path) -> None:
    """Let a process with no more rights than the agent unpack it."""
    as_root = os.geteuid() == 0
    if as_root:
        os.chown(target, OUTER_UID, OUTER_UID)
    code = Path(__file__).with_name("unpack.py").read_text("utf-8")
    with subprocess.Popen(
        [*isolated(own_python()), "-c", code, *([str(OUTER_UID)] if as_root else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=target,
        env={},
    ) as process:
        assert process.stdin is not None and process.stderr is not None
        try:
            feed(source, process.stdin)
        except BrokenPipeError:
            pass  # its output is the reason
        finally:
            process.stdin.close()
        message = process.stderr.read().decode("utf-8", "replace").rstrip().rpartition("\n")[2][-500:]
    if process.returncode != 0:
        raise UserError(f"sandbox.image {source} cannot be unpacked: {message}")


def _stream_archive(path: Path, pipe: IO[bytes]) -> None:
    # Without a buffer: a program that inherits the file starts to read at its position.
    with path.open("rb", buffering=0) as file:
        zstandard = file.read(4) == ZSTANDARD
        file.seek(0)
        if not zstandard or sys.version_info >= (3, 14):
            shutil.copyfileobj(file, pipe, 1 << 20)
            return
        program = shutil.which("zstd")
        if program is None:
            raise UserError(
                f"sandbox.image {path}: zstd archives need Python 3.14 or the program zstd (apt install zstd)"
            )
        done = subprocess.run([program, "-dcq"], stdin=file, stdout=pipe, stderr=subprocess.PIPE, check=False)
    if done.returncode not in (0, -signal.SIGPIPE):
        raise UserError(f"sandbox.image {path} cannot be unpacked: {done.stderr.decode('utf-8', 'replace').strip()}")


def _pack_folder(folder: Path, pipe: IO[bytes]) -> None:
    with tarfile.open(fileobj=pipe, mode="w|") as archive:
        archive.add(folder, ".")


def _digest_of_folder(folder: Path) -> str:
    """Hash the names, sizes, permissions and times of all files, by which `make` too would see a change."""
    digest = hashlib.sha256(str(folder).encode())
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(folders + files):
            path = Path(parent, name)
            info = path.lstat()
            digest.update(f"{path}\0{info.st_size}\0{info.st_mode}\0{info.st_mtime_ns}\n".encode("utf-8", "replace"))
    return digest.hexdigest()


def overlay_refused(message: str) -> UserError | None:
    """Return the error with a fix if bubblewrap reports that the kernel has refused the layers of an image."""
    if "overlay" not in message:
        return None
    return UserError(
        f"this kernel does not lay a sandbox over an image ({message}): it takes Linux 5.11 or later with the module "
        "overlay (`modprobe overlay`), and a cache folder on an ordinary file system (set XDG_CACHE_HOME); or use "
        "sandbox.backend docker"
    )
