"""Serve the spec's tools to an agent program with the Model Context Protocol, at the same address as the model.

The server implements the part of the protocol that tools need: one JSON response to each request over HTTP, without
sessions and streams. Calls run with the limits of the loop, and are recorded so that rewards see them. Source: the
protocol's specification of 18 June 2025.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from hermes_rl import __version__
from hermes_rl.agent.recorder import LoopOptions
from hermes_rl.agent.result import ToolCall
from hermes_rl.errors import ToolError
from hermes_rl.tools.base import Toolkit, ToolRuntime
from hermes_rl.tools.execute import execute_calls

PATH = "/mcp"
"""Suffix of the request path."""
KNOWN = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Protocol versions, newest first."""
MOST_KEPT = 32 << 20
"""Total characters of arguments and results in one rollout after which no further call is run."""
NO_REQUEST, NO_METHOD, WRONG = -32600, -32601, -32602
"""JSON-RPC error codes."""


class ToolServer:
    """Serve the tools of one rollout.

    Args:
        runtime: the rollout's sandbox.
        options: limits for calls and results.
        toolkit: the offered tools; default: the toolkit of the sandbox.
    """

    def __init__(self, runtime: ToolRuntime, options: LoopOptions, toolkit: Toolkit | None = None) -> None:
        self._runtime, self._options = runtime, options
        self._toolkit = runtime.toolkit if toolkit is None else toolkit
        self.calls: list[ToolCall] = []
        """Completed calls, in the order of completion."""
        self.errors: list[ToolError] = []
        self._kept_bytes = 0
        self._alone = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """Names of the offered tools."""
        return [schema["function"]["name"] for schema in self._toolkit.schemas]

    async def answer(self, message: Any) -> dict[str, Any] | None:
        """Return the response to a message, or None if it needs none.

        Raises:
            Failure: a tool failed because of infrastructure, which the program did not cause.
        """
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            return None if isinstance(message, dict) and "result" in message else _error(None, NO_REQUEST, "no request")
        if "id" not in message:
            return None
        parameters = message.get("params")
        params = parameters if isinstance(parameters, dict) else {}
        match message["method"]:
            case "initialize":
                version = params.get("protocolVersion")
                return _result(
                    message,
                    {
                        "protocolVersion": version if version in KNOWN else KNOWN[0],
                        "capabilities": {"tools": {}},
                        "serverInfo": {"name": "hermes-rl", "version": __version__},
                    },
                )
            case "ping":
                return _result(message, {})
            case "tools/list":
                functions = [schema["function"] for schema in self._toolkit.schemas]
                return _result(message, {"tools": [_describe_tool(function) for function in functions]})
            case "tools/call":
                name, arguments = params.get("name"), params.get("arguments") or {}
                if not isinstance(name, str) or not isinstance(arguments, dict):
                    return _error(message, WRONG, "a call has a `name`, and `arguments` that are an object")
                if self._kept_bytes >= MOST_KEPT:
                    return _error(message, WRONG, f"this rollout's calls have {MOST_KEPT} characters: no more are run")
                tool = self._toolkit.get(name)
                async with self._alone if tool is not None and not tool.parallel else nullcontext():
                    return _result(message, await self._run_tool(name, arguments))
        return _error(message, NO_METHOD, f"there is no method {message['method'][:100]!r}")

    async def _run_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        options, call_number = self._options, len(self.calls) + 1
        written = json.dumps(arguments)
        self._kept_bytes += len(written)
        call = {"id": f"mcp-{call_number}", "function": {"name": name, "arguments": written}}
        seconds = min((each for each in (options.tool_timeout, options.working_time) if each), default=None)
        outcomes = await execute_calls([call], self._toolkit, self._runtime, turn=0, tool_timeout=seconds)
        (outcome,) = outcomes if options.results is None else options.results.apply(outcomes)
        error = outcome.error
        self._kept_bytes += len(outcome.content)
        self.calls.append(ToolCall.from_outcome(outcome, 0, f"mcp-{len(self.calls) + 1}"))
        self.errors += [] if error is None else [error]
        return {"content": [{"type": "text", "text": outcome.content}], "isError": error is not None}


def _describe_tool(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", **(function.get("parameters") or {})}
    return {"name": function["name"], "description": function.get("description") or "", "inputSchema": schema}


def _result(message: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _error(message: Mapping[str, Any] | None, code: int, text: str) -> dict[str, Any]:
    identity = None if message is None else message["id"]
    return {"jsonrpc": "2.0", "id": identity, "error": {"code": code, "message": text}}
