"""Replies of an engine that are odd as HTTP: each is a failed attempt, or the completion that it contains."""

# ruff: noqa: E501 - an attack is one line

from __future__ import annotations

import asyncio
import gzip
import json
import zlib

from hermes_rl.errors import ServerFailure
from hermes_rl.servers.base import ChatRequest, ContextLengthExceeded, ServerConfig
from hermes_rl.servers.client import ModelClient
from hermes_rl.servers.factory import create_client
from hermes_rl.servers.transport import RetryPolicy

CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
BODY = json.dumps({"choices": [CHOICE], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}).encode()


def reply(*headers: str, body: bytes = BODY, status: str = "200 OK", length: bool = True) -> bytes:
    """Return the bytes of a reply, which closes its connection."""
    counted = [f"Content-Length: {len(body)}"] if length else []
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", *counted, "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + body


def chunked(*sizes: bytes) -> bytes:
    return reply("Transfer-Encoding: chunked", body=b"".join(sizes), length=False)


def part(data: bytes, size: bytes | None = None) -> bytes:
    return (b"%x" % len(data) if size is None else size) + b"\r\n" + data + b"\r\n"


WHOLE = part(BODY)
DATES = (
    "Jan  999999999999999999999  31  00:00:00",
    "Fri, 31 Dec 9999 23:59:59 -2359",
    "1e309",
    "-1",
    "nan",
    "\u0663",
    "x" * 4000,
)
REPLIES = {
    "right": reply(),
    "no bytes": b"",
    "no HTTP": b"hello\r\n\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9\r\n",
    "an older HTTP": b"HTTP/0.9 200 OK\r\n\r\n" + BODY,
    "a later HTTP": b"HTTP/3.0 200 OK\r\n\r\n" + BODY,
    "a status of letters": reply(status="abc OK"),
    "a status of many digits": reply(status="2000000000000000000 OK"),
    "a negative status": reply(status="-200 OK"),
    "a status without a reason": reply(status="200"),
    "a reason with controls": reply(status="500 \x1b[2J\x07"),
    "a reason of many letters": reply(status="500 " + "x" * 100_000),
    "another status": reply(status="299 OK"),
    "no content": reply(status="204 No Content", body=b""),
    "a part": reply(status="206 Partial Content"),
    "not modified": reply(status="304 Not Modified", body=b""),
    "continue for ever": b"HTTP/1.1 100 Continue\r\n\r\n" * 200 + reply(),
    "another protocol by upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    "a redirect to a file": reply("Location: file:///etc/passwd", status="302 Found"),
    "a redirect elsewhere": reply("Location: http://169.254.169.254/", status="307 Temporary Redirect"),
    "a redirect to itself": reply("Location: /v1/chat/completions", status="308 Permanent Redirect"),
    "a proxy that asks for a password": reply('Proxy-Authenticate: Basic realm="x"', status="407 Proxy"),
    "a server that asks for a password": reply('WWW-Authenticate: Digest realm="x"', status="401 No"),
    **{f"a wait of {date[:20]}": reply(f"Retry-After: {date}", status="503 Busy") for date in DATES},
    "a wait that is no text": reply("Retry-After: \udcff\udcfe", status="503 Busy"),
    "no blank line": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n",
    "a header without a name": reply(": x"),
    "a header without a colon": reply("nothing"),
    "a header with NUL": reply("X-A: a\0b"),
    "a header that goes on": reply("X-A: a\r\n b"),
    "a header of many letters": reply("X-A: " + "x" * 1_000_000),
    "many headers": reply(*(f"X-{n}: {n}" for n in range(20_000))),
    "two lengths": reply("Content-Length: 1"),
    "two equal lengths": reply(f"Content-Length: {len(BODY)}"),
    "a length and chunks": reply("Transfer-Encoding: chunked"),
    "a negative length": reply("Content-Length: -1", length=False),
    "a length of letters": reply("Content-Length: abc", length=False),
    "a length of many digits": reply("Content-Length: " + "9" * 5000, length=False),
    "a length that is too large": reply(f"Content-Length: {len(BODY) + 10}", length=False),
    "a length that is too small": reply(f"Content-Length: {len(BODY) - 10}", length=False),
    "no length": reply(length=False),
    "chunks": chunked(WHOLE, b"0\r\n\r\n"),
    "chunks of one byte": chunked(*(part(bytes([byte])) for byte in BODY), b"0\r\n\r\n"),
    "chunks without an end": chunked(WHOLE),
    "chunks with a trailer": chunked(WHOLE, b"0\r\nX-A: b\r\n\r\n"),
    "a chunk of letters": chunked(part(BODY, b"xyz")),
    "a negative chunk": chunked(part(BODY, b"-5")),
    "a chunk of many digits": chunked(part(BODY, b"f" * 5000)),
    "a chunk with an extension": chunked(part(BODY, b"%x;%s" % (len(BODY), b"a" * 100_000)), b"0\r\n\r\n"),
    "another coding": reply("Transfer-Encoding: gzip, identity", length=False),
    "gzip": reply("Content-Encoding: gzip", body=gzip.compress(BODY)),
    "deflate": reply("Content-Encoding: deflate", body=zlib.compress(BODY)),
    "gzip that is none": reply("Content-Encoding: gzip"),
    "gzip cut short": reply("Content-Encoding: gzip", body=gzip.compress(BODY)[:-12]),
    "gzip in gzip": reply("Content-Encoding: gzip, gzip", body=gzip.compress(gzip.compress(BODY))),
    "gzip with more behind it": reply("Content-Encoding: gzip", body=gzip.compress(BODY) + b"x" * 100),
    "gzip of many members": reply("Content-Encoding: gzip", body=gzip.compress(b" ") * 20_000 + gzip.compress(BODY)),
    "gzip of nothing": reply("Content-Encoding: gzip", body=b""),
    "gzip of many blanks": reply("Content-Encoding: gzip", body=gzip.compress(b" " * (64 << 20) + BODY)),
    "brotli": reply("Content-Encoding: br"),
    "zstd": reply("Content-Encoding: zstd", body=b"(\xb5/\xfd"),
    "a coding of many letters": reply("Content-Encoding: " + "gzip, " * 1000 + "gzip"),
    "a coding that is no text": reply("Content-Encoding: \udcff"),
    "another kind": reply("Content-Type: text/html; charset=utf-7"),
    "a charset that there is not": reply("Content-Type: application/json; charset=nothing"),
    "a stream": reply("Content-Type: text/event-stream", body=b"data: " + BODY + b"\n\ndata: [DONE]\n\n"),
    "UTF-16": reply(body=BODY.decode().encode("utf-16")),
    "a mark of the order of bytes": reply(body=b"\xef\xbb\xbf" + BODY),
    "bytes that are no text": reply(body=BODY.replace(b"hello", b"\xff\xfe")),
    "halves of characters": reply(body=BODY.replace(b"hello", b"\\ud800")),
    "NUL": reply(body=BODY.replace(b"hello", b"\\u0000")),
    "two values": reply(body=BODY + BODY),
    "lines before it": reply(body=b"\n" * 100_000 + BODY),
    "nested lists": reply(body=b"[" * 200_000),
    "nested objects": reply(body=b'{"choices":' * 50_000),
    "a number of many digits": reply(body=BODY.replace(b"3", b"3" * 100_000)),
    "a number beyond floats": reply(body=BODY.replace(b": 3", b": 1e999")),
    "not a number": reply(body=BODY.replace(b": 3", b": NaN")),
    "a key that stands twice": reply(body=BODY.replace(b'"index": 0', b'"message": {"role": "user", "content": "x"}')),
    "an error with status 200": reply(body=b'{"error": {"message": "maximum context length is 5 tokens"}}'),
    "an overflow of the context": reply(status="400 Bad", body=b'{"error": "maximum context length is 5 tokens"}'),
    "an error that repeats much": reply(status="500 No", body=b"maximum " * 1_000_000),
    "an error of nested values": reply(status="400 Bad", body=b'{"error":' * 50_000),
    "cookies": reply(*("Set-Cookie: a" + "b" * 100 + f"={n}; Domain=.com" for n in range(100))),
    "a second reply": reply() + reply(body=BODY.replace(b"hello", b"other")),
    "a second reply on a connection that stays": reply().replace(b"Connection: close", b"Connection: keep-alive") + reply(body=BODY.replace(b"hello", b"other")),
}  # fmt: skip
HONEST = {"", "hello", "\ufffd\ufffd", "\ufffd", "\0", chr(0xD800)}


class Engine:
    """Answers each request with the same bytes."""

    def __init__(self) -> None:
        self.data = b""
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.CancelledError):
                break
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            await reader.readexactly(length)
            self.asked += 1
            writer.write(self.data)
            if b"keep-alive" not in self.data:
                break
        writer.close()


async def outcome(client: ModelClient) -> str:
    """Return what was said; or, for a failed attempt, nothing."""
    try:
        answer = await client.chat(ChatRequest([{"role": "user", "content": "Hi."}], max_tokens=50))
    except (ServerFailure, ContextLengthExceeded):
        return ""
    return str(answer.message.get("content"))


async def test_reply_that_is_odd_as_http_is_a_failure_or_its_completion() -> None:
    engine, wrong = Engine(), {}
    async with await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 20) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        for name, engine.data in REPLIES.items():
            async with create_client(
                "policy", [ServerConfig("openai", url, "m")], RetryPolicy(attempts=1, outage=0.0)
            ) as client:
                try:
                    said = [await outcome(client), await outcome(client)]
                except Exception as error:  # noqa: BLE001 - each is a finding
                    wrong[name] = f"{type(error).__name__}: {error}"[:300]
                else:
                    if not set(said) <= HONEST:
                        wrong[name] = repr(said)[:300]
    assert wrong == {}
