"""Linux functions for the helper inside a sandbox that Python's modules do not offer; this module runs there.

It reads the tree of processes and makes two system calls. `ctypes` itself would take longer to import than all the rest
of the helper, so it uses `_ctypes`.
"""

# ruff: noqa: PTH123

from __future__ import annotations

import _ctypes
import errno
import posix
import sys

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2


def process_status(pid: int) -> list[bytes]:
    """Return the fields of a process in /proc, from its state and its parent on; raises `OSError` if it is gone."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def process_state(pid: int) -> bytes:
    """Return the letter for the state of a process (proc(5)); empty if it is gone."""
    try:
        return process_status(pid)[0]
    except OSError:
        return b""


def _parent_ids() -> dict[int, int]:
    """Return the parent of each process, without zombies."""
    parents: dict[int, int] = {}
    for name in posix.listdir("/proc"):
        if name.isdigit():
            try:
                state, parent = process_status(int(name))[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(name)] = int(parent)
    return parents


def children(root: int) -> list[int]:
    """Return the process ids of the direct children of `root`."""
    return [pid for pid, parent in _parent_ids().items() if parent == root]


def descendants(root: int) -> list[int]:
    """Return the process ids below `root`."""
    parents = _parent_ids()
    family = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            return sorted(family - {root})
        family |= more


def prctl(option: int, value: int, address: int = 0) -> int:
    class Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "i"

    class Long(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "l"

    class Function(_ctypes.CFuncPtr):
        _flags_ = 1  # the C calling convention
        _restype_ = Int

    function = Function(_ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl"))  # type: ignore[arg-type]
    answer: int = function(option, Long(value), Long(address), Long(0), Long(0))
    return answer


def filter_calls(program: bytes) -> None:
    """Apply a filter on system calls, a program of classic BPF, to this process and all its future children."""

    class Byte(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "c"

    class Program(_ctypes.Array):  # type: ignore[type-arg]
        _type_, _length_ = Byte, len(program)

    class Head(_ctypes.Array):  # type: ignore[type-arg]
        """`struct sock_fprog`: the number of instructions, and their address after six bytes of padding."""

        _type_, _length_ = Byte, 16

    rules = Program.from_buffer_copy(program)
    address = _ctypes.addressof(rules)
    head = Head.from_buffer_copy((len(program) // 8).to_bytes(8, sys.byteorder) + address.to_bytes(8, sys.byteorder))
    if prctl(PR_SET_NO_NEW_PRIVS, 1) or prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, _ctypes.addressof(head)):
        raise OSError(errno.EPERM, "the filter on system calls was refused")
