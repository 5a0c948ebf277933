"""What the helper inside a sandbox asks of Linux that Python's own modules do not offer; runs there.

Owns two calls. `ctypes` itself would take longer to import than all the rest of the helper, hence `_ctypes`.
"""

# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import _ctypes
import os

PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36


def _parents() -> dict[int, int]:
    """The parent of each process, zombies left out."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state != b"Z":
                parents[int(name)] = int(parent)
    return parents


def children(root: int) -> list[int]:
    """Process ids of what `root` itself has started."""
    return [pid for pid, parent in _parents().items() if parent == root]


def descendants(root: int) -> list[int]:
    """Process ids below `root`."""
    parents = _parents()
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return sorted(found - {root})
        found |= more


def prctl(option: int, value: int) -> None:
    class Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
        _type_ = "i"

    class Function(_ctypes.CFuncPtr):
        _flags_ = 1  # the C calling convention
        _restype_ = Int

    Function(
        _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")  # type: ignore[arg-type]
    )(option, value, 0, 0, 0)
