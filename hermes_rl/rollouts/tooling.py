"""The tools that a spec gives to its rollouts, from toolsets, functions, state objects and tool servers.

Owns which tools a group has, and what has to be started once before any rollout can have them. Compiling
loads code and reads variables; `open` starts servers, lists their tools, and fails there rather than in the
first rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.rollouts.sandboxes import laid_files
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.spec.model import Mcp, Spec
from hermes_rl.tools.base import Tool
from hermes_rl.tools.catalogue import resolve_toolsets, sample_distribution
from hermes_rl.tools.mcp_server import McpSettings
from hermes_rl.tools.mcp_tools import McpSource
from hermes_rl.tools.python_tools import python_tool
from hermes_rl.tools.state_tools import state_tools
from hermes_rl.tools.toolkit import Toolkit


class Tooling:
    """What the agent of a spec can do.

    Args:
        spec: the spec.
        environ: where variables that hold headers are looked up.

    Raises:
        UserError: a function cannot be loaded, or a variable is missing.
    """

    def __init__(self, spec: Spec, environ: Mapping[str, str]) -> None:
        self.spec = spec
        self._functions = tuple(python_tool(tool.python) for tool in spec.tools if tool.python is not None)
        self._sources = tuple(
            McpSource(_settings(tool.mcp, spec, environ, number))
            for number, tool in enumerate(spec.tools)
            if tool.mcp is not None
        )
        self._fixed: tuple[Tool, ...] | None = None
        self._listed: tuple[Tool, ...] | None = None if self._sources else ()
        self._opening = asyncio.Lock()

    @property
    def fingerprints(self) -> dict[str, str]:
        """SHA-256 of what each tool server lists, by its name; those that have been asked."""
        return {s.settings.name: s.fingerprint for s in self._sources if s.fingerprint is not None}

    async def open(self, sandbox: SandboxConfig) -> None:
        """Start what has to be there before a rollout; does nothing the second time.

        Raises:
            RunError: a tool server cannot be started, in a sandbox like `sandbox` where it runs in one.
            UserError: it has not the tools that the spec allows.
        """
        async with self._opening:
            if self._listed is None:
                taken = {tool.name for tool in self._functions}
                if self.spec.toolsets.distribution is None:
                    taken |= {tool.name for tool in self._catalogue("")}
                listed: list[Tool] = []
                for source in self._sources:
                    listed += await source.list_tools(sandbox, taken | {tool.name for tool in listed})
                self._listed = tuple(listed)

    async def close(self) -> None:
        """End the tool servers that rollouts share."""
        for source in self._sources:
            await source.close()

    def toolkit(self, group: str, state: Any) -> Toolkit:
        """The tools of a rollout: those of its group, and those of its own state object."""
        shared = self.shared(group)
        names = [tool.state for tool in self.spec.tools if tool.state is not None]
        own = [tool for name in names for tool in state_tools(state, name)]
        return Toolkit([*shared.tools, *own]) if own else shared

    def shared(self, group: str) -> Toolkit:
        """The tools that all rollouts of a group have; those of tool servers once they are open."""
        return Toolkit([*self._catalogue(group), *self._functions, *(self._listed or ())])

    def _catalogue(self, group: str) -> tuple[Tool, ...]:
        toolsets = self.spec.toolsets
        if toolsets.distribution is not None:
            drawn = sample_distribution(toolsets.distribution, f"{self.spec.seed}:{group}")
            return resolve_toolsets(drawn, toolsets.disabled)
        if self._fixed is None:
            self._fixed = resolve_toolsets(toolsets.enabled, toolsets.disabled)
        return self._fixed


def _settings(mcp: Mcp, spec: Spec, environ: Mapping[str, str], number: int) -> McpSettings:
    return McpSettings(
        name=mcp.name,
        command=tuple(mcp.command or ()),
        url=mcp.url,
        files=laid_files(mcp.files, spec.folder, f"tools.{number}.mcp.files"),
        shared=mcp.scope == "shared",
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
