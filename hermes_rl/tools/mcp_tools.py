"""Tools of an MCP server: ``tools: [{mcp: {…}}]``.

The tools are listed once, before the first rollout, so that every rollout gets the same tools; a server that later
lists others is refused.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from hermes_rl.errors import RunError, ToolServerFailure, UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.spec.json_schema import InvalidSchemaError
from hermes_rl.tools.base import DescribedTool, ToolRuntime
from hermes_rl.tools.mcp_client import Listed, fingerprint, require_mcp
from hermes_rl.tools.mcp_server import STARTS_AT_ONCE, HostServer, HttpServer, McpServer, McpSettings, SandboxServer
from hermes_rl.tools.python_tools import TOOL_NAME

SCHEMA_LIMIT = 100_000
"""Maximum characters of one tool's schema."""


class McpTool(DescribedTool):
    """One tool of a server. Not parallel if each rollout has a separate server: its calls may depend on each other."""

    checks_arguments = False

    def __init__(self, source: McpSource, listing: Listed, name: str) -> None:
        accepted = {"type": "object", "properties": {}, **listing.parameters}
        super().__init__(name, listing.description, accepted)
        self.listing, self._source = listing, source
        try:
            self.compiled.check()
        except InvalidSchemaError:
            self.arguments = "strict"  # nothing can be coerced to it; the server may know what it means
        self.parallel = source.settings.shared
        self.on_sandbox = source.settings.in_sandbox
        self.outside = not source.settings.in_sandbox

    async def prepare(self, runtime: ToolRuntime) -> None:
        if self.on_sandbox:
            await self._source.server(runtime).tools()

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        return await self._source.server(runtime).call(self.listing.name, args)


class McpSource:
    """The server of one entry of `tools`; `fingerprint` is the SHA-256 of its tool list, None before `list_tools`."""

    def __init__(self, settings: McpSettings) -> None:
        require_mcp()
        self.settings = settings
        self.fingerprint: str | None = None
        self._shared: McpServer | None = None
        self._tools: tuple[McpTool, ...] = ()
        self._listing = asyncio.Lock()
        self._starts = asyncio.Semaphore(STARTS_AT_ONCE)

    async def list_tools(self, config: SandboxConfig, reserved: Collection[str] = ()) -> tuple[McpTool, ...]:
        """Start the server once and return its tools; a name in `reserved` gets the server's name as a prefix.

        A server that runs in a sandbox is started in one with `config`. Raises `RunError` if it cannot be started, and
        `UserError` if `allow` names a tool that it does not have, or a tool cannot be offered to a model.
        """
        async with self._listing:
            if self.fingerprint is None:
                try:
                    async with ToolRuntime(config) as runtime:
                        listed_tools = await self.server(runtime).tools()
                except ToolServerFailure as failure:
                    raise RunError(failure.detail) from failure
                self._tools = tuple(self._tool(tool, reserved) for tool in self._allowed(listed_tools))
                self.fingerprint = fingerprint(listed_tools)
            return self._tools

    def server(self, runtime: ToolRuntime) -> McpServer:
        """Return the server for this rollout."""
        if self.settings.shared:
            if self._shared is None:
                self._shared = self._make(runtime)
            return self._shared
        runtime = runtime.copied_from or runtime
        server = runtime.held.get(self.settings.name)
        if not isinstance(server, McpServer):
            server = runtime.held[self.settings.name] = self._make(runtime)
        return server

    async def close(self) -> None:
        """End the server that all rollouts share."""
        if self._shared is not None:
            await self._shared.close()

    def _make(self, runtime: ToolRuntime) -> McpServer:
        if self.settings.url is not None:
            return HttpServer(self.settings, self.fingerprint, self._starts)
        if self.settings.on_host:
            return HostServer(self.settings, self.fingerprint, self._starts)
        return SandboxServer(self.settings, self.fingerprint, self._starts, runtime)

    def _allowed(self, listed_tools: tuple[Listed, ...]) -> list[Listed]:
        names = [tool.name for tool in listed_tools]
        allow = self.settings.allow
        for name in allow or ():
            if name not in names:
                have = ", ".join(names) or "none"
                raise UserError(
                    f"MCP server {self.settings.name} has no tool {name!r}{did_you_mean(name, names)} (it has {have})"
                )
        return [tool for tool in listed_tools if allow is None or tool.name in allow]

    def _tool(self, listing: Listed, reserved: Collection[str]) -> McpTool:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", (self.settings.prefix or "") + listing.name)
        if name in reserved:
            name = f"{self.settings.name}_{name}"
        label = f"tool {listing.name!r} of the MCP server {self.settings.name}"
        if not TOOL_NAME.fullmatch(name):
            raise UserError(f"{label} cannot be offered as {name!r}: a name has 1 to 64 letters, digits, _ and -")
        schema = listing.parameters
        if schema.get("type", "object") != "object":
            raise UserError(
                f"{label} has parameters of type {schema['type']!r}; only objects can be offered to a model"
            )
        if not isinstance(schema.get("properties", {}), Mapping):
            raise UserError(f"{label} has no JSON Schema for its parameters: properties are not a mapping")
        if len(json.dumps(schema)) > SCHEMA_LIMIT:
            raise UserError(f"{label} has a schema of more than {SCHEMA_LIMIT} characters")
        return McpTool(self, listing, name)
