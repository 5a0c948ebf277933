"""Directories of images as the files of another user, so that each sandbox with an image can have a separate user.

All files of an image belong to one user of this machine. Here root makes a mount of such a directory on which they
belong to the user of one sandbox (an id-mapped mount: `mount_setattr(2)`, Linux 5.12, below an overlay Linux 5.19). It
is in a mount namespace of the launcher's thread, which starts the sandboxes: no other process sees it, and it
disappears when the runner ends, for any reason.

All functions must be called in the launcher's thread, and nowhere else.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import subprocess
import time
from pathlib import Path

from hermes_rl.sandbox.images import OUTER_UID
from hermes_rl.sandbox.launcher import libc_call

UNSHARE = "/usr/bin/unshare"
CLONE_NEWNS = 0x20000
MS_REC, MS_SLAVE = 0x4000, 1 << 19
UMOUNT_DETACH = 2
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
"""Numbers of system calls, the same on all processors."""
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, AT_EMPTY_PATH, AT_FDCWD = 1, 4, 0x1000, -100
MOUNT_ATTR_IDMAP = 0x00100000
LEAST = (5, 19)
NAMESPACE_SECONDS = 10.0
"""Seconds in which a process must have entered its namespace."""


class ImageMounts:
    """Mounts of one launcher.

    Args:
        root: an empty directory of the machine, which others may enter.

    Raises:
        OSError: this user, or the kernel, makes no such mounts.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._mount_count = 0
        root.mkdir(mode=0o755, parents=True, exist_ok=True)
        libc_call("unshare", CLONE_NEWNS)
        # Later mounts of the machine are seen here, and mounts made here are not seen there.
        libc_call("mount", None, b"/", None, MS_REC | MS_SLAVE, None)
        libc_call("mount", b"hermes-rl", os.fsencode(root), b"tmpfs", 0, b"mode=755,size=1m")

    def lay(self, folder: Path, uid: int) -> Path:
        """Return a directory with the same files, in which files of the images' user belong to `uid`."""
        self._mount_count += 1
        mount_point = self._root / str(self._mount_count)
        tree = libc_call("syscall", OPEN_TREE, AT_FDCWD, os.fsencode(folder), OPEN_TREE_CLONE | os.O_CLOEXEC)
        try:
            attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_IDMAP, 0, 0, _namespace_of(uid))
            libc_call("syscall", MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, ctypes.sizeof(attributes))
            mount_point.mkdir()
            libc_call("syscall", MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(mount_point), MOVE_MOUNT_F_EMPTY_PATH)
        finally:
            os.close(tree)
        return mount_point

    def remove(self, mount_point: Path) -> None:
        """Remove it. A sandbox that was started meanwhile has a separate mount."""
        libc_call("umount2", os.fsencode(mount_point), UMOUNT_DETACH)
        mount_point.rmdir()


@functools.cache
def _namespace_of(uid: int) -> int:
    """Return a descriptor, which stays open, of a user namespace that shows `uid` instead of the images' user."""
    child = subprocess.Popen(
        [UNSHARE, "--user", "--", "sleep", str(2 * NAMESPACE_SECONDS)],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={}, cwd="/",
    )  # fmt: skip
    try:
        own_namespace, deadline = Path("/proc/self/ns/user").readlink(), time.monotonic() + NAMESPACE_SECONDS
        while Path(f"/proc/{child.pid}/ns/user").readlink() == own_namespace:
            if child.poll() is not None or time.monotonic() > deadline:
                raise OSError(f"{UNSHARE} makes no user namespace")
            time.sleep(0.0005)
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{child.pid}/{kind}").write_text(f"{OUTER_UID} {uid} 1")
        return os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        child.kill()
        child.wait()


@functools.cache
def recent_kernel() -> bool:
    """Return True if such a mount may be below an overlay."""
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return match is not None and (int(match[1]), int(match[2])) >= LEAST
