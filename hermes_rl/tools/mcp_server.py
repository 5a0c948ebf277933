"""One running MCP server: started when it is first needed, and again after it was lost.

A call that kills the server is a tool error: the model gets the error, and the next call finds a new server. A server
that cannot be started is an infrastructure failure. The agent caused it only if the server is in its sandbox and has
worked in this rollout, the agent has acted there since, and the start did not merely take too long. So a server in the
sandbox is started before the agent acts there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.errors import ToolServerFailure
from hermes_rl.sandbox.base import Conversation, SandboxFile
from hermes_rl.scrubber import Scrubber, keys_of
from hermes_rl.threads import acquire_in_thread, done_in_thread
from hermes_rl.tools.base import ToolInputError, ToolRuntime
from hermes_rl.tools.host_process import HostProcess
from hermes_rl.tools.mcp_client import (
    Listed,
    McpLostError,
    McpSession,
    McpTimeoutError,
    McpTooLargeError,
    McpTransport,
    McpUnansweredError,
    fingerprint,
    over_http,
    over_process,
)

STARTS_AT_ONCE = max(2, os.cpu_count() or 1)
"""Servers of one entry of `tools` that start at the same time; others wait, and their timeout does not start yet."""
PAUSES = (0.5, 2.0, 5.0)
"""Delays in seconds before a call is retried that the server has not accepted."""


@dataclass(frozen=True)
class McpSettings:
    """Settings of one server in a spec; see the spec's key `tools[].mcp`."""

    name: str
    command: tuple[str, ...] = ()
    url: str | None = None
    files: tuple[SandboxFile, ...] = ()
    shared: bool = False
    """True for one server, or one session with the server at a URL, for all rollouts."""
    on_host: bool = False
    """True to run the command on this machine instead of in the rollout's sandbox."""
    folder: Path = Path()
    """Working directory of a command on the host that brings no files."""
    allow: tuple[str, ...] | None = None
    prefix: str | None = None
    timeout: float = 60.0
    """Seconds for one call."""
    start_timeout: float = 120.0
    """Seconds for the handshake and the list of tools."""
    env: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def in_sandbox(self) -> bool:
        """True if it runs in the rollout's sandbox."""
        return self.url is None and not self.on_host


class McpServer(ABC):
    """One server and the session with it. Belongs to one event loop."""

    def __init__(self, settings: McpSettings, expected: str | None, starts: asyncio.Semaphore) -> None:
        self.settings = settings
        self._expected = expected
        """Fingerprint of the tools that it must list; None accepts any list."""
        self._starts = starts
        self._scrubber = Scrubber((), keys_of(settings.headers))
        self._session: McpSession | None = None
        self._process: Conversation | None = None
        self._opening = asyncio.Lock()

    @abstractmethod
    async def transport(self) -> McpTransport:
        """Start the transport to it; raises `OSError` if that cannot start."""

    def on_started(self) -> None:
        """Record that the server works."""
        return

    def blames_agent(self) -> bool:
        """Return True if the agent may have prevented the start of the server."""
        return False

    async def tools(self) -> tuple[Listed, ...]:
        """Return its list of tools; raises `ToolServerFailure` if it cannot be started."""
        return (await self._open()).tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result.

        Raises `ToolInputError` for the model's mistakes, `ToolServerFailure` for infrastructure failures.
        """
        ended = False
        for attempt in itertools.count(1):
            session = await self._open()
            try:
                return await self._answer(session, name, arguments, ended)
            except McpUnansweredError as error:
                ended = error.ended
                if ended:
                    session.retire()
                if error.executed or attempt > (1 if error.ended else len(PAUSES)):
                    raise ToolServerFailure(f"MCP server {self.settings.name}: {error}") from None
                await asyncio.sleep(0 if error.ended else PAUSES[attempt - 1])
            finally:
                if not session.alive and not session.calls:  # the last call of a session that has ended
                    await session.close()
        raise AssertionError("a call is answered or fails")

    async def _answer(self, session: McpSession, name: str, arguments: Mapping[str, Any], retried: bool) -> str:
        """Return the result of a call in a session; raises as `call`, or `McpUnansweredError`."""
        try:
            text, is_error = await session.call(name, arguments, self.settings.timeout, retried=retried)
        except McpTimeoutError as error:
            if not self.settings.shared:  # a server that hangs in one call may never respond again
                await session.close()
            raise ToolInputError(f"the tool server gave {error}") from None
        except McpTooLargeError as error:
            raise ToolInputError(f"the tool server's result has {error}; it was discarded") from None
        except McpLostError as error:
            await session.close()
            raise ToolInputError(f"the tool server was lost: {error}; the next call restarts it") from None
        text = self._scrubber.unechoed(text.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")
        if is_error:
            raise ToolInputError(text)
        return text

    async def close(self) -> None:
        """End the session, and the process with it."""
        if self._session is not None:
            await self._session.close()

    async def _open(self) -> McpSession:
        async with self._opening:
            if self._session is None or not self._session.alive:
                async with self._starts:
                    self._session = await self._start()
                self.on_started()
            return self._session

    async def _start(self) -> McpSession:
        try:
            session = await McpSession.open(await self.transport(), self.settings.start_timeout)
            if self._expected is not None and fingerprint(session.tools) != self._expected:
                await session.close()
                raise McpLostError("it lists other tools than at the start of the run")
            return session
        except (McpLostError, McpTimeoutError, OSError) as error:
            message = self._process.errors().decode("utf-8", "replace").strip()[-1000:] if self._process else ""
            detail = f"MCP server {self.settings.name} cannot be started: {error}" + (f"\n{message}" if message else "")
            if not isinstance(error, McpTimeoutError) and self.blames_agent():
                raise ToolInputError(f"the tool server {self.settings.name} cannot be started here any more") from None
            raise ToolServerFailure(detail) from None


class HttpServer(McpServer):
    """A server at a URL."""

    async def transport(self) -> McpTransport:
        assert self.settings.url is not None
        return over_http(self.settings.url, self.settings.headers)


class SandboxServer(McpServer):
    """A command in the rollout's sandbox, in a separate directory below the home directory."""

    def __init__(
        self, settings: McpSettings, expected: str | None, starts: asyncio.Semaphore, runtime: ToolRuntime
    ) -> None:
        super().__init__(settings, expected, starts)
        self._runtime = runtime
        self._acts_before: int | None = None
        """Number of the agent's actions in the sandbox when the server last worked; None before it has."""

    async def transport(self) -> McpTransport:
        sandbox = await self._runtime.sandbox()
        folder = f"{sandbox.home}/.mcp/{self.settings.name}"
        await sandbox.make_dir(folder)
        for file in self.settings.files:
            await sandbox.write_file(sandbox.resolve(file.to, folder), file.data, file.mode)
        self._process = await sandbox.converse(self.settings.command, cwd=folder, env=self.settings.env, keep=True)
        return over_process(self._process)

    def on_started(self) -> None:
        self._acts_before = self._runtime.acts

    def blames_agent(self) -> bool:
        return self._acts_before is not None and self._runtime.acts > self._acts_before


class HostServer(McpServer):
    """A command on this machine, outside every sandbox."""

    _folder: Path | None = None

    async def transport(self) -> McpTransport:
        if self._folder is None and self.settings.files:
            self._folder = await acquire_in_thread(self._lay, lambda made: shutil.rmtree(made, ignore_errors=True))
        folder = self._folder or self.settings.folder
        self._process = await HostProcess.start(self.settings.command, folder, self.settings.env)
        return over_process(self._process)

    async def close(self) -> None:
        await super().close()
        if self._folder is not None:
            await done_in_thread(partial(shutil.rmtree, self._folder, ignore_errors=True))
            self._folder = None

    def _lay(self) -> Path:
        folder = Path(tempfile.mkdtemp(prefix="hermes-rl-mcp-"))
        for file in self.settings.files:
            path = folder / file.to
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            path.chmod(file.mode)
        return folder
