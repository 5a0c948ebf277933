"""Commands of the agent through a shell that waits in the sandbox.

Owns when there is such a shell, which commands it gets, and that none is used which the agent could have touched once
the agent has ended. Everything that it does not get runs in a new shell, as `Sandbox.run_reporting` has it.
"""

from __future__ import annotations

import asyncio
import re
import time

from hermes_rl.sandbox.base import OUTPUT_LIMIT, TIMEOUT_EXIT_CODE, CommandResult
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.sandbox.helper_client import as_field
from hermes_rl.sandbox.helper_commands import SCRIPT_LIMIT, HelperCommands
from hermes_rl.sandbox.output import OutputBuffer
from hermes_rl.sandbox.shell_server import PROGRAM, ShellServer, room_for_one_more

BASH = "/bin/bash"
OWN_PROCESS = re.compile(r"\$\{?[!#]?\$|BASH_EXECUTION_STRING")
"""What a command sees of its shell's own process: for ``$$`` that would be the one that waits, and always the same."""
STEERS = re.compile(
    "BASH.*|ENV|SHELLOPTS|POSIXLY_CORRECT|PROMPT_COMMAND|PS4|TMOUT|IFS|GLOBIGNORE|FUNCNEST|EXECIGNORE|REPLY|RANDOM"
    "|SRANDOM|SECONDS|LINENO|SHLVL|OPT(ARG|IND|ERR)|_"
)
"""Names of variables that mean something to bash itself; BASH_FUNC_name%% is an exported function."""
START_SECONDS = 10.0
NOT_STARTED = CommandResult(126, b"cannot start the command: Resource temporarily unavailable\n")


class HelperShell(HelperCommands):
    """The half of a sandbox with a helper that belongs to the terminal."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self._server: ShellServer | None = None
        self._retired: set[ShellServer] = set()
        """They get no more commands, but still run, or something that they have left holds their pipe."""
        self._serves = True
        self._asked_of: SandboxConfig | None = None
        self._is_steered = False

    async def run_reporting(
        self, script: str, state: str, *, timeout: float | None = None, output_limit: int = OUTPUT_LIMIT
    ) -> CommandResult:
        server = await self._idle_server(script)
        if server is not None:
            began, output = time.perf_counter(), OutputBuffer(output_limit)
            if server.begin(as_field(script), as_field(state), output):
                code = await self._end_of_command(
                    server, self.config.timeout if timeout is None else timeout, output_limit
                )
                return _result(server, code, output, time.perf_counter() - began)
            self._drop(server)
        return await super().run_reporting(script, state, timeout=timeout, output_limit=output_limit)

    async def end_shells(self) -> None:
        self._serves = False
        if self._server is not None:
            self._drop(self._server)

    @property
    def working(self) -> bool:
        return super().working or (self._server is not None and not self._server.idle)

    def on_exit(self, number: int, code: int) -> None:
        server = next((one for one in (self._server, *self._retired) if one is not None and one.number == number), None)
        if server is None:
            super().on_exit(number, code)
            return
        server.end(code)
        server.gone()
        self._drop(server)

    def end_jobs(self) -> None:
        super().end_jobs()
        if self._server is not None:
            self._retired.add(self._server)
            self._server = None
        for server in self._retired:
            server.close()
        self._retired.clear()

    async def _idle_server(self, script: str) -> ShellServer | None:
        """The shell that waits, started where there is none; None where this script is not for it."""
        if (
            not self._serves
            or self._steered()
            or self.shell != BASH
            or len(script) > SCRIPT_LIMIT
            or OWN_PROCESS.search(script)
        ):
            return None
        if self._server is None and room_for_one_more():
            await self._start_server()
        return self._server if self._server is not None and self._server.idle else None

    def _steered(self) -> bool:
        """Whether a variable of the sandbox changes how a new shell begins or reads, which one that waits would not.

        Asked when it counts: a sandbox from the pool learns its variables after it was made.
        """
        if self._asked_of is not self.config:
            self._asked_of = self.config
            self._is_steered = any(STEERS.fullmatch(name) for name in (*self.environment(), *self.config.env))
        return self._is_steered

    async def _start_server(self) -> None:
        number, started = self.channel().next_number(), False
        server = self._server = ShellServer(number, lambda: self._interrupt(number))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self._exec(number, [BASH, "-c", PROGRAM], server.inherited())
                started = True
                self._serves = await server.ready()
        except OSError:
            self._serves = False  # a new shell will say why
        finally:
            if not started:
                server.gone()
            if not server.idle:
                self._drop(server)

    async def _end_of_command(self, server: ShellServer, timeout: float, report_limit: int) -> int | None:
        try:
            code = await server.ended(timeout, report_limit)
            if not self.alive:
                await self.judged()
                raise self.lost()
            return code
        finally:
            if not server.idle:
                self._drop(server)

    def _interrupt(self, number: int) -> None:
        self.channel().tell("interrupt", str(number).encode())

    def _drop(self, server: ShellServer) -> None:
        """No more commands for this one. What it runs is killed, what its commands have left runs on."""
        if self._server is server:
            self._server = None
        self._interrupt(server.number)
        self.channel().tell("kill", str(server.number).encode(), b"9")
        server.retire()
        self._retired = {left for left in (*self._retired, server) if not left.released}


def _result(server: ShellServer, code: int | None, output: OutputBuffer, duration: float) -> CommandResult:
    if code is None and not server.timed_out:
        return NOT_STARTED
    return CommandResult(
        TIMEOUT_EXIT_CODE if server.timed_out or code is None else code,
        output.value(),
        server.report,
        timed_out=server.timed_out,
        truncated=output.dropped > 0,
        duration=duration,
    )
