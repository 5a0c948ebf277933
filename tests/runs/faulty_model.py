"""A chat server that answers by the request's seed alone, and fails a share of the calls in seven ways.

The first turn of a conversation is a tool call, the second says a number that follows from the seed. What was answered
in full is remembered by (seed, turn), so that a test can tell what was paid for twice.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import suppress
from random import Random
from typing import Any

FAULTS = ("500", "429", "hang", "reset", "broken JSON", "truncated", "no choices")


def number_of(seed: int) -> int:
    return seed % 11


def message_of(seed: int, turn: int) -> dict[str, Any]:
    if turn == 0:
        call = {"name": "shout", "arguments": json.dumps({"text": "a", "times": 1 + seed % 3})}
        calls = [{"id": "c", "type": "function", "function": call}]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    return {"role": "assistant", "content": f"it is {number_of(seed)}"}


class FaultyModel:
    def __init__(self, *, faults: float, latency: float = 0.03, port: int = 0) -> None:
        self.faults, self.latency, self.port = faults, latency, port
        self.random = Random(11)
        self.answered: Counter[tuple[int, int]] = Counter()
        self.failed: Counter[str] = Counter()
        self.asked = asyncio.Event()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def __aenter__(self) -> FaultyModel:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port, backlog=1024)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get "):  # how long its context is: it does not say
            self._write(writer, 404, b"{}")
            await writer.drain()
            return True
        length = int(head.partition("content-length: ")[2].partition("\r")[0])
        body = json.loads(await reader.readexactly(length))
        self.asked.set()
        await asyncio.sleep(self.latency * self.random.uniform(0.5, 1.5))
        seed, turn = body["seed"], sum(message["role"] == "assistant" for message in body["messages"])
        if self.random.random() < self.faults:
            return await self._fail(self.random.choice(FAULTS), reader, writer)
        self._write(writer, 200, self._completion(seed, turn))
        await writer.drain()
        self.answered[seed, turn] += 1
        return True

    def _completion(self, seed: int, turn: int) -> bytes:
        message = message_of(seed, turn)
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if turn == 0 else "stop"}
        usage = {"prompt_tokens": 20 + turn, "completion_tokens": 1 + seed % 5}
        return json.dumps({"model": "faulty", "choices": [choice], "usage": usage}).encode()

    async def _fail(self, fault: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.failed[fault] += 1
        if fault == "hang":
            await reader.read()
            return False
        whole = self._completion(0, 1)
        bodies = {"broken JSON": whole[:-20], "no choices": b'{"choices": []}', "truncated": whole[:-20]}
        if fault in ("500", "429"):
            self._write(writer, int(fault), b'{"error": {"message": "no"}}')
        elif fault != "reset":
            self._write(writer, 200, bodies[fault], surplus=20 if fault == "truncated" else 0)
        await writer.drain()
        return fault not in ("reset", "truncated")

    def _write(self, writer: asyncio.StreamWriter, status: int, body: bytes, surplus: int = 0) -> None:
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body) + surplus}\r\n\r\n"
        writer.write(head.encode() + body)


async def serve(port: int) -> None:
    """Serve without faults until the process is ended."""
    async with FaultyModel(faults=0.0, latency=0.15, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
