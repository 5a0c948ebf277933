"""A bash that waits in a sandbox and forks for each command: a fork costs a quarter of a new shell's start.

`ShellServer` owns the host's end of one such shell and the commands inside it. `WaitingShell` owns the selection of
commands for it, replacing a lost shell, and not using a shell that the agent could have modified once the agent has
ended. Other commands run in a new shell, as in `Sandbox.run_reporting`.

A server runs one command at a time, each in a separate subshell and process group, so that only the report of
`Sandbox.run_reporting` is passed from one command to the next. It belongs to the agent as any process in the sandbox
does: false reports only affect the agent's commands.

A running bash cannot receive descriptors, so these are passed to it at its start and used for many commands:

- a socket: an empty line from the host starts a command, a NUL and the exit code end it; the shell's error messages
  come too;
- a file in memory of a fixed size: with state and script when a command starts, and its report after them, up to a NUL,
  when it has ended. The host has the same open file description, but no setting of the agent makes reading a file in
  memory block, and the agent cannot make it larger;
- the reading end of a pipe, which the subshell reopens for writing. Only processes of the command can hold that writing
  end, so its end of file shows that none of them can write into the next one's output. It has a separate open file
  description: with the host's, the agent could make the host's reads block.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.base import STATE, TIMEOUT_EXIT_CODE, CommandResult, OutputBuffer, PipeReader
from hermes_rl.sandbox.channel import Connection
from hermes_rl.sandbox.jobs import Command, Processes, output_pipe
from hermes_rl.sandbox.launcher import fixed_file, reopened, socket_pair
from hermes_rl.values import system_bytes

BASH = "/bin/bash"
SCRIPT_LIMIT = 100_000
"""Maximum bytes of a script that are passed as an argument (the kernel takes 128 KiB); a longer one is passed as a
file.
"""
OWN_PROCESS = re.compile(r"\$\{?[!#]?\$|BASH_EXECUTION_STRING")
"""Expressions for the id of its shell's process: for ``$$`` that would be the waiting shell, and always the same."""
STEERS = re.compile(
    "BASH.*|ENV|SHELLOPTS|POSIXLY_CORRECT|PROMPT_COMMAND|PS4|TMOUT|IFS|GLOBIGNORE|FUNCNEST|EXECIGNORE|REPLY|RANDOM"
    "|SRANDOM|SECONDS|LINENO|SHLVL|OPT(ARG|IND|ERR)|_"
)
"""Names of variables that mean something to bash itself; BASH_FUNC_name%% is an exported function."""
START_SECONDS = 10.0
KILL_SECONDS = 5.0
NOT_STARTED = CommandResult(126, b"cannot start the command: Resource temporarily unavailable\n")
SHELL_MESSAGE_LIMIT = 1 << 16
"""Maximum bytes of a shell's other messages; a process that writes more is not the started shell."""
FILE_SIZE = 4 << 20
"""Bytes for the state, the script and the report of a command."""
READ_BYTES = 1 << 14
"""Bytes of that file that are read in one call."""
CANNOT_FORK = b"fork: retry"
"""Bash retries for 15 s; its message meanwhile shows that the command has not started."""
VARIABLE = re.compile(rb'declare -x \w+="(?:[^"\\]|\\.)*"')
"""A line of `export -p` that is a complete variable; no line of a longer value looks like it: quotes are escaped."""
DESCRIPTORS_PER_SHELL = 4
"""Descriptors of this process that one shell uses."""
_SUBSHELL = "; ".join(
    (
        "exec >/proc/$$/fd/4 2>&1 4<&-",
        "set +m",  # job control would put the subshell into a separate group, not its jobs
        "BASH_SUBSHELL=0 SECONDS=0",
        "trap '{ pwd -P; export -p; echo .; printf \"\\0\"; } 2>/dev/null >&3' EXIT",
        f"IFS= read -r -d '' -u 3 {STATE}; IFS= read -r -d '' -u 3",
        'eval "unset REPLY; $REPLY"',
    )
)
# One line, as bash counts the lines of a command from the line of its `eval`.
PROGRAM = "; ".join(
    (
        "((BASH_VERSINFO >= 4)) && : >/proc/$$/fd/4 && set -m && export -p >&3 && printf '\\0%d\\n' 0 || exit",
        "trap : INT",  # else a command that SIGINT has ended would end this loop
        f"while read -r -u 2; do ( {_SUBSHELL} ); printf '\\0%d\\n' $?; done; code=$?",
        # A command that stops itself with SIGTSTP leaves the loop: its processes could not be found afterwards.
        "kill -KILL %% 2>/dev/null; exit $code",
    )
)

_live: set[ShellServer] = set()


def room_for_one_more() -> bool:
    """Return True while waiting shells use less than a quarter of the descriptors of this process."""
    return DESCRIPTORS_PER_SHELL * (len(_live) + 1) <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4


class ShellServer:
    """One shell, from before its start. `interrupt` ends its command, and leaves the shell itself."""

    def __init__(self, request_id: int, interrupt: Callable[[], None]) -> None:
        self.request_id = request_id
        """Number of the request that starts it."""
        self.idle = False
        """True while it accepts a command."""
        self.timed_out = False
        self.report = b""
        """Report of the last command; empty if there was none."""
        self._initial_lines: frozenset[bytes] = frozenset()
        """Lines of a state that need no evaluation, since every command finds these variables anyway."""
        self._written = 0
        """Bytes of the file that the host wrote; the report follows them."""
        self._interrupt = interrupt
        self._loop = asyncio.get_running_loop()
        with ExitStack() as unfinished:
            self._file = fixed_file(FILE_SIZE, "command")
            unfinished.callback(os.close, self._file)
            self._reading, self._writer = output_pipe()
            unfinished.callback(os.close, self._writer)
            unfinished.callback(os.close, self._reading)
            self._passed = reopened(self._reading, os.O_RDONLY | os.O_NONBLOCK)
            unfinished.callback(os.close, self._passed)
            self._control, self._theirs = socket_pair()
            unfinished.pop_all()
        self._output = PipeReader(self._reading, OutputBuffer(0))
        self._control.setblocking(False)
        self._messages = b""
        self._completion: asyncio.Future[int | None] = self._loop.create_future()
        self._open = True
        self._loop.add_reader(self._control, self._listen)
        _live.add(self)

    def inherited(self) -> dict[int, int]:
        """Return the descriptors for its start: target number → descriptor of this process."""
        theirs = self._theirs.fileno()
        return {1: theirs, 2: theirs, 3: self._file, 4: self._passed}

    async def ready(self) -> bool:
        """Wait, after the request to start it, until it accepts commands; return False if it never will."""
        self._close_theirs()
        self.idle = await self._completion == 0 and self._open  # it may have been declared lost in the same moment
        if self.idle:
            self._initial_lines = frozenset(
                filter(VARIABLE.fullmatch, self._file_from(0, SHELL_MESSAGE_LIMIT).split(b"\n"))
            )
        return self.idle

    # ------------------------------------------------------------------ a command

    def start_script(self, script: bytes, state: bytes, output: OutputBuffer) -> bool:
        """Start a script; return False if nothing was started, since the shell is gone."""
        news = b"\n".join(line for line in state.split(b"\n") if line not in self._initial_lines)
        data = news + b"\0" + script + b"\0"
        if len(data) >= FILE_SIZE:
            return False
        self.idle = self.timed_out = False
        self.report, self._messages, self._completion = b"", b"", self._loop.create_future()
        self._output.into(output)
        try:
            os.pwrite(self._file, data + b"\0", 0)  # so that there is no report yet
            os.lseek(self._file, 0, os.SEEK_SET)  # the offset is the shell's too
            self._written = len(data)
            self._control.send(b"\n")
        except OSError:
            return False
        return True

    async def ended(self, timeout: float, report_limit: int) -> int | None:
        """Wait for the exit code of the script; None if the shell could not run it, or did not report it.

        After `timeout` seconds its processes are killed, and a while later the shell counts as lost.
        """
        self._timer = self._loop.call_later(timeout, self._expire)
        try:
            code = await self._completion
            if self._open and code is not None:
                self.report = self._file_from(self._written, report_limit)
                self.idle = True
        finally:
            self._timer.cancel()
            self._output.drain()
            self._output.ignore()
        self.idle = self.idle and self._nobody_writes()
        return code

    def end(self, code: int | None) -> None:
        """Record the end of the start, or of the running command."""
        if not self._completion.done():
            self._completion.set_result(code)

    def _file_from(self, offset: int, limit: int) -> bytes:
        data, max_size = b"", min(limit, FILE_SIZE - offset)
        while len(data) < max_size:  # in chunks: a report is short, and the rest of the file is zeros
            chunk, terminator, _ = os.pread(
                self._file, min(READ_BYTES, max_size - len(data)), offset + len(data)
            ).partition(b"\0")
            data += chunk
            if terminator or not chunk:
                break
        return data

    # ------------------------------------------------------------------ the end

    def retire(self) -> None:
        """Give it no more commands; output of its last command's background processes is read and dropped.

        Its descriptor stays open: at the end of it the shell would exit, maybe before its processes are killed, which
        could not be found then.
        """
        if not self._open:
            return
        self._open = self.idle = False
        _live.discard(self)
        self.end(None)
        with suppress(RuntimeError):  # a loop that was closed first has forgotten its readers already
            self._loop.remove_reader(self._control)
        self._close_theirs()
        os.close(self._file)
        if self._writer >= 0:
            os.close(self._writer)

    def release(self) -> None:
        """Release it if its process has ended, or was never started."""
        self.retire()
        self._control.close()

    def close(self) -> None:
        """Release everything."""
        self.release()
        self._output.close()

    @property
    def released(self) -> bool:
        """True if its process has ended, and nothing holds the writing end of its pipe."""
        return self._control.fileno() < 0 and not self._output.open

    def _nobody_writes(self) -> bool:
        """Return True if no process is left that could write into the output of the next command."""
        os.close(self._writer)
        self._writer = -1
        abandoned = self._output.abandoned()
        with suppress(SandboxFailure):  # then a new shell is started for the next command
            # Without a writing end in the host the pipe would have its end of file between two commands.
            self._writer = reopened(self._reading, os.O_WRONLY)
        return abandoned and self._writer >= 0

    def _close_theirs(self) -> None:
        """Close the host's copies of descriptors that only the shell must have."""
        self._theirs.close()
        if self._passed >= 0:
            os.close(self._passed)
            self._passed = -1

    def _expire(self) -> None:
        self.timed_out = True
        self._interrupt()
        self._timer = self._loop.call_later(KILL_SECONDS, self.end, None)

    def _listen(self) -> None:
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._messages += data
        _, separator, end = self._messages.rpartition(b"\0")
        if separator and end.endswith(b"\n") and end[:-1].isdigit():
            self.end(int(end))
        elif CANNOT_FORK in self._messages or len(self._messages) > SHELL_MESSAGE_LIMIT:
            self.end(None)
        if not data:
            self._loop.remove_reader(self._control)  # the helper reports how it has ended


def may_wait(shell: str, variables: Iterable[str]) -> bool:
    """Return True if this shell can wait: not if a variable changes how a new shell starts or reads."""
    return shell == BASH and not any(map(STEERS.fullmatch, variables))


class WaitingShell:
    """Waiting shell of one sandbox. `command` starts one, when it is first needed and after a loss."""

    def __init__(self, connection: Connection, processes: Processes, command: Command) -> None:
        self._connection, self._processes, self._command = connection, processes, command
        self.server: ShellServer | None = None
        self._retired: set[ShellServer] = set()
        """Shells that get no more commands, but still run, or whose background processes hold their pipe."""
        self._usable = True

    @property
    def running(self) -> bool:
        """True while it starts or runs a command."""
        return self.server is not None and not self.server.idle

    async def run(self, script: str, state: str, timeout: float, output_limit: int) -> CommandResult | None:
        """Run a script of `Sandbox.run_reporting`, or return None if it needs a new shell."""
        if not self._usable or len(script) > SCRIPT_LIMIT or OWN_PROCESS.search(script):
            return None
        if self.server is None and room_for_one_more():
            await self._start()
        server = self.server
        if server is None or not server.idle:
            return None
        started_at, output = time.perf_counter(), OutputBuffer(output_limit)
        if not server.start_script(system_bytes(script), system_bytes(state), output):
            self._drop(server)
            return None
        try:
            code = await server.ended(timeout, output_limit)
        finally:
            self._keep_if_idle(server)
        if not self._connection.alive:
            raise await self._connection.failure()
        if code is None and not server.timed_out:
            return NOT_STARTED
        return CommandResult(
            TIMEOUT_EXIT_CODE if server.timed_out or code is None else code,
            output.value(),
            server.report,
            timed_out=server.timed_out,
            truncated=output.dropped > 0,
            duration=time.perf_counter() - started_at,
        )

    def retire(self) -> None:
        """Give it no more commands, permanently."""
        self._usable = False
        if self.server is not None:
            self._drop(self.server)

    def on_exit(self, request_id: int, code: int) -> bool:
        """Handle the helper's report that a process has ended; return False if it was none of these shells."""
        for server in (self.server, *self._retired):
            if server is not None and server.request_id == request_id:
                server.end(code)
                server.release()
                self._drop(server)
                return True
        return False

    def end(self) -> None:
        """Release everything: the sandbox is gone."""
        if self.server is not None:
            self._retired.add(self.server)
            self.server = None
        for server in self._retired:
            server.close()
        self._retired.clear()

    async def _start(self) -> None:
        request_id, started = self._connection.next_number(), False
        server = self.server = ShellServer(request_id, lambda: self._interrupt(request_id))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._processes.execute(request_id, self._command, server.inherited())
                started = True
                self._usable = await server.ready()
        except OSError:
            self._usable = False  # a new shell will report the reason
        finally:
            if not started:
                server.release()
            self._keep_if_idle(server)

    def _keep_if_idle(self, server: ShellServer) -> None:
        if not server.idle:
            self._drop(server)

    def _interrupt(self, request_id: int) -> None:
        self._connection.tell("interrupt", str(request_id).encode())

    def _drop(self, server: ShellServer) -> None:
        """Give this one no more commands. Its running command is killed, background processes continue."""
        if self.server is server:
            self.server = None
        self._interrupt(server.request_id)
        self._processes.signal(server.request_id, 9)
        server.retire()
        self._retired = {retired for retired in (*self._retired, server) if not retired.released}
