"""Provide the toolsets of hermes-agent that reach outside a rollout's sandbox: web, browser, vision, ….

Each rollout has a separate process of `hermes_rl.tools.hermes_worker`. A toolset that lacks a key never vanishes: a
request for it is an error that names the variable.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.errors import ToolServerFailure, UserError, install_command
from hermes_rl.threads import done_in_thread
from hermes_rl.tools.base import DescribedTool, Tool, ToolInputError, ToolRuntime
from hermes_rl.tools.hermes_worker import HOME
from hermes_rl.tools.host_process import HostProcess
from hermes_rl.values import read_json

log = logging.getLogger(__name__)

NAMES = (
    "browser", "clarify", "computer_use", "cronjob", "delegation", "discord", "discord_admin", "homeassistant",
    "image_gen", "memory", "search", "session_search", "skills", "spotify", "tts", "video", "video_gen", "vision",
    "web", "x_search",
)  # fmt: skip
"""Toolsets of hermes-agent that a spec may name."""
REFUSED = {
    "clarify": "it asks a person, and there is none; a simulated user answers questions",
    "cronjob": "it schedules work on this machine, which outlives the rollout",
    "delegation": "it starts agents of hermes-agent's own loop, whose tokens would not be recorded",
    "memory": "it is answered by hermes-agent's own loop",
    "session_search": "it is answered by hermes-agent's own loop",
}
"""Toolsets that cannot work in a rollout, and why."""
_SEARCHING = ("SEARXNG_URL", "EXA_API_KEY", "TAVILY_API_KEY", "PARALLEL_API_KEY", "FIRECRAWL_API_KEY")
VARIABLES: Mapping[str, tuple[str, ...]] = {
    "browser": ("BROWSERBASE_API_KEY", "BROWSERBASE_PROJECT_ID"),
    "discord": ("DISCORD_BOT_TOKEN",),
    "discord_admin": ("DISCORD_BOT_TOKEN",),
    "homeassistant": ("HASS_TOKEN", "HASS_URL"),
    "image_gen": ("FAL_KEY",),
    "search": (*_SEARCHING, "FIRECRAWL_API_URL"),
    "video": ("OPENROUTER_API_KEY",),
    "vision": ("OPENROUTER_API_KEY",),
    "web": (*_SEARCHING, "FIRECRAWL_API_URL"),
    "x_search": ("XAI_API_KEY",),
}
"""Toolset → the environment variables with its keys and addresses, if they are known."""
REMEDIES = {
    "browser": "install the program agent-browser (npm install -g agent-browser), or set BROWSERBASE_API_KEY",
    "computer_use": "install cua-driver",
    "homeassistant": "set HASS_TOKEN",
    "image_gen": "set FAL_KEY",
    "search": f"set {', '.join(_SEARCHING[:-1])} or {_SEARCHING[-1]}",
    "video": "set OPENROUTER_API_KEY, or configure a vision model of hermes-agent",
    "vision": "set OPENROUTER_API_KEY, or configure a vision model of hermes-agent",
    "web": f"set {', '.join(_SEARCHING[:-1])} or {_SEARCHING[-1]}",
}
"""Requirements of a toolset, if hermes-agent names no variable or unusual ones."""
START_SECONDS = 60.0
RESPONSE_LIMIT = 64 << 20
"""Maximum bytes of one response."""


class HermesTool(DescribedTool):
    """One tool of hermes-agent."""

    outside = True

    def __init__(self, toolsets: HermesToolsets, schema: Mapping[str, Any]) -> None:
        accepted = {"type": "object", "properties": {}, **schema.get("parameters", {})}
        super().__init__(schema["name"], str(schema.get("description", "")), accepted)
        self._toolsets = toolsets

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        answer = await self._toolsets.session(runtime).call(self.name, args)
        error = _error_in(answer)
        if error is not None:
            raise ToolInputError(error)
        return answer


class HermesToolsets:
    """hermes-agent for a run: one process, forked for each rollout that calls one of its tools, with the variables of
    `environ` for keys and addresses.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {name: value for name, value in environ.items() if name != "HERMES_HOME"}
        self._descriptions: dict[str, Any] = {}
        self._process: HostProcess | None = None
        self._folder: Path | None = None
        self._starting = asyncio.Lock()

    def tools(self, source: str) -> tuple[Tool, ...]:
        """Return the tools of one toolset; raises UserError that names its missing requirements.

        Takes a second the first time: call it off the event loop.
        """
        problem = self.problem(source)
        if problem is not None:
            raise UserError(problem)
        description = self._descriptions[source]
        for tool in description["missing"]:
            log.warning("toolset %s: %s is omitted, %s", source, tool, _remedy_for(source, description["missing"]))
        return tuple(HermesTool(self, schema["function"]) for schema in description["schemas"])

    def problem(self, toolset: str) -> str | None:
        """Return why a toolset cannot be used here, with a fix, or None if it can be used. May take a second."""
        if toolset in REFUSED:
            return f"toolset {toolset} cannot be used in a rollout: {REFUSED[toolset]}"
        if importlib.util.find_spec("model_tools") is None:
            return f"toolset {toolset} needs the extra `hermes`: {install_command('hermes')}"
        if toolset not in self._descriptions:
            self._descriptions |= self._describe(toolset)
        description = self._descriptions[toolset]
        if description["schemas"]:
            return None
        return f"toolset {toolset} cannot work here: {_remedy_for(toolset, description['missing'])}"

    def session(self, runtime: ToolRuntime) -> HermesSession:
        """Return the connection of the rollout."""
        session = runtime.held.get("hermes-agent")
        if not isinstance(session, HermesSession):
            session = runtime.held["hermes-agent"] = HermesSession(self)
        return session

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection to a process for one rollout; raises `ToolServerFailure` if none is available."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._process = await self._start()
        assert self._folder is not None
        try:
            return await asyncio.open_unix_connection(str(self._folder / "socket"), limit=RESPONSE_LIMIT)
        except OSError as error:
            raise ToolServerFailure(f"hermes-agent's process cannot be reached: {error.strerror}") from error

    async def close(self) -> None:
        """End the process; the processes of rollouts end with their connections."""
        try:
            if self._process is not None:
                await self._process.close()
        finally:
            if self._folder is not None:
                await done_in_thread(partial(shutil.rmtree, self._folder, ignore_errors=True))

    async def _start(self) -> HostProcess:
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="hermes-rl-agent-"))
        path = self._folder / "socket"
        path.unlink(missing_ok=True)
        command = [*_COMMAND, "serve", str(path)]
        env = {**self._environ, "HERMES_HOME": HOME, "TMPDIR": str(self._folder)}
        process = await HostProcess.start(command, self._folder, env)
        try:
            async with asyncio.timeout(START_SECONDS):
                if await process.read():
                    return process
        except TimeoutError:
            pass
        except BaseException:  # on cancellation too: no other code knows the process
            await process.close()
            raise
        await process.close()
        message = process.errors().decode("utf-8", "replace").strip()[-1000:]
        raise ToolServerFailure(f"hermes-agent's process does not start: {message or 'no message'}")

    def _describe(self, toolset: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="hermes-rl-agent-") as folder:
            ended = subprocess.run(
                [*_COMMAND, "describe", toolset],
                cwd=folder,
                env={**self._environ, "HERMES_HOME": HOME},
                capture_output=True,
                timeout=START_SECONDS,
                check=False,
            )
        if ended.returncode != 0:
            message = ended.stderr.decode("utf-8", "replace").strip()[-1000:]
            raise UserError(f"toolset {toolset}: hermes-agent cannot be asked what it offers: {message}")
        descriptions: dict[str, Any] = json.loads(ended.stdout)
        return descriptions


_COMMAND = (sys.executable, "-P", "-m", "hermes_rl.tools.hermes_worker")
"""-P: a directory `tools` in the working directory must not be taken for hermes-agent's."""


class HermesSession:
    """One rollout's process of hermes-agent, from its first call until the rollout ends."""

    def __init__(self, toolsets: HermesToolsets) -> None:
        self._toolsets = toolsets
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count()
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of the tool.

        Raises `ToolInputError` if the process, which belongs to this rollout alone, ended during the call; the next
        call gets another. Raises `ToolServerFailure` if no process is available.
        """
        async with self._connecting:
            if self._writer is None or (self._reading is not None and self._reading.done()):
                if self._writer is not None:
                    self._writer.transport.abort()
                reader, self._writer = await self._toolsets.connect()
                self._reading = asyncio.create_task(self._read_answers(reader))
        request_id = next(self._numbers)
        answer = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps({"id": request_id, "tool": tool, "arguments": arguments}).encode() + b"\n")
        try:
            text: str = await answer
            return text
        finally:
            self._waiting.pop(request_id, None)

    async def close(self) -> None:
        """End the process: it ends with the connection."""
        if self._writer is not None:
            self._writer.transport.abort()
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read_answers(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = read_json(line)
                waiting = self._waiting.get(message["id"])
                if waiting is not None and not waiting.done():  # its caller may have stopped waiting a moment ago
                    waiting.set_result(message["answer"])
        except (OSError, ValueError):
            pass  # an incomplete line: the same as the end
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(
                    ToolInputError("the tool's process ended during the call; the next one finds another")
                )


def _remedy_for(toolset: str, missing: Mapping[str, Sequence[str]]) -> str:
    variables = sorted({name for names in missing.values() for name in names})
    if toolset in REMEDIES:
        return REMEDIES[toolset]
    return f"set {' or '.join(variables)}" if variables else "`hermes doctor` lists its requirements"


def _error_in(answer: str) -> str | None:
    """Return the message of a result that is an error; None for any other."""
    try:
        parsed = read_json(answer)
    except ValueError:
        return None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return str(error) if error else None
