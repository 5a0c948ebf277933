"""HTTP to an MCP server, below the SDK: limits on responses, and notes on the HTTP layer's handling of a call.

The SDK reports an error if the HTTP layer gave no response, and an error of the server may have the same number. So
this client records in the `Exchange` of a call if the server itself responded.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2

from hermes_rl.threads import run_exclusively
from hermes_rl.tools.mcp_exchange import EXCHANGE, Exchange
from hermes_rl.values import MOST_VALUES, read_object, too_many_values

ANSWER_LIMIT = 16 << 20
"""Maximum bytes of one response or event."""
STREAM_LIMIT = 64 << 20
"""Maximum bytes of all events of one call."""
ERROR_LIMIT = 1 << 16
"""Bytes that are read of a response with an error status."""
CONNECT_SECONDS = 30.0
NOT_EXECUTED = frozenset({429, 502, 503})
"""Statuses of a server, or of a gateway before it, that has not accepted the call."""


class TooLargeError(httpx2.StreamError):
    """A response exceeds the limit."""

    def __init__(self) -> None:
        super().__init__(f"an answer has more than {ANSWER_LIMIT} bytes or {MOST_VALUES} values")


class BoundedClient(httpx2.AsyncClient):
    """The client that the SDK uses for one session."""

    def __init__(self, headers: dict[str, str]) -> None:
        # The client would decompress in parts: a small response could become a large one. Each call has a separate
        # timeout.
        timeout = httpx2.Timeout(CONNECT_SECONDS, read=None)
        super().__init__(headers={**headers, "Accept-Encoding": "identity"}, timeout=timeout)

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send a request; an error in the context of a call fails that call alone, and is recorded in its exchange."""
        exchange = EXCHANGE.get() or Exchange()
        exchange.problem = None
        try:
            response = await super().send(request, **options)
            return await self._checked(request, response, exchange)
        except TooLargeError:
            exchange.large = True
        except httpx2.TransportError as error:
            unsent = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout)
            exchange.fail(f"{type(error).__name__}: {error}", executed=not unsent)
            if EXCHANGE.get() is None:
                raise
        if EXCHANGE.get() is None:
            raise TooLargeError
        return httpx2.Response(500, request=request)  # the SDK converts it into an error of this call

    async def _checked(self, request: httpx2.Request, response: httpx2.Response, exchange: Exchange) -> httpx2.Response:
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding != "identity":
            exchange.fail(f"its answer has the encoding {encoding[:50]!r}, which was not asked for")
            await response.aclose()
            return httpx2.Response(500, request=request)
        if response.status_code >= 400:
            return await _error_response(request, response, exchange)
        if response.status_code == 200 and kind == "text/event-stream":
            response.stream = Events(response, exchange)
        elif response.status_code == 200 and kind == "application/json":
            body = await _read_body(response, ANSWER_LIMIT)
            if await run_exclusively(too_many_values, body) if len(body) > MOST_VALUES else False:
                raise TooLargeError
            return httpx2.Response(200, headers=_select_headers(response), content=body, request=request)
        elif response.status_code >= 300 or request.method == "POST":
            exchange.fail(f"it answered with the HTTP status {response.status_code} and content type {kind[:100]!r}")
        return response


async def _error_response(request: httpx2.Request, response: httpx2.Response, exchange: Exchange) -> httpx2.Response:
    """Return a response with an error status, whose body is retained if it is the server's response to the request."""
    status = response.status_code
    try:
        body = await _read_body(response, ERROR_LIMIT)
    except TooLargeError:
        body = b""
    request_body, response_body = (read_object(each, ANSWER_LIMIT) or {} for each in (request.content, body))
    has_session = "mcp-session-id" in request.headers
    is_rpc = isinstance(response_body.get("error"), dict) and "jsonrpc" in response_body
    is_answer = is_rpc and response_body.get("id") is not None and response_body.get("id") == request_body.get("id")
    # By the specification 404 means that the session has ended. Some servers send 400, before they have read the id.
    # What a new session answers too is the server's own error.
    ended = has_session and (not (is_answer and exchange.retried) if status == 404 else status == 400 and is_rpc)
    if is_answer and not (ended and status == 404):
        return httpx2.Response(status, headers=_select_headers(response), content=body, request=request)
    exchange.fail(f"HTTP status {status}", executed=not ended and status not in NOT_EXECUTED, ended=ended)
    return httpx2.Response(status, request=request)


def _select_headers(response: httpx2.Response) -> dict[str, str]:
    """Return the headers that the SDK reads."""
    names = ("content-type", "mcp-session-id")
    return {name: response.headers[name] for name in names if name in response.headers}


async def _read_body(response: httpx2.Response, limit: int) -> bytes:
    """Return the complete body; raises `TooLargeError`."""
    body = bytearray()
    try:
        async for part in response.aiter_raw():
            body += part
            if len(body) > limit:
                raise TooLargeError
    finally:
        await response.aclose()
    return bytes(body)


_BLANK_LINES = (b"\n\n", b"\r\r", b"\r\n\r\n")


class Events(httpx2.AsyncByteStream):
    """The events of a response, each passed on when it is complete."""

    def __init__(self, response: httpx2.Response, exchange: Exchange) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        self._stream, self._exchange = response.stream, exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        waiting, total = bytearray(), 0
        try:
            async for part in self._stream:
                total += len(part)
                waiting += part
                since = max(0, len(waiting) - len(part) - 3)
                ends = [
                    position + len(separator)
                    for separator in _BLANK_LINES
                    if (position := waiting.rfind(separator, since)) >= 0
                ]
                if len(waiting) > ANSWER_LIMIT or total > STREAM_LIMIT:
                    self._exchange.large = True
                    raise TooLargeError
                if not ends:
                    continue
                events = bytes(waiting[: max(ends)])
                del waiting[: max(ends)]
                if len(events) > MOST_VALUES and await run_exclusively(too_many_values, events):
                    self._exchange.large = True
                    raise TooLargeError
                yield events
        except httpx2.TransportError as error:
            self._exchange.fail(f"{type(error).__name__}: {error}")
            raise httpx2.StreamError(str(error)) from error
        self._exchange.fail("its events ended before the answer")

    async def aclose(self) -> None:
        await self._stream.aclose()
