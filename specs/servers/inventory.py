"""A small tool server over stdio (Model Context Protocol): the stock of a shop. It needs nothing but Python."""

import json
import sys
from typing import Any

STOCK: dict[str, int] = {}
WHOLE, TEXT = {"type": "integer"}, {"type": "string"}
TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "store": ("Put boxes of something on the shelf.", {"what": TEXT, "boxes": WHOLE, "each": WHOLE}),
    "count": ("Count the pieces of something on the shelf.", {"what": TEXT}),
}


def call(name: str, args: dict[str, Any]) -> str:
    """Execute one call of a tool."""
    if name == "store":
        STOCK[args["what"]] = STOCK.get(args["what"], 0) + args["boxes"] * args["each"]
        return "stored"
    return str(STOCK.get(args["what"], 0))


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request, or None if its method is unknown."""
    if method == "initialize":
        server = {"name": "inventory", "version": "1"}
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
