"""Tool `process`: manage processes that `terminal` started in the background."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from hermes_rl.tools.base import (
    CALL_TIMEOUT,
    ListedProcess,
    Tool,
    ToolInputError,
    ToolRuntime,
    arguments,
    as_json,
    readable,
    typed,
)

PREVIEW = 1000
"""Characters of output in a process's status."""
LISTED = 200
"""Characters of the command and of the output of each process in a list."""
TAIL = 2000
LOG_LINES = 200
WAIT_SECONDS = 180.0
SIGTERM = 15
SIGKILL = 9
KILL_SECONDS = 2.0
"""Seconds for a process to end by itself after SIGTERM."""


def _status_fields(entry: ListedProcess, preview: int) -> dict[str, Any]:
    """Return the status of a process, with up to `preview` characters of its latest output."""
    return {
        "session_id": entry.id,
        "command": entry.command,
        "status": entry.status,
        "pid": entry.process.pid,
        "uptime_seconds": entry.uptime,
        "output_preview": _output_text(entry)[-preview:],
    }


def _output_text(entry: ListedProcess) -> str:
    return readable(entry.process.output())


def _end_fields(entry: ListedProcess) -> dict[str, Any]:
    return {"exit_code": entry.process.poll(), "completion_reason": "killed" if entry.killed else "exited"}


async def _poll_process(entry: ListedProcess, args: dict[str, Any]) -> dict[str, Any]:
    return _status_fields(entry, PREVIEW) | (_end_fields(entry) if entry.status == "exited" else {})


async def _read_log(entry: ListedProcess, args: dict[str, Any]) -> dict[str, Any]:
    lines = _output_text(entry).splitlines()
    offset, limit = args.get("offset", 0), args.get("limit", LOG_LINES)
    visible_lines = lines[offset : offset + limit] if offset > 0 else lines[-limit:]
    return {
        "session_id": entry.id,
        "command": entry.command,
        "status": entry.status,
        "output": "\n".join(visible_lines),
        "total_lines": len(lines),
        "showing": f"{len(visible_lines)} lines",
    }


async def _wait_for_end(entry: ListedProcess, args: dict[str, Any]) -> dict[str, Any]:
    timeout = min(float(args.get("timeout", WAIT_SECONDS)), (CALL_TIMEOUT.get() or WAIT_SECONDS) * 0.9)
    code = await entry.process.wait(timeout)
    if code is None:
        note = f"Waited {timeout:g}s, the process is still running"
        return {"status": "timeout", "output": _output_text(entry)[-PREVIEW:], "timeout_note": note}
    return {"status": "exited", "command": entry.command, **_end_fields(entry), "output": _output_text(entry)[-TAIL:]}


async def _kill_process(entry: ListedProcess, args: dict[str, Any]) -> dict[str, Any]:
    if entry.status == "exited":
        return {"status": "already_exited", **_end_fields(entry), "output": _output_text(entry)[-TAIL:]}
    entry.killed = True
    await entry.process.kill(SIGTERM)
    if await entry.process.wait(KILL_SECONDS) is None:
        await entry.process.kill(SIGKILL)
        await entry.process.wait(KILL_SECONDS)
    return {"status": "killed", "session_id": entry.id, **_end_fields(entry), "output": _output_text(entry)[-TAIL:]}


async def _write_stdin(entry: ListedProcess, args: dict[str, Any]) -> dict[str, Any]:
    data = args.get("data", "") + ("\n" if args["action"] == "submit" else "")
    if entry.status == "exited":
        return {"status": "already_exited", "error": "Process has already finished"}
    try:
        await entry.process.write_stdin(data.encode("utf-8", "replace"))
    except BrokenPipeError:
        return {"status": "error", "error": "Its standard input is closed"}
    return {"status": "ok", "bytes_written": len(data)}


async def _close_stdin(entry: ListedProcess, args: dict[str, Any]) -> dict[str, Any]:
    if entry.status == "exited":
        return {"status": "already_exited", "error": "Process has already finished"}
    await entry.process.close_stdin()
    return {"status": "ok", "message": "stdin closed"}


ACTIONS: dict[str, Callable[[ListedProcess, dict[str, Any]], Awaitable[dict[str, Any]]]] = {
    "poll": _poll_process,
    "log": _read_log,
    "wait": _wait_for_end,
    "kill": _kill_process,
    "write": _write_stdin,
    "submit": _write_stdin,
    "close": _close_stdin,
}


class ProcessTool(Tool):
    """List, poll, read, wait for, kill and write to background processes of this rollout."""

    name = "process"
    parallel = False

    description = (
        "Look after background processes that terminal(background=true) started. Actions: list (all), "
        "poll (status and latest output), log (output by lines), wait (until it ends, or timeout), kill, "
        "write (text to its stdin), submit (text and Enter), close (end its stdin)."
    )
    parameters = arguments(
        ["action"],
        action=typed("string", "What to do", "list", *ACTIONS),
        session_id=typed("string", "The session_id from terminal; needed for every action but list"),
        data=typed("string", "Text for write and submit"),
        timeout=typed("integer", "Seconds to wait at most, for wait", minimum=1),
        offset=typed("integer", "Line to start from, for log; default: the last 200 lines"),
        limit=typed("integer", "Lines at most, for log", minimum=1),
    )

    async def call(self, args: dict[str, Any], runtime: ToolRuntime) -> str:
        action = args["action"]
        if action == "list":
            entries = ((entry, _status_fields(entry, LISTED)) for entry in runtime.processes.all())
            processes = [{**about, "command": entry.command[:LISTED], "cwd": entry.cwd} for entry, about in entries]
            return as_json({"processes": processes})
        if not args.get("session_id"):
            raise ToolInputError(f"session_id is required for {action}")
        entry = runtime.processes.get(args["session_id"])
        return as_json(await ACTIONS[action](entry, args))
