"""Starting and burying the processes that sandboxes are made of, from one thread that never ends.

Owns that thread. It has to be one that lasts: the kernel ties `bwrap --die-with-parent` to the *thread*
that started it, so a sandbox started from a worker thread would die with the worker. Burying is here too,
because it must be done even where the event loop that used the sandbox is already gone."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.helper_system import descendants

# --------------- Descriptors that the host makes for a sandbox: files in memory, pipes, pairs of sockets, copies
# Owns that a machine which has none left is our failure. The same `OSError` from inside a sandbox would be an answer to
# the agent, so it must not look like one.
#
# Whatever is handed into a sandbox is an open file description that the agent can change: whether it blocks, whom it
# signals, where it stands. So the host reads and waits only at descriptions that no sandbox has. `reopened` makes
# another description of the same pipe, to be handed in instead of the host's own.


@contextmanager
def ours(what: str) -> Iterator[None]:
    """Turn an `OSError` inside of the block into a failure of this machine."""
    try:
        yield
    except OSError as error:
        raise SandboxFailure(f"{what}: {error.strerror or error}") from error


def memory_file(data: bytes, name: str = "data") -> int:
    """A descriptor of an unnamed file in memory that holds `data`, at its start."""
    with _new_file(name) as fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


def fixed_file(size: int, name: str) -> int:
    """A descriptor of an unnamed file in memory of zeros, which nobody can make larger or smaller."""
    with _new_file(name, os.MFD_ALLOW_SEALING) as fd:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


@contextmanager
def _new_file(name: str, flags: int = 0) -> Iterator[int]:
    """A new file in memory, which is closed where the block does not end well."""
    with ours("this machine cannot make a file in memory"), ExitStack() as unfinished:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | flags)
        unfinished.callback(os.close, fd)
        yield fd
        unfinished.pop_all()


def pipe() -> tuple[int, int]:
    """Reading and writing end."""
    with ours("this machine cannot make a pipe"):
        return os.pipe2(os.O_CLOEXEC)


def socket_pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets of the family AF_UNIX."""
    with ours("this machine cannot make a pair of sockets"):
        return socket.socketpair(socket.AF_UNIX, kind)


def copy_of(fd: int) -> int:
    """Another descriptor of the same open file description."""
    with ours("this machine cannot copy a descriptor"):
        return os.dup(fd)


def reopened(fd: int, flags: int) -> int:
    """A descriptor of the same pipe with an open file description of its own."""
    with ours("this machine cannot open a pipe anew"):
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


# -------------------------------------------------------------------------------- launcher

GRACE_SECONDS = 5.0
"""How long a sandbox may take to end by itself, once its control socket is closed."""
KILL_SECONDS = 10.0
"""How long it may take after that, while everything in it is killed again and again."""
KILL_PAUSE = 0.05
POLL_SECONDS = 0.001

log = logging.getLogger(__name__)

_launcher: Launcher | None = None
_lock = threading.Lock()


@dataclass(frozen=True)
class Program:
    """What to start: nothing is inherited but the descriptors named here."""

    argv: Sequence[str]
    executable: str
    fds: Sequence[int]
    stderr: int
    uid: int | None = None
    """Become this user and group first; None stays who we are."""
    env: Mapping[str, str] = field(default_factory=dict)


Child = subprocess.Popen[bytes]


class Remains(Protocol):
    """Knows the processes of one sandbox, also those whose ancestors are gone."""

    def processes(self) -> list[int]:
        """Ids of those that still run."""
        ...

    def kill(self) -> None:
        """Kill them all, without waiting."""
        ...


@dataclass
class _Ending:
    """A sandbox that ought to end by itself before the deadline, from when on it is killed."""

    child: Child
    buried: Future[int | None]
    remains: Remains | None
    deadline: float
    next_kill: float = 0.0

    def over(self) -> bool:
        code, now = self.child.poll(), time.monotonic()
        if code is not None and not self._left():
            self.buried.set_result(code)
            return True
        if now > self.deadline + KILL_SECONDS:
            self._give_up(code)
            return True
        if (code is not None or now > self.deadline) and now > self.next_kill:
            self.next_kill = now + KILL_PAUSE
            self._kill(code)
        return False

    def _left(self) -> list[int]:
        return self.remains.processes() if self.remains is not None else []

    def _kill(self, code: int | None) -> None:
        """Kill what is inside, and only then what waits for it: afterwards nobody would know what is inside."""
        if self.remains is not None:
            self.remains.kill()
        inside = descendants(self.child.pid) if code is None else []
        for pid in inside:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if code is None and not inside:
            self.child.send_signal(signal.SIGKILL)

    def _give_up(self, code: int | None) -> None:
        left = sorted({*self._left(), *(descendants(self.child.pid) if code is None else [])}) or [self.child.pid]
        if code is None:
            self.child.send_signal(signal.SIGKILL)
        some = ", ".join(map(str, left[:5]))
        told = f"{len(left)} processes of a closed sandbox cannot be killed and still run ({some})"
        log.error(told)
        self.buried.set_exception(SandboxFailure(told))


class Launcher:
    """The thread, and the children that it waits for."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ending: list[_Ending] = []
        threading.Thread(target=self._work, name="hermes-rl-launcher", daemon=True).start()

    def launch(self, program: Program) -> Future[Child]:
        """Start a program; the future fails with the `OSError` of a program that cannot be started."""
        future: Future[Child] = Future()
        self._jobs.put(lambda: _fulfil(future, lambda: _start(program)))
        return future

    def bury(self, launched: Future[Child], remains: Remains | None = None) -> Future[int | None]:
        """Wait for a sandbox that is about to end, and kill it if it does not; its exit status, if it has one.

        The future fails with `SandboxFailure` where something of the sandbox still lives in the end. Jobs are done in
        order, so what `launch` was asked for has been started, or has failed, by then.
        """
        buried: Future[int | None] = Future()
        self._jobs.put(lambda: self._adopt(launched, buried, remains))
        return buried

    def _adopt(self, launched: Future[Child], buried: Future[int | None], remains: Remains | None) -> None:
        if launched.exception() is not None:
            buried.set_result(None)
            return
        child = launched.result()
        self._ending.append(_Ending(child, buried, remains, time.monotonic() + GRACE_SECONDS))

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=POLL_SECONDS if self._ending else None)
            except queue.Empty:
                self._ending = [ending for ending in self._ending if not ending.over()]
            else:
                job()


def launcher() -> Launcher:
    """The launcher of this process; made on first use, and again after a fork."""
    global _launcher
    with _lock:
        if _launcher is None or _launcher.owner != os.getpid():
            _launcher = Launcher()
        return _launcher


_setpriv = functools.cache(lambda: shutil.which("setpriv"))


def _by_setpriv(program: Program) -> Program:
    """The same, where another program changes the user.

    To do it itself, Python would have to copy itself first, which stops every thread for milliseconds.
    """
    setpriv = _setpriv()
    if program.uid is None or setpriv is None:
        return program
    change = [f"--reuid={program.uid}", f"--regid={program.uid}", "--clear-groups", "--", program.executable]
    return replace(program, argv=["setpriv", *change, *program.argv[1:]], executable=setpriv, uid=None)


def _start(program: Program) -> Child:
    program = _by_setpriv(program)
    return subprocess.Popen(
        program.argv,
        executable=program.executable,
        pass_fds=program.fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=program.stderr,
        env=program.env,
        cwd="/",
        # Ctrl-C in the terminal is the runner's to handle; it must not reach the sandboxes by itself.
        start_new_session=True,
        user=program.uid,
        group=program.uid,
        extra_groups=[] if program.uid is not None else None,
    )


def _fulfil(future: Future[Child], action: Callable[[], Child]) -> None:
    try:
        child = action()
    except (OSError, subprocess.SubprocessError) as error:
        future.set_exception(error)
    else:
        future.set_result(child)
