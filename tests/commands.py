"""`hermes-rl` as a user types it, in a process of its own that need not load the command first.

Loading takes longer than most commands do. So one process of each worker loads it once, and every command is a fork of
that: with its own folder, variables, streams and exit status, and ended as any other process. Tests of what is loaded
when, or of signals, start Python themselves.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 90.0
"""How long a command may take."""

_waiting: list[_Loaded] = []
"""Those that run no command; with threads there are several."""


def end_commands() -> None:
    """End the processes that wait for further commands."""
    while _waiting:
        _waiting.pop().close()


def environment(more: dict[str, str] | None = None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("OPENAI")}
    return {**kept, "PYTHONPATH": str(ROOT), **(more or {})}


def hermes(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` does that captures both outputs; `typed` is its input."""
    loaded = _waiting.pop() if _waiting else _Loaded()
    with TemporaryFile("w+") as given, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        given.write(typed)
        given.seek(0)
        request = {"arguments": arguments, "cwd": str(cwd), "env": environment(env)}
        status = loaded.run(request, given.fileno(), out.fileno(), err.fileno())
        _waiting.append(loaded)
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(["hermes-rl", *arguments], status, out.read(), err.read())


class _Loaded:
    """A process that has loaded the command, and forks itself for one after the other. It ends with its socket."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        program = "from tests.commands import serve; serve()"
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-c", program], stdin=theirs.fileno(), cwd=ROOT, env=env)

    def run(self, request: dict[str, Any], *streams: int) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
        pid = int(self._socket.recv(100))
        self._socket.settimeout(SECONDS)
        try:
            return int(self._socket.recv(100))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self.close()
            raise subprocess.TimeoutExpired(request["arguments"], SECONDS) from None

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve() -> None:
    """Load the command, and run each that is asked for at standard input in a fork."""
    import hermes_rl.cli.commands
    import hermes_rl.cli.running  # noqa: F401 - what most commands load when they are called
    from hermes_rl.cli.main import main

    path = sys.path[1:]
    gc.freeze()  # so that forks share what is loaded
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
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    # As `python -m` has it.
    sys.path[:] = [request["cwd"], *request["env"]["PYTHONPATH"].split(os.pathsep), *path]
    sys.argv = [str(ROOT / "hermes_rl/cli/main.py"), *request["arguments"]]
    main()
