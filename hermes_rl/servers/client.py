"""The client of a model: one name behind which one or more servers answer.

Owns the call as a whole: it asks `pool` for a server, repeats failed attempts (`retry`), and accounts for the time. A
call from another thread (a reward's) runs on the client's own event loop, so that connections and the bound on requests
in flight exist once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from hermes_rl.servers.base import Backend, ChatReply, ChatRequest, Message, ServerConfig, without_thinking
from hermes_rl.servers.pool import PooledServer, ServerPool
from hermes_rl.servers.retry import RetryPolicy, with_retries

T = TypeVar("T")


@runtime_checkable
class PlaysScripts(Protocol):
    """A backend that plays the script of a rollout instead of asking a model."""

    def register(self, rollout_id: str, script: Any) -> None: ...

    def forget(self, rollout_id: str) -> None: ...


@runtime_checkable
class Versioned(Protocol):
    """A backend that may know which weights its server has."""

    async def weights(self) -> int | None: ...


class ModelClient:
    """The model behind one role of a run: `policy`, `judge`, `user`, or a name that the spec gives."""

    def __init__(self, name: str, backends: Sequence[Backend], retry: RetryPolicy | None = None) -> None:
        self.name = name
        self._backends = tuple(backends)
        self._pool = ServerPool(backends)
        self._retry = retry or RetryPolicy()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.retries = 0
        """Attempts beyond the first, of all calls together."""
        self._scripted = [backend for backend in backends if isinstance(backend, PlaysScripts)]

    @property
    def configs(self) -> tuple[ServerConfig, ...]:
        """The configuration of each server, in the order of the spec."""
        return tuple(backend.config for backend in self._backends)

    @property
    def scripted(self) -> bool:
        """Whether rollouts are played from a script that has to be registered."""
        return bool(self._scripted)

    def register(self, rollout_id: str, script: Any) -> None:
        """Give the scripted servers the script (`scripted.Script`) of a rollout; other servers ignore it."""
        for backend in self._scripted:
            backend.register(rollout_id, script)

    def forget(self, rollout_id: str) -> None:
        """Forget the script and the server of a rollout that is over."""
        self._pool.forget(rollout_id)
        for backend in self._scripted:
            backend.forget(rollout_id)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answer a request from any event loop; raises `ServerFailure` or `ContextLengthExceeded`."""
        return await self._on_own_loop(self._chat(request))

    async def chat_text(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """Return the text alone; see `answer`."""
        return (await self.answer(messages, schema, temperature=temperature, max_tokens=max_tokens))[0]

    async def answer(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> tuple[str, ChatReply]:
        """Return the text without its thinking, and the reply; a JSON Schema is sent as `response_format`."""
        body = None
        if schema is not None:
            json_schema = {"name": "answer", "schema": dict(schema)}
            body = {"response_format": {"type": "json_schema", "json_schema": json_schema}}
        reply = await self.chat(ChatRequest(messages, temperature=temperature, max_tokens=max_tokens, extra_body=body))
        content = reply.message.get("content")
        return without_thinking(content) if isinstance(content, str) else "", reply

    async def weights(self) -> int | None:
        """Return the newest version of the weights that any server has; None where no server tells one."""
        telling = [backend for backend in self._backends if isinstance(backend, Versioned)]
        return await self._on_own_loop(_newest(telling))

    async def close(self) -> None:
        """Close every server; may be called twice. Another event loop may use the client afterwards."""
        await self._on_own_loop(self._close())
        self._loop = None

    def live_here(self) -> None:
        """Make the running event loop the client's own, so that a call from a reward's thread comes back to it."""
        self._own_loop()

    async def __aenter__(self) -> Self:
        self.live_here()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def waiting(self) -> int:
        """How many calls wait for a place at a server; while some do, further calls bring nothing."""
        return sum(server.limiter.waiting for server in self._pool)

    @property
    def places(self) -> int:
        """How many calls the servers are given at a time."""
        return sum(server.limiter.limit for server in self._pool)

    def fix(self) -> None:
        """Give the servers always as many calls at a time as the configuration allows; stop adapting."""
        for server in self._pool:
            server.limiter.fix()

    def tell(self, say: Callable[[str], None]) -> None:
        """Send messages about servers that are down, or back, to `say`."""
        self._pool.say = lambda message: say(f"{self.name}: {message}")

    async def _chat(self, request: ChatRequest) -> ChatReply:
        tried: list[PooledServer] = []

        async def attempt() -> ChatReply:
            if self._retry.outage:
                await self._pool.up()
            server = self._pool.pick(request.rollout_id, tried)
            tried.append(server)
            return await self._pool.attempt(server, request)

        def elsewhere() -> bool:
            self.retries += 1
            if self._pool.untried(tried):
                return True
            tried.clear()
            return False

        started = time.monotonic()
        reply, attempts = await with_retries(self._retry, self.name, attempt, elsewhere, self._pool.clock)
        if attempts == 1:
            return reply
        timing = reply.timing
        retrying = max(0.0, time.monotonic() - started - timing.queued - timing.generating)
        return replace(reply, attempts=attempts, timing=replace(timing, retrying=retrying))

    async def _close(self) -> None:
        for backend in self._backends:
            await backend.close()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop that the client lives on: the first one that used it, while that one runs."""
        if self._loop is None or not self._loop.is_running():
            self._loop = asyncio.get_running_loop()
        return self._loop

    async def _on_own_loop(self, work: Coroutine[Any, Any, T]) -> T:
        loop = self._own_loop()
        if loop is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def _newest(backends: Sequence[Versioned]) -> int | None:
    versions = [version for backend in backends if (version := await backend.weights()) is not None]
    return max(versions, default=None)
