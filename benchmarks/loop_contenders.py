"""The same conversations by each contender. Run as a program it plays them and prints what it took, as JSON.

Every contender sends the same history and the same tool, and calls a function that does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from report import say

Message = dict[str, Any]
Play = Callable[[], Awaitable[int]]
"""Plays one conversation; returns the number of its model calls."""

PROMPT: list[Message] = [
    {"role": "system", "content": "You are a careful engineer. Work step by step and check what you did. " * 20},
    {"role": "user", "content": "List what is in the working directory, and say when you are done."},
]
RESULT = "total 12\n" + "-rw-r--r-- 1 user user 120 Jan  1 00:00 notes.txt\n" * 4
PARAMETERS = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
TOOL = {"type": "function", "function": {"name": "noop", "description": "Do nothing.", "parameters": PARAMETERS}}


async def noop(note: str) -> str:
    """Do nothing."""
    return RESULT


def sync_noop(note: str) -> str:
    """Do nothing."""
    return RESULT


@asynccontextmanager
async def raw_aiohttp(url: str) -> AsyncIterator[Play]:
    """Posts, and nothing around them."""
    import aiohttp

    async def play() -> int:
        messages, turns = list(PROMPT), 0
        while True:
            payload = {"model": "bench", "messages": messages, "tools": [TOOL], "temperature": 1.0}
            async with session.post(f"{url}/chat/completions", json=payload) as response:
                message = json.loads(await response.read())["choices"][0]["message"]
            turns += 1
            messages.append(message)
            if not message.get("tool_calls"):
                return turns
            for call in message["tool_calls"]:
                content = await noop(**json.loads(call["function"]["arguments"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield play


@asynccontextmanager
async def openai_client(url: str, key: str = "none") -> AsyncIterator[Play]:
    """The loop of a tutorial, over the openai client."""
    from openai import AsyncOpenAI

    async def play() -> int:
        messages, turns = list(PROMPT), 0
        while True:
            completion = await client.chat.completions.create(
                model="bench",
                messages=messages,  # type: ignore[arg-type]
                tools=[TOOL],  # type: ignore[list-item]
                temperature=1.0,
            )
            message = completion.choices[0].message
            turns += 1
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return turns
            for call in message.tool_calls:
                content = await noop(**json.loads(call.function.arguments))  # type: ignore[union-attr]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
        yield play


@asynccontextmanager
async def hermes_rl(url: str, tool: Callable[..., Any] = noop) -> AsyncIterator[Play]:
    """Our loop, with our transport, tool validation, retries, timings and records."""
    from hermes_rl.agent.loop import HermesAgentLoop
    from hermes_rl.agent.recorder import LoopOptions
    from hermes_rl.servers.base import ServerConfig
    from hermes_rl.servers.factory import create_client
    from hermes_rl.tools.base import Toolkit
    from hermes_rl.tools.python_tools import python_tool

    toolkit = Toolkit([python_tool(tool, "noop")])
    options = LoopOptions(max_turns=1000, timeout=3600.0, tool_timeout=300.0)

    async def play() -> int:
        result = await HermesAgentLoop(role, toolkit.schemas, options=options).run(PROMPT)
        assert result.finished_naturally and not result.tool_errors, result
        return result.turns_used

    async with create_client("policy", [ServerConfig("openai", url, "bench", max_concurrency=4096)]) as role:
        yield play


@asynccontextmanager
async def hermes_rl_sync_tool(url: str) -> AsyncIterator[Play]:
    """As `hermes_rl`, with a tool that is a plain function and so gets a thread for each call."""
    async with hermes_rl(url, sync_noop) as play:
        yield play


CONTENDERS = {
    "raw aiohttp": raw_aiohttp,
    "openai client": openai_client,
    "hermes-rl": hermes_rl,
    "hermes-rl, sync tool": hermes_rl_sync_tool,
}


async def measure(name: str, url: str, conversations: int, concurrency: int) -> dict[str, float]:
    """CPU and wall seconds of all conversations, once imports and connections are there."""
    async with CONTENDERS[name](url) as play:
        await asyncio.gather(*(play() for _ in range(concurrency)))
        remaining = iter(range(conversations))
        cpu, wall = time.process_time(), time.perf_counter()

        async def lane() -> int:
            return sum([await play() for _ in remaining])

        turns = sum(await asyncio.gather(*(lane() for _ in range(concurrency))))
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "turns": turns}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("url")
    parser.add_argument("conversations", type=int)
    parser.add_argument("concurrency", type=int)
    given = parser.parse_args()
    say(json.dumps(asyncio.run(measure(given.contender, given.url, given.conversations, given.concurrency))))
