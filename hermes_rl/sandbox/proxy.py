"""Network access of a sandbox whose spec lists hosts: an HTTP proxy on the host's side, for this sandbox alone.

This module speaks HTTP with the agent's programs and passes bytes on. `hosts` decides which hosts they may reach. Its
listening socket belongs to the sandbox's network, which has no other connection: the helper opens it and passes it on.
Each request is checked separately, so following a redirect is a new request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from hermes_rl.sandbox.hosts import HostList, RefusedError, public_address
from hermes_rl.threads import end_tasks

PORT = 3128
ADDRESS = f"http://127.0.0.1:{PORT}"
ENVIRONMENT = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), ADDRESS),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1"),
}
"""Variables by which programs in the sandbox find it."""

HEAD_LIMIT = 1 << 16
CONNECTIONS = 64
"""Maximum open connections of one sandbox."""
HEAD_SECONDS = 30.0
CONNECT_SECONDS = 30.0
IDLE_SECONDS = 300.0
ACCEPT_PAUSE = 0.1
OWN_HEADERS = ("connection", "proxy-connection", "proxy-authorization", "keep-alive", "host")
"""Headers that are between the agent and the proxy, or that the proxy writes itself."""

Resolve = Callable[[str, int], Awaitable[str]]


@dataclass(frozen=True)
class ProxyRequest:
    """The head of a request: its target, and the data to send there first; a tunnel has no data to send."""

    host: str
    port: int
    head: bytes | None


class Proxy:
    """See above. `resolve` returns the address of a host that may be reached, or raises `RefusedError`."""

    def __init__(self, hosts: Sequence[str], resolve: Resolve = public_address) -> None:
        self._hosts = HostList(hosts)
        self._resolve = resolve
        self._slots = asyncio.Semaphore(CONNECTIONS)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, listener: socket.socket) -> None:
        """Serve connections of a listening socket, which then belongs to the proxy."""
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> None:
        """End it and every connection."""
        tasks = [task for task in (self._accepting, *self._tasks) if task is not None]
        await end_tasks(tasks)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections one by one, each when there is a slot for it: before that, it uses no resources of the
        host.
        """
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                self._slots.release()
                await asyncio.sleep(ACCEPT_PAUSE)  # this machine has no descriptors left, or the client is gone
                continue
            except BaseException:  # no connection has taken the slot
                self._slots.release()
                raise
            task = asyncio.create_task(self.serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()

    async def serve(self, connection: socket.socket) -> None:
        """Serve the requests of one connection, until its end."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=HEAD_LIMIT)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # either side is gone, or sends nothing: only the connection ends
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Here and below no `wait_for`: Python 3.11's loses a cancellation that comes together with the result.
        async with asyncio.timeout(HEAD_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        try:
            request = read_request(head)
            self._hosts.require(request.host, request.port)
            address = await self._resolve(request.host, request.port)
            async with asyncio.timeout(CONNECT_SECONDS):
                far_reader, far_writer = await asyncio.open_connection(address, request.port)
        except RefusedError as error:
            await _send_status(writer, "403 Forbidden", str(error))
        except (OSError, TimeoutError, ValueError) as error:
            await _send_status(writer, "502 Bad Gateway", f"{request.host} does not answer: {error}")
        else:
            await _pass_on(request, (reader, writer), (far_reader, far_writer))


Side = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _pass_on(request: ProxyRequest, near: Side, far: Side) -> None:
    try:
        if request.head is None:
            near[1].write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            far[1].write(request.head)
        async with asyncio.timeout(IDLE_SECONDS) as idle:
            await asyncio.gather(_relay_data(near[0], far[1], idle), _relay_data(far[0], near[1], idle))
    finally:
        far[1].close()


async def _relay_data(source: asyncio.StreamReader, target: asyncio.StreamWriter, idle: asyncio.Timeout) -> None:
    """Pass on data until its end; the connection is idle if no data comes from either side."""
    while data := await source.read(1 << 16):
        idle.reschedule(asyncio.get_running_loop().time() + IDLE_SECONDS)
        target.write(data)
        await target.drain()
    with contextlib.suppress(OSError):
        target.write_eof()


async def _send_status(writer: asyncio.StreamWriter, status: str, reason: str) -> None:
    body = f"{reason}\n".encode("utf-8", "replace")
    writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()


def read_request(head: bytes) -> ProxyRequest:
    """Return the head of a request to a proxy, in authority form for CONNECT, else in absolute form (RFC 9112).

    Raises `RefusedError` if it is not such a request.
    """
    lines = head.decode("latin-1").split("\r\n")
    request_fields = lines[0].split(" ")
    if len(request_fields) != 3 or not request_fields[2].startswith("HTTP/1."):
        raise RefusedError("this is not a request to a proxy")
    method, target, version = request_fields
    try:
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise RefusedError(f"{target}: {error}") from error
    if host is None or (method == "CONNECT" and port is None) or (method != "CONNECT" and parts.scheme != "http"):
        raise RefusedError("ask for http://HOST/…, or CONNECT HOST:PORT")
    if method == "CONNECT":
        return ProxyRequest(host, port or 0, None)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = [line for line in lines[1:-2] if line.partition(":")[0].strip().lower() not in OWN_HEADERS]
    proxy_headers = [f"Host: {parts.netloc.rpartition('@')[2]}", "Connection: close"]
    text = "\r\n".join([f"{method} {path} {version}", *proxy_headers, *headers, "", ""])
    return ProxyRequest(host, port or 80, text.encode("latin-1"))
