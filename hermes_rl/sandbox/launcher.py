"""The first process of a sandbox on this machine: what it inherits, which code it runs, how it is started and reaped.

Owns the descriptors that the host makes for sandboxes, the choice of the Python that runs the helper and the compiling
of the helper for it, `LocalProcess`, and the one thread that starts and reaps such processes. That thread must last:
the kernel ties `bwrap --die-with-parent` to the *thread* that started it, so a sandbox started from a worker thread
would die with the worker. It reaps as well, since that must happen even if the event loop that used the sandbox is
closed. The strength of the isolation belongs to the backends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import os
import platform
import pwd
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.helper_system import descendants
from hermes_rl.threads import acquire_in_thread

# -------------------------------------------------------------------------------- descriptors
# A machine that has none left is an infrastructure failure. The same `OSError` from inside a sandbox would be a result
# for the agent, so it must not look like one.
#
# The agent can change every open file description that is passed into a sandbox: if it blocks, whom it signals, its
# position. So the host reads and waits only at descriptions that no sandbox has. `reopened` makes another description
# of the same pipe, to be passed in instead of the host's.

IN_THREAD = 1 << 20
"""Bytes from which copying is done in a thread."""


@contextmanager
def as_sandbox_failure(description: str) -> Iterator[None]:
    """Convert an `OSError` in the block to a failure of this machine."""
    try:
        yield
    except OSError as error:
        limit = f" (the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: `ulimit -n`)"
        raise SandboxFailure(
            f"{description}: {error.strerror or error}{limit * (error.errno == errno.EMFILE)}"
        ) from error


def memory_file(data: bytes, name: str = "data") -> int:
    """Return a descriptor of an unnamed file in memory that holds `data`, at its start."""
    with _new_file(name) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def in_memory(data: bytes) -> int:
    """See `memory_file`; a large one is filled in a thread."""
    if len(data) < IN_THREAD:
        return memory_file(data)
    return await acquire_in_thread(partial(memory_file, data), os.close)


def fixed_file(size: int, name: str) -> int:
    """Return a descriptor of an unnamed file in memory of zeros, whose size cannot be changed."""
    with _new_file(name, os.MFD_ALLOW_SEALING) as fd:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@contextmanager
def _new_file(name: str, flags: int = 0) -> Iterator[int]:
    """Open a new file in memory, which is closed if the block raises an exception."""
    with as_sandbox_failure("this machine cannot make a file in memory"), ExitStack() as unfinished:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
        unfinished.callback(os.close, fd)
        yield fd
        unfinished.pop_all()


def pipe() -> tuple[int, int]:
    """Return the reading and the writing end."""
    with as_sandbox_failure("this machine cannot make a pipe"):
        return os.pipe2(os.O_CLOEXEC)


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets of the family AF_UNIX."""
    with as_sandbox_failure("this machine cannot make a pair of sockets"):
        return socket.socketpair(socket.AF_UNIX, kind)


def copy_of(fd: int) -> int:
    """Return another descriptor of the same open file description."""
    with as_sandbox_failure("this machine cannot copy a descriptor"):
        return os.dup(fd)


def reopened(fd: int, flags: int) -> int:
    """Return a descriptor of the same pipe with a separate open file description."""
    with as_sandbox_failure("this machine cannot reopen a pipe"):
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


async def read_to_end(fd: int) -> bytes:
    """Return all that is written into a pipe until its other end is closed, and close it."""
    loop, parts = asyncio.get_running_loop(), list[bytes]()
    ended: asyncio.Future[None] = loop.create_future()

    def take() -> None:
        data = os.read(fd, 4096)
        parts.append(data)
        if not data and not ended.done():
            ended.set_result(None)

    loop.add_reader(fd, take)
    try:
        await ended
    finally:
        loop.remove_reader(fd)
        os.close(fd)
    return b"".join(parts)


# -------------------------------------------------------------------------------- the helper's code
# The helper is compiled once per interpreter: compiling at every start would cost a third of the time that a sandbox
# takes to start.

MODULES = ("wire", "helper_files", "helper_copy", "helper_system", "helper")
SYSTEM_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")

BOOT = """
import marshal, posix, sys
for name, code in marshal.loads(posix.pread(int(sys.argv[2]), 1 << 22, 0)):
    module = sys.modules[name] = type(sys)(name)
    exec(code, module.__dict__)
module.main()
posix._exit(0)
"""
"""Program for the Python in a sandbox; its arguments are the numbers of the control socket and of the code's
descriptor. It exits immediately: tearing down its modules would take a quarter of the time of starting them.
"""

_COMPILE = """
import marshal, sys
sources = eval(sys.stdin.read())
compiled = [(name, compile(source, name, "exec", dont_inherit=True, optimize=2)) for name, source in sources]
sys.stdout.buffer.write(marshal.dumps(compiled))
"""


@functools.cache
def helper_bundle(python: str) -> bytes:
    """Return the helper's modules, compiled by `python`; starts that interpreter at the first call."""
    folder = Path(__file__).parent
    sources = [(f"hermes_rl.sandbox.{name}", (folder / f"{name}.py").read_text("utf-8")) for name in MODULES]
    return python_output(python, _COMPILE, "compile the sandbox helper", repr(sources).encode())


def python_output(python: str, code: str, purpose: str, stdin: bytes = b"") -> bytes:
    """Return the output of a program under an interpreter of this machine; raises `SandboxFailure` if that fails."""
    command = [*isolated(python), "-X", "utf8", "-c", code]
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, env={}, timeout=60, check=True)
    except subprocess.CalledProcessError as error:
        tail = error.stderr.decode("utf-8", "replace")[-500:]
        raise SandboxFailure(f"{python} cannot {purpose}: {tail}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxFailure(f"{python} cannot {purpose}: {error}") from error
    return done.stdout


def boot_argv(python: Sequence[str], control: int, code: int) -> list[str]:
    """Return the command that runs the helper with its socket and its code at these descriptors."""
    return [*python, "-c", BOOT, str(control), str(code)]


def isolated(python: str) -> list[str]:
    """Return the command of a Python that ignores variables and packages of all users."""
    return [python, "-I", "-S"]


def system_python() -> str | None:
    """Return a Python that is part of the system directories which every sandbox sees anyway."""
    for path in SYSTEM_PYTHONS:
        if os.access(path, os.X_OK) and os.path.realpath(path).startswith("/usr/"):
            return path
    return None


def own_python() -> str:
    """Return the interpreter of this program, outside any virtual environment."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(base if base.exists() else Path(sys.executable).resolve())


# -------------------------------------------------------------------------------- starting and reaping

GRACE_SECONDS = 5.0
"""Seconds for a sandbox to end by itself, once its control socket is closed."""
KILL_AGAIN_SECONDS = 10.0
"""Further seconds, in which everything in it is killed again and again."""
KILL_PAUSE = 0.05
POLL_SECONDS = 0.001

log = logging.getLogger(__name__)

_launcher: Launcher | None = None
_lock = threading.Lock()


@dataclass(frozen=True)
class Program:
    """A program to start: it inherits only the descriptors named here."""

    argv: Sequence[str]
    executable: str
    fds: Sequence[int]
    stderr: int
    uid: int | None = None
    """User and group of the program; None for the current one."""
    env: Mapping[str, str] = field(default_factory=dict)


Child = subprocess.Popen[bytes]
T = TypeVar("T")


class ProcessSet(Protocol):
    """Tracks the processes of one sandbox, even if their ancestors are gone."""

    def processes(self) -> list[int]:
        """Return the ids of the processes that still run."""

    def kill(self) -> None:
        """Kill them all, without waiting."""


@dataclass
class _Ending:
    """A sandbox that should end by itself before the deadline; after it, the launcher kills its processes."""

    child: Child
    reaped: Future[int | None]
    inside: ProcessSet | None
    deadline: float
    next_kill: float = 0.0

    def poll_finished(self) -> bool:
        """Poll it, kill the remaining processes after the deadline, and return True if nothing remains to be done."""
        try:
            return self._look()
        except Exception as error:  # the thread is shared: the caller that waits for this sandbox gets the error
            log.exception("a closed sandbox cannot be watched any more")
            self.child.kill()
            self.reaped.set_exception(SandboxFailure(f"what is left of a closed sandbox is not known: {error}"))
            return True

    def _look(self) -> bool:
        code, now = self.child.poll(), time.monotonic()
        if code is not None and not self._list_processes():
            self.reaped.set_result(code)
            return True
        if now > self.deadline + KILL_AGAIN_SECONDS:
            self._give_up(code)
            return True
        if (code is not None or now > self.deadline) and now > self.next_kill:
            self.next_kill = now + KILL_PAUSE
            self._kill(code)
        return False

    def _list_processes(self) -> list[int]:
        return self.inside.processes() if self.inside is not None else []

    def _kill(self, code: int | None) -> None:
        """Kill the processes inside first, and then their parent: without it the processes inside are unknown."""
        if self.inside is not None:
            self.inside.kill()
        below = descendants(self.child.pid) if code is None else []
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if code is None and not below:
            self.child.send_signal(signal.SIGKILL)

    def _give_up(self, code: int | None) -> None:
        alive = sorted({*self._list_processes(), *(descendants(self.child.pid) if code is None else [])}) or [
            self.child.pid
        ]
        if code is None:
            self.child.send_signal(signal.SIGKILL)
        some = ", ".join(map(str, alive[:5]))
        message = f"{len(alive)} processes of a closed sandbox cannot be killed and still run ({some})"
        log.error(message)
        self.reaped.set_exception(SandboxFailure(message))


class Launcher:
    """The thread, and the children that it waits for."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending: list[_Ending] = []
        threading.Thread(target=self._work, name="hermes-rl-launcher", daemon=True).start()

    def launch(self, program: Program) -> Future[Child]:
        """Start a program; the future fails with the error of `subprocess.Popen` if it cannot be started."""
        return self.call(lambda: _start_program(program))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run a function in the launcher's thread, whose mounts every sandbox starts with.

        It does not run if the future is cancelled before its turn; after that, it cannot be cancelled.
        """
        future: Future[T] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except Exception as error:  # noqa: BLE001 - carried to the caller; the thread is everybody's
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def reap(self, launched: Future[Child], inside: ProcessSet | None = None) -> Future[int | None]:
        """Wait for a sandbox that is about to end, and kill it if it does not; its exit status, if it has one.

        The future fails with `SandboxFailure` if a process of the sandbox still lives at the end. Jobs are done in
        order, so earlier requests of `launch` have started, or have failed, by then.
        """
        reaped: Future[int | None] = Future()

        def adopt() -> None:
            if launched.cancelled() or launched.exception() is not None:
                reaped.set_result(None)
            else:
                deadline = time.monotonic() + GRACE_SECONDS
                self._ending.append(_Ending(launched.result(), reaped, inside, deadline))

        self.call(adopt)
        return reaped

    def _work(self) -> None:
        """Run the requested jobs, and in between poll sandboxes that should end, however many jobs there are."""
        look_at = 0.0
        while True:
            with contextlib.suppress(queue.Empty):
                self._jobs.get(timeout=POLL_SECONDS if self._ending else None)()
            started_at = time.monotonic()
            if started_at >= look_at:
                self._ending = [process for process in self._ending if not process.poll_finished()]
                now = time.monotonic()
                look_at = now + max(POLL_SECONDS, now - started_at)  # starts get at least half of the time


def launcher() -> Launcher:
    """Return the launcher of this process; made on first use, and again after a fork."""
    global _launcher
    with _lock:
        if _launcher is None or _launcher.owner != os.getpid():
            _launcher = Launcher()
        return _launcher


class Descriptors:
    """Descriptors that the first process inherits. The host closes its copies once the process is started."""

    control: int
    """The helper's end of the control socket."""
    code: int
    """The helper's compiled modules."""
    stderr: int

    def __init__(self) -> None:
        self.all: list[int] = []

    def add(self, fd: int) -> int:
        self.all.append(fd)
        return fd

    def close(self) -> None:
        for fd in self.all:
            os.close(fd)


class LocalProcess:
    """The first process of one sandbox on this machine, from before its start until it is reaped.

    `inside` knows all processes of the sandbox, even after the first has ended; without it, the descendants of the
    first are ended. `on_reaped` is called in the launcher's thread when all of them are gone, even without a waiting
    caller.
    """

    def __init__(self, inside: ProcessSet | None = None, on_reaped: Callable[[], None] = lambda: None) -> None:
        self.inside, self._on_reaped = inside, on_reaped
        self._launched: Future[Child] | None = None
        self._reaped: Future[int | None] | None = None

    @property
    def pid(self) -> int:
        if self._launched is None:
            raise SandboxFailure("the sandbox is not started")
        return self._launched.result().pid

    @asynccontextmanager
    async def started(self, python: str, program: Callable[[Descriptors], Program]) -> AsyncIterator[socket.socket]:
        """Start it and yield the host's end of the control socket, which then belongs to the block.

        Compiling the helper for `python` blocks, so `helper_bundle` must be called before, in a thread. A
        `SandboxFailure` of the block is raised with the process's standard error: that is the cause if it ended before
        the helper responded.
        """
        bundle = helper_bundle(python)
        with ExitStack() as cleanup:
            stderr = memory_file(b"", "stderr")
            cleanup.callback(os.close, stderr)
            with ExitStack() as unclaimed:
                parent_end, child_end = socket_pair(socket.SOCK_SEQPACKET)
                unclaimed.callback(parent_end.close)
                descriptors = Descriptors()
                try:
                    descriptors.control = descriptors.add(child_end.detach())
                    descriptors.code = descriptors.add(memory_file(bundle, "helper"))
                    descriptors.stderr = descriptors.add(copy_of(stderr))
                    requested = program(descriptors)
                except BaseException:  # only this method knows them
                    descriptors.close()
                    raise
                self._launched = launcher().launch(requested)
                # Also on cancellation: the launcher needs them until the program is started.
                self._launched.add_done_callback(lambda _: descriptors.close())
                try:
                    await asyncio.shield(asyncio.wrap_future(self._launched))
                except (OSError, ValueError, subprocess.SubprocessError) as error:  # a zero byte is a ValueError
                    raise SandboxFailure(f"{requested.executable} cannot be started: {error}") from error
                unclaimed.pop_all()
            try:
                yield parent_end
            except SandboxFailure as failure:
                message = os.pread(stderr, 4096, 0).decode("utf-8", "replace").strip()
                raise SandboxFailure(f"the sandbox did not start: {message or failure}") from None

    def reap(self) -> None:
        """Start to reap it and all others of its sandbox, in the launcher's thread, with or without a waiting
        caller.
        """
        if self._launched is not None and self._reaped is None:
            self._reaped = launcher().reap(self._launched, self.inside)
            self._reaped.add_done_callback(lambda _: self._on_reaped())

    async def wait(self) -> int | None:
        """Reap it; return its exit status, or None if it never started.

        Raises `SandboxFailure` if something still lives.
        """
        self.reap()
        return None if self._reaped is None else await asyncio.shield(asyncio.wrap_future(self._reaped))


SYSTEM_CALLS = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}
"""`setgroups`, `setresgid` and `setresuid`, by their numbers in the kernel: the functions of the C library change all
threads.
"""


@contextmanager
def as_user(uid: int) -> Iterator[None]:
    """Make this thread of root's process another user, in the group of the same number alone; its children too.

    A program in between that changes the user, such as setpriv, would have to be started for each sandbox, and Python's
    method copies the process, which stops every thread for milliseconds.
    """
    setgroups, setresgid, setresuid = SYSTEM_CALLS[platform.machine()]
    groups = os.getgroups()
    with ExitStack() as back:
        libc_call("syscall", setgroups, 0, None)
        back.callback(libc_call, "syscall", setgroups, len(groups), (ctypes.c_uint32 * len(groups))(*groups))
        for syscall_number, before in ((setresgid, os.getresgid()), (setresuid, os.getresuid())):
            libc_call("syscall", syscall_number, uid, uid, before[2])  # the third allows the thread to come back
            back.callback(libc_call, "syscall", syscall_number, *before)
        yield


def libc_call(name: str, *arguments: object) -> int:
    """Call a function of the C library; raises the `OSError` that it fails with."""
    result: int = getattr(_load_libc(), name)(*arguments)
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"{name}: {os.strerror(error_number)}")
    return result


@functools.cache
def _load_libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def unshare_options(uid: int) -> list[str]:
    """Return the options with which `unshare` becomes a subordinate user and group of this number, and no other."""
    # The number is the same on both sides, so that it does not matter which of them a version names first.
    mapped = f"{uid},{uid},1"
    return ["--user", "--map-users", mapped, "--map-groups", mapped, "--setuid", str(uid), "--setgid", str(uid)]


@functools.cache
def subordinate_users() -> range:
    """Return the users that this user, who is not root, may become by `newuidmap`; empty if it may not.

    They are the users of /etc/subuid that are groups of /etc/subgid too: sandboxes become both.
    """
    users, groups = (_subordinate_ids(Path(file)) for file in ("/etc/subuid", "/etc/subgid"))
    both = range(max(users.start, groups.start), min(users.stop, groups.stop))
    if not both:
        return range(0)
    try:
        tried = subprocess.run(
            ["/usr/bin/unshare", *unshare_options(both.start), "--", "/bin/true"],
            stdin=subprocess.DEVNULL, capture_output=True, env={}, cwd="/", timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return range(0)
    return both if tried.returncode == 0 else range(0)


def _subordinate_ids(file: Path) -> range:
    """Return the largest range that a file of subordinate numbers gives this user, by name or by number."""
    uid = os.geteuid()
    mine = {str(uid)}
    with contextlib.suppress(KeyError):
        mine.add(pwd.getpwuid(uid).pw_name)
    ranges = [range(0)]
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text("utf-8").splitlines():
            owner, first, count = line.split(":")
            if owner in mine:
                ranges.append(range(int(first), int(first) + int(count)))
    return max(ranges, key=len)


def _start_program(program: Program) -> Child:
    argv, executable, uid = program.argv, program.executable, program.uid
    if uid is not None and os.geteuid() != 0:
        # A user other than root becomes one of its subordinate users in a user namespace.
        argv = ["/usr/bin/unshare", *unshare_options(uid), "--", executable, *argv[1:]]
        executable, uid = argv[0], None
    with nullcontext() if uid is None else as_user(uid):
        return subprocess.Popen(
            argv,
            executable=executable,
            pass_fds=program.fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=program.stderr,
            env=program.env,
            cwd="/",
            # Ctrl-C in the terminal is the runner's to handle; it must not reach the sandboxes by itself.
            start_new_session=True,
        )
