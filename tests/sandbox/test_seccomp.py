"""The filter on system calls: what it refuses, asked of the kernel from inside of a sandbox."""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from hermes_rl.sandbox.base import Sandbox
from hermes_rl.sandbox.seccomp import ALLOW, MACHINES, REFUSE, TIOCSTI, filter_program

NUMBERS = MACHINES[platform.machine()].numbers

CALLS = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
for words in sys.argv[1:]:
    ctypes.set_errno(0)
    result = libc.syscall(*(ctypes.c_long(int(word)) for word in words.split()))
    print(result, ctypes.get_errno())
"""


async def calls(sandbox: Sandbox, *calls: tuple[str, *tuple[int, ...]]) -> list[tuple[int, int]]:
    """Return the result and the error number of each call, which one process makes."""
    words = [" ".join(map(str, (NUMBERS[name], *arguments))) for name, *arguments in calls]
    answer = await sandbox.run(["python3", "-c", CALLS, *words])
    results = [tuple(map(int, line.split())) for line in answer.output.splitlines()]
    assert len(results) == len(calls), answer.output
    return results  # type: ignore[return-value]


async def call(sandbox: Sandbox, name: str, *arguments: int) -> tuple[int, int]:
    (result,) = await calls(sandbox, (name, *arguments))
    return result


NAMES = (
    "mount", "umount2", "pivot_root", "setns", "unshare", "keyctl", "add_key", "request_key", "bpf",
    "perf_event_open", "io_uring_setup", "userfaultfd", "kexec_load", "init_module", "finit_module", "reboot",
    "open_tree", "fsopen", "move_mount", "open_by_handle_at", "syslog",
)  # fmt: skip


async def test_refused_whatever_its_arguments(fenced: Sandbox) -> None:
    results = await calls(fenced, *((name, 0, 0, 0, 0, 0) for name in NAMES))
    assert dict(zip(NAMES, results, strict=True)) == dict.fromkeys(NAMES, (-1, errno.EPERM))


async def test_new_namespaces_are_refused_and_processes_are_not(fenced: Sandbox) -> None:
    new_user, signal_child = 0x10000000, 17
    assert await call(fenced, "clone", new_user | signal_child, 0, 0, 0, 0) == (-1, errno.EPERM)
    assert await call(fenced, "clone3", 0, 0) == (-1, errno.ENOSYS)
    threads = "import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()"
    assert (await fenced.run(["python3", "-c", threads])).output == "ran\n"
    assert (await fenced.run("sh -c 'echo child'")).output == "child\n"


async def test_typing_into_a_terminal_is_refused(fenced: Sandbox) -> None:
    assert await call(fenced, "ioctl", 0, TIOCSTI, 0) == (-1, errno.EPERM)
    assert await call(fenced, "ioctl", 0, TIOCSTI | 1 << 40, 0) == (-1, errno.EPERM)


@pytest.mark.parametrize("command", [1024, 1026, 1024 | 1 << 40, 1040])
async def test_file_leases_and_change_notifications_are_denied(fenced: Sandbox, command: int) -> None:
    """Who held one on a file that all sandboxes are shown delayed each that opened it."""
    assert await call(fenced, "fcntl", 0, command, 1) == (-1, errno.EPERM)
    assert (await call(fenced, "fcntl", 0, 1))[0] >= 0


@pytest.mark.parametrize("request_number", [0x4200, 0x4206])
async def test_no_process_is_stopped_at_its_end_by_a_tracer(fenced: Sandbox, request_number: int) -> None:
    """Two that trace each other so cannot be killed. Of process 0, which there is not, everything else says so."""
    assert await call(fenced, "ptrace", request_number, 0, 0, 0x40 | 1) == (-1, errno.EPERM)
    assert await call(fenced, "ptrace", request_number, 0, 0, 1) == (-1, errno.ESRCH)


async def test_project_of_a_file_cannot_be_changed(fenced: Sandbox) -> None:
    """Docker limits disks by projects: a file of another project is charged to another container."""
    assert await call(fenced, "ioctl", 0, 0x401C5820, 0) == (-1, errno.EPERM)
    assert (await call(fenced, "ioctl", -1, 0x801C581F, 0))[1] == errno.EBADF


async def test_address_families(fenced: Sandbox) -> None:
    families = {1: True, 2: True, 10: True, 17: False, 38: False, 40: False}
    results = await calls(fenced, *(("socket", family, 1, 0) for family in families))
    for (family, allowed), (result, error) in zip(families.items(), results, strict=True):
        assert result >= 0 if allowed else error == errno.EAFNOSUPPORT, family


@pytest.mark.parametrize("kind", [2, 3])
async def test_of_netlink_only_what_lists_interfaces(fenced: Sandbox, kind: int) -> None:
    protocols = {0: True, 1 << 40: True, 2: False, 1 << 40 | 2: False, 4: False, 16: False}
    results = await calls(fenced, *(("socket", 16, kind, protocol) for protocol in protocols))
    for (protocol, allowed), (result, error) in zip(protocols.items(), results, strict=True):
        assert result >= 0 if allowed else error == errno.EPROTONOSUPPORT, protocol


async def test_programs_list_their_interfaces(fenced: Sandbox) -> None:
    listed = await fenced.run(["python3", "-c", "import socket; print(socket.if_nameindex())"])
    assert listed.output == "[(1, 'lo')]\n"


async def test_debuggers_may_switch_off_address_randomisation(fenced: Sandbox) -> None:
    assert (await call(fenced, "personality", 0x40000))[0] >= 0
    assert await call(fenced, "personality", 0x400000) == (-1, errno.EPERM)


def run_filter(program: bytes, data: bytes) -> int:
    """What a filter answers, by the rules of classic BPF."""
    rules = list(struct.iter_unpack("=HBBI", program))
    place, value = 0, 0
    while True:
        code, yes, no, operand = rules[place]
        place += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            value = struct.unpack_from("=I", data, operand)[0]
            continue
        held = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
        place += yes if held else no


@pytest.mark.parametrize("machine", sorted(MACHINES))
def test_another_convention_of_calls_is_refused(machine: str) -> None:
    program = filter_program(machine)
    assert program is not None
    audit = MACHINES[machine].audit

    def answer(number: int, architecture: int, *arguments: int) -> int:
        return run_filter(
            program, struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
        )

    assert answer(MACHINES[machine].numbers["socket"] + 1, audit) == ALLOW
    assert answer(0, 0x40000003) == REFUSE | errno.ENOSYS
    assert answer(0x40000000, audit) == REFUSE | errno.ENOSYS
    assert answer(MACHINES[machine].numbers["mount"], audit) == REFUSE | errno.EPERM
    assert answer(MACHINES[machine].numbers["socket"], audit, 2) == ALLOW
    assert answer(MACHINES[machine].numbers["socket"], audit, 40) == REFUSE | errno.EAFNOSUPPORT


def test_unknown_processor_has_no_filter() -> None:
    assert filter_program("vax") is None
