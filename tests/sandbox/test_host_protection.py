"""No sandbox blocks the host, and no agent chooses not to be graded."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox import channel, launcher
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig
from hermes_rl.sandbox.bubblewrap import Bubblewrap
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.sandbox.helper_system import descendants
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.base import ToolRuntime
from hermes_rl.tools.context import ToolContext
from tests.sandbox.test_cleanup import ended
from tests.waiting import until

KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
libc = ctypes.CDLL(None, use_errno=True)

TURN_BLOCKING = """
import ctypes, fcntl, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
        pidfd = os.pidfd_open(int(pid))
    except OSError:
        continue
    for fd in fds:
        own = libc.syscall(438, pidfd, int(fd), 0)
        if own >= 0:
            fcntl.fcntl(own, fcntl.F_SETFL, 0)
"""
"""Makes every open file description of every process that it may look into a blocking one."""


def descriptions(pid: int) -> list[int]:
    """Descriptors of a process that are no regular files: reading such a one may block."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)  # noqa: PTH115 - what it names is no path
        except FileNotFoundError:
            continue  # the one with which this folder is read
        if target.startswith(("pipe:", "socket:", "anon_inode:")):
            found.append(int(entry.name))
    return found


def shared(pid: int) -> list[tuple[int, int]]:
    """Which descriptors of ours and of another process are the same open file description."""
    found = []
    theirs = descriptions(pid)
    for own in descriptions(os.getpid()):
        found += [(own, fd) for fd in theirs if libc.syscall(KCMP, os.getpid(), pid, 0, own, fd) == 0]
    return found


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """This process may open no more than `left` descriptors beside those that it has."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + left, before[1]))
    # Places below the highest one are free too; fill them.
    filled: list[int] = []
    try:
        with suppress(OSError):
            while not filled or filled[-1] < highest:
                filled.append(os.open("/dev/null", os.O_RDONLY))
        if filled and filled[-1] > highest:
            os.close(filled.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in filled:
            os.close(fd)


@pytest.fixture
async def quick(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """What does not answer is given up soon."""
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.3)
    yield


def isolation_of(sandbox: Sandbox) -> Bubblewrap:
    assert isinstance(sandbox, HelperSandbox) and isinstance(sandbox.isolation, Bubblewrap)
    return sandbox.isolation


def first(sandbox: Sandbox) -> int:
    """Process 1 of a sandbox, as this machine numbers it."""
    return isolation_of(sandbox).first


@pytest.fixture
def end_itself(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the newest helper end as by a fault of its own: it cannot tell a broken socket from any other."""
    controls, take = list[socket.socket](), channel.Connection.open

    def noted(self: channel.Connection, control: socket.socket) -> None:
        controls.append(control)
        take(self, control)

    monkeypatch.setattr(channel.Connection, "open", noted)
    return lambda: controls[-1].shutdown(socket.SHUT_WR)


# ------------------------------------------------------------------ descriptors


@pytest.mark.skipif(KCMP is None or os.geteuid() != 0, reason="comparing descriptions needs root and a known processor")
async def test_no_process_of_a_sandbox_has_an_open_file_description_of_the_host(sandbox: Sandbox) -> None:
    assert isinstance(sandbox, HelperSandbox)
    await sandbox.run_reporting("true", "")
    process = await sandbox.spawn("sleep 60")
    running = asyncio.create_task(sandbox.run_reporting("sleep 60", ""))
    talk = await sandbox.converse(["sleep", "60"]) if sandbox.config.backend != "ssh" else None
    try:
        await until(lambda: len(descendants(sandbox.pid)) >= 3)
        inside = descendants(sandbox.pid)
        assert {pid: found for pid in inside if (found := shared(pid))} == {}
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await process.kill()
        if talk is not None:
            await talk.close()


async def test_making_all_descriptors_blocking_does_not_block_the_runner(fenced: Sandbox) -> None:
    await fenced.write_file("block.py", TURN_BLOCKING.encode())
    await fenced.run_reporting("true", "")
    async with asyncio.timeout(20):
        await fenced.run_reporting("python3 block.py; sleep 30 & echo $! >pid", "", timeout=5)
        assert (await fenced.run_reporting("echo next", "", timeout=5)).output == "next\n"


# ------------------------------------------------------------------ process 1


STARVE = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
SELF = {
    "prlimit": lambda who: libc.syscall(%(prlimit64)d, who, 7, struct.pack("QQ", 0, 0), 0),
    "scheduler": lambda who: libc.sched_setscheduler(who, 5, struct.pack("i", 0)),
    "affinity": lambda who: libc.sched_setaffinity(who, 8, struct.pack("Q", 1)),
    "param": lambda who: libc.sched_setparam(who, struct.pack("i", 0)),
    "attr": lambda who: libc.syscall(%(sched_setattr)d, who, struct.pack("IIQiIQQQ", 48, 5, 0, 0, 0, 0, 0, 0), 0),
    "priority": lambda who: libc.setpriority(0, who, 19),
    "group's priority": lambda who: libc.setpriority(1, who, 19),
    "io priority": lambda who: libc.syscall(%(ioprio_set)d, 1, who, 3 << 13),
}
for name, call in SELF.items():
    if call(1) == 0 or call(1 | 1 << 40) == 0:
        print("process 1:", name)
if libc.setpriority(2, 0, 19) == 0 or libc.setpriority(2, os.getuid(), 19) == 0:
    print("user: priority")
if libc.syscall(%(ioprio_set)d, 3, os.getuid(), 3 << 13) == 0:
    print("user: io priority")
for name in ("affinity", "scheduler", "priority", "io priority"):
    if SELF[name](0) != 0:
        print("itself is refused:", name, ctypes.get_errno())
"""


async def test_an_agent_changes_its_own_scheduling_and_never_that_of_process_1(sandbox: Sandbox) -> None:
    if sandbox.config.backend == "none":
        pytest.skip("there is no fence")
    from hermes_rl.sandbox.seccomp import MACHINES

    numbers = MACHINES[os.uname().machine].numbers
    await sandbox.write_file("starve.py", (STARVE % numbers).encode())
    assert (await sandbox.run("python3 starve.py")).output == ""


FLOOD = """
import ctypes, os, struct, time
libc = ctypes.CDLL(None)
libc.sched_setscheduler(1, 5, struct.pack("i", 0))
core = struct.pack("Q", 1 << min(os.sched_getaffinity(0)))
libc.sched_setaffinity(1, 8, core)
for _ in range(%d):
    if os.fork() == 0:
        libc.sched_setaffinity(0, 8, core)
        end = time.monotonic() + 60
        while time.monotonic() < end: pass
"""


async def test_many_busy_processes_on_one_core_end_with_the_sandbox() -> None:
    async with asyncio.timeout(60):
        async with create_sandbox(SandboxConfig()) as sandbox:
            await sandbox.write_file("flood.py", (FLOOD % 60).encode())
            await sandbox.run("python3 flood.py", timeout=5)
            inside = descendants(sandbox.pid)
            assert len(inside) > 60
            await sandbox.kill_all()
            assert (await sandbox.run("echo lives")).output == "lives\n"
        assert all(map(ended, inside))


# ------------------------------------------------------------------ waits


@pytest.mark.usefixtures("quick")
async def test_no_wait_on_a_sandbox_that_is_stopped_is_without_end(fenced: Sandbox) -> None:
    """Stopped from outside, as an engine's pause does: ours, so that it is played again."""
    for operation in ("run", "read", "kill"):
        async with create_sandbox(SandboxConfig()) as sandbox:
            await sandbox.run("true")
            os.kill(first(sandbox), signal.SIGSTOP)
            asked = {
                "run": lambda: sandbox.run("true", timeout=2),
                "read": lambda: sandbox.read_file("/etc/passwd"),
                "kill": sandbox.kill_all,
            }[operation]
            async with asyncio.timeout(30):
                with pytest.raises(SandboxFailure, match="did not answer") as caught:
                    await asked()
            assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE
        assert ended(first(sandbox))


@pytest.mark.usefixtures("quick")
async def test_a_helper_that_is_silent_while_it_runs_is_the_agents_doing(
    fenced: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hermes_rl.sandbox import bubblewrap

    monkeypatch.setattr(bubblewrap, "process_state", lambda pid: b"S")
    os.kill(first(fenced), signal.SIGSTOP)
    with pytest.raises(SandboxFailure, match="by the doing of the agent") as caught:
        await fenced.stat("/")
    assert caught.value.stop_reason is StopReason.SANDBOX_KILLED


async def test_closing_a_sandbox_reports_surviving_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "KILL_AGAIN_SECONDS", 0.2)
    sandbox = create_sandbox(SandboxConfig())

    class Immortal:
        def processes(self) -> list[int]:
            return [os.getpid()]

        def kill(self) -> None: ...

    isolation_of(sandbox).process.inside = Immortal()
    await sandbox.start()
    with pytest.raises(SandboxFailure, match="still run"):
        await sandbox.close()


@pytest.mark.parametrize("grouped", [True, False])
async def test_what_does_not_end_by_itself_is_killed(monkeypatch: pytest.MonkeyPatch, grouped: bool) -> None:
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.2)
    async with create_sandbox(SandboxConfig()) as sandbox:
        isolation = isolation_of(sandbox)
        if not grouped:
            isolation.process.inside = None
        await sandbox.spawn("sleep 1000")
        inside = descendants(isolation.pid)
        os.kill(first(sandbox), signal.SIGSTOP)
    assert len(inside) >= 2
    assert all(map(ended, inside))


# ------------------------------------------------------------------ whose doing


async def test_a_helper_that_ends_by_itself_is_the_agents_doing(end_itself: Callable[[], None]) -> None:
    async with create_sandbox(SandboxConfig()) as sandbox:
        await sandbox.run("true")
        end_itself()
        with pytest.raises(SandboxFailure) as caught:
            await sandbox.run("sleep 30")
    assert caught.value.stop_reason is StopReason.SANDBOX_KILLED


async def test_killed_helper_is_an_infrastructure_failure(fenced: Sandbox) -> None:
    os.kill(first(fenced), signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await fenced.run("sleep 30")
    assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE


async def test_sandbox_that_ends_before_agent_code_is_an_infrastructure_failure(
    end_itself: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepare(self: Sandbox) -> None:
        end_itself()
        await self.stat("/")

    monkeypatch.setattr(Sandbox, "prepare", prepare)
    with pytest.raises(SandboxFailure, match="was lost") as caught:
        await create_sandbox(SandboxConfig()).start()
    assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE


async def test_what_was_done_to_a_sandbox_is_an_answer_to_rewards_and_no_failure(
    end_itself: Callable[[], None],
) -> None:
    async with ToolRuntime(SandboxConfig(), task_id="held") as runtime:
        await runtime.sandbox()
        context = ToolContext("held")
        assert (await asyncio.to_thread(context.write_file, "laid", "x")) == {"bytes_written": 1}
        end_itself()
        await runtime.settle()
        assert (await asyncio.to_thread(context.terminal, "true"))["exit_code"] == 137
        await asyncio.to_thread(context.restore)


# ------------------------------------------------------------------ descriptors of this machine


@pytest.mark.parametrize("left", range(0, 26, 3))
async def test_a_start_without_descriptors_is_our_failure_and_leaves_none(left: int) -> None:
    async with create_sandbox(SandboxConfig()):
        pass
    before = len(list(Path("/proc/self/fd").iterdir()))
    sandbox = create_sandbox(SandboxConfig())
    with few_descriptors(left):
        try:
            await sandbox.start()
        except SandboxFailure as failure:
            assert failure.stop_reason is StopReason.SANDBOX_FAILURE
        await sandbox.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("left", range(9))
async def test_a_command_or_file_without_descriptors_is_our_failure(fenced: Sandbox, left: int) -> None:
    await fenced.write_file("large", b"x" * 100_000)
    before = len(list(Path("/proc/self/fd").iterdir()))
    asked = {
        "run": lambda: fenced.run("cat; exit 3", stdin=b"x"),
        "terminal": lambda: fenced.run_reporting("exit 3", ""),
        "write": lambda: fenced.write_file("new", b"x" * 100_000),
        "read": lambda: fenced.read_file("large"),
    }
    for name, one in asked.items():
        with few_descriptors(left):
            try:
                answer = await one()
            except SandboxFailure as failure:
                assert failure.stop_reason is StopReason.SANDBOX_FAILURE, name
                continue
        assert answer is None or answer == b"x" * 100_000 or answer.exit_code == 3, name  # type: ignore[attr-defined]
    await fenced.close()
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


async def test_cancelled_read_of_a_large_file_leaks_no_descriptor(
    fenced: Sandbox,
) -> None:
    await fenced.write_file("large", b"x" * (4 << 20))
    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    let_go = threading.Event()
    occupied = asyncio.create_task(asyncio.to_thread(let_go.wait, 30))
    reading = asyncio.create_task(fenced.read_file("large"))
    await fenced.read_file("/etc/passwd")  # answered after it
    await asyncio.sleep(0)
    reading.cancel()
    let_go.set()  # it may wait for its thread
    with pytest.raises(asyncio.CancelledError):
        await reading
    await occupied
    await until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


async def test_cancelling_a_large_input_leaves_no_descriptor(fenced: Sandbox) -> None:
    data = b"x" * (64 << 20)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for delay in (0, 0.001, 0.005, 0.01, 0.02):
        for work in (fenced.run("sleep 5", stdin=data), fenced.write_file("large", data)):
            task = asyncio.create_task(work)
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await fenced.run("true")
    await until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
