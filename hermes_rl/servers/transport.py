"""HTTP to one model server: the connection, the headers, the bound on requests in flight, and what failures say.

Owns everything about sending and receiving bytes. Leaves the JSON to `wire` and the dialects, what is tried again to
`retry`. No health polls: a server shows its health by answering.
"""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from hermes_rl.errors import UserError
from hermes_rl.servers.base import ContextLengthExceeded, ServerConfig
from hermes_rl.servers.redact import Scrubber, public_url
from hermes_rl.servers.retry import AttemptFailed, failed_status, is_context_overflow
from hermes_rl.servers.turnstile import Turnstile

_CONNECT_SECONDS = 30.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back, and when it was asked for, sent and received (monotonic seconds)."""

    status: int
    headers: Mapping[str, str]
    raw: bytes
    asked: float
    sent: float
    received: float


class Transport:
    """One server; used from one event loop at a time."""

    def __init__(self, config: ServerConfig) -> None:
        if not config.base_url:
            raise UserError(f"a server of type {config.type!r} needs a base_url")
        if urlsplit(config.base_url).scheme not in ("http", "https"):
            raise UserError(f"base_url {public_url(config.base_url)!r} must begin with http:// or https://")
        self._config = config
        self._base = public_url(config.base_url).rstrip("/")
        self._query = urlsplit(config.base_url).query or None
        self._urls: dict[str, URL] = {}
        self._headers = _headers(config)
        self._scrubber = Scrubber(_secrets(config))
        self._proxy = _proxy(URL(self._base))
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._turnstile = Turnstile()
        self._loop: asyncio.AbstractEventLoop | None = None

    def address(self, path: str) -> str:
        """The address of a path, as it may be shown. ``/…`` is relative to the root: base_url without ``/v1``."""
        if path.startswith("/"):
            return self._base.removesuffix("/v1") + path
        return f"{self._base}/{path}"

    async def post(self, path: str, payload: bytes, headers: Mapping[str, str] | None = None) -> HttpAnswer:
        """Wait for a free place, send once; raises `AttemptFailed` where no answer came."""
        session = await self._connected()
        asked = time.monotonic()
        async with self._places:
            sent = time.monotonic()
            status, received, raw = await self._send(session, path, payload, headers)
        answer = HttpAnswer(status, received, raw, asked, sent, time.monotonic())
        await self._turnstile.pass_through()
        return answer

    async def get_json(self, path: str, timeout: float = 10.0) -> tuple[int, Any]:
        """Status and JSON (None where it is none) of a question beside the calls; status 0: no answer."""
        session = await self._connected()
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with session.get(self._url(path), timeout=limit, allow_redirects=False, proxy=self._proxy) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return 0, None
        try:
            return answer.status, json.loads(raw)
        except ValueError:
            return answer.status, None

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def refused(self, path: str, answer: HttpAnswer, status: int | None = None) -> Exception:
        """The exception for an answer that is an error; `status` where the body tells another one."""
        code = answer.status if status is None else status
        text = excerpt(answer.raw)
        shown = self._scrubber.excerpt(text)
        if is_context_overflow(code, text):
            return ContextLengthExceeded(f"{self.address(path)}: {shown}")
        return failed_status(code, answer.headers, text, f"{self.address(path)}: status {code}: {shown}")

    def failed(self, path: str, what: str, *, timed_out: bool = False, unreachable: bool = False) -> AttemptFailed:
        """An attempt that failed, with the address and without secrets."""
        shown = f"{self.address(path)}: {self._scrubber.excerpt(what)}"
        return AttemptFailed(shown, timed_out=timed_out, unreachable=unreachable)

    def _url(self, path: str) -> URL:
        if path not in self._urls:
            self._urls[path] = URL(self.address(path)).with_query(self._query)
        return self._urls[path]

    async def _connected(self) -> aiohttp.ClientSession:
        """The session of the running loop; one of an earlier, closed loop is replaced."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            await self.close()
            self._loop = loop
            self._places = asyncio.Semaphore(self._config.max_concurrency)
            self._turnstile = Turnstile()
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=self._config.timeout, sock_connect=_CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
            )
        return self._session

    async def _send(
        self, session: aiohttp.ClientSession, path: str, payload: bytes, headers: Mapping[str, str] | None
    ) -> tuple[int, Mapping[str, str], bytes]:
        try:
            # A redirected POST would arrive as a GET or carry the key elsewhere.
            async with session.post(
                self._url(path), data=payload, headers=headers, allow_redirects=False, proxy=self._proxy
            ) as response:
                return response.status, response.headers, await response.read()
        except aiohttp.ConnectionTimeoutError:
            failed = self.failed(path, f"no connection within {_CONNECT_SECONDS:g} s", unreachable=True)
        except TimeoutError:
            failed = self.failed(path, f"no answer within {self._config.timeout:g} s", timed_out=True)
        except (aiohttp.ClientError, OSError) as error:
            failed = self.failed(path, f"connection lost: {type(error).__name__}: {error}", unreachable=True)
        # Outside the handler: aiohttp's exceptions hold the request's headers, and so the key.
        raise failed


def excerpt(raw: bytes) -> str:
    """The beginning of an answer as text."""
    return raw[:20_000].decode("utf-8", errors="replace")


def _headers(config: ServerConfig) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "User-Agent": "hermes-rl"}
    if config.api_key is not None:
        headers["Authorization"] = f"Bearer {config.api_key.reveal()}"
    elif (basic := _url_credentials(config)) is not None:
        headers["Authorization"] = f"Basic {basic}"
    return headers | {name: value.reveal() for name, value in config.headers.items()}


def _url_credentials(config: ServerConfig) -> str | None:
    parts = urlsplit(config.base_url or "")
    if parts.username is None:
        return None
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return b64encode(pair.encode()).decode("ascii")


def _secrets(config: ServerConfig) -> list[str]:
    """Everything that must not be shown: keys, header values, what the address holds beside the host."""
    parts = urlsplit(config.base_url or "")
    secrets = [value.reveal() for value in config.headers.values()]
    if config.api_key is not None:
        secrets.append(config.api_key.reveal())
    queries = [pair.partition("=")[2] for pair in parts.query.split("&")]
    secrets += [unquote(text) for text in (parts.password or "", *queries)]
    return [*secrets, _url_credentials(config) or ""]


def _proxy(url: URL) -> str | None:
    """The proxy of the machine's settings; read once, as aiohttp would look it up for every call."""
    host = url.host or ""
    if host in _LOOPBACK or proxy_bypass(host):
        return None
    return getproxies().get(url.scheme)
