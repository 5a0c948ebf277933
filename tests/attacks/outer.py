"""A world of its own for attacks: user, PID, mount, network, IPC and host-name namespaces around a whole run.

    python outer.py FOLDER USER COMMAND …

Everything of the machine is read-only in there, but for a file system in memory at FOLDER; no other process, no
network but an own loopback, no device but a few harmless ones. An attack that gets through harms nothing else, and ends
with the first process of that world.

USER is the number of the user whose world it is; root can make one for another, who then sees what the command needs
even where it lies in a folder that is root's alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

NEW = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""CLONE_NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
MOUNT_SETATTR, AT_RECURSIVE, READ_ONLY = 442, 0x8000, 1
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 0x1000, 0x4000, 1 << 18
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(kind: bytes, target: bytes, flags: int = 0, data: bytes = b"") -> None:
    check(libc.mount(kind, target, kind, flags, data), f"mount {target!r}")


def enter() -> None:
    """Become the first process of the new namespaces; users keep their numbers, those of sandboxes too."""
    uid, gid = os.geteuid(), os.getegid()
    whole = "4294967295" in Path("/proc/self/uid_map").read_text()
    own = [(0, 1 << 16), *([(0x70000000, 1 << 16)] if whole else [])] if uid == 0 else [(uid, 1)]
    groups = own if uid == 0 else [(gid, 1)]
    asked, told = os.pipe(), os.pipe()
    writer = os.fork()
    if writer == 0:
        # Only somebody outside may write the map of users.
        os.read(asked[0], 1)
        parent = os.getppid()
        if uid != 0:
            write(f"/proc/{parent}/setgroups", "deny")
        write(f"/proc/{parent}/uid_map", "".join(f"{first} {first} {count}\n" for first, count in own))
        write(f"/proc/{parent}/gid_map", "".join(f"{first} {first} {count}\n" for first, count in groups))
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


def furnish(folder: bytes, user: int, needed: list[Path]) -> None:
    """Everything read-only, then a place to write and the new namespaces' own /proc."""
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private mounts")
    if user != os.geteuid():
        reveal(needed)
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY, 0, 0, 0)
    check(libc.syscall(MOUNT_SETATTR, -100, b"/", AT_RECURSIVE, attributes, 32), "read-only mounts")
    mount(b"tmpfs", folder, MS_NOSUID | MS_NODEV, b"size=1g,mode=755,uid=%d,gid=%d" % (user, user))
    mount(b"proc", b"/proc")
    if user != os.geteuid():
        lend(Path(os.fsdecode(folder)), user)


def lend(folder: Path, user: int) -> None:
    """Give the user subordinate users and groups, where LENT is set and the machine has the files that say so."""
    lent = f"{user}:20000:{os.environ.get('LENT', '0')}\n"
    person = f"ordinary:x:{user}:{user}::/:/bin/sh\n"
    for name, text in {"subuid": lent, "subgid": lent, "passwd": Path("/etc/passwd").read_text() + person}.items():
        if Path("/etc", name).exists():
            given = folder / name
            given.write_text(text)
            check(libc.mount(os.fsencode(given), f"/etc/{name}".encode(), None, MS_BIND, None), f"bind {name}")


def reveal(paths: list[Path]) -> None:
    """Lay an empty folder over each that only its owner may enter, with nothing in it but what these paths need."""
    closed: dict[Path, set[Path]] = {}
    for path in paths:
        for folder in (*reversed(path.parents), path):
            if not folder.stat().st_mode & 1:
                closed.setdefault(folder, set()).update(path.iterdir() if folder == path else [path])
                break
    for folder, inside in closed.items():
        # What lies below another one of them comes with it, and may be a link to what is not there yet.
        highest = [path for path in sorted(inside) if inside.isdisjoint(path.parents)]
        held = [(path, path.is_dir(), os.open(path, os.O_PATH)) for path in highest]
        mount(b"tmpfs", os.fsencode(folder), MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
        for path, is_folder, fd in held:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir() if is_folder else path.touch()
            source = b"/proc/self/fd/%d" % fd
            check(libc.mount(source, os.fsencode(path), None, MS_BIND | MS_REC, None), f"bind {path}")
            os.close(fd)


def loopback_up() -> None:
    """Start the loopback, which also has the address at which clouds tell a machine its secrets."""
    import fcntl
    import socket
    import struct

    with socket.socket() as any_socket:
        up = struct.pack("16sh14x", b"lo", 1)  # IFF_UP
        fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
        address = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("169.254.169.254"))
        fcntl.ioctl(any_socket, 0x8916, address)  # SIOCSIFADDR


def main() -> None:
    folder, user, command = os.fsencode(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    given = [Path(word) for word in command if word.startswith("/") and Path(word).exists() and word != sys.argv[1]]
    needed = {Path(sys.base_prefix), Path(sys.prefix), Path(__file__).resolve().parents[2], *given}
    enter()
    furnish(folder, user, sorted(needed))
    loopback_up()
    if user != os.geteuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
