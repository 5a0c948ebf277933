"""What sandboxes of this machine's system see as /etc: what programs need of its own, and the users and names inside.

A mount for each file takes a tenth of a sandbox's start, so a folder with all of them is laid out once, in the cache,
under a hash of what it is made of, and each sandbox has that one read-only.
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
"""The directory of this machine that the files are taken from."""
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
"""What programs need of /etc; nothing here is a secret."""
ACCOUNTS = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nuser:x:{UID}:{UID}::{HOME}:/bin/bash\n",
    "group": f"root:x:0:\nuser:x:{UID}:\n",
}
HOSTS = {"hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n", "hostname": "sandbox\n"}
RESOLVER = "resolv.conf"


def etc_folder(*, others: bool) -> Path | None:
    """Return the folder, made where it is not there yet; blocks. Sandboxes with a network get a resolv.conf besides.

    None where the cache cannot be written, or `others` than its owner have to enter the folder and may not: then
    the caller mounts each file by itself.
    """
    try:
        try:
            folder = cached(f"etc/{_key(SOURCE)}", _lay_out)
        except _ChangedError:
            _key.cache_clear()
            folder = cached(f"etc/{_key(SOURCE)}", _lay_out)
    except (OSError, UserError) as error:
        log.debug("the /etc of sandboxes is not kept: %s", error)
        return None
    return folder if not others or open_to_all(folder) else None


class _ChangedError(OSError):
    """The folder is to be made, of other files than those that its name stands for."""


@functools.cache
def _key(source: Path) -> str:
    """Return a hash of all that the folder is made of, as this process first saw it, or last laid it out."""
    stamps = [
        f"{path} {info.st_mode} {info.st_size} {info.st_mtime_ns}"
        for path in _files(source)
        for info in (path.lstat(),)
    ]
    text = repr((stamps, ACCOUNTS, HOSTS, Path(__file__).read_text("utf-8")))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _files(source: Path) -> Iterator[Path]:
    for name in ETC:
        path = source / name
        yield from sorted(path.rglob("*")) if path.is_dir() else [path.resolve()] if path.exists() else []


def _lay_out(folder: Path) -> None:
    if _key.__wrapped__(SOURCE) != _key(SOURCE):
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
