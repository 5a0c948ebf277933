"""The model of the benchmark: a chat server that answers after a fixed time, always with the same turns.

Stateless: a conversation gets a tool call until it has `--turns` - 1 answers, then a text. Prints its address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from aiohttp import web
from report import say

USAGE = {"prompt_tokens": 900, "completion_tokens": 40, "total_tokens": 940}
TEXT = "The listing shows what was asked for; the last step is done and nothing else is left to do. " * 2


def completion(message: dict[str, Any], reason: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason, "logprobs": None}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "bench", "choices": [choice]}
    return json.dumps({**body, "usage": USAGE}).encode()


def tool_call(turn: int) -> bytes:
    call = {"id": f"call_{turn}", "type": "function", "function": {"name": "noop", "arguments": '{"note": "go on"}'}}
    return completion({"content": TEXT, "tool_calls": [call]}, "tool_calls")


class Server:
    """Counts the assistant's messages in what it is sent, without parsing it: the server must not be what is slow."""

    def __init__(self, turns: int, latency: float) -> None:
        self.latency = latency
        self.answers = [*(tool_call(turn) for turn in range(turns - 1)), completion({"content": TEXT}, "stop")]

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        asked = body.count(b'"role": "assistant"') + body.count(b'"role":"assistant"')
        await asyncio.sleep(self.latency)
        return web.Response(body=self.answers[asked], content_type="application/json")


async def serve(turns: int, latency: float) -> None:
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", Server(turns, latency).answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    host, port = runner.addresses[0][:2]
    say(f"http://{host}:{port}/v1")
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--latency", type=float, required=True, help="seconds")
    options = parser.parse_args()
    asyncio.run(serve(options.turns, options.latency))
