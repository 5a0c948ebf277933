"""A small MCP server over stdio without the SDK, whose tools misbehave on request. Run as a program.

What it sends is what the specification of 2025-11-25 says, where a tool is not there to break it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

counted = 0


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def listed() -> list[dict[str, Any]]:
    tools = []
    for name in TOOLS:
        properties = {key: {"type": "integer"} for key in ("a", "b") if name == "add"}
        if name == "lock":
            properties = {"a": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        tools.append({"name": name, "description": f"Does {name}.", "inputSchema": schema})
        if name == "lie":
            tools[-1]["outputSchema"] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        if name == "endless":
            tools[-1]["outputSchema"] = {"type": "object", "properties": {"text": {"pattern": "^(a|a)*$"}}}
    return tools[:3] if Path("fewer").exists() else tools


def text(said: object) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": str(said)}]}


def add(a: object = None, b: object = None) -> dict[str, Any]:
    if isinstance(a, int) and isinstance(b, int):
        return text(a + b)
    return {**text("a and b must be integers"), "isError": True}


def count() -> dict[str, Any]:
    global counted
    counted += 1
    return text(counted)


def crash() -> dict[str, Any]:
    sys.stderr.write("I am dying\n")
    os._exit(3)


def hang() -> dict[str, Any]:
    time.sleep(1000)
    return text("at last")


def flood() -> dict[str, Any]:
    while True:
        send({"method": "notifications/message", "params": {"level": "info", "data": "x" * 100_000}})


def junk() -> dict[str, Any]:
    sys.stdout.write("this is no message\n" * 1000)
    return text("after junk")


def huge() -> dict[str, Any]:
    sys.stdout.write("x" * (20 << 20))
    return text("")


def lie() -> dict[str, Any]:
    return {"content": [], "structuredContent": {"n": "no number"}}


def endless() -> dict[str, Any]:
    return {"content": [], "structuredContent": {"text": "a" * 40 + "!"}}


def refuse() -> dict[str, Any]:
    return {**text("not today"), "isError": True}


def image() -> dict[str, Any]:
    return {"content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]}


def pid() -> dict[str, Any]:
    return text(os.getpid())


def environment() -> dict[str, Any]:
    return text(json.dumps(dict(os.environ)))


def lock(a: int) -> dict[str, Any]:
    return {"error": {"code": a, "message": "row 7 is locked"}}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        info = {"name": "bad", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": listed()}
    if method == "tools/call":
        return TOOLS[params["name"]](**params.get("arguments", {}))
    return None


tools = (add, count, crash, hang, flood, junk, huge, lie, endless, refuse, image, pid, environment, lock)
TOOLS = {tool.__name__: tool for tool in tools}
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    result = answer(request["method"], request.get("params", {}))
    if result is not None and "error" in result:
        send({"id": request["id"], **result})
    elif result is None:
        send({"id": request["id"], "error": {"code": -32601, "message": "Method not found"}})
    else:
        send({"id": request["id"], "result": result})
