"""Code that runs inside the sandbox of user code: a template process, and its forks, isolated from each other.

The template process, which bubblewrap has started, imports the code and reads no text of an agent. A fork of it gets
separate user, process, mount, network and IPC namespaces before it works: it is process 1 there, so that it sees and
signals only its children, and all of them end with it. Its files are the template's, read-only, and a separate empty
directory in memory. Finally it drops all capabilities, and applies the filter on system calls of sandboxes.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
from contextlib import suppress
from functools import partial
from typing import NoReturn

from hermes_rl.sandbox.helper_system import filter_calls
from hermes_rl.sandbox.launcher import libc_call
from hermes_rl.sandbox.seccomp import filter_program
from hermes_rl.user_code import process

DISK = 64 << 20
"""Maximum bytes of the files of one fork, in total and for each."""
FILES = 4096
"""Maximum number of files of one fork."""
PROCESSOR_SECONDS = 300
MAX_DESCRIPTORS = 256
OWN_NAMESPACES = 0x10000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x40000000
"""CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNS, CLONE_NEWIPC and CLONE_NEWNET: forks cannot meet at a port or an abstract
socket either.
"""
COVERED = (b"/dev/shm", b"/dev/pts")
"""Directories of the template that its forks could write to, and so share data."""
NOSUID, NODEV = 2, 4
PR_CAPBSET_DROP = 24
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522
CONFINED_MESSAGE = b"confined"
"""Message of a fork to its template when user code may run in it."""


def main(descriptor: int, directory: str) -> None:
    """Serve as the template, whose forks may write to `directory`, until the runner closes the control socket."""
    process.main(descriptor, partial(fork, directory))


def fork(directory: str, connection: int, output: int) -> int:
    """Return the id of a fork, as the runner sees it, that works for it in separate namespaces.

    Raises `OSError` if the kernel provides none, or the fork could not be confined: then it has read nothing yet.
    """
    status_fd, tell = os.pipe()
    wait, go = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(go)
        _fork_apart(directory, connection, output, tell, wait)
    os.close(tell)
    os.close(wait)
    try:
        answer = os.read(status_fd, 4096).decode()
        os.waitpid(between, 0)
        if not answer.isdigit():
            raise OSError(answer or "the process between ended")
        os.write(go, b"g")  # from now on this process is its parent
        confined = os.read(status_fd, 4096)
        if confined != CONFINED_MESSAGE:
            os.waitpid(int(answer), 0)
            raise OSError(confined.decode() or "it ended while it was confined")
        return int(answer)
    finally:
        os.close(status_fd)
        os.close(go)


def _fork_apart(directory: str, connection: int, output: int, tell: int, wait: int) -> NoReturn:
    """Create new namespaces, whose first process is the fork; runs in a process between the template and the fork."""
    try:
        uid, gid = os.getuid(), os.getgid()
        libc_call("unshare", OWN_NAMESPACES)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123 - once per fork
                file.write(text)
        if (pid := os.fork()) == 0:
            if os.read(wait, 1):  # the template is there and has heard of it
                # Most importantly, the template's control socket is closed.
                connection, output, tell = _keep_only(connection, output, tell)
                process.become_worker(connection, output, directory, partial(_confine_process, directory, tell))
            os._exit(0)
        os.write(tell, b"%d" % pid)
    except BaseException as error:  # noqa: BLE001 - the template tells it
        os.write(tell, f"{type(error).__name__}: {error}".encode()[:4096])
    finally:
        os._exit(0)


def _keep_only(*descriptors: int) -> range:
    """Close all descriptors except the standard ones and these, which get the returned numbers."""
    copies = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3 + len(descriptors)) for each in descriptors]
    for target_fd, copy in enumerate(copies, 3):
        os.dup2(copy, target_fd, inheritable=False)
    os.closerange(3 + len(descriptors), MAX_DESCRIPTORS * 16)
    return range(3, 3 + len(descriptors))


def _confine_process(directory: str, tell: int) -> None:
    """Confine this process, and report that, or the error, to the template."""
    try:
        _drop_access(directory)
    except BaseException as error:
        os.write(tell, f"{type(error).__name__}: {error}".encode()[:4096])
        raise
    os.write(tell, CONFINED_MESSAGE)
    os.close(tell)


def _drop_access(directory: str) -> None:
    """Drop access to the template's resources; raises `OSError` if any part of it fails."""
    options = f"size={DISK},nr_inodes={FILES},mode=700".encode()
    for path in (directory.encode(), *COVERED):
        libc_call("mount", b"tmpfs", path, b"tmpfs", NOSUID | NODEV, options)
    try:
        libc_call("mount", b"proc", b"/proc", b"proc", NOSUID | NODEV, None)
    except OSError:  # in a container that hides parts of it; the machine's processes are not shown in any case
        libc_call("mount", b"tmpfs", b"/proc", b"tmpfs", NOSUID | NODEV, b"size=4096,mode=555")
    os.chdir(directory)
    process.limit()
    for limit, maximum in (
        (resource.RLIMIT_CPU, PROCESSOR_SECONDS),
        (resource.RLIMIT_FSIZE, DISK),
        (resource.RLIMIT_NOFILE, MAX_DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        maximum = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
        resource.setrlimit(limit, (maximum, maximum))
    for capability in range(64):
        with suppress(OSError):  # the kernel has fewer
            libc_call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    libc_call("syscall", CAPSET[os.uname().machine], header, (ctypes.c_uint32 * 6)())
    rules = filter_program()
    if rules is None:
        raise OSError(f"no filter on system calls is known for {os.uname().machine}")
    filter_calls(rules)
