"""Build the /etc of sandboxes on this machine's system: the files that programs need, and the users and names inside.

A mount for each file takes a tenth of a sandbox's start, so a directory with all of them is created once, in the cache,
under a hash of its content, and each sandbox has that one read-only.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.sandbox.images import cached, open_to_all

log = logging.getLogger(__name__)

SOURCE = Path("/etc")
"""Directory of this machine from which the files are copied."""
HOME = "/home/user"
UID = 1000
"""User and group inside."""
USER_LINE = f"user:x:{UID}:{UID}::{HOME}:/bin/sh\n"
ETC = (
    "alternatives",
    "ca-certificates.conf",
    "fonts",
    "ld.so.cache",
    "localtime",
    "magic",
    "mime.types",
    "nsswitch.conf",
    "perl",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
)
"""Files in /etc that programs need; none of them is a secret."""
ACCOUNTS = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:{UID}:{UID}::{HOME}:/bin/bash\n",
    "group": f"root:x:0:\nuser:x:{UID}:\n",
}
HOSTS = {"hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n", "hostname": "sandbox\n"}
RESOLVER = "resolv.conf"


def etc_folder(*, others: bool) -> Path | None:
    """Return the directory, created if it does not exist yet; blocks. Sandboxes with a network get a resolv.conf as
    well.

    Returns None if the cache cannot be written, or if `others` than its owner must enter the directory and may not:
    then the caller mounts each file separately.
    """
    try:
        try:
            folder = cached(f"etc/{_content_key(SOURCE)}", _lay_out)
        except _ChangedError:
            _content_key.cache_clear()
            folder = cached(f"etc/{_content_key(SOURCE)}", _lay_out)
    except (OSError, UserError) as error:
        log.debug("the /etc of sandboxes is not kept: %s", error)
        return None
    return folder if not others or open_to_all(folder) else None


class _ChangedError(OSError):
    """The files have changed since the name of the directory was computed."""


@functools.cache
def _content_key(source: Path) -> str:
    """Return a hash of the directory's content, as this process first saw it, or last created it."""
    stamps = [
        f"{path} {info.st_mode} {info.st_size} {info.st_mtime_ns}"
        for path in _etc_files(source)
        for info in (path.lstat(),)
    ]
    text = repr((stamps, ACCOUNTS, HOSTS, Path(__file__).read_text("utf-8")))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _etc_files(source: Path) -> Iterator[Path]:
    for name in ETC:
        path = source / name
        yield from sorted(path.rglob("*")) if path.is_dir() else [path.resolve()] if path.exists() else []


def _lay_out(folder: Path) -> None:
    if _content_key.__wrapped__(SOURCE) != _content_key(SOURCE):
        raise _ChangedError
    for name in ETC:
        source, target = SOURCE / name, folder / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            shutil.copyfile(source, target)
    for name, text in (ACCOUNTS | HOSTS | {RESOLVER: ""}).items():
        (folder / name).write_text(text, "utf-8")
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():  # for the user of root's sandboxes, whatever the umask
            path.chmod(0o755 if path.is_dir() else 0o644)
