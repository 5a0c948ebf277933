"""A machine of one of hermes-agent's backends, in a separate process. It is run as a program, and no module imports it.

Importing hermes-agent changes the environment of its process and writes below ``$HERMES_HOME``. Symbols of hermes-agent
0.19 that are used, asserted by a test: the classes of `CLASSES`, and of each `execute` and `cleanup`; of the one for
ssh the methods that `connected` replaces; of the module of their base `_BoundedOutputCollector`, which stores the
output of a command.

    python -m hermes_rl.sandbox.remote_worker BACKEND ARGUMENTS CLEANUP

ARGUMENTS are the class's arguments, as JSON; CLEANUP is a last command before the machine is released. A line ``{}``
reports that the machine exists, ``{"error"}`` that it cannot be created. Then JSON texts, one a line: ``{"id",
"command", "stdin", "timeout", "most"}`` in, ``{"id", "output", "code"}`` or ``{"id", "error"}`` out; an output of more
than `most` characters is an error, and never held completely. The end of standard input releases the machine, even if
commands still run on it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

CLASSES = {
    "ssh": ("tools.environments.ssh", "SSHEnvironment"),
    "modal": ("tools.environments.modal", "ModalEnvironment"),
    "daytona": ("tools.environments.daytona", "DaytonaEnvironment"),
    "singularity": ("tools.environments.singularity", "SingularityEnvironment"),
}
CLEANUP_SECONDS = 15
COMMANDS_AT_ONCE = 10
"""Concurrent commands of one machine, by default the most that sshd allows: those of the sandbox, and two that end
them.
"""
MEMORY = 4 << 30
"""Memory limit of this process in bytes: services' libraries collect the output of a command, however large it is."""
UNREAD_CHARACTERS = 1000
"""Characters that are stored of the last command's output."""
SSH_CONNECT_SECONDS = 20.0
SSH_OPTIONS = (
    *("ForwardAgent=no", "ForwardX11=no", "ClearAllForwardings=yes"),  # nothing of this machine is for agents
    *("ServerAliveInterval=15", "ServerAliveCountMax=4"),  # a silent network ends the connection
    "LogLevel=ERROR",
)
"""Options of ssh, which take precedence over the user's files."""
BASE = "tools.environments.base"
_current_command = threading.local()
"""Output limit of the command of this thread, and its collector."""


def main(backend: str, arguments: str, cleanup: str) -> None:
    """Handle requests until standard input ends; hermes-agent's output goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    if backend != "singularity":  # its containers are children of this process, and would inherit the bound
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    try:
        bound_outputs()
        module, name = CLASSES[backend]
        environment_class = getattr(importlib.import_module(module), name)
        machine = (connected(environment_class) if backend == "ssh" else environment_class)(**json.loads(arguments))
    except Exception as error:  # noqa: BLE001 (whatever the backend raises is reported to the runner)
        _send_line(out, {"error": f"{type(error).__name__}: {error}"})
        return
    try:
        _send_line(out, {})
        serve(machine, out)
    finally:
        machine.execute(cleanup, cwd="/", timeout=CLEANUP_SECONDS)
        machine.cleanup()


def bound_outputs() -> None:
    """Make hermes-agent store only the requested part of an output; by itself it stores all."""
    base: Any = importlib.import_module(BASE)

    class Collector(base._BoundedOutputCollector):  # type: ignore[misc]
        def __init__(self, max_chars: int) -> None:
            super().__init__(min(max_chars, getattr(_current_command, "most", UNREAD_CHARACTERS)))
            _current_command.collector = self

    base._BoundedOutputCollector = Collector


def connected(base: Any) -> Any:
    """Return hermes-agent's class for ssh, with trusted host keys alone and without its files on the machine.

    Instead of reading the file to which it saves the login shell's variables, each command runs in a login shell. It
    connects without a command: the account's start-up files belong to all agents, and what they print to none.
    """

    class Connected(base):  # type: ignore[misc]
        def __init__(self, known_hosts: str | None, accept_unknown_host: bool, **arguments: Any) -> None:
            self._trusted = [f"StrictHostKeyChecking={'accept-new' if accept_unknown_host else 'yes'}"]
            if known_hosts is not None:
                self._trusted += [f"UserKnownHostsFile={_as_option(known_hosts)}", "GlobalKnownHostsFile=/dev/null"]
            super().__init__(**arguments)

        def _build_ssh_command(self, extra_args: list[str] | None = None) -> list[str]:
            program, *rest = super()._build_ssh_command(extra_args)
            # If an option is given twice, ssh takes the first.
            return [program, *(word for option in (*self._trusted, *SSH_OPTIONS) for word in ("-o", option)), *rest]

        def _establish_connection(self) -> None:
            try:
                done = subprocess.run(
                    self._build_ssh_command(["-fN"]),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    timeout=SSH_CONNECT_SECONDS,
                )
            except subprocess.TimeoutExpired:
                raise RuntimeError("SSH connection timed out") from None
            if done.returncode != 0:
                raise RuntimeError(f"SSH connection failed: {done.stderr.decode(errors='replace').strip()}")

        def _detect_remote_home(self) -> str:
            return "/"

        def _ensure_remote_dirs(self) -> None:
            """Make none."""

        def init_session(self) -> None:
            """Save nothing."""

    return Connected


def _as_option(path: str) -> str:
    """Return a path as a value of ssh's options, which expand `%` and split at blanks outside of quotes."""
    quoted = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{quoted}"'


def serve(machine: Any, out: IO[str]) -> None:
    """Run commands until standard input ends.

    Commands still running then are not awaited: the cleanup command ends them.
    """
    answering = threading.Lock()
    pool = ThreadPoolExecutor(COMMANDS_AT_ONCE)
    for line in sys.stdin:
        pool.submit(_answer_request, machine, json.loads(line), out, answering)
    pool.shutdown(wait=False, cancel_futures=True)


def _answer_request(machine: Any, request: dict[str, Any], out: IO[str], answering: threading.Lock) -> None:
    _current_command.most, _current_command.collector = request["most"], None
    try:
        # Each command is independent: the final directory of one must not affect the next.
        done = machine.execute(request["command"], cwd="/", timeout=request["timeout"], stdin_data=request["stdin"])
        answer = {"output": done["output"], "code": done["returncode"]}
        if (
            max(len(done["output"]), _current_command.collector.total_chars if _current_command.collector else 0)
            > request["most"]
        ):
            answer = {"error": f"it answered with more than the {request['most']} characters that were asked for"}
    except Exception as error:  # noqa: BLE001 (as above)
        answer = {"error": f"{type(error).__name__}: {error}"}
    # The other side may be gone: then the result is not needed.
    with answering, contextlib.suppress(OSError, ValueError):
        _send_line(out, {"id": request["id"], **answer})


def _send_line(out: IO[str], answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
