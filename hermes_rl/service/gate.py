"""Checks that every request must pass first: the token, the bounds, and if the service accepts requests.

A body is read here, up to its bound; the application gets it complete.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from hermes_rl.service.refusals import Refused, service_ending

BODY = 8 * 2**20
"""Maximum bytes of a request."""
LARGE_BODY = 64 * 2**20
"""Maximum bytes of NeMo Gym's request to /aggregate_metrics: a line for each rollout of a run."""
HEADERS = 100
HEADER_BYTES = 64 * 2**10
PATIENCE = 30.0
"""Seconds in which a client must send its headers, and its body after them."""


class Gate:
    """Passes requests to the application if they contain the token (None: anybody on this machine may send requests);
    once it is `closed`, only started work may continue.
    """

    def __init__(self, app: ASGIApp, token: str | None, closed: Callable[[], bool]) -> None:
        self._app, self._closed = app, closed
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._require_allowed(scope)
            body = await _read_body(scope, receive)
        except Refused as refused:
            response = refused.response()
            # The rest of the data that is still being sent is not read.
            response.headers["connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, _replay_body(body, receive), send)

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._require_allowed(scope)
            if self._token is None and b"origin" in dict(scope["headers"]):
                raise Refused(403, "web_page", "without a token the service does not answer to web pages")
        except Refused as refused:
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": str(refused)})
            return
        await self._app(scope, receive, send)

    def _require_allowed(self, scope: Scope) -> None:
        headers = scope["headers"]
        if len(headers) > HEADERS:
            raise Refused(431, "too_many_headers", f"a request has at most {HEADERS} headers")
        headers_by_name = dict(headers)
        if self._token is None:
            _require_local(headers_by_name)
        else:
            scheme, _, token = headers_by_name.get(b"authorization", b"").partition(b" ")
            is_token_valid = hmac.compare_digest(token.strip(), self._token)
            if scheme.lower() != b"bearer" or not is_token_valid:
                raise Refused(401, "unauthorized", "send the service's token: `Authorization: Bearer …`")
        path, method = scope["path"], scope.get("method")  # a WebSocket has none
        is_session_call = path.startswith("/v1/sessions/") and method in ("GET", "POST", "DELETE")
        if self._closed() and not is_session_call and path != "/v1/metrics":
            raise service_ending()


def _require_local(headers: dict[bytes, bytes]) -> None:
    """Refuse requests that a web page lets a browser of this machine make, if no token distinguishes them."""
    host = headers.get(b"host", b"").decode("latin-1")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        local = name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        local = False
    if not local:
        raise Refused(403, "foreign_host", "without a token the service answers to localhost alone: use --token-env")


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """Read the body, which must be JSON if there is one."""
    size_limit = LARGE_BODY if scope["path"] == "/aggregate_metrics" else BODY
    headers = dict(scope["headers"])
    announced = headers.get(b"content-length", b"0")
    if not announced.isdigit() or int(announced) > LARGE_BODY:
        raise _too_large(size_limit)
    read, size = bytearray(), 0
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "incomplete", "the body ended too early")
                part = message.get("body", b"")
                size += len(part)
                if size <= size_limit:
                    read += part
                elif size > LARGE_BODY:
                    raise _too_large(size_limit)
                # A body that is too large is read nevertheless: a connection with unread data is reset, and its
                # response lost.
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise Refused(408, "too_slow", f"the body did not come within {PATIENCE:.0f} seconds") from None
    if size > size_limit:
        raise _too_large(size_limit)
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    # A web page may post other types to any address without permission; JSON it may not.
    if read and kind != b"application/json":
        raise Refused(415, "not_json", "a body is JSON: send `Content-Type: application/json`")
    return bytes(read)


def _too_large(size_limit: int) -> Refused:
    return Refused(413, "too_large", f"a request has at most {size_limit // 2**20} MiB: ask in several parts")


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a receiver of a body that was read already, and then of further messages."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def following() -> Message:
        return messages.pop() if messages else await receive()

    return following


class TimedProtocol(H11Protocol):
    """HTTP protocol that does not wait for a client that is silent when it should send."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()

    def _start_timer(self) -> None:
        """Count the seconds while no request is being handled; waiting during a request is limited elsewhere."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._late is None:
            self._late = self.loop.call_later(PATIENCE, self._close)

    def _stop_timer(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        self._late = None
        if not self.transport.is_closing():
            self.transport.close()
