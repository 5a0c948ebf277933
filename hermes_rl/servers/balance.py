"""A role: one name behind which one or more servers answer.

Owns the call as a whole: a server is chosen (`members`), failed attempts are repeated (`retry`), and
the time is accounted for. Callers in other threads (rewards) are brought to the role's own event loop,
so that connections and the bound on requests in flight exist once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from hermes_rl.servers.base import Backend, ChatReply, ChatRequest, Message, ServerConfig, without_thinking
from hermes_rl.servers.members import Member, Members
from hermes_rl.servers.retry import RetryPolicy, with_retries

T = TypeVar("T")


@runtime_checkable
class Playable(Protocol):
    """A backend that plays what was written for a rollout, instead of asking a model."""

    def register(self, rollout_id: str, script: Any) -> None: ...

    def forget(self, rollout_id: str) -> None: ...


@runtime_checkable
class Versioned(Protocol):
    """A backend that may know which weights its server has."""

    async def weights(self) -> int | None: ...


class Role:
    """What plays a part in a run: `policy`, `judge`, `user`, or a name of the spec's own."""

    def __init__(self, name: str, backends: Sequence[Backend], retry: RetryPolicy | None = None) -> None:
        self.name = name
        self._backends = tuple(backends)
        self._members = Members(backends)
        self._retry = retry or RetryPolicy()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.retries = 0
        """Attempts beyond the first, of all calls together."""
        self._players = [backend for backend in backends if isinstance(backend, Playable)]

    @property
    def configs(self) -> tuple[ServerConfig, ...]:
        """The configuration of each server, in the order of the spec."""
        return tuple(backend.config for backend in self._backends)

    @property
    def scripted(self) -> bool:
        """Whether rollouts are played from a script that has to be registered."""
        return bool(self._players)

    def register(self, rollout_id: str, script: Any) -> None:
        """What a scripted policy plays for this rollout (`scripted.Script`); nothing for other types."""
        for player in self._players:
            player.register(rollout_id, script)

    def forget(self, rollout_id: str) -> None:
        """The rollout is over: its script and its place at a server are free."""
        self._members.forget(rollout_id)
        for player in self._players:
            player.forget(rollout_id)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answer, from any event loop; raises `ServerFailure` or `ContextLengthExceeded`."""
        return await self._at_home(self._chat(request))

    async def chat_text(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """The text of an answer; see `answer`."""
        return (await self.answer(messages, schema, temperature=temperature, max_tokens=max_tokens))[0]

    async def answer(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> tuple[str, ChatReply]:
        """The text of an answer, without its thinking, and the reply; with a JSON Schema the server is held to it."""
        body = {"response_format": _json_schema(schema)} if schema is not None else None
        reply = await self.chat(ChatRequest(messages, temperature=temperature, max_tokens=max_tokens, extra_body=body))
        content = reply.message.get("content")
        return without_thinking(content) if isinstance(content, str) else "", reply

    async def weights(self) -> int | None:
        """The newest version of the weights that any server has; None where none tells it."""
        telling = [backend for backend in self._backends if isinstance(backend, Versioned)]
        return await self._at_home(_newest(telling))

    async def close(self) -> None:
        """Close every server; may be called twice. Another event loop may use the role afterwards."""
        await self._at_home(self._close())
        self._loop = None

    def live_here(self) -> None:
        """Make the running event loop the role's own, so that a call from a reward's thread comes back to it."""
        self._home()

    async def __aenter__(self) -> Self:
        self.live_here()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _chat(self, request: ChatRequest) -> ChatReply:
        tried: list[Member] = []

        async def attempt() -> ChatReply:
            if self._retry.outage:
                await self._members.up()
            member = self._members.pick(request.rollout_id, tried)
            tried.append(member)
            return await self._members.attempt(member, request)

        def elsewhere() -> bool:
            self.retries += 1
            if self._members.untried(tried):
                return True
            tried.clear()
            return False

        started = time.monotonic()
        reply, attempts = await with_retries(self._retry, self.name, attempt, elsewhere, self._members.clock)
        return reply if attempts == 1 else _accounted(reply, attempts, time.monotonic() - started)

    @property
    def waiting(self) -> int:
        """Calls that wait for a place at a server: more of them at a time would bring nothing."""
        return sum(member.limiter.waiting for member in self._members)

    @property
    def places(self) -> int:
        """Calls that the servers are given at a time."""
        return sum(member.limiter.limit for member in self._members)

    def fix(self) -> None:
        """As many calls at a time as the configuration allows, instead of as many as the servers do well with."""
        for member in self._members:
            member.limiter.fix()

    def tell(self, say: Callable[[str], None]) -> None:
        """Who hears that a server is down, and that it is back."""
        self._members.say = lambda message: say(f"{self.name}: {message}")

    async def _close(self) -> None:
        for backend in self._backends:
            await backend.close()

    def _home(self) -> asyncio.AbstractEventLoop:
        """The event loop that the role lives on: the first one that used it, while that one runs."""
        if self._loop is None or not self._loop.is_running():
            self._loop = asyncio.get_running_loop()
        return self._loop

    async def _at_home(self, work: Coroutine[Any, Any, T]) -> T:
        home = self._home()
        if home is asyncio.get_running_loop():
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))


async def _newest(backends: Sequence[Versioned]) -> int | None:
    versions = [version for backend in backends if (version := await backend.weights()) is not None]
    return max(versions, default=None)


def _accounted(reply: ChatReply, attempts: int, total: float) -> ChatReply:
    timing = reply.timing
    retrying = max(0.0, total - timing.queued - timing.generating)
    return replace(reply, attempts=attempts, timing=replace(timing, retrying=retrying))


def _json_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(schema)}}
