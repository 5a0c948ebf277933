"""The model of the benchmarks: a chat server that answers after a time, always with the same turns.

Stateless: a conversation gets a tool call until it has `--turns` - 1 answers, then a text. Prints its address. It
shares the machine with what is measured, so it is no more than a protocol that finds the end of a request: a tenth of
the processor time that a web framework would take from the contenders.

`GET /flight` answers with how many requests were in flight, from when to when: [[seconds of the monotonic clock, count
from then on], …]. After `GET /capacity/N` it takes N at a time and refuses the others, with status 429.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from typing import Any

from report import say

USAGE = {"prompt_tokens": 900, "completion_tokens": 40, "total_tokens": 940}
TEXT = "The listing shows what was asked for; the last step is done and nothing else is left to do. " * 2
COMMANDS = {"noop": '{"note": "go on"}', "terminal": '{"command": "true"}'}
SPREAD = math.log(10) / 2.3263
"""Standard deviation of the logarithm of a latency whose 99th percentile is ten times its median."""


def http(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode("ascii") + body


REFUSED = http(b'{"error": {"message": "too many requests"}}', "429 Too Many Requests")


def completion(message: dict[str, Any], reason: str) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason, "logprobs": None}
    body = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "bench", "choices": [choice]}
    return http(json.dumps({**body, "usage": USAGE}).encode())


def tool_call(turn: int, tool: str) -> bytes:
    function = {"name": tool, "arguments": COMMANDS[tool]}
    call = {"id": f"call_{turn}", "type": "function", "function": function}
    return completion({"content": TEXT, "tool_calls": [call]}, "tool_calls")


class Model:
    """What is answered, when, and how many requests are in flight meanwhile."""

    def __init__(self, turns: int, latency: Callable[[], float], tool: str) -> None:
        self.latency = latency
        self.mark: tuple[bytes, ...] = (b'"role": "assistant"', b'"role":"assistant"')
        """What stands once in a request for each answer so far."""
        self.answers = [*(tool_call(turn, tool) for turn in range(turns - 1)), completion({"content": TEXT}, "stop")]
        self.flight: list[tuple[float, int]] = [(time.monotonic(), 0)]
        self.capacity = math.inf

    def ask(self, path: str) -> bytes:
        """Answer a GET."""
        if path.startswith("/capacity/"):
            self.capacity = int(path.removeprefix("/capacity/"))
        return http(json.dumps(self.flight).encode())

    @property
    def full(self) -> bool:
        return self.flight[-1][1] >= self.capacity

    def count(self, by: int) -> None:
        self.flight.append((time.monotonic(), self.flight[-1][1] + by))


class Connection(asyncio.Protocol):
    """Requests of one client, one after the other; Content-Length is there, as every contender sends it."""

    def __init__(self, model: Model) -> None:
        self.model, self.buffer = model, bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        end = head + 4 + self._length(head)
        if len(self.buffer) < end:
            return
        request = bytes(self.buffer[:end])
        del self.buffer[:end]
        if request.startswith(b"GET"):
            self.transport.write(self.model.ask(request.split(b" ", 2)[1].decode()))
            return
        if self.model.full:
            self.transport.write(REFUSED)
            return
        # Without parsing the JSON: the server must not be what is slow.
        answer_index = sum(map(request.count, self.model.mark))
        self.model.count(1)
        asyncio.get_running_loop().call_later(self.model.latency(), self._answer, answer_index)

    def _length(self, head: int) -> int:
        name = b"\r\ncontent-length:"
        header_start = self.buffer[:head].lower().find(name)
        return 0 if header_start < 0 else int(self.buffer[header_start + len(name) : head].split(b"\r\n", 1)[0])

    def _answer(self, answer_index: int) -> None:
        self.model.count(-1)
        self.transport.write(self.model.answers[answer_index])


def latency(median: float, shape: str) -> Callable[[], float]:
    """Seconds until the next answer: always the same, or spread so that p99 is ten times the median."""
    drawn = random.Random(0)
    return (lambda: median) if shape == "fixed" else lambda: median * drawn.lognormvariate(0.0, SPREAD)


async def serve(options: argparse.Namespace) -> None:
    model = Model(options.turns, latency(options.latency, options.shape), options.tool)
    listening = await asyncio.get_running_loop().create_server(lambda: Connection(model), "127.0.0.1", 0, backlog=4096)
    host, port = listening.sockets[0].getsockname()[:2]
    say(f"http://{host}:{port}/v1")
    await listening.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--latency", type=float, required=True, help="seconds; the median where it is spread")
    parser.add_argument("--shape", choices=["fixed", "lognormal"], default="fixed")
    parser.add_argument("--tool", choices=COMMANDS, default="noop")
    asyncio.run(serve(parser.parse_args()))
