"""Token-level servers: the conversation is rendered here, the server gets token ids and gives token ids.

Owns one model call: the prompt extends what the rollout has sampled so far, the answer is checked, parsed into a
message and added to the rollout's transcript. A generation that the server aborts for new weights goes on from its
partial ids. Leaves the servers' JSON to their dialects, tokens to `hermes_rl.tokens`, repeating to `retry`.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, Sampled, ServerConfig, Timing
from hermes_rl.servers.generation import ABORT, Dialect, Generated, Sampling
from hermes_rl.servers.retry import AttemptFailed
from hermes_rl.servers.transport import Answer, Transport, excerpt
from hermes_rl.servers.turns import assistant_message, cut_message
from hermes_rl.servers.weights import Pauses, Versions
from hermes_rl.servers.wire import Malformed
from hermes_rl.tokens.rendering import Renderer, RendererSettings, load_renderer, next_prompt
from hermes_rl.tokens.sequence import ids, numbers
from hermes_rl.tokens.tokenizer import TemplateRefused
from hermes_rl.tokens.transcript import Prompt, Step, Transcript, Weights

DEFAULT_MAX_TOKENS = 4096
"""Tokens of one turn where neither the spec nor the server bounds it."""
LARGE = 20_000
"""Characters of a conversation from which it is rendered in a thread."""
_TAIL = 256
_MOST_ABORTS = 1000

HeadersFor = Callable[[ChatRequest], Mapping[str, str]]


class CannotRender(AttemptFailed):
    """The template does not take the conversation: images, for example."""


@dataclass(slots=True)
class _Run:
    """What was sampled for one call, perhaps in several pieces."""

    ids: array[int] = field(default_factory=ids)
    logprobs: array[float] = field(default_factory=numbers)
    finish: str = ABORT
    model: str | None = None
    before: int | None = None
    after: int | None = None
    timing: Timing = field(default_factory=Timing)

    def take(self, piece: Generated, timing: Timing) -> None:
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


class TokenServer:
    """One server of a role; used from one event loop at a time.

    Args:
        dialects: ways to ask it, tried in order until the server knows one.
    """

    def __init__(
        self, config: ServerConfig, dialects: Sequence[Dialect], headers_for: HeadersFor | None = None
    ) -> None:
        self._config = config
        self._transport = Transport(config)
        self._dialects = list(dialects)
        self._headers_for = headers_for
        self._renderer: Renderer | None = None
        self._context: int | None = None
        self._use(self._dialects[0])

    @property
    def config(self) -> ServerConfig:
        return self._config

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Render, sample, parse; adds to the request's transcript when the answer is good."""
        renderer = await self._ready()
        transcript = request.transcript if request.transcript is not None else Transcript()
        prompt = await self._prompt(renderer, transcript, request)
        room = self._room(request, prompt.ids)
        run = await self._sample(Sampling.of(request, prompt.ids, room, renderer.stop_ids, prompt.text), request)
        step = Step(prompt.ids, run.ids, run.logprobs, run.finish, Weights(run.before, run.after))
        if run.finish == "length":
            message = cut_message(renderer.tokenizer, step.completion)
        else:
            message = assistant_message(
                renderer.parse(step.completion, prompt.ids[-_TAIL:], request.tools), request.messages
            )
        transcript.add(step, [*request.messages, message], prompt)
        texts = [renderer.tokenizer.decode([one]) for one in step.completion] if request.logprobs else None
        return self._reply(step, run, message, texts)

    async def renderer(self) -> Renderer:
        """How conversations become tokens; raises UserError where that is not possible."""
        return await self._ready()

    async def sample(self, sampling: Sampling) -> Generated:
        """One bare request; raises as `attempt`."""
        run = await self._sample(sampling, ChatRequest(()))
        return Generated(run.ids.tolist(), run.logprobs.tolist(), run.finish, run.after, run.model)

    async def weights(self) -> int | None:
        """The version of the server's weights now; None where it does not tell."""
        return await self._versions.after()

    async def close(self) -> None:
        await self._transport.close()

    def _use(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._versions = Versions(self._transport, self._config.weights_path or dialect.weights_path)
        self._pauses = Pauses(self._transport, dialect.paused_path)

    async def _ready(self) -> Renderer:
        if self._renderer is None:
            settings = RendererSettings.of(self._config.renderer)
            self._renderer = await asyncio.to_thread(load_renderer, self._tokenizer_name(), settings)
            self._context = await self._context_length()
        return self._renderer

    def _tokenizer_name(self) -> str | None:
        if self._config.type == "scripted":
            return self._config.tokenizer
        name = self._config.tokenizer or self._config.model
        if not name:
            raise UserError(f"a server of type {self._config.type!r} needs a model or a tokenizer")
        return name

    async def _context_length(self) -> int | None:
        """The longest conversation, where the server tells it in its list of models."""
        _, data = await self._transport.get_json("models")
        entries = data.get("data") if isinstance(data, dict) else None
        lengths = [one.get("max_model_len") for one in entries or () if isinstance(one, dict)]
        return next((length for length in lengths if isinstance(length, int)), None)

    async def _prompt(self, renderer: Renderer, transcript: Transcript, request: ChatRequest) -> Prompt:
        given = renderer, transcript, request.messages, request.tools
        try:
            if not transcript.turns and _characters(request) > LARGE:
                return await asyncio.to_thread(next_prompt, *given)
            return next_prompt(*given)
        except TemplateRefused as error:
            raise CannotRender(f"the chat template refuses the conversation: {error}", retryable=False) from error

    def _room(self, request: ChatRequest, prompt: array[int]) -> int:
        """Tokens that this turn may have."""
        wanted = request.max_tokens or (DEFAULT_MAX_TOKENS if self._context is None else self._context)
        if self._context is None:
            return wanted
        left = self._context - len(prompt)
        if left < 1:
            raise ContextLengthExceeded(f"the prompt has {len(prompt)} tokens, the model's context {self._context}")
        return min(wanted, left)

    async def _sample(self, sampling: Sampling, request: ChatRequest) -> _Run:
        run = _Run(before=await self._versions.before())
        for _ in range(_MOST_ABORTS):
            left = sampling.after(run.ids) if run.ids else sampling
            piece, timing = await self._piece(left, request, run)
            run.take(piece, timing)
            run.after = await self._versions.after(piece.version)
            if run.before is None:
                run.before = piece.version
            if piece.finish != ABORT:
                return run
            if len(run.ids) >= sampling.max_tokens:
                run.finish = "length"
                return run
            run.wait(await self._pauses.over())
            if not piece.ids:
                await asyncio.sleep(0.1)
        raise AttemptFailed(f"the server aborted a generation {_MOST_ABORTS} times")

    async def _piece(self, sampling: Sampling, request: ChatRequest, run: _Run) -> tuple[Generated, Timing]:
        """One answer of the server; while it is paused it is waited for, which is no failure."""
        while True:
            seen = self._pauses.seconds
            try:
                async with self._pauses.watched():
                    answer = await self._ask(sampling, request)
            except AttemptFailed as failed:
                if not failed.timed_out or self._pauses.seconds == seen:
                    raise
                run.wait(self._pauses.seconds - seen)
                continue
            if answer.status == 503 and await self._pauses.now():
                run.wait(await self._pauses.over())
                continue
            if answer.status != 200:
                raise self._transport.refused(self._dialect.path, answer)
            took = answer.received - answer.sent
            paused = min(self._pauses.seconds - seen, took)
            timing = Timing(queued=answer.sent - answer.asked, generating=took - paused, paused=paused)
            return self._read(answer), timing

    async def _ask(self, sampling: Sampling, request: ChatRequest) -> Answer:
        headers = self._headers_for(request) if self._headers_for is not None else None
        while True:
            dialect = self._dialect
            answer = await self._post(dialect, sampling, headers)
            if not _unknown_path(answer) or (dialect is self._dialect and not self._next()):
                return answer

    def _next(self) -> bool:
        """Go over to the next way to ask; False where there is none."""
        if len(self._dialects) < 2:
            return False
        del self._dialects[0]
        self._use(self._dialects[0])
        return True

    async def _post(self, dialect: Dialect, sampling: Sampling, headers: Mapping[str, str] | None) -> Answer:
        body = sampling.written(dialect.body(sampling, self._config))
        return await self._transport.post(dialect.path, body, headers)

    def _read(self, answer: Answer) -> Generated:
        try:
            return self._dialect.read(json.loads(answer.raw))
        except Malformed as error:
            problem = str(error)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            problem = f"the answer cannot be read ({type(error).__name__})"
        raise self._transport.failed(self._dialect.path, f"{problem}: {excerpt(answer.raw)[:200]}")

    def _reply(self, step: Step, run: _Run, message: dict[str, Any], texts: list[str] | None) -> ChatReply:
        counts = {"prompt_tokens": len(step.prompt), "completion_tokens": len(step.completion)}
        called = bool(message.get("tool_calls")) and step.finish == "stop"
        return ChatReply(
            message=message,
            finish_reason="tool_calls" if called else step.finish,
            usage={**counts, "total_tokens": sum(counts.values())},
            model=run.model or self._config.model,
            server_type=self._config.type,
            logprobs=None if texts is None else step.logprobs.tolist(),
            tokens=texts,
            sampled=Sampled.of(step),
            timing=run.timing,
        )


def _unknown_path(answer: Answer) -> bool:
    """Whether the server has no such path; a model that it does not have is told as an error of its own."""
    return answer.status == 405 or (answer.status == 404 and b'"error"' not in answer.raw)


def _characters(request: ChatRequest) -> int:
    return sum(len(content) for one in request.messages if isinstance(content := one.get("content"), str))
