"""A chat server that writes down each call: what it answered, and what that used. It knows the truth about a run."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from tests.http_servers import listening

COST = 0.01
"""US dollars of a call."""


@dataclass
class Called:
    """One request: its role (the first part of its path), its rollout, and what was reported for it, or None if it has
    failed.
    """

    role: str
    rollout: str
    usage: dict[str, Any] | None


@dataclass
class CountingServer:
    """Replies depend on the request alone; `fails` is the share of requests that get status 500.

    Requests wait until `held` is set, if there is one. With `unreadable` no verdict of the judge can be read.
    """

    fails: float = 0.0
    calls: list[Called] = field(default_factory=list)
    in_flight: int = 0
    held: asyncio.Event | None = None
    unreadable: bool = False
    url: str = ""
    _random: random.Random = field(default_factory=lambda: random.Random(7))

    def used(self, role: str, rollout: str | None = None, since: int = 0) -> dict[str, float]:
        """Return the counts of a role in the form of run.json, without its seconds, of one rollout or of all."""
        calls = [call for call in self.calls[since:] if call.role == role and rollout in (None, call.rollout)]
        answered = [call.usage for call in calls if call.usage is not None]
        counts = {
            "prompt_tokens": sum(usage["prompt_tokens"] for usage in answered),
            "completion_tokens": sum(usage["completion_tokens"] for usage in answered),
            "calls": len(answered),
            "cached_tokens": sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in answered),
            "unanswered": len(calls) - len(answered),
        }
        optional = ("cached_tokens", "unanswered")
        return {
            **{name: count for name, count in counts.items() if count or name not in optional},
            **({"cost": COST * len(answered)} if answered else {}),
        }

    async def chat(self, request: web.Request) -> web.Response:
        role, body = request.match_info["role"], await request.json()
        rollout = unquote(request.headers.get("X-Session-ID", ""))
        self.in_flight += 1
        try:
            text = json.dumps([body.get("seed"), body["messages"]], sort_keys=True)
            draw = random.Random(hashlib.sha256(text.encode()).hexdigest())
            await asyncio.sleep(draw.random() * 0.01)
            if self.held is not None:
                await self.held.wait()
        finally:
            self.in_flight -= 1
        if self._random.random() < self.fails or request.transport is None or request.transport.is_closing():
            self.calls.append(Called(role, rollout, None))
            return web.json_response({"error": {"message": "busy"}}, status=500)
        prompt, completion = draw.randint(50, 500), draw.randint(1, 100)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": draw.randint(0, prompt)},
            "cost": COST,
        }
        turns = sum(message["role"] == "assistant" for message in body["messages"])
        message, finish = self._reply(role, body, draw, turns)
        self.calls.append(Called(role, rollout, usage))
        choice = {"index": 0, "finish_reason": finish, "message": {"role": "assistant", **message}}
        return web.json_response({"model": f"the {role}", "choices": [choice], "usage": usage})

    def _reply(self, role: str, body: dict[str, Any], draw: random.Random, turns: int) -> tuple[dict[str, Any], str]:
        if role == "judge" and self.unreadable:
            return {"content": "so"}, "stop"
        if role == "judge":
            return {"content": json.dumps({"score": draw.choice([0, 0.5, 1]), "reason": "so"})}, "stop"
        if body.get("tools") and turns < 6 and draw.random() < 0.6:
            arguments = json.dumps({"n": draw.randint(0, 9)})
            call = {"id": f"c{turns}", "type": "function", "function": {"name": "roll", "arguments": arguments}}
            return {"content": None, "tool_calls": [call]}, "tool_calls"
        words = draw.choice(["none", "half", "third", "whole"])
        return {"content": f"{words} {draw.randint(0, 99)}"}, "length" if draw.random() < 0.1 else "stop"


@asynccontextmanager
async def counting_server(fails: float = 0.0) -> AsyncIterator[CountingServer]:
    """Yield a server on loopback that listens until the block ends."""
    server, app = CountingServer(fails), web.Application(client_max_size=1 << 26)
    app.router.add_post("/{role}/v1/chat/completions", server.chat)
    async with listening(app) as server.url:
        yield server
