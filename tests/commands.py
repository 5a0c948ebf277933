"""`hermes-rl` as a user types it, in a process of its own that need not load the command first.

Loading takes longer than most commands do. So one process of each worker loads it once, and every command is a fork of
that: with its own folder, variables, streams and exit status, and ended as any other process. Tests of what is loaded
when, or of another interpreter, start Python themselves.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

ROOT = Path(__file__).parents[1]
SECONDS = 90.0
"""How long a command may take."""
LOADED = ("hermes_rl.cli.commands", "hermes_rl.cli.running", "hermes_rl.cli.serving", "hermes_rl.cli.viewing")
"""What commands load when they are called."""

_waiting: list[_Loaded] = []
"""Those that run no command now."""


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI")}
    return {**kept, "PYTHONPATH": str(ROOT), **(more or {})}


def hermes(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does that captures both outputs; `typed` is its input."""
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        given.write(typed)
        given.seek(0)
        command = Command(*arguments, cwd=cwd, env=environment(env), streams=(given, out, err))
        try:
            status = command.wait(SECONDS)
        except BaseException:
            command.kill()
            raise
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(["hermes-rl", *arguments], status, out.read(), err.read())


def end_commands() -> None:
    """End the processes that wait for further commands."""
    while _waiting:
        _waiting.pop().close()


class Command:
    """A command that was started, as `subprocess.Popen` has one: it has to be waited for, or be killed."""

    def __init__(self, *arguments: str, cwd: Path, env: dict[str, str], streams: tuple[IO[str], IO[str], IO[str]]):
        self._loaded = _waiting.pop() if _waiting else _Loaded()
        self._status: int | None = None
        request = {"arguments": arguments, "cwd": str(cwd), "env": env}
        self.pid = self._loaded.start(request, [stream.fileno() for stream in streams])

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status, negative where a signal has ended it."""
        if self._status is None:
            self._status = self._loaded.status(timeout)
            _waiting.append(self._loaded)
        return self._status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self.wait()


class _Loaded:
    """A process that has loaded what commands need, and forks itself for one after the other."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        program = "from tests.commands import serve; serve()"
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", program], stdin=theirs.fileno(), cwd=ROOT, env=env)

    def start(self, request: dict[str, object], streams: list[int]) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
        return int(self._socket.recv(100))

    def status(self, timeout: float | None) -> int:
        if not select.select([self._socket], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("hermes-rl", timeout or 0)
        return int(self._socket.recv(100))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve() -> None:
    """Load what commands need, and run each that is asked for at standard input in a fork."""
    from hermes_rl.cli.main import main

    for name in LOADED:
        importlib.import_module(name)
    gc.freeze()  # so that forks share what is loaded
    path = sys.path[1:]
    asked = socket.socket(fileno=os.dup(0))
    while True:
        data, fds, _, _ = socket.recv_fds(asked, 1 << 20, 3)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            break
        for fd in fds:
            os.close(fd)
        with suppress(BrokenPipeError):
            asked.send(str(pid).encode())
            asked.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    asked.close()
    request = json.loads(data)
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
    sys.argv = [str(ROOT / "hermes_rl/cli/main.py"), *request["arguments"]]
    main()
