"""`type: openai`: one chat-completions server over aiohttp.

Owns the connection, the headers and the bound on requests in flight. Leaves the JSON to `wire`, what
is tried again to `retry`. No health polls: a server shows its health by answering.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from hermes_rl.errors import UserError
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, ServerConfig, Timing
from hermes_rl.servers.redact import Scrubber, public_url
from hermes_rl.servers.retry import AttemptFailed, failed_status, is_context_overflow
from hermes_rl.servers.wire import ErrorBody, Malformed, chat_body, encode, read_reply

_CONNECT_SECONDS = 30.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

HeadersFor = Callable[[ChatRequest], Mapping[str, str]]


class OpenAIServer:
    """One server of a role; used from one event loop at a time."""

    def __init__(self, config: ServerConfig, headers_for: HeadersFor | None = None) -> None:
        if not config.base_url:
            raise UserError(f"a server of type {config.type!r} needs a base_url")
        if urlsplit(config.base_url).scheme not in ("http", "https"):
            raise UserError(f"base_url {public_url(config.base_url)!r} must begin with http:// or https://")
        self._config = config
        self._address = f"{public_url(config.base_url).rstrip('/')}/chat/completions"
        self._url = URL(self._address).with_query(urlsplit(config.base_url).query or None)
        self._headers = _headers(config)
        self._headers_for = headers_for
        self._scrubber = Scrubber(_secrets(config))
        self._proxy = _proxy(self._url)
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(config.max_concurrency)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def config(self) -> ServerConfig:
        return self._config

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Wait for a free place, send once, read the answer."""
        session = await self._connected()
        payload = encode(chat_body(request, self._config))
        asked = time.monotonic()
        async with self._places:
            sent = time.monotonic()
            status, headers, raw = await self._post(session, payload, request)
        timing = Timing(queued=sent - asked, generating=time.monotonic() - sent)
        if status == 200:
            return self._reply(raw, headers, timing)
        raise self._refused(status, headers, raw)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _connected(self) -> aiohttp.ClientSession:
        """The session of the running loop; one of an earlier, closed loop is replaced."""
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            await self.close()
            self._loop = loop
            self._places = asyncio.Semaphore(self._config.max_concurrency)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
                timeout=aiohttp.ClientTimeout(total=self._config.timeout, sock_connect=_CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
            )
        return self._session

    async def _post(
        self, session: aiohttp.ClientSession, payload: bytes, request: ChatRequest
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = self._headers_for(request) if self._headers_for is not None else None
        try:
            # A redirected POST would arrive as a GET or carry the key elsewhere.
            async with session.post(
                self._url, data=payload, headers=headers, allow_redirects=False, proxy=self._proxy
            ) as response:
                return response.status, response.headers, await response.read()
        except aiohttp.ConnectionTimeoutError:
            failed = self._failed(f"no connection within {_CONNECT_SECONDS:g} s")
        except TimeoutError:
            failed = self._failed(f"no answer within {self._config.timeout:g} s", timed_out=True)
        except (aiohttp.ClientError, OSError) as error:
            failed = self._failed(f"connection lost: {type(error).__name__}: {error}")
        # Outside the handler: aiohttp's exceptions hold the request's headers, and so the key.
        raise failed

    def _reply(self, raw: bytes, headers: Mapping[str, str], timing: Timing) -> ChatReply:
        try:
            return read_reply(raw, self._config, timing)
        except ErrorBody as error:
            if error.status is not None:
                raise self._refused(error.status, headers, raw) from None
            raise self._failed(f"{error}: {_text(raw)}") from None
        except Malformed as error:
            raise self._failed(f"{error}: {_text(raw)}") from None

    def _refused(self, status: int, headers: Mapping[str, str], raw: bytes) -> Exception:
        text = _text(raw)
        excerpt = self._scrubber.excerpt(text)
        if is_context_overflow(status, text):
            return ContextLengthExceeded(f"{self._address}: {excerpt}")
        return failed_status(status, headers, text, f"{self._address}: status {status}: {excerpt}")

    def _failed(self, what: str, *, timed_out: bool = False) -> AttemptFailed:
        return AttemptFailed(f"{self._address}: {self._scrubber.excerpt(what)}", timed_out=timed_out)


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


def _text(raw: bytes) -> str:
    return raw[:20_000].decode("utf-8", errors="replace")
