"""Send HTTP requests to one model server, retry calls, and remove secrets from failures.

Secrets are removed from every text that leaves this module, because failures appear in exceptions, records and logs.
The module does not poll health: a server shows its health by responding.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import ssl
import time
import zlib
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, partial
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from yarl import URL

from hermes_rl.errors import ServerFailure, UserError
from hermes_rl.scrubber import Scrubber, keys_of
from hermes_rl.servers.base import (
    LARGEST_REPLY,
    SESSION_HEADER,
    ContextLengthExceeded,
    ErrorBody,
    Malformed,
    ServerConfig,
)
from hermes_rl.threads import PerLoopSemaphore, run_exclusively
from hermes_rl.values import read_bounded, safe_name, url_text

if TYPE_CHECKING:
    import aiohttp

# ------------ The one retry policy of model calls: which failures are repeated, how often, and after which pause
# The only retry policy of model calls: which failures are retried, how often, and after which pause. No other code in
# the program retries a model call.

log = logging.getLogger(__name__)
T = TypeVar("T")

_RETRIED_4XX = frozenset({408, 409, 425, 429})
_OVERLOADED = frozenset({429, 529})
_GATEWAY = frozenset({502, 503, 504})
_CONTEXT_STATUS = frozenset({400, 413, 422})
_CONTEXT_TEXT = re.compile(
    r"context_length_exceeded|exceed_context_size|string_above_max_length"
    r"|(?:maximum|max|model'?s) context (?:length|window|size)|available context size"
    r"|(?:exceeds?|longer than|beyond|over) [^.]{0,60}(?:context|max_model_len|maximum number of tokens)"
    r"|prompt is too long|too many (?:input )?tokens"
    # remaining tokens if the prompt fills the context
    r"|max(?:_completion)?_tokens must be at least 1, got (?:0|-\d+)",
    re.IGNORECASE,
)
_HOPELESS_TEXT = re.compile(r"insufficient_quota", re.IGNORECASE)


class AttemptFailed(Exception):
    """One attempt of a call failed. The message contains no secrets."""

    def __init__(
        self,
        message: str,
        *,
        retryable: bool = True,
        timed_out: bool = False,
        retry_after: float | None = None,
        overloaded: bool = False,
        unreachable: bool = False,
    ) -> None:
        super().__init__(message)
        self.retryable = retryable
        self.timed_out = timed_out
        self.retry_after = retry_after
        self.overloaded = overloaded
        """True if the server refused because of its load: it needs fewer concurrent calls."""
        self.unreachable = unreachable or timed_out
        """True if the server itself did not respond: nothing listens, a gateway reports that, or the connection was
        lost.
        """
        self.outage = False
        """True if every server is down, so this failure is independent of the call."""


def is_context_overflow(status: int, text: str) -> bool:
    """Return True if the server refused because the conversation exceeds its context."""
    return status in _CONTEXT_STATUS and _CONTEXT_TEXT.search(text) is not None


def failed_status(status: int, headers: Mapping[str, str], text: str, message: str) -> AttemptFailed:
    """Return the failure for an HTTP status. `text` decides about retries; only `message` is shown."""
    retryable = status >= 500 or status in _RETRIED_4XX
    if status == 429 and _HOPELESS_TEXT.search(text):
        retryable = False
    return AttemptFailed(
        message,
        retryable=retryable,
        retry_after=retry_after(headers.get("Retry-After")),
        overloaded=status in _OVERLOADED and retryable,
        unreachable=status in _GATEWAY,
    )


def retry_after(value: str | None, now: Callable[[], float] = time.time) -> float | None:
    """Return the seconds of a Retry-After header (a number or an HTTP date), or None if it requests no delay."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if seconds < float("inf") else None


@dataclass(frozen=True)
class RetryPolicy:
    """Limited attempts, exponential backoff with full jitter, and respect for Retry-After."""

    attempts: int = 8
    """Maximum attempts of one call, including the first."""
    timeouts: int = 3
    """Maximum attempts of one call that may time out, each of which takes the full timeout."""
    base: float = 0.5
    """Seconds; the first pause is between 0 and this, each further one may be twice as long."""
    cap: float = 30.0
    """Seconds; the longest pause without a request by the server."""
    longest_wait: float = 300.0
    """Seconds; the longest pause that a server may request."""
    outage: float = 1800.0
    """Maximum seconds for which a call waits while all servers are down; attempts during this time do not count. 0: the
    call does not wait, and the attempts count.
    """
    random: Callable[[], float] = random.random
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def pause(self, failures: int, failed: AttemptFailed) -> float:
        """Return the seconds to wait after the given number of failures."""
        jitter = self.random() * min(self.cap, self.base * 2.0 ** min(failures - 1, 30))
        if failed.retry_after is None:
            return jitter
        # Add jitter, so that calls that got the same response do not return at the same time.
        return min(failed.retry_after, self.longest_wait) + min(jitter, self.base)

    def gives_up(self, failures: Sequence[AttemptFailed], seconds: float = 0.0) -> bool:
        """Return True if no further attempt is made, `seconds` after the first."""
        last = failures[-1]
        if last.retryable and last.outage and self.outage:
            return seconds >= self.outage
        counted_failures = [failed for failed in failures if not failed.outage or not self.outage]
        timeouts = sum(failed.timed_out for failed in counted_failures)
        return not last.retryable or len(counted_failures) >= self.attempts or timeouts >= self.timeouts


async def with_retries(
    policy: RetryPolicy,
    role: str,
    attempt: Callable[[], Awaitable[T]],
    elsewhere: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
) -> tuple[T, int]:
    """Retry a call until it succeeds; return the reply and the number of attempts.

    Args:
        elsewhere: returns True if the next attempt uses a server that has not failed this call: then there is no pause.

    Raises:
        ServerFailure: no attempt succeeded.
    """
    failures: list[AttemptFailed] = []
    started, paused = clock(), 0.0
    while True:
        try:
            return await attempt(), len(failures) + 1
        except AttemptFailed as failed:
            failures.append(failed)
        log.info("server %r: attempt %d failed: %s", role, len(failures), failures[-1])
        if policy.gives_up(failures, max(clock() - started, paused)):
            raise exhausted(role, failures)
        if not elsewhere():
            pause = policy.pause(len(failures), failures[-1])
            paused += pause
            await policy.sleep(pause)


def exhausted(role: str, failures: Sequence[AttemptFailed]) -> ServerFailure:
    """Return the failure of a call, with the cause of each attempt in its text and in `__cause__`."""
    times = "1 attempt" if len(failures) == 1 else f"{len(failures)} attempts"
    # Consecutive equal causes form one entry: ``1-7`` instead of seven equal lines.
    runs: list[tuple[int, int, AttemptFailed]] = []
    for attempt, failed in enumerate(failures, 1):
        first = runs.pop()[0] if runs and str(runs[-1][2]) == str(failed) else attempt
        runs.append((first, attempt, failed))
    labelled_failures = [(f"{first}" if first == last else f"{first}-{last}", failed) for first, last, failed in runs]
    causes = "; ".join(f"[{attempt_range}] {failed}" for attempt_range, failed in labelled_failures)
    failure = ServerFailure(f"server {role!r} gave no usable answer in {times}: {causes}")
    failure.about_the_call, failure.refused = not failures[-1].outage, not failures[-1].retryable
    failure.__cause__ = failures[0] if len(failures) == 1 else ExceptionGroup("attempts", list(failures))
    return failure


# -------------------------------------------------------------------------------- transport

_CONNECT_SECONDS = 30.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
AT_ONCE = 8
"""Responses processed per turn of the event loop; the work after each takes about half a millisecond."""
_turns = PerLoopSemaphore(AT_ONCE)
IN_THREAD = 1 << 17
"""Bytes from which a reply is read in the helper thread."""
MOST_TOLD = 16 << 20
"""Maximum bytes of a response to other requests, such as the list of models."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A response, and the times at which the request was sent and it was received (monotonic seconds)."""

    status: int
    headers: Mapping[str, str]
    raw: bytes
    sent: float
    received: float


def _is_address(url: str) -> bool:
    """Return True if a URL that can be parsed has the scheme, the host and the port of an HTTP server."""
    parts = urlsplit(url)
    is_printable = url.isprintable() and " " not in url
    return is_printable and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0


class Transport:
    """Connection to one server; used from one event loop at a time."""

    def __init__(self, config: ServerConfig) -> None:
        if not config.base_url:
            raise UserError(f"a server of type {config.type!r} needs a base_url")
        try:
            url_text(config.base_url)
        except ValueError as error:
            raise UserError(f"base_url: {error}") from None
        if not _is_address(config.base_url):
            raise UserError(f"base_url {public_url(config.base_url)!r} must start with http:// or https:// and a host")
        self._config = config
        self._base = public_url(config.base_url).rstrip("/")
        self._query = urlsplit(config.base_url).query or None
        self._urls: dict[str, URL] = {}
        self._headers = _request_headers(config)
        has_session_header = SESSION_HEADER.lower() in map(str.lower, self._headers)
        self._names_rollouts = config.session_header and not has_session_header
        self._scrubber = Scrubber(_hidden_texts(config), _secret_values(config))
        self._proxy = proxy_of(self._base)  # read once: aiohttp would look it up for every call
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def address(self, path: str) -> str:
        """Return the address of a path without secrets. ``/…`` is relative to the root: base_url without ``/v1``."""
        if path.startswith("/"):
            return self._base.removesuffix("/v1") + path
        return f"{self._base}/{path}"

    async def post(
        self, path: str, payload: bytes, rollout_id: str | None = None, max_bytes: int = LARGEST_REPLY
    ) -> HttpAnswer:
        """Send once, as a call of this rollout.

        Raises:
            AttemptFailed: no response arrived, or one of more than `max_bytes` bytes.
        """
        session = await self._connected()
        body, sent = _body_class()(payload), time.monotonic()
        del payload
        status, received, raw = await self._send(session, path, body, self._session_header(rollout_id), max_bytes)
        answer = HttpAnswer(status, received, raw, sent, time.monotonic())
        await in_turn()
        return answer

    async def get_json(self, path: str, timeout: float = 10.0) -> tuple[int, Any]:
        """Return status and JSON of a GET request. Status 0: no response; None: the body is not JSON."""
        import aiohttp

        session = await self._connected()
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with session.get(self._url(path), timeout=limit, allow_redirects=False, proxy=self._proxy) as answer:
                raw = await self._body(path, answer, MOST_TOLD)
        except (aiohttp.ClientError, OSError, TimeoutError, AttemptFailed):
            return 0, None
        try:
            return answer.status, await _read_aside(partial(read_bounded, largest=MOST_TOLD), raw)
        except ValueError:
            return answer.status, None

    async def read(self, path: str, answer: HttpAnswer, read: Callable[[bytes], T]) -> T:
        """Return the result of `read` for a response, computed off the event loop if it is large.

        Raises `AttemptFailed` or `ContextLengthExceeded` if `read` raises `Malformed`.
        """
        try:
            return await _read_aside(read, answer.raw)
        except ErrorBody as problem:
            failed: Exception = self.failed(path, f"{problem}: {excerpt(answer.raw)}")
            if problem.status is not None:
                failed = self.refused(path, answer, problem.status)
        except Malformed as problem:
            failed = self.failed(path, f"{problem}: {excerpt(answer.raw)}")
        raise failed

    async def context_length(self) -> int | None:
        """Return the maximum tokens of a conversation, if the server's list of models contains it."""
        _, data = await self.get_json("models")
        entries = data.get("data") if isinstance(data, dict) else None
        lengths = [entry.get("max_model_len") for entry in entries or () if isinstance(entry, dict)]
        return next((length for length in lengths if isinstance(length, int)), None)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def refused(self, path: str, answer: HttpAnswer, status: int | None = None) -> Exception:
        """Return the exception for an error response; `status` is the one in its body, if it differs."""
        code = answer.status if status is None else status
        text = excerpt(answer.raw)
        public_text = self._scrubber.excerpt(text)
        if is_context_overflow(code, text):
            return ContextLengthExceeded(f"{self.address(path)}: {public_text}")
        hint = unversioned(self._base) if code == 404 and not path.startswith("/") else ""
        return failed_status(code, answer.headers, text, f"{self.address(path)}: status {code}: {public_text}{hint}")

    def failed(self, path: str, problem: str, *, timed_out: bool = False, unreachable: bool = False) -> AttemptFailed:
        """Return the exception for a failed attempt; its text contains the address and no secrets."""
        message = f"{self.address(path)}: {self._scrubber.excerpt(problem)}"
        return AttemptFailed(message, timed_out=timed_out, unreachable=unreachable)

    def _url(self, path: str) -> URL:
        if path not in self._urls:
            self._urls[path] = URL(self.address(path)).with_query(self._query)
        return self._urls[path]

    async def _connected(self) -> aiohttp.ClientSession:
        """Return the session of the running loop; it replaces the session of an earlier loop."""
        import aiohttp  # the scripted policy needs no HTTP

        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            await self.close()
            self._loop = loop
            secure = any(str(url).startswith("https:") for url in (self.address(""), self._proxy))
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60, ssl=_tls_context() if secure else True),
                timeout=aiohttp.ClientTimeout(total=self._config.timeout, sock_connect=_CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                auto_decompress=False,  # `_body` does, within its limit
            )
        return self._session

    def _session_header(self, rollout_id: str | None) -> dict[str, str]:
        """Return the header that names the rollout of a call; a configured header with its name takes precedence."""
        if rollout_id is None or not self._names_rollouts:
            return {}
        return {SESSION_HEADER: safe_name(rollout_id)}

    async def _send(
        self,
        session: aiohttp.ClientSession,
        path: str,
        body: aiohttp.BytesPayload,
        headers: Mapping[str, str],
        max_bytes: int,
    ) -> tuple[int, Mapping[str, str], bytes]:
        import aiohttp

        try:
            # A redirected POST would arrive as a GET or send the key to another server.
            async with session.post(
                self._url(path), data=body, headers=headers, allow_redirects=False, proxy=self._proxy
            ) as response:
                return response.status, response.headers, await self._body(path, response, max_bytes)
        except aiohttp.ConnectionTimeoutError:
            failed = self.failed(path, f"no connection within {_CONNECT_SECONDS:g} s", unreachable=True)
        except TimeoutError:
            failed = self.failed(path, f"no answer within {self._config.timeout:g} s", timed_out=True)
        except (aiohttp.ClientError, OSError) as error:
            failed = self.failed(path, f"connection lost: {type(error).__name__}: {error}", unreachable=True)
        # Outside the handler: aiohttp's exceptions hold the request's headers, and so the key.
        raise failed

    async def _body(self, path: str, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        """Return a body of at most `max_bytes` bytes, counted after decompression; raise `AttemptFailed` for larger
        ones.

        If the server repeats a secret that it received, the secret is masked, because a reply becomes a record.

        aiohttp would decompress each part on arrival, on the event loop, and 64 KiB may become 64 MiB.
        """
        body = bytearray()
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        async for part in response.content.iter_any():
            body += part
            if len(body) > max_bytes:
                raise self.failed(path, _too_large(max_bytes))
        if encoding in ("", "identity"):
            return await _read_aside(self._scrubber.unechoed, bytes(body))
        if encoding not in _ENCODINGS:
            raise self.failed(path, f"the reply has the encoding {encoding!r:.50}, which was not asked for")
        try:
            content = await run_exclusively(_decompress, bytes(body), max_bytes)
        except zlib.error as error:
            raise self.failed(path, f"the reply cannot be decompressed: {error}") from None
        if content is None:
            raise self.failed(path, _too_large(max_bytes))
        return await _read_aside(self._scrubber.unechoed, content)


@cache
def _body_class() -> type[aiohttp.BytesPayload]:
    """Return the class of request bodies, which are released while their responses are pending."""
    import aiohttp

    class SentBody(aiohttp.BytesPayload):
        async def write_with_length(self, writer: Any, content_length: int | None) -> None:
            body, self._value = self._value, b""
            await writer.write(body)

    return SentBody


_ENCODINGS = ("gzip", "x-gzip", "deflate")
_EITHER_HEADER = zlib.MAX_WBITS | 32
"""zlib detects gzip or deflate."""


def _decompress(raw: bytes, max_bytes: int) -> bytes | None:
    """Return the bytes, or None if there are more than `max_bytes`; raises `zlib.error`."""
    content = bytearray()
    while raw:  # gzip may have several parts
        part = zlib.decompressobj(_EITHER_HEADER)
        content += part.decompress(raw, max_bytes + 1 - len(content))
        if len(content) > max_bytes:
            return None
        if not part.eof:
            raise zlib.error("it ends too early")
        raw = part.unused_data
    return bytes(content)


def _too_large(max_bytes: int) -> str:
    return f"the reply has more than {max_bytes} bytes after decompression, the limit of this request"


async def _read_aside(read: Callable[[bytes], T], raw: bytes) -> T:
    return read(raw) if len(raw) <= IN_THREAD else await run_exclusively(read, raw)


@cache
def _tls_context() -> ssl.SSLContext:
    """Return the TLS settings of this process.

    aiohttp creates its own settings when it is imported. A worker is a fork of a process that imported it without
    variables, so SSL_CERT_FILE, which names a company's TLS certificates, would have no effect.
    """
    context = ssl.create_default_context()
    context.set_alpn_protocols(("http/1.1",))
    return context


def excerpt(raw: bytes) -> str:
    """Return the start of a response as text."""
    return raw[:20_000].decode("utf-8", errors="replace")


def _request_headers(config: ServerConfig) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "User-Agent": "hermes-rl", "Accept-Encoding": "gzip, deflate"}
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


def _hidden_texts(config: ServerConfig) -> list[str]:
    """Return the texts that must not be shown: keys, header values, and the address's password and query values."""
    parts = urlsplit(config.base_url or "")
    secrets = [value.reveal() for value in config.headers.values()]
    if config.api_key is not None:
        secrets.append(config.api_key.reveal())
    queries = [pair.partition("=")[2] for pair in parts.query.split("&")]
    secrets += [unquote(text) for text in (parts.password or "", *queries)]
    return [*secrets, _url_credentials(config) or ""]


def _secret_values(config: ServerConfig) -> list[str]:
    """Return the secrets that a server may repeat in a reply, and that no valid reply contains."""
    parts = urlsplit(config.base_url or "")
    keys = keys_of({name: value.reveal() for name, value in config.headers.items()} | dict(parse_qsl(parts.query)))
    if config.api_key is not None:
        keys.append(config.api_key.reveal())
    return [*keys, unquote(parts.password or ""), _url_credentials(config) or ""]


def proxy_of(url: str) -> str | None:
    """Return the host's configured proxy for an address, or None for a direct connection.

    As in curl, an address range in `no_proxy` (`10.0.0.0/8`) applies to hosts written as addresses.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host in _LOOPBACK or proxy_bypass(host) or _is_in_ranges(host, getproxies().get("no", "")):
        return None
    return getproxies().get(parts.scheme)


def _is_in_ranges(host: str, excluded: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    for entry in excluded.split(","):
        with suppress(ValueError):  # a name
            if "/" in entry and address in ip_network(entry.strip(), strict=False):
                return True
    return False


def with_version(base_url: str) -> str | None:
    """Return the address with `/v1` at its end, or None if it contains a version already."""
    parts = urlsplit(base_url)
    if re.search(r"/v\d", parts.path):
        return None
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/v1"))


def unversioned(base_url: str) -> str:
    """Return a hint for an address that responds with 404; empty if it contains a version."""
    other = with_version(base_url)
    return "" if other is None else f"; base_url has no /v1, where most servers answer: try {public_url(other)}"


async def in_turn() -> None:
    """Wait until fewer than `AT_ONCE` responses are processed in a turn of the event loop, in order of arrival.

    The loop itself gives every ready task a step in each turn. If thousands of responses arrive together, none would
    lead to its next request before all are read, and all other work would wait that long.
    """
    async with _turns.get_semaphore():
        await asyncio.sleep(0)


def public_url(url: str) -> str:
    """Return the address without user, password and query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("?")[0].rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
