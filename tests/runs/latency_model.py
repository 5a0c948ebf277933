"""A chat server that takes its time: it asks for the tool twice, then answers, and counts the rollouts in flight.

A rollout is in flight from its first request until its last answer is sent.
Run as a program it prints its address and serves until its standard input is closed, then prints what it counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

LATENCY = 0.05
TOOL_TURNS = 2


class LatencyModel:
    def __init__(self) -> None:
        self.open = self.most = self.requests = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests += 1
        self.open += body["messages"][-1]["role"] == "user"
        self.most = max(self.most, self.open)
        await asyncio.sleep(LATENCY)
        message = self._message(body["messages"], body["seed"])
        finish = "tool_calls" if "tool_calls" in message else "stop"
        if finish == "stop":
            self.open -= 1
        usage = {"prompt_tokens": 20, "completion_tokens": 5}
        choice = {"index": 0, "message": message, "finish_reason": finish}
        return web.json_response({"model": "latency", "choices": [choice], "usage": usage})

    def _message(self, messages: list[dict[str, Any]], seed: int) -> dict[str, Any]:
        results = [message["content"] for message in messages if message["role"] == "tool"]
        if len(results) < TOOL_TURNS:
            word = messages[0]["content"].rsplit(" ", 1)[-1]
            call = {"name": "shout", "arguments": json.dumps({"text": word, "times": 1 + seed % 2})}
            return {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": call}],
            }
        return {"role": "assistant", "content": results[-1]}


async def main() -> None:
    model = LatencyModel()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    sys.stdout.write(f"http://127.0.0.1:{runner.addresses[0][1]}/v1\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    sys.stdout.write(json.dumps({"most": model.most, "requests": model.requests}) + "\n")
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
