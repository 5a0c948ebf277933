"""Provide the client of a model: one name for one or more servers.

The client gets a server from the pool, retries failed attempts, and accounts for the time. A call from another thread
(such as a reward's) runs on the client's own event loop, so that connections and the limit of requests in flight exist
once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from hermes_rl.errors import UserError
from hermes_rl.servers.base import (
    ABORT,
    UNREADABLE,
    Backend,
    ChatReply,
    ChatRequest,
    ContextLengthExceeded,
    ContextLengthProvider,
    Dialect,
    Malformed,
    Message,
    ReplyBound,
    Sampled,
    Sampling,
    ScoringDialect,
    ServerConfig,
    Timing,
    generated,
    read_answer,
    require_parts,
    version_of,
    without_thinking,
)
from hermes_rl.servers.pool import PooledServer, ServerPool
from hermes_rl.servers.transport import AttemptFailed, HttpAnswer, RetryPolicy, Transport, with_retries
from hermes_rl.servers.usage import Meter
from hermes_rl.servers.weights import Pauses, Versions
from hermes_rl.spec.server_types import TEXT_PARTS
from hermes_rl.threads import settled
from hermes_rl.tokens.transcript import TokenLogprobs, ids, numbers
from hermes_rl.values import write_json

log = logging.getLogger(__name__)

T = TypeVar("T")


@runtime_checkable
class ScriptRegistry(Protocol):
    """A backend that runs the script of a rollout instead of calling a model."""

    def register(self, rollout_id: str, script: Any) -> None: ...

    def forget(self, rollout_id: str) -> None: ...


@runtime_checkable
class Versioned(Protocol):
    """A backend that may know the version of its server's weights."""

    async def weights(self) -> int | None: ...


@runtime_checkable
class VersionListener(Protocol):
    """Receiver of weight versions that other processes got in responses."""

    def hear(self, version: int) -> None: ...


@runtime_checkable
class RendererProvider(Protocol):
    """A backend that renders conversations itself, and can load its renderer in advance."""

    async def load(self) -> Any: ...


@runtime_checkable
class TokenCounter(Protocol):
    """A component that may count the prompt tokens of a request without sampling."""

    async def count(self, request: ChatRequest) -> int | None: ...


class ModelClient:
    """The model of one role of a run: `policy`, `judge`, `user`, or a name that the spec gives."""

    def __init__(self, name: str, backends: Sequence[Backend], retry: RetryPolicy | None = None) -> None:
        self.name = name
        self._backends = tuple(backends)
        self._pool = ServerPool(backends, name)
        self._retry = retry or RetryPolicy()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.retries = 0
        """Number of attempts beyond the first, of all calls together."""
        self._scripted = [backend for backend in backends if isinstance(backend, ScriptRegistry)]
        self._context: int | None = None

    @property
    def configs(self) -> tuple[ServerConfig, ...]:
        """Configuration of each server, in the order of the spec."""
        return tuple(backend.config for backend in self._backends)

    @property
    def scripted(self) -> bool:
        """True if rollouts run from a script that must be registered."""
        return bool(self._scripted)

    def register(self, rollout_id: str, script: Any) -> None:
        """Give the scripted servers the script (`scripted.Script`) of a rollout; other servers ignore it."""
        for backend in self._scripted:
            backend.register(rollout_id, script)

    def forget(self, rollout_id: str) -> None:
        """Forget the script and the server of a finished rollout."""
        self._pool.unpin(rollout_id)
        for backend in self._scripted:
            backend.forget(rollout_id)

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Return the reply to a request from any event loop. Raises `ServerFailure` or `ContextLengthExceeded`."""
        require_parts(request, self.parts, f"server {self.name!r}")
        return await self._run_on_loop(self._chat(request))

    async def count(self, request: ChatRequest) -> int | None:
        """Return the token count of a request's prompt, or None if no server renders conversations locally.

        Raises:
            AttemptFailed: the chat template refuses the conversation.
        """
        counting = next((backend for backend in self._backends if isinstance(backend, TokenCounter)), None)
        return None if counting is None else await self._run_on_loop(counting.count(request))

    async def chat_text(
        self,
        messages: Sequence[Message],
        schema: Mapping[str, Any] | None = None,
        *,
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """Return only the text; see `answer`."""
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

    async def rated(self, messages: Sequence[Message]) -> Sequence[float]:
        """Return the numbers of a reward model for a conversation.

        Raises the errors of `chat`, and `UserError` if a server is not a reward model.
        """
        talking = [config.type for config in self.configs if not config.kind.rates]
        if talking:
            raise UserError(f"servers.{self.name}: a server of type {talking[0]} is not a reward model")
        return (await self.chat(ChatRequest(messages))).numbers

    async def scored(self, tokens: array[int], top_k: int, rollout_id: str | None = None) -> TokenLogprobs:
        """Return the log-probability of each token, and the `top_k` most probable tokens at its position.

        Raises the errors of `chat`, and `UserError` if a server is not token-level, or its type does not support this.
        """
        chatting = [config.type for config in self.configs if not config.kind.exact]
        if chatting:
            raise UserError(
                f"servers.{self.name}: a server of type {chatting[0]} does not report the probability of given tokens"
            )
        reply = await self.chat(ChatRequest((), prompt=tokens, scored=top_k, rollout_id=rollout_id))
        assert reply.scored is not None, "a token-level server returns the requested log-probabilities"
        return reply.scored

    async def weights(self) -> int | None:
        """Return the newest version of the weights of any server, or None if no server reports one."""
        telling = [backend for backend in self._backends if isinstance(backend, Versioned)]

        async def newest() -> int | None:
            versions = [version for backend in telling if (version := await backend.weights()) is not None]
            return max(versions, default=None)

        return await self._run_on_loop(newest())

    async def context_length(self) -> int | None:
        """Return the maximum tokens of a conversation for every server, or None if no server reports a limit."""
        telling = [backend for backend in self._backends if isinstance(backend, ContextLengthProvider)]

        async def shortest() -> int | None:
            lengths = [length for backend in telling if (length := await backend.context_length()) is not None]
            return min(lengths, default=None)

        if self._context is None:
            self._context = await self._run_on_loop(shortest())
        return self._context

    def hear(self, version: int) -> None:
        """Record a version of the weights that another process got in a response: the newest is at least that."""
        for backend in self._backends:
            if isinstance(backend, VersionListener):
                backend.hear(version)

    @property
    def exact(self) -> bool:
        """True if every server reports the tokens that it sampled."""
        return all(isinstance(backend, RendererProvider) or backend.config.kind.exact for backend in self._backends)

    @cached_property
    def parts(self) -> frozenset[str]:
        """Types of content parts that every server accepts."""
        kinds = [
            TEXT_PARTS if isinstance(each, RendererProvider) else each.config.kind.parts for each in self._backends
        ]
        return frozenset.intersection(*kinds)

    async def prepare(self) -> None:
        """Load the renderers of token-level servers. Raises UserError if one is not available."""
        for backend in self._backends:
            if isinstance(backend, RendererProvider):
                await backend.load()

    async def close(self) -> None:
        """Close every server; may be called twice. Another event loop may use the client afterwards."""
        await self._run_on_loop(self._close())
        self._loop = None

    def bind_to_loop(self) -> None:
        """Make the running event loop the client's own, so that calls from a reward's thread run on it."""
        self._own_loop()

    async def __aenter__(self) -> Self:
        self.bind_to_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot at a server; while some do, further calls gain nothing."""
        return sum(server.limiter.waiting for server in self._pool)

    @property
    def call_capacity(self) -> int:
        """Number of concurrent calls that the servers may get."""
        return sum(server.limiter.limit for server in self._pool)

    @property
    def last_failure(self) -> str:
        """Error of the last failed attempt; empty if none has failed."""
        return self._pool.last_failure

    def fix(self) -> None:
        """Allow the servers the configured maximum of concurrent calls; stop adapting."""
        for server in self._pool:
            server.limiter.fix()

    def count_by(self, meter: Meter) -> None:
        """Count calls with this meter if no other one counts them: a thread that user code starts has no context."""
        self._pool.meter = meter

    def share(self, index: int, count: int) -> None:
        """Use one of `count` equal parts of each server's concurrent calls; `index` is its index, from 0."""
        for server in self._pool:
            max_concurrency = server.backend.config.max_concurrency
            server.limiter.bound(max_concurrency * (index + 1) // count - max_concurrency * index // count)

    def tell(self, say: Callable[[str], None]) -> None:
        """Send messages about servers that fail or recover to `say`."""
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
        """Return the event loop that the client lives on: the first one that used it, while it is running."""
        if self._loop is None or not self._loop.is_running():
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _run_on_loop(self, work: Coroutine[Any, Any, T]) -> Awaitable[T]:
        loop = self._own_loop()
        if loop is asyncio.get_running_loop():
            return work
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


# ------------------------ Functions of the caller as model servers: token ids in and out, or messages in and out
# Their results are validated, and every exception is a failed attempt, as with a real server.

SampleFunction = Callable[[list[int], Sampling], Awaitable[Sampled]]
"""Samples the continuation of a prompt's ids."""
ChatFunction = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], Awaitable[Mapping[str, Any] | str]]
"""Returns the reply to messages, with the schemas of the tools that may be called."""
_MOST_ABORTS = 1000


class SampledByFunction:
    """A `TokenSource` that samples with a function; `version` returns the weight version if results lack it."""

    def __init__(self, function: SampleFunction, context: int | None, version: Callable[[], int | None]) -> None:
        self._function, self._context, self._version = function, context, version
        self._newest_version: int | None = None
        """Newest version in a result so far."""
        self._ends = frozenset[int]()

    def set_vocabulary(self, ends: Iterable[int]) -> None:
        """Record tokens that may end a turn in addition to a request's stop tokens."""
        self._ends = frozenset(ends)

    async def sample(self, sampling: Sampling, request: ChatRequest) -> Generation:
        """Call the function, and again if it stopped for new weights. Raises `AttemptFailed`."""
        generation = Generation(before=self._now())
        settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, **sampling.extra_body}
        generation.sampling = {name: value for name, value in settings.items() if value is not None}

        async def note(chunk: Sampled) -> None:
            self._note_version(chunk.version, chunk.oldest, generation)

        return await generation.completed(sampling, self._sample_chunk, note, "the policy's function")

    async def weights(self) -> int | None:
        """Return the newest version reported by the trainer or in a result."""
        return self._now()

    async def context_length(self) -> int | None:
        """Return the length given by the caller."""
        return self._context

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _now(self) -> int | None:
        versions = [version for version in (self._version(), self._newest_version) if version is not None]
        return max(versions, default=None)

    def _note_version(self, version: int | None, oldest: int | None, generation: Generation) -> None:
        """Record a version. Versions only rise, so the known one is a lower bound unless the result reports a lower
        one.
        """
        if version is None:
            generation.after = self._now()
        else:
            self._newest_version = version if self._newest_version is None else max(version, self._newest_version)
            generation.after = version if generation.after is None else max(version, generation.after)
            first = version if oldest is None else min(oldest, version)
            generation.before = first if generation.before is None else min(first, generation.before)

    async def _sample_chunk(self, sampling: Sampling) -> tuple[Sampled, Timing]:
        started = time.monotonic()
        answer = await _call_function(self._function, sampling.prompt.tolist(), sampling)
        if not isinstance(answer, Sampled):
            raise UserError(
                f"the policy's function returned {type(answer).__name__}: return hermes_rl.Sampled(ids, logprobs, "
                "finish), with a log-probability for each id"
            )
        try:
            ids, logprobs = numbers_of(answer.ids), numbers_of(answer.logprobs)
            chunk = generated(ids, logprobs, answer.finish, answer.version, answer.model, answer.cached)
            chunk = sampling.checked(replace(chunk, oldest=version_of(answer.oldest)))
            self._check(chunk, sampling)
        except UNREADABLE as error:
            raise AttemptFailed(f"the policy's function gave a wrong answer: {error}") from error
        return chunk, Timing(generating=time.monotonic() - started)

    def _check(self, chunk: Sampled, sampling: Sampling) -> None:
        """Raise `Malformed` if the tokens do not end as a turn does, or their versions decrease.

        A server may end a turn with its own stop tokens, which are unknown here.
        """
        if passed := set(sampling.stop_ids).intersection(chunk.ids[:-1]):
            raise Malformed(f"the answer continues after the token {min(passed)}, which ends a turn")
        if chunk.finish == "stop" and sampling.stop_ids and not {*sampling.stop_ids, *self._ends} & {chunk.ids[-1]}:
            raise Malformed(f"the response has finish reason `stop`, but its last token {chunk.ids[-1]} ends no turn")
        if None not in (chunk.oldest, chunk.version) and chunk.oldest > chunk.version:  # type: ignore[operator]
            raise Malformed(f"its first token is of version {chunk.oldest}, and its last of version {chunk.version}")


class AnsweredByFunction:
    """A `Backend` that replies to messages with a function."""

    def __init__(self, config: ServerConfig, function: ChatFunction) -> None:
        self.config, self._function = config, function

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Call the function once; raises `AttemptFailed`."""
        started = time.monotonic()
        tools = [dict(tool) for tool in request.tools] if request.tools else None
        message = await _call_function(self._function, [dict(message) for message in request.messages], tools)
        return ChatReply(
            message=assistant(message),
            finish_reason="tool_calls" if isinstance(message, Mapping) and message.get("tool_calls") else "stop",
            usage={},
            model=self.config.model,
            server_type=self.config.type,
            timing=Timing(generating=time.monotonic() - started),
        )

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


def assistant(answer: Mapping[str, Any] | str) -> dict[str, Any]:
    """Return an assistant message from a message or a text. Raises UserError if it is neither, or is not JSON."""
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    is_assistant = isinstance(answer, Mapping) and answer.get("role", "assistant") == "assistant"
    if not is_assistant or not {"content", "tool_calls"} & answer.keys():
        raise UserError(
            'an answer is a text, or an assistant message such as {"content": "…", "tool_calls": […]}, not '
            f"{answer!r:.200}"
        )
    message = {"role": "assistant", "content": None, **answer}
    try:
        write_json(message)  # everything after this point records and renders it
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"the answer of the policy's function has a value that JSON cannot represent: {error}"
        ) from error
    return message


async def _call_function(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Call a function; an exception is a failed attempt, except for errors that mark the call as invalid.

    It runs in a separate task: one that suppresses its cancellation delays its caller for at most `LEAVING` seconds,
    and one that was cancelled by its own trainer is not mistaken for a cancelled rollout.
    """
    name = f"the policy's function {getattr(function, '__qualname__', type(function).__qualname__)}"
    try:
        call = await settled(name, function, *arguments)
        if call.cancelled():
            raise AttemptFailed("the policy's function was cancelled by its own code")
        return call.result()
    except (AttemptFailed, ContextLengthExceeded, UserError):
        raise
    except Exception as error:
        raise AttemptFailed(f"the policy's function raised {type(error).__name__}: {error}") from error


def numbers_of(values: Any) -> Any:
    """Return a list, an array or a tensor as a list with Python numbers.

    Other values are returned unchanged and rejected by later validation.
    """
    sequence: Any = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(sequence, Sequence):
        return sequence
    has_builtin_numbers = set(map(type, sequence)) <= {int, float}
    return (
        list(sequence)
        if has_builtin_numbers
        else [value.item() if hasattr(value, "item") else value for value in sequence]
    )


# ----------------------------------------- One generation of a token-level server, in one or more pieces
# The versions of the weights around each piece are recorded, and pauses of the server are awaited. A piece that the
# server aborts for new weights is continued from its last token.


@dataclass(slots=True)
class Generation:
    """Tokens sampled for one call, possibly in several pieces."""

    ids: array[int] = field(default_factory=ids)
    logprobs: array[float] = field(default_factory=numbers)
    finish: str = ABORT
    model: str | None = None
    before: int | None = None
    after: int | None = None
    timing: Timing = field(default_factory=Timing)
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that the server received, under its own names."""
    cached: int = 0
    """Tokens of the prompt that came from the server's cache."""

    def append(self, chunk: Sampled, timing: Timing) -> None:
        if not self.ids:  # the prompts of later pieces contain the first one
            self.cached = chunk.cached
        self.ids.extend(chunk.ids)
        self.logprobs.extend(chunk.logprobs)
        self.finish, self.model = chunk.finish, chunk.model
        self.timing = Timing(
            generating=self.timing.generating + timing.generating,
            paused=self.timing.paused + timing.paused,
        )

    async def completed(
        self,
        sampling: Sampling,
        ask: Callable[[Sampling], Awaitable[tuple[Sampled, Timing]]],
        note: Callable[[Sampled], Awaitable[None]],
        sampler: str,
    ) -> Self:
        """Request pieces until the generation is complete, passing each one to `note`. Raises `AttemptFailed`."""
        for _ in range(_MOST_ABORTS):
            chunk, timing = await ask(sampling.after(self.ids) if self.ids else sampling)
            self.append(chunk, timing)
            await note(chunk)
            if chunk.finish != ABORT:
                return self
            if len(self.ids) >= sampling.max_tokens:
                self.finish = "length"
                return self
            if not chunk.ids:
                await asyncio.sleep(0.1)
        raise AttemptFailed(f"{sampler} broke a generation off {_MOST_ABORTS} times")

    def wait(self, seconds: float) -> None:
        self.timing = replace(self.timing, paused=self.timing.paused + seconds)


class TokenSource(Protocol):
    """A source of sampled tokens: a server, or a function in this process."""

    async def sample(self, sampling: Sampling, request: ChatRequest) -> Generation:
        """Sample one generation; raises `AttemptFailed` or `ContextLengthExceeded`."""

    async def weights(self) -> int | None:
        """Return the current version of the weights, or None if unknown."""

    async def context_length(self) -> int | None:
        """Return the maximum tokens of a conversation, or None if unknown."""

    async def close(self) -> None:
        """Release connections; may be called twice."""


@runtime_checkable
class ScoresTokens(Protocol):
    """A source that also returns the log-probabilities of given tokens, as servers do and functions do not."""

    async def score(self, prompt: array[int], top_k: int, request: ChatRequest) -> tuple[TokenLogprobs, Timing]:
        """Return the log-probabilities. Raises `UserError` if this server cannot, otherwise as `TokenSource.sample`."""


class TokenServerClient:
    """Send requests to one token-level server, as `TokenSource` and `ScoresTokens`; `dialects` are tried in order."""

    def __init__(self, config: ServerConfig, dialects: Sequence[Dialect]) -> None:
        self._transport, self._config = Transport(config), config
        self._dialects = list(dialects)
        self._set_dialect(self._dialects[0])

    async def weights(self) -> int | None:
        """Return the current version of the server's weights, or None if it does not report it."""
        return await self._versions.after()

    def hear(self, version: int) -> None:
        """Record a version that another process got in a response."""
        self._versions.hear(version)

    async def context_length(self) -> int | None:
        """Return the maximum tokens of a conversation, if the server reports it."""
        return await self._transport.context_length()

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.close()

    def _set_dialect(self, dialect: Dialect) -> None:
        self._dialect = dialect
        configured_path = self._config.weights_path
        paths = (configured_path,) if configured_path else dialect.weights_paths
        self._versions = Versions(self._transport, paths, self._config.version)
        self._pauses = Pauses(self._transport, dialect.paused_path)

    async def sample(self, sampling: Sampling, request: ChatRequest) -> Generation:
        """Sample until the generation is complete; raises `AttemptFailed`."""
        generation = Generation(before=await self._versions.before())

        async def ask(rest: Sampling) -> tuple[Sampled, Timing]:
            def body(dialect: Dialect) -> bytes:
                return rest.written(dialect.body(rest, self._config.current()))

            bound = ReplyBound.of_tokens(rest.max_tokens, len(rest.prompt))
            answer, timing = await self._answer(body, request, generation, bound)
            return await self._read(answer, lambda data: rest.checked(self._dialect.read(data)), bound), timing

        async def note(chunk: Sampled) -> None:
            generation.sampling = sampling.policy(self._dialect)
            generation.after = await self._versions.after(chunk.version)
            if generation.before is None:
                generation.before = chunk.version
            if chunk.finish == ABORT and len(generation.ids) < sampling.max_tokens:
                generation.wait(await self._pauses.wait_for_resume())

        return await generation.completed(sampling, ask, note, "the server")

    async def score(self, prompt: array[int], top_k: int, request: ChatRequest) -> tuple[TokenLogprobs, Timing]:
        """Request the log-probability of each token of the prompt; raises `AttemptFailed`."""
        sampling = Sampling(prompt, 1, ())

        def body(dialect: Dialect) -> bytes:
            return sampling.written(_scoring_dialect(dialect, self._config).scoring_body(top_k, self._config.current()))

        waited = Generation()
        bound = ReplyBound.of_scores(len(prompt), top_k)
        answer, timing = await self._answer(body, request, waited, bound)
        scores = await self._read(
            answer, lambda data: _scoring_dialect(self._dialect, self._config).read_scores(data, prompt, top_k), bound
        )
        return scores, replace(timing, paused=timing.paused + waited.timing.paused)

    async def _answer(
        self, body: Callable[[Dialect], bytes], request: ChatRequest, generation: Generation, bound: ReplyBound
    ) -> tuple[HttpAnswer, Timing]:
        """Return one response of the server. Waiting while the server is paused is not a failure."""
        while True:
            paused_before = self._pauses.seconds
            try:
                with self._pauses.watched():
                    answer = await self._ask(body, request, bound)
            except AttemptFailed as failed:
                if not failed.timed_out or self._pauses.seconds == paused_before:
                    raise
                generation.wait(self._pauses.seconds - paused_before)
                continue
            if answer.status == 503 and await self._pauses.now():
                generation.wait(await self._pauses.wait_for_resume())
                continue
            if answer.status != 200:
                raise self._transport.refused(self._dialect.path, answer)
            took = answer.received - answer.sent
            paused = min(self._pauses.seconds - paused_before, took)
            return answer, Timing(generating=took - paused, paused=paused)

    async def _ask(self, body: Callable[[Dialect], bytes], request: ChatRequest, bound: ReplyBound) -> HttpAnswer:
        while True:
            dialect = self._dialect
            answer = await self._transport.post(dialect.path, body(dialect), request.rollout_id, bound.size)
            # A server without the model responds with 404 too, but with an error in JSON.
            if answer.status != 405 and (answer.status != 404 or b'"error"' in answer.raw):
                return answer
            if dialect is self._dialect:
                if len(self._dialects) < 2:
                    return answer
                del self._dialects[0]
                self._set_dialect(self._dialects[0])

    async def _read(self, answer: HttpAnswer, read: Callable[[Any], T], bound: ReplyBound) -> T:
        return await self._transport.read(self._dialect.path, answer, lambda raw: read_answer(raw, read, bound))


def _scoring_dialect(dialect: Dialect, config: ServerConfig) -> ScoringDialect:
    if not isinstance(dialect, ScoringDialect):
        raise UserError(f"a server of type {config.type} does not report the probability of given tokens")
    return dialect
