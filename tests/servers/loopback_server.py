"""A loopback HTTP server that does what a test tells it to, faults included, and remembers what it saw."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Answer:
    """What the server does with one request."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    fault: str = ""
    """reset: close without an answer; truncate: announce more bytes than are sent; hang: never answer."""


def completion(content: str = "hello", **choice: Any) -> Answer:
    """A plain chat completion."""
    message = {"role": "assistant", "content": content}
    choices = [{"index": 0, "message": message, "finish_reason": "stop", **choice}]
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    return Answer(body=json.dumps({"model": "served", "choices": choices, "usage": usage}).encode())


def error(status: int, text: str = "no", **headers: str) -> Answer:
    """An error with a JSON body; `Retry_After="1"` gives that header."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status=status, body=json.dumps({"error": {"message": text}}).encode(), headers=sent)


class Loopback:
    """Answers come from `answers` in order, then from `otherwise`."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.otherwise = completion()
        self.seen: list[Seen] = []
        self.in_flight = 0
        self.peak = 0
        self.lost = 0
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def start(self) -> Loopback:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        return self

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.lost += 1
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers.get("Content-Length", 0)))
        self.seen.append(Seen(head[0].split()[1], headers, json.loads(body or b"{}")))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            return await self._answer(reader, writer)
        finally:
            self.in_flight -= 1

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        answer = self.answers.pop(0) if self.answers else self.otherwise
        await asyncio.sleep(answer.delay)
        if answer.fault == "reset":
            return False
        if answer.fault == "hang":
            await reader.read()  # until the client goes away
            self.lost += 1
            return False
        surplus = 100 if answer.fault == "truncate" else 0
        extra = "".join(f"{name}: {value}\r\n" for name, value in answer.headers.items())
        head = f"HTTP/1.1 {answer.status} X\r\n{extra}Content-Length: {len(answer.body) + surplus}\r\n\r\n"
        writer.write(head.encode() + answer.body)
        await writer.drain()
        return not surplus


class Naps:
    """Stands in for `asyncio.sleep` in a policy and remembers the pauses."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
