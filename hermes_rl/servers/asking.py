"""One generation of a token-level server, in as many pieces as it takes.

Owns asking a server: it finds the dialect that the server knows, notes the versions of the weights around each piece,
waits while the server is paused, and goes on from partial ids where the server aborts a generation for new weights.
Leaves rendering and messages to `token_level`, and the questions beside the calls to `weights`.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hermes_rl.servers.base import ChatRequest, ServerConfig, Timing
from hermes_rl.servers.generation import ABORT, Dialect, Sampled, Sampling
from hermes_rl.servers.retry import AttemptFailed
from hermes_rl.servers.transport import HttpAnswer, Transport, excerpt
from hermes_rl.servers.weights import Pauses, Versions
from hermes_rl.servers.wire import Malformed
from hermes_rl.tokens.sequence import ids, numbers

_MOST_ABORTS = 1000

HeadersFor = Callable[[ChatRequest], Mapping[str, str]]


@dataclass(slots=True)
class Generation:
    """The tokens that were sampled for one call, perhaps in several pieces."""

    ids: array[int] = field(default_factory=ids)
    logprobs: array[float] = field(default_factory=numbers)
    finish: str = ABORT
    model: str | None = None
    before: int | None = None
    after: int | None = None
    timing: Timing = field(default_factory=Timing)
    sampling: dict[str, Any] = field(default_factory=dict)
    """The parameters of sampling that the server got, under its own names."""

    def append(self, piece: Sampled, timing: Timing) -> None:
        self.ids.extend(piece.ids)
        self.logprobs.extend(piece.logprobs)
        self.finish, self.model = piece.finish, piece.model
        self.timing = Timing(
            queued=self.timing.queued + timing.queued,
            generating=self.timing.generating + timing.generating,
            paused=self.timing.paused + timing.paused,
        )

    def wait(self, seconds: float) -> None:
        self.timing = replace(self.timing, paused=self.timing.paused + seconds)


class TokenSource(Protocol):
    """A source of sampled tokens: a server, or a function in this process."""

    async def sample(self, sampling: Sampling, request: ChatRequest) -> Generation:
        """Sample one generation; raises `AttemptFailed` or `ContextLengthExceeded`."""
        ...

    async def weights(self) -> int | None:
        """Return the version of the weights now; None where it is not known."""
        ...

    async def context_length(self) -> int | None:
        """Return the longest conversation in tokens; None where it is not known."""
        ...

    async def close(self) -> None:
        """Release connections; may be called twice."""
        ...


class Asker:
    """Asks one token-level server: a `TokenSource`.

    Args:
        dialects: ways to ask it, tried in order until the server knows one.
    """

    def __init__(
        self, config: ServerConfig, dialects: Sequence[Dialect], headers_for: HeadersFor | None = None
    ) -> None:
        self._transport, self._config, self._headers_for = Transport(config), config, headers_for
        self._dialects = list(dialects)
        self._use(self._dialects[0])

    async def weights(self) -> int | None:
        """Return the version of the server's weights now; None where it does not tell."""
        return await self._versions.after()

    async def context_length(self) -> int | None:
        """Return the longest conversation, where the server tells it in its list of models."""
        _, data = await self._transport.get_json("models")
        entries = data.get("data") if isinstance(data, dict) else None
        lengths = [one.get("max_model_len") for one in entries or () if isinstance(one, dict)]
        return next((length for length in lengths if isinstance(length, int)), None)

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    def _use(self, dialect: Dialect) -> None:
        self._dialect = dialect
        own = self._config.weights_path
        paths = (own,) if own else dialect.weights_paths
        self._versions = Versions(self._transport, paths, self._config.version)
        self._pauses = Pauses(self._transport, dialect.paused_path)

    async def sample(self, sampling: Sampling, request: ChatRequest) -> Generation:
        """Sample until the generation is complete; raises `AttemptFailed`."""
        generation = Generation(before=await self._versions.before())
        for _ in range(_MOST_ABORTS):
            left = sampling.after(generation.ids) if generation.ids else sampling
            piece, timing = await self._piece(left, request, generation)
            generation.append(piece, timing)
            generation.sampling = sampling.policy(self._dialect)
            generation.after = await self._versions.after(piece.version)
            if generation.before is None:
                generation.before = piece.version
            if piece.finish != ABORT:
                return generation
            if len(generation.ids) >= sampling.max_tokens:
                generation.finish = "length"
                return generation
            generation.wait(await self._pauses.over())
            if not piece.ids:
                await asyncio.sleep(0.1)
        raise AttemptFailed(f"the server aborted a generation {_MOST_ABORTS} times")

    async def _piece(self, sampling: Sampling, request: ChatRequest, generation: Generation) -> tuple[Sampled, Timing]:
        """Get one answer of the server. Waiting while the server is paused is no failure."""
        while True:
            seen = self._pauses.seconds
            try:
                async with self._pauses.watched():
                    answer = await self._ask(sampling, request)
            except AttemptFailed as failed:
                if not failed.timed_out or self._pauses.seconds == seen:
                    raise
                generation.wait(self._pauses.seconds - seen)
                continue
            if answer.status == 503 and await self._pauses.now():
                generation.wait(await self._pauses.over())
                continue
            if answer.status != 200:
                raise self._transport.refused(self._dialect.path, answer)
            took = answer.received - answer.sent
            paused = min(self._pauses.seconds - seen, took)
            timing = Timing(queued=answer.sent - answer.asked, generating=took - paused, paused=paused)
            return self._read(answer), timing

    async def _ask(self, sampling: Sampling, request: ChatRequest) -> HttpAnswer:
        headers = self._headers_for(request) if self._headers_for is not None else None
        while True:
            dialect = self._dialect
            body = sampling.written(dialect.body(sampling, self._config.current()))
            answer = await self._transport.post(dialect.path, body, headers)
            if not _unknown_path(answer) or (dialect is self._dialect and not self._next()):
                return answer

    def _next(self) -> bool:
        """Go over to the next dialect; False where there is none."""
        if len(self._dialects) < 2:
            return False
        del self._dialects[0]
        self._use(self._dialects[0])
        return True

    def _read(self, answer: HttpAnswer) -> Sampled:
        try:
            return self._dialect.read(json.loads(answer.raw))
        except Malformed as error:
            problem = str(error)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            problem = f"the answer cannot be read ({type(error).__name__})"
        raise self._transport.failed(self._dialect.path, f"{problem}: {excerpt(answer.raw)[:200]}")


def _unknown_path(answer: HttpAnswer) -> bool:
    """Whether the server has no such path. A server without the model answers 404 too, but with an error in JSON."""
    return answer.status == 405 or (answer.status == 404 and b'"error"' not in answer.raw)
