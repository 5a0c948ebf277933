"""`hermes-rl` as a user types it, in a process of its own that need not load the command first.

Loading takes longer than most commands do. So one process loads it for all workers of a run of the tests, and every
command is a fork of that: with its own folder, variables, streams and exit status, and ended as any other process.
Tests of what is loaded when, or of another interpreter, start Python themselves.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn
from zlib import crc32

ROOT = Path(__file__).parents[1]
RUN = os.getpid()
"""The process that has loaded this module: all workers of a run of the tests are forks of it."""
SECONDS = 90.0
"""How long a command may take."""
COMMANDS = (
    "hermes_rl.cli.main", "hermes_rl.cli.commands", "hermes_rl.cli.run", "hermes_rl.cli.serving",
    "hermes_rl.cli.validate", "hermes_rl.view.server", "hermes_rl.spec.check_code", "hermes_rl.tools.toolsets.file",
    "tokenizers",
)  # fmt: skip
"""What commands load when they are called."""
LIBRARIES = (*COMMANDS, "hermes_rl.env.spec_env", "transformers.models.auto.tokenization_auto")
"""And what they load for trainers and for tokenizers of the hub: seconds, and settings read from variables."""

used: list[float] = []
"""Seconds of processor time of each command that was waited for: they are no children of this process."""
_loaded: dict[tuple[str, ...], _Loaded] = {}
"""The processes that wait for commands, by what they have loaded."""


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI")}
    return {**kept, "PYTHONPATH": str(ROOT), **(more or {})}


def hermes(
    *arguments: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    typed: str = "",
    code: str | None = None,
    loaded: tuple[str, ...] = COMMANDS,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does that captures both outputs; `typed` is its input."""
    command = started(*arguments, cwd=cwd, env=env, typed=typed, code=code, loaded=loaded)
    try:
        status = command.wait(SECONDS)
    except BaseException:  # a test that is stopped by its time limit too: leave no process
        command.kill()
        raise
    return subprocess.CompletedProcess(["hermes-rl", *arguments], status, *command.said())


def started(
    *arguments: str,
    cwd: Path,
    env: dict[str, str] | None = None,
    typed: str = "",
    code: str | None = None,
    loaded: tuple[str, ...] = COMMANDS,
) -> Command:
    """Start a command that keeps what it says in both outputs."""
    streams = TemporaryFile("w+"), TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115, `said` closes them
    streams[0].write(typed)
    streams[0].seek(0)
    return Command(*arguments, cwd=cwd, env=environment(env), streams=streams, code=code, loaded=loaded)


def program(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of a user to its end, as `python -c` does, where the libraries of trainers are loaded already."""
    return hermes(*arguments, cwd=cwd, code=code, loaded=LIBRARIES)


@atexit.register
def end_commands() -> None:
    """End the processes that wait for further commands."""
    while _loaded:
        _loaded.popitem()[1].close()


class Command:
    """A command that was started, as `subprocess.Popen` has one: it has to be waited for, or be killed.

    `code` runs in the place of `hermes-rl`, as `python -c` runs it.
    """

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        env: dict[str, str],
        streams: tuple[IO[Any], IO[Any], IO[Any]],
        code: str | None = None,
        loaded: tuple[str, ...] = COMMANDS,
    ) -> None:
        if loaded not in _loaded:
            _loaded[loaded] = _Loaded(loaded)
        self._status: int | None = None
        self._streams = streams
        request = {"arguments": arguments, "cwd": str(cwd), "env": env, "code": code}
        self._keeper = _loaded[loaded].start(request, [stream.fileno() for stream in streams])
        self.pid = int(self._keeper.recv(100))

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, negative where a signal has ended it."""
        if self._status is None:
            if not select.select([self._keeper], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("hermes-rl", timeout or 0)
            with self._keeper:
                status, seconds = self._keeper.recv(100).split()
            self._status = int(status)
            used.append(float(seconds))
        return self._status

    def said(self) -> tuple[str, str]:
        """Return what an ended command has written to its outputs, which were files."""
        texts = []
        for stream in self._streams:
            with stream:
                stream.seek(0)
                texts.append(stream.read())
        return texts[1], texts[2]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


class _Loaded:
    """A process that has loaded what commands need, and forks itself for each.

    All workers of one run of the tests share it; it ends when none of them is left.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        name = f"\0hermes-rl-tests-{RUN}-{crc32(repr(modules).encode())}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        while True:
            with suppress(ConnectionRefusedError):  # nobody has begun it, or not to its end
                self._socket.connect(name)
                return
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
                suppress(OSError),
            ):  # another one begins it
                listening.bind(name)
                listening.listen()
                env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
                code = f"from tests.commands import serve; serve({modules!r})"
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=listening.fileno(), cwd=ROOT, env=env
                )

    def start(self, request: dict[str, object], streams: list[int]) -> socket.socket:
        """Start a command; the process that keeps it sends its id and then its exit status."""
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [theirs.fileno(), *streams])
        return ours

    def close(self) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.wait()  # until the other workers have ended too: its processor time is that of the tests


def serve(modules: tuple[str, ...]) -> None:
    """Load what commands need, and run each in a fork that somebody asks for who connects to standard input."""
    _load(modules)
    path = sys.path[1:]
    listening = socket.socket(fileno=os.dup(0))
    asking: list[socket.socket] = []
    while True:
        for ready in select.select([listening, *asking], [], [])[0]:
            if ready is listening:
                asking.append(listening.accept()[0])
                continue
            data, fds, _, _ = socket.recv_fds(ready, 1 << 20, 4)
            if not data:
                ready.close()
                asking.remove(ready)
            elif os.fork() == 0:
                for connection in (listening, *asking):
                    connection.close()
                _command(json.loads(data), path, *fds)
            for fd in fds:
                os.close(fd)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not asking:
            return


def _load(modules: tuple[str, ...]) -> None:
    from hermes_rl.cli.main import program
    from hermes_rl.runs.handles import PRELOAD
    from hermes_rl.spec.section import Section
    from hermes_rl.user_code.fork_server import FORK_SERVER
    from hermes_rl.user_code.worker import MODULES

    program()
    for name in modules:
        importlib.import_module(name)
    sections = [Section]
    for section in sections:
        section.model_rebuild()  # else what checks and writes it is made by each command that uses it
        sections += section.__subclasses__()
    FORK_SERVER.preload("hermes_rl.runs.worker", *PRELOAD, "hermes_rl.user_code.process", *MODULES)  # commands share it
    gc.freeze()  # so that forks share what is loaded


def _command(request: dict[str, Any], path: list[str], keeper: int, *fds: int) -> NoReturn:
    """Become the command that was asked for."""
    _keep(keeper, *fds)
    for descriptor, fd in enumerate(fds):
        os.dup2(fd, descriptor)
        os.close(fd)
    # As Python makes them at its start: those that are there know what kind of file they had.
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace")
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # As `python -m` has it.
    sys.path[:] = [request["cwd"], *request["env"]["PYTHONPATH"].split(os.pathsep), *path]
    try:
        _play(request["code"], *request["arguments"])
    except SystemExit as leaving:
        if isinstance(leaving.code, int):
            _end(leaving.code)
        raise
    _end(0)


def _play(code: str | None, *arguments: str) -> None:
    from hermes_rl.cli.main import main

    if code is None:
        sys.argv = [str(ROOT / "hermes_rl/cli/main.py"), *arguments]
        main()
    else:
        sys.argv = ["-c", *arguments]
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))


def _end(status: int) -> NoReturn:
    """End this process as Python does, except that nothing is taken apart: to copy all of it took longest."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status & 0xFF)


def _keep(fd: int, *streams: int) -> None:
    """Fork; the parent tells the child's id and exit status at this socket, and only the child comes back."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever a shell in the background lets it ignore
    pid = os.fork()
    if pid == 0:
        os.close(fd)
        return
    with socket.socket(fileno=fd) as answered, suppress(BrokenPipeError):
        answered.send(str(pid).encode())
        for stream in streams:
            os.close(stream)
        _, status, usage = os.wait4(pid, 0)
        answered.send(f"{os.waitstatus_to_exitcode(status)} {usage.ru_utime + usage.ru_stime}".encode())
    os._exit(0)
