"""The tools that a spec gives to its rollouts, from toolsets, functions, state objects and tool servers.

Owns which tools a group has, and what has to be started once before any rollout can have them. Compiling
loads code and reads variables; `open` starts servers, lists their tools, and fails there rather than in the
first rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hermes_rl.errors import Problem, UserError
from hermes_rl.rollouts.sandboxes import laid_files
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.spec.model import Mcp, Spec, Toolsets
from hermes_rl.spec.model import Tool as ToolEntry
from hermes_rl.threads import in_thread
from hermes_rl.tools.base import Tool
from hermes_rl.tools.canned import canned_tools
from hermes_rl.tools.catalogue import resolve_toolsets, sample_distribution
from hermes_rl.tools.distributions import DISTRIBUTIONS
from hermes_rl.tools.hermes_toolsets import NAMES, HermesToolsets
from hermes_rl.tools.mcp_server import McpSettings
from hermes_rl.tools.mcp_tools import McpSource
from hermes_rl.tools.python_tools import python_tool
from hermes_rl.tools.recording import Recorder, Replay
from hermes_rl.tools.state_tools import state_tools
from hermes_rl.tools.toolkit import Toolkit

Place = tuple[str | int, ...]


class Outside:
    """The tools that reach outside, as the spec wants them: at work, recorded, or replayed.

    Raises:
        UserError: there is no recording to replay, or none can be made.
    """

    def __init__(self, spec: Spec, environ: Mapping[str, str]) -> None:
        record, replay = spec.toolsets.record, spec.toolsets.replay
        self.hermes = HermesToolsets(environ)
        self._canned = spec.toolsets.canned if spec.demo else None
        self.replay = Replay(Path(replay)) if replay is not None else None
        self._recorder = Recorder(Path(record)) if record is not None else None

    def tools(self, source: str) -> tuple[Tool, ...]:
        """The tools of one of hermes-agent's toolsets."""
        if self._canned is not None:
            return canned_tools(source, self._canned)
        if self.replay is not None:
            return self.replay.tools(source)
        return self.recorded(self.hermes.tools(source), source)

    def recorded(self, tools: tuple[Tool, ...], source: str) -> tuple[Tool, ...]:
        """Tools that reach outside, kept where the spec says so."""
        recorder = self._recorder
        return tools if recorder is None else tuple(recorder.wrap(tool, source) for tool in tools)

    async def close(self) -> None:
        """End hermes-agent's process."""
        await self.hermes.close()


class Tooling:
    """What the agent of a spec can do, or its simulated user.

    Args:
        spec: the spec.
        environ: where the keys of tools and the variables that hold headers are looked up.
        tools, toolsets: others than the agent's.

    Raises:
        UserError: a function cannot be loaded, or a variable is missing.
    """

    def __init__(
        self,
        spec: Spec,
        environ: Mapping[str, str],
        tools: Sequence[ToolEntry] | None = None,
        toolsets: Toolsets | None = None,
    ) -> None:
        self.spec = spec
        self._toolsets = spec.toolsets if toolsets is None else toolsets
        self._entries = spec.tools if tools is None else tools
        self._outside = Outside(spec, environ)
        self._functions = tuple(self._function(tool.python, tool.outside) for tool in self._entries if tool.python)
        self._servers = tuple(
            _McpTools(_settings(tool.mcp, spec, environ, number), self._outside)
            for number, tool in enumerate(self._entries)
            if tool.mcp is not None
        )
        self._fixed: tuple[Tool, ...] | None = None
        self._listed: tuple[Tool, ...] | None = None
        self._opening = asyncio.Lock()

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of what each tool server lists, by its name; those that have been asked."""
        return {name: digest for server in self._servers for name, digest in server.fingerprint.items()}

    async def open(self, sandbox: SandboxConfig) -> None:
        """Start what has to be there before a rollout; does nothing the second time.

        Raises:
            RunError: a tool server cannot be started, in a sandbox like `sandbox` where it runs in one.
            UserError: it has not the tools that the spec allows, or a toolset lacks a key or an extra.
        """
        if self._listed is not None:
            return  # every rollout asks: none waits for the others
        async with self._opening:
            if self._listed is None:
                taken = {tool.name for tool in (*self._functions, *await in_thread(self._every_toolset))}
                listed: list[Tool] = []
                for server in self._servers:
                    listed += await server.list_tools(sandbox, taken | {tool.name for tool in listed})
                self._listed = tuple(listed)

    async def close(self) -> None:
        """End the tool servers that rollouts share."""
        await self._outside.close()
        for server in self._servers:
            await server.close()

    def toolkit(self, group: str, state: Any) -> Toolkit:
        """The tools of a rollout: those of its group, and those of its own state object."""
        shared = self.shared(group)
        names = [tool.state for tool in self._entries if tool.state is not None]
        own = [tool for name in names for tool in state_tools(state, name)]
        return Toolkit([*shared.tools, *own]) if own else shared

    def shared(self, group: str) -> Toolkit:
        """The tools that all rollouts of a group have; those of tool servers once they are open."""
        return Toolkit([*self._catalogue(group), *self._functions, *(self._listed or ())])

    def _catalogue(self, group: str) -> tuple[Tool, ...]:
        toolsets = self._toolsets
        if toolsets.distribution is not None:
            drawn = sample_distribution(toolsets.distribution, f"{self.spec.seed}:{group}")
            return resolve_toolsets(drawn, toolsets.disabled, self._outside)
        if self._fixed is None:
            self._fixed = resolve_toolsets(toolsets.enabled, toolsets.disabled, self._outside)
        return self._fixed

    def _every_toolset(self) -> tuple[Tool, ...]:
        """The tools of all toolsets that a group may get, so that none is found missing later."""
        if self._toolsets is not self.spec.toolsets:
            return ()
        needless = self._outside.replay is not None or self.spec.demo
        problems = [] if needless else toolset_problems(self.spec, self._outside.hermes)
        if problems:
            raise UserError("\n".join(map(str, problems)))
        return resolve_toolsets([name for _, name in named_toolsets(self.spec)], (), self._outside)

    def _function(self, reference: str, outside: bool) -> Tool:
        tool = python_tool(reference)
        if not outside:
            return tool
        if self._outside.replay is not None:
            return self._outside.replay.tools(f"python {tool.name}")[0]
        return self._outside.recorded((tool,), f"python {tool.name}")[0]


class _McpTools:
    """The tools of one MCP server: its own, recorded, or replayed without it."""

    def __init__(self, settings: McpSettings, outside: Outside) -> None:
        self._name = f"mcp {settings.name}"
        self._outside = outside
        self._replay = None if settings.in_sandbox else outside.replay
        self._source = McpSource(settings) if self._replay is None else None

    @property
    def fingerprint(self) -> dict[str, str]:
        source = self._source
        return {source.settings.name: source.fingerprint} if source is not None and source.fingerprint else {}

    async def list_tools(self, sandbox: SandboxConfig, taken: set[str]) -> tuple[Tool, ...]:
        if self._source is None:
            return self._replay.tools(self._name) if self._replay is not None else ()
        tools = await self._source.list_tools(sandbox, taken)
        return tools if self._source.settings.in_sandbox else self._outside.recorded(tools, self._name)

    async def close(self) -> None:
        if self._source is not None:
            await self._source.close()


def named_toolsets(spec: Spec) -> list[tuple[Place, str]]:
    """Every toolset that a rollout of the spec may have, with the place that names it; unknown names too."""
    chances = spec.toolsets.distribution
    if chances is None:
        named: list[tuple[Place, str]] = [(("toolsets", "enabled", n), s) for n, s in enumerate(spec.toolsets.enabled)]
    elif isinstance(chances, str):
        named = [(("toolsets", "distribution"), name) for name in DISTRIBUTIONS.get(chances, ())]
    else:
        named = [(("toolsets", "distribution", name), name) for name, chance in chances.items() if chance > 0]
    return [(place, name) for place, name in named if name not in spec.toolsets.disabled]


def toolset_problems(spec: Spec, hermes: HermesToolsets) -> list[Problem]:
    """What the spec's toolsets lack on this machine, each at its place. Takes a second for each of hermes-agent's."""
    found = [(place, hermes.problem(name)) for place, name in named_toolsets(spec) if name in NAMES]
    return [spec.problem(place, problem) for place, problem in found if problem is not None]


def _settings(mcp: Mcp, spec: Spec, environ: Mapping[str, str], number: int) -> McpSettings:
    return McpSettings(
        name=mcp.name,
        command=tuple(mcp.command or ()),
        url=mcp.url,
        files=laid_files(mcp.files, spec.folder, f"tools.{number}.mcp.files"),
        shared=mcp.scope == "shared" or mcp.url is not None,
        on_host=mcp.where == "host",
        folder=spec.folder,
        allow=None if mcp.allow is None else tuple(mcp.allow),
        prefix=mcp.prefix,
        timeout=mcp.timeout,
        env=dict(mcp.env),
        headers={header: _variable(environ, name, header) for header, name in mcp.headers_env.items()},
    )


def _variable(environ: Mapping[str, str], name: str, header: str) -> str:
    value = environ.get(name)
    if not value:
        raise UserError(f"headers_env.{header} names the environment variable {name}, which is not set")
    return value
