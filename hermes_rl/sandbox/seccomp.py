"""Build the filter on system calls that bubblewrap applies to a sandbox, as a program of classic BPF.

This module owns which calls are refused and the bytes of the filter, which it assembles itself, so that no library of
the system is needed. It refuses calls that an agent has no honest use for and that have exposed most kernel bugs:
namespaces, mounts, keys, kernel modules, io_uring, BPF, performance counters, other address families than the usual,
netlink except for listing the network's interfaces (programs can queue messages to themselves there, in memory that no
limit counts), typing into a terminal, and calls that would change how process 1 is scheduled or limited: a process 1
without processor time cannot end the sandbox, and one that can open no file cannot serve it. Leases and notifications
(`fcntl`) are refused, as the holder of one delays all sandboxes that open the same file. Tracing is allowed, for
debuggers: it reaches only the sandbox's own processes, and never the helper. Only PTRACE_O_TRACEEXIT is refused: two
processes that trace each other with it cannot be killed. Calls that affect the whole machine, and that no process in a
sandbox needs, succeed without effect: `sync` writes all files of all users to disk, and POSIX_FADV_DONTNEED and
MADV_PAGEOUT drop data that others read from memory. The project of a file (FS_IOC_FSSETXATTR, `file_setattr`) cannot be
changed: engines limit disks by projects, and the owner of a file could charge it to another container.

Numbers come from Linux' own tables (`arch/x86/entry/syscalls/syscall_64.tbl`, `include/uapi/asm-generic/unistd.h`); the
layout of a filter's input is `struct seccomp_data` of `include/uapi/linux/seccomp.h`.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NUMBER, ARCHITECTURE = 0, 4
"""Offsets in `struct seccomp_data`."""
ARGUMENTS = 16
"""Offset of the first argument; each takes 8 bytes, the low half first."""

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW = 0x7FFF0000
REFUSE = 0x00050000
X32_BIT = 0x40000000

NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6. A network namespace does not isolate others, such as AF_VSOCK."""
AF_NETLINK, NETLINK_ROUTE = 16, 0
DONTNEED = 4
"""POSIX_FADV_DONTNEED."""
PAGE_OUT = (20, 21)
"""MADV_COLD and MADV_PAGEOUT."""
FSSETXATTR = 0x401C5820
"""FS_IOC_FSSETXATTR."""
LEASES = (1024, 1026, 1040)
"""F_SETLEASE, F_NOTIFY and F_SETDELEG."""
SET_OPTIONS, SEIZE, TRACE_EXIT = 0x4200, 0x4206, 0x40
"""Requests of ptrace that set options, and PTRACE_O_TRACEEXIT."""
HELPER = 1
"""Process id of the helper, in the sandbox's own namespace."""
OF_A_USER = {"setpriority": 2, "ioprio_set": 3}
"""Value of their first argument that means all processes of a user, and so the helper too."""
PERSONALITIES = (0, 0x0008, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
"""Standard Linux, and without address randomisation, for debuggers."""


@dataclass(frozen=True)
class Processor:
    """One processor: its architecture code in a filter, and its numbers of the calls."""

    audit: int
    numbers: Mapping[str, int]


_COMMON = {
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "mount_setattr": 442, "open_tree_attr": 467, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "clone3": 435, "process_madvise": 440, "file_setattr": 469,
}  # fmt: skip
"""Newer calls have the same number everywhere."""

X86_64 = Processor(
    0xC000003E,
    {
        **_COMMON,
        "socket": 41, "clone": 56, "ioctl": 16, "fcntl": 72, "ptrace": 101, "personality": 135, "unshare": 272,
        "setns": 308,
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "swapon": 167, "swapoff": 168,
        "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175,
        "delete_module": 176, "quotactl": 179, "acct": 163, "settimeofday": 164, "adjtimex": 159, "syslog": 103,
        "vhangup": 153, "modify_ldt": 154, "lookup_dcookie": 212, "clock_settime": 227, "clock_adjtime": 305,
        "kexec_load": 246, "kexec_file_load": 320, "add_key": 248, "request_key": 249, "keyctl": 250,
        "perf_event_open": 298, "fanotify_init": 300, "open_by_handle_at": 304, "finit_module": 313, "bpf": 321,
        "userfaultfd": 323, "quotactl_fd": 443, "create_module": 174, "get_kernel_syms": 177, "query_module": 178,
        "nfsservctl": 180, "uselib": 134, "ustat": 136, "_sysctl": 156, "move_pages": 279, "io_setup": 206,
        "migrate_pages": 256, "prlimit64": 302, "sched_setparam": 142, "sched_setscheduler": 144,
        "sched_setaffinity": 203, "sched_setattr": 314, "setpriority": 141, "ioprio_set": 251,
        "sync": 162, "syncfs": 306, "fadvise64": 221, "madvise": 28,
    },
)  # fmt: skip

AARCH64 = Processor(
    0xC00000B7,
    {
        **_COMMON,
        "socket": 198, "clone": 220, "ioctl": 29, "fcntl": 25, "ptrace": 117, "personality": 92, "unshare": 97,
        "setns": 268,
        "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "swapon": 224, "swapoff": 225,
        "reboot": 142, "sethostname": 161, "setdomainname": 162, "init_module": 105, "delete_module": 106,
        "quotactl": 60, "acct": 89, "settimeofday": 170, "adjtimex": 171, "syslog": 116, "vhangup": 58,
        "lookup_dcookie": 18, "clock_settime": 112, "clock_adjtime": 266, "kexec_load": 104,
        "kexec_file_load": 294, "add_key": 217, "request_key": 218, "keyctl": 219, "perf_event_open": 241,
        "fanotify_init": 262, "open_by_handle_at": 265, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
        "quotactl_fd": 443, "nfsservctl": 42, "move_pages": 239, "io_setup": 0, "migrate_pages": 238,
        "prlimit64": 261, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
        "sched_setattr": 274, "setpriority": 140, "ioprio_set": 30, "sync": 81, "syncfs": 267, "fadvise64": 223,
        "madvise": 233,
    },
)  # fmt: skip

MACHINES = {"x86_64": X86_64, "aarch64": AARCH64}
OF_A_PROCESS = ("prlimit64", "sched_setparam", "sched_setscheduler", "sched_setaffinity", "sched_setattr")
"""Calls whose first argument is the process that they change."""
INSPECTED = (
    "socket", "clone", "clone3", "ioctl", "fcntl", "ptrace", "personality", "fadvise64", "madvise",
    *OF_A_PROCESS, *OF_A_USER,
)  # fmt: skip
"""Calls of which only some are refused, by their arguments."""
IN_APPEARANCE = ("sync", "syncfs")
"""Calls that succeed and do nothing."""


def filter_program(machine: str | None = None) -> bytes | None:
    """Return the filter for a processor (default: this one), as `bwrap --seccomp` reads it; None: unknown."""
    processor = MACHINES.get(machine or platform.machine())
    # `struct sock_filter` is 16 bits of code, two jumps of 8, 32 bits of value.
    return None if processor is None else b"".join(struct.pack("=HBBI", *rule) for rule in _all_rules(processor))


Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, value."""


def _all_rules(machine: Processor) -> list[Instruction]:
    """Return all rules of the filter; first of all it refuses other processors' calls, which have other numbers."""
    numbers = machine.numbers
    rules: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, machine.audit),
        _refuse_with(errno.ENOSYS),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32_BIT),
        _refuse_with(errno.ENOSYS),
    ]
    for name, call_number in numbers.items():
        if name not in INSPECTED:
            rules += [(EQUAL, 0, 1, call_number), _refuse_with(0 if name in IN_APPEARANCE else errno.EPERM)]
    # The arguments of clone3 are in memory, which a filter cannot read; C libraries then use clone.
    rules += [(EQUAL, 0, 1, numbers["clone3"]), _refuse_with(errno.ENOSYS)]
    rules += _with_argument(numbers["clone"], 0, [(ANY_BIT, 0, 1, NEW_NAMESPACES), _refuse_with(errno.EPERM)])
    rules += _with_argument(numbers["ioctl"], 1, _refuse_any((TIOCSTI, TIOCLINUX, FSSETXATTR), errno.EPERM))
    rules += _with_argument(numbers["fcntl"], 1, _refuse_any(LEASES, errno.EPERM))
    rules += _with_argument(numbers["fadvise64"], 3, _refuse_any((DONTNEED,), 0))
    rules += _with_argument(numbers["madvise"], 2, _refuse_any(PAGE_OUT, 0))
    options = [(LOAD, 0, 0, ARGUMENTS + 24), (ANY_BIT, 0, 1, TRACE_EXIT), _refuse_with(errno.EPERM)]
    requests = [(EQUAL, 1, 0, SET_OPTIONS), (EQUAL, 0, len(options), SEIZE), *options]
    rules += _with_argument(numbers["ptrace"], 0, requests)
    route = [(LOAD, 0, 0, ARGUMENTS + 16), *_allow_only((NETLINK_ROUTE,), errno.EPROTONOSUPPORT), (RETURN, 0, 0, ALLOW)]
    families = [(EQUAL, 0, len(route), AF_NETLINK), *route, *_allow_only(FAMILIES, errno.EAFNOSUPPORT)]
    rules += _with_argument(numbers["socket"], 0, families)
    rules += _with_argument(numbers["personality"], 0, _allow_only(PERSONALITIES, errno.EPERM))
    for name in OF_A_PROCESS:
        rules += _with_argument(numbers[name], 0, [(EQUAL, 0, 1, HELPER), _refuse_with(errno.EPERM)])
    for name, everybody in OF_A_USER.items():
        user = [(EQUAL, 0, 1, everybody), _refuse_with(errno.EPERM)]
        group = [(LOAD, 0, 0, ARGUMENTS + 8), (EQUAL, 0, 1, HELPER), _refuse_with(errno.EPERM)]
        rules += _with_argument(numbers[name], 0, [*user, *group])
    return [*rules, (RETURN, 0, 0, ALLOW)]


def _with_argument(call_number: int, index: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Return rules that apply `body` to an argument of the call with this number: only its low half matters."""
    argument_rules = [(LOAD, 0, 0, ARGUMENTS + 8 * index), *body, (RETURN, 0, 0, ALLOW)]
    return [(EQUAL, 0, len(argument_rules), call_number), *argument_rules]


def _allow_only(values: Sequence[int], refusal: int) -> list[Instruction]:
    """Allow an argument that is one of `values`."""
    checks = [(EQUAL, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [*checks, _refuse_with(refusal)]


def _refuse_any(values: Sequence[int], refusal: int) -> list[Instruction]:
    """Refuse an argument that is one of `values`."""
    last = len(values) - 1
    checks = [(EQUAL, last - index, int(index == last), value) for index, value in enumerate(values)]
    return [*checks, _refuse_with(refusal)]


def _refuse_with(error_number: int) -> Instruction:
    """Return the rule that fails a call with this error; with 0 the call seems to succeed."""
    return RETURN, 0, 0, REFUSE | error_number
