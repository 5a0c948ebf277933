"""Toolset ``terminal``: run commands in the rollout's sandbox, with names and parameters that models know from
hermes-agent.
"""

from __future__ import annotations

from typing import Any

from hermes_rl.sandbox.base import Sandbox
from hermes_rl.tools.base import (
    CALL_TIMEOUT,
    LISTED_OUTPUT,
    OUTPUT_LIMIT,
    STATE_LIMIT,
    Tool,
    ToolRuntime,
    Toolset,
    arguments,
    as_json,
    readable,
    typed,
)
from hermes_rl.tools.toolsets._process import ProcessTool

SPARE_SECONDS = 1.0
"""A command ends this long before its tool call would, so that the model still gets its output."""
OUTPUT_BYTES = max(4 * OUTPUT_LIMIT, STATE_LIMIT)
NOT_HERE = {
    "pty": "pty has no effect: commands run without a terminal",
    "notify_on_complete": "there are no notifications: ask with process(action='wait') or 'poll'",
    "watch_patterns": "there are no notifications: ask with process(action='poll') or 'log'",
}
"""Parameters that are accepted, since models send them, and the notes on each in the result."""


class Terminal(Tool):
    """Run a shell command; the working directory and exported variables last from one call to the next."""

    name = "terminal"
    on_sandbox = True

    description = (
        "Run a shell command in the sandbox. Files, the working directory and exported variables last "
        "between calls. The answer has the output (stdout and stderr together) and the exit code; long "
        "output keeps its head and tail. Use background=true for servers and other commands that do not "
        "end by themselves, and the process tool to look after them. Prompts for input get no answer."
    )
    parameters = arguments(
        ["command"],
        command=typed("string", "The command to run"),
        background=typed(
            "boolean", "Start it and come back at once with a session_id for the process tool", default=False
        ),
        timeout=typed("integer", "Seconds to wait at most; the sandbox has its own limit", minimum=1),
        workdir=typed("string", "Directory for this command alone; default: where the last command ended"),
        pty=typed("boolean", "Has no effect here", default=False),
        notify_on_complete=typed("boolean", "Has no effect here; wait with the process tool", default=False),
        watch_patterns={
            "type": "array",
            "items": {"type": "string"},
            "description": "Has no effect here; poll with the process tool",
        },
    )

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        sandbox = await runtime.sandbox()
        run = _run_background if args.get("background") else _run_foreground
        answer = await run(sandbox, runtime, args)
        notes = [note for name, note in NOT_HERE.items() if args.get(name)]
        return as_json(answer | ({"note": "; ".join(notes)} if notes else {}))


async def _run_foreground(sandbox: Sandbox, runtime: ToolRuntime, args: dict[str, Any]) -> dict[str, Any]:
    workdir = _resolve_workdir(sandbox, runtime, args)
    timeout = _limited_timeout(sandbox, args.get("timeout"))
    script = runtime.shell.script(args["command"], workdir)
    result = await sandbox.run_reporting(script, runtime.shell.exports, timeout=timeout, output_limit=OUTPUT_BYTES)
    runtime.shell.learn(result.stderr, keep_cwd=workdir is not None)
    error = f"Command timed out after {timeout:g} seconds" if result.timed_out else None
    return {"output": readable(result.stdout), "exit_code": result.exit_code, "error": error}


async def _run_background(sandbox: Sandbox, runtime: ToolRuntime, args: dict[str, Any]) -> dict[str, Any]:
    workdir = _resolve_workdir(sandbox, runtime, args)
    command = args["command"]
    cwd = workdir or runtime.shell.cwd or sandbox.workdir
    with runtime.processes.room():
        try:
            script = runtime.shell.script(command, workdir, report=False)
            process = await sandbox.spawn(script, env=runtime.shell.variables(), output_limit=LISTED_OUTPUT)
        except OSError as error:
            return {"output": "", "exit_code": 126, "error": f"cannot start the command: {error.strerror}"}
        entry = runtime.processes.add(command, cwd, process)
    return {
        "output": "Background process started",
        "session_id": entry.id,
        "pid": process.pid,
        "exit_code": 0,
        "error": None,
    }


def _resolve_workdir(sandbox: Sandbox, runtime: ToolRuntime, args: dict[str, Any]) -> str | None:
    workdir = args.get("workdir")
    return sandbox.resolve(workdir, runtime.shell.cwd) if workdir else None


def _limited_timeout(sandbox: Sandbox, requested: float | None) -> float:
    """Return the requested timeout, limited by the sandbox's bound and the remaining time of the call."""
    bounds = [sandbox.config.timeout]
    call = CALL_TIMEOUT.get()
    if call is not None:
        bounds.append(call - min(SPARE_SECONDS, call / 10))
    if requested is not None:
        bounds.append(float(requested))
    return min(bounds)


TOOLSET = Toolset("terminal", "Shell commands and background processes in the sandbox.", (Terminal(), ProcessTool()))
