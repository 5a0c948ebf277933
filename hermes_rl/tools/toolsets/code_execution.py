"""Toolset ``code_execution``: a Python script in the sandbox that may call the rollout's other tools.

Name, parameter and form of the result are the ones that models know from hermes-agent. Each call of a script is checked
and executed here like one of the model's calls, so that it can use no tool that the rollout does not have.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from importlib import resources
from typing import Any

from hermes_rl.sandbox.base import Conversation
from hermes_rl.threads import run_exclusively
from hermes_rl.tools.base import (
    CALL_TIMEOUT,
    OUTPUT_LIMIT,
    RESULT_LIMIT,
    Tool,
    ToolFailedError,
    ToolInputError,
    ToolRuntime,
    Toolset,
    arguments,
    as_json,
    capped,
    error_json,
    readable,
    typed,
)
from hermes_rl.tools.execute import checked_arguments, run_tool
from hermes_rl.tools.host_process import LineTooLongError, lines_of
from hermes_rl.values import read_bounded

SECONDS = 300.0
"""Seconds for one script, unless the spec or the sandbox sets a shorter limit."""
SPARE_SECONDS = 2.0
"""The script ends this long before its tool call would, so that the model still gets its output."""
MAX_SCRIPT_CALLS = 50
NAME_CHARACTERS = 100
"""Maximum characters of an unknown tool's name in the error for a script."""
THREAD_CALL_BYTES = 1 << 16
"""Bytes from which a call is parsed in a thread."""
SCRIPT_ERRORS_LIMIT = 10_000
REFUSED_CALLS = 10 * MAX_SCRIPT_CALLS
"""Calls after which a script is killed that ignores the errors about too many calls."""
CALL_LIMIT = 16 << 20
"""Maximum bytes of one call of a script."""


class ExecuteCode(Tool):
    """Run a script to its end and return its output."""

    name = "execute_code"
    on_sandbox = True
    parallel = False
    timeout = SECONDS

    description = (
        "Run a Python script in the sandbox. It can call your other tools: `from hermes_tools import NAME`, then "
        "NAME(...) with the parameters that you know; each call gives the tool's answer, parsed where it is "
        "JSON. Use it for several calls with logic between them: loops, conditions, filtering long output "
        "before you read it. Print what you want to see; nothing else comes back. hermes_tools also has "
        "json_parse(text), shell_quote(text) and retry(fn, max_attempts=3, delay=2). Limits: 5 minutes, "
        f"50 KB of output, {MAX_SCRIPT_CALLS} tool calls."
    )
    parameters = arguments(
        ["code"],
        code=typed("string", "Python code. Import tools with `from hermes_tools import ...`, print the result."),
    )

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        sandbox = await runtime.sandbox()
        bound = min(CALL_TIMEOUT.get() or SECONDS, sandbox.config.timeout)
        seconds = bound - min(SPARE_SECONDS, bound / 3)
        try:
            conversation = await sandbox.converse(
                ["python3", "-c", _module_source("code_runner.py")],
                cwd=runtime.shell.cwd,
                env=runtime.shell.variables(),
            )
        except OSError as error:
            raise ToolInputError(f"scripts cannot run here: python3: {error.strerror}") from None
        try:
            return as_json(await _Script(conversation, runtime, seconds).run(args["code"]))
        finally:
            await conversation.close()


class _Script:
    """A running script: its requests, until it reports how it ended."""

    def __init__(self, conversation: Conversation, runtime: ToolRuntime, seconds: float) -> None:
        self._conversation = conversation
        self._runtime = runtime
        self._seconds = seconds
        self._started_at = time.perf_counter()
        self._calls_made = 0

    async def run(self, code: str) -> dict[str, Any]:
        await self._write(
            {
                "code": code,
                "tools": _module_source("hermes_tools.py"),
                "parameters": {tool.name: list(tool.parameters["properties"]) for tool in self._callable()},
                "timeout": self._seconds,
                "stdout_limit": OUTPUT_LIMIT,
                "stderr_limit": SCRIPT_ERRORS_LIMIT,
            }
        )
        try:
            async for line in lines_of(self._conversation, CALL_LIMIT):
                message = (
                    _read_object(line) if len(line) <= THREAD_CALL_BYTES else await run_exclusively(_read_object, line)
                )
                if "tool" not in message:
                    return self._success_report(message)
                await self._write(await self._answer(message))
        except LineTooLongError:
            raise ToolInputError(f"the script made a tool call of more than {CALL_LIMIT} bytes") from None
        errors = readable(self._conversation.errors())
        return self._report("error", "", f"the script's runner ended before the script did\n{errors}".rstrip())

    async def _write(self, value: Any) -> None:
        # If no process listens any more, the end of its output shows it.
        with contextlib.suppress(OSError):
            await self._conversation.write(json.dumps(value).encode() + b"\n")

    def _callable(self) -> list[Tool]:
        return [tool for tool in self._runtime.toolkit.tools if not isinstance(tool, ExecuteCode)]

    async def _answer(self, message: dict[str, Any]) -> str:
        self._calls_made += 1
        if self._calls_made > REFUSED_CALLS:
            raise ToolInputError(
                f"the script made {REFUSED_CALLS} tool calls, of which {MAX_SCRIPT_CALLS} are made at most"
            )
        tool = next((tool for tool in self._callable() if tool.name == message["tool"]), None)
        if tool is None:
            return error_json(f"there is no tool named {str(message['tool'])[:NAME_CHARACTERS]!r} for a script")
        if self._calls_made > MAX_SCRIPT_CALLS:
            return error_json(f"a script may make {MAX_SCRIPT_CALLS} tool calls at most")
        remaining = self._seconds - (time.perf_counter() - self._started_at)
        try:
            args, _ = await checked_arguments(message.get("arguments"), tool)
            return capped(await run_tool(tool, args, self._runtime, max(remaining, 0.1)), RESULT_LIMIT)
        except (ToolInputError, ToolFailedError) as problem:
            return error_json(str(problem))

    def _success_report(self, end: dict[str, Any]) -> dict[str, Any]:
        output, errors = (readable(str(end.get(name, "")).encode()) for name in ("stdout", "stderr"))
        if end.get("timed_out"):
            return self._report("timeout", output, f"the script ran past {self._seconds:g} s and was killed")
        code = end.get("exit_code")
        if code != 0:
            return self._report("error", output, errors or f"the script ended with exit code {code}")
        return self._report("success", output, None)

    def _report(self, status: str, output: str, error: str | None) -> dict[str, Any]:
        report = {"status": status, "output": output, "tool_calls_made": self._calls_made}
        report["duration_seconds"] = round(time.perf_counter() - self._started_at, 2)
        return report if error is None else report | {"error": error}


def _read_object(line: bytes) -> dict[str, Any]:
    try:
        value = read_bounded(line, CALL_LIMIT)
    except ValueError as error:
        raise ToolInputError(f"the script made a tool call whose values {error}") from None
    if not isinstance(value, dict):
        raise ToolInputError("the script wrote to the pipe of its tool calls")
    return value


@functools.cache
def _module_source(name: str) -> str:
    return resources.files("hermes_rl.tools.in_sandbox").joinpath(name).read_text("utf-8")


TOOLSET = Toolset(
    "code_execution", "Python scripts in the sandbox that can call the rollout's other tools.", (ExecuteCode(),)
)
