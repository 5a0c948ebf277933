"""A world of its own for attacks: user, PID, mount, network, IPC and host-name namespaces around a whole run.

    python outer.py FOLDER COMMAND …

Everything of the machine is read-only in there, but for a file system in memory at FOLDER; no other process, no
network but an own loopback, no device but a few harmless ones. An attack that gets through harms nothing else, and ends
with the first process of that world.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
MOUNT_SETATTR, AT_RECURSIVE, READ_ONLY = 442, 0x8000, 1
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 1 << 18
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(kind: bytes, target: bytes, flags: int = 0, data: bytes = b"") -> None:
    check(libc.mount(kind, target, kind, flags, data), f"mount {target!r}")


def enter() -> None:
    """Become the first process of the new namespaces; users keep their numbers."""
    uid, gid = os.geteuid(), os.getegid()
    count = 65536 if uid == 0 else 1
    asked, told = os.pipe(), os.pipe()
    writer = os.fork()
    if writer == 0:
        # Only somebody outside may write the map of users.
        os.read(asked[0], 1)
        parent = os.getppid()
        if uid != 0:
            write(f"/proc/{parent}/setgroups", "deny")
        write(f"/proc/{parent}/uid_map", f"{uid} {uid} {count}")
        write(f"/proc/{parent}/gid_map", f"{gid} {gid} {count}")
        os.write(told[1], b"x")
        os._exit(0)
    check(libc.unshare(NEW), "unshare")
    os.write(asked[1], b"x")
    os.read(told[0], 1)
    os.waitpid(writer, 0)
    for fd in (*asked, *told):
        os.close(fd)
    child = os.fork()
    if child:
        libc.signal(signal.SIGTERM, 1)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    os.close(fd)


def furnish(folder: bytes) -> None:
    """Everything read-only, then a place to write and the new namespaces' own /proc."""
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    check(libc.syscall(MOUNT_SETATTR, -100, b"/", AT_RECURSIVE, attributes, 32), "read-only mounts")
    mount(b"tmpfs", folder, MS_NOSUID | MS_NODEV, b"size=1g,mode=755")
    mount(b"proc", b"/proc")


def loopback_up() -> None:
    import fcntl
    import socket
    import struct

    with socket.socket() as any_socket:
        request = struct.pack("16sh14x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def main() -> None:
    enter()
    furnish(os.fsencode(sys.argv[1]))
    loopback_up()
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
