"""Run hermes-agent in separate processes: the only module that imports it. It is run as a program, and no module
imports it.

Importing hermes-agent changes the environment of its process, writes below ``$HERMES_HOME``, and its tools share state.
So one process imports it once, and forks for each rollout that calls one of its tools: each child has a separate home,
and rollouts share nothing. Symbols of hermes-agent 0.19 that are used, asserted by a test:
`model_tools.get_tool_definitions`, `model_tools.handle_function_call`, `toolsets.resolve_toolset`,
`tools.registry.registry.get_entry`, `tools.browser_tool.cleanup_all_browsers`.

    python -m hermes_rl.tools.hermes_worker describe TOOLSET…   prints each toolset's tools and missing keys as JSON
    python -m hermes_rl.tools.hermes_worker serve SOCKET        forks a child for each connection, until stdin ends

A connection carries JSON texts, one a line: ``{"id", "tool", "arguments"}`` up, ``{"id", "answer"}`` down.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

CALLS_AT_ONCE = 8
"""Concurrent calls of one rollout."""
HOME = "/proc/self/cwd"
"""Required value of ``$HERMES_HOME``. hermes-agent builds paths from it when it is imported, once for all children; so
it names the working directory, which is different for each child.
"""


def describe(names: list[str]) -> dict[str, Any]:
    """Return toolset → the schemas of its available tools, and tool → its variables, for unavailable tools."""
    from model_tools import get_tool_definitions
    from tools.registry import registry
    from toolsets import resolve_toolset

    descriptions: dict[str, Any] = {}
    for name in names:
        schemas = get_tool_definitions([name], quiet_mode=True, skip_tool_search_assembly=True)
        available_names = {schema["function"]["name"] for schema in schemas}
        entries = {tool: registry.get_entry(tool) for tool in sorted(set(resolve_toolset(name)) - available_names)}
        missing = {tool: list(entry.requires_env or ()) for tool, entry in entries.items() if entry is not None}
        descriptions[name] = {"schemas": schemas, "missing": missing}
    return descriptions


def serve(path: str, out: IO[str]) -> None:
    """Fork a child for each connection until standard input ends; a line of `out` reports that it accepts
    connections.
    """
    import model_tools  # noqa: F401 (once, for all children)

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(128)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    out.write("ready\n")
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if listener in ready:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                serve_rollout(connection)
            connection.close()
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 1):
            return


def serve_rollout(connection: socket.socket) -> None:
    """Handle calls until the other side is gone, then leave no process and no file."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    home = tempfile.mkdtemp(prefix="rollout-")
    os.chdir(home)
    answering = threading.Lock()
    try:
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool, connection.makefile("rb") as lines:
            for line in lines:
                pool.submit(_answer_call, json.loads(line), connection, answering)
            if "tools.browser_tool" in sys.modules:
                from tools.browser_tool import cleanup_all_browsers

                cleanup_all_browsers()
    finally:
        shutil.rmtree(home, ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


def _answer_call(call: dict[str, Any], connection: socket.socket, answering: threading.Lock) -> None:
    from model_tools import handle_function_call

    try:
        answer = handle_function_call(call["tool"], call["arguments"], task_id=f"rollout-{os.getpid()}")
    except Exception as error:  # noqa: BLE001 (a tool's own; the model is told)
        answer = json.dumps({"error": f"{type(error).__name__}: {error}"})
    # The other side may be gone: then the result is not needed.
    with answering, contextlib.suppress(OSError):
        connection.sendall(json.dumps({"id": call["id"], "answer": answer}).encode() + b"\n")


def main(arguments: list[str]) -> None:
    """Handle requests until standard input ends; hermes-agent's output goes to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    if arguments[0] == "describe":
        out.write(json.dumps(describe(arguments[1:])) + "\n")
    else:
        serve(arguments[1], out)


if __name__ == "__main__":
    main(sys.argv[1:])
