"""A small MCP server over standard input and output. It needs nothing but Python; any other server does as well."""

import json
import sys
from typing import Any

NOTES: list[str] = []
TEXT = {"type": "string"}
TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "keep": ("Keep a note.", {"note": TEXT}),
    "find": ("Find the notes that have a word in them.", {"word": TEXT}),
}


def call(name: str, args: dict[str, Any]) -> str:
    """Do what a tool does."""
    if name == "keep":
        NOTES.append(args["note"])
        return "kept"
    return "\n".join(note for note in NOTES if args["word"].lower() in note.lower()) or "there is no such note"


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request; None for one that is not known."""
    if method == "initialize":
        server = {"name": "notes", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        schema = {name: {"type": "object", "properties": p, "required": list(p)} for name, (_, p) in TOOLS.items()}
        return {"tools": [{"name": n, "description": d, "inputSchema": schema[n]} for n, (d, _) in TOOLS.items()]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": call(params["name"], params.get("arguments", {}))}]}
    return None


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params", {}))
        body = {"error": {"code": -32601, "message": "unknown"}} if result is None else {"result": result}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": request["id"], **body}) + "\n")
        sys.stdout.flush()
