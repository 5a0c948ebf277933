"""Token-level servers: the conversation is rendered here, the server gets token ids and gives token ids.

Owns one model call: the prompt extends what the rollout has sampled so far, the answer is checked, parsed into a
message and added to the rollout's transcript. Leaves asking to `asking`, the servers' JSON to their dialects,
tokens to `hermes_rl.tokens`, repeating to `retry`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.servers.asking import Run, TokenSource
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, LedgerEntry, ServerConfig
from hermes_rl.servers.generation import Sampled, Sampling
from hermes_rl.servers.retry import AttemptFailed
from hermes_rl.servers.turns import assistant_message, cut_message
from hermes_rl.tokens.rendering import Renderer, RendererSettings, load_renderer, next_prompt
from hermes_rl.tokens.sequence import ids
from hermes_rl.tokens.tokenizer import TemplateRefused
from hermes_rl.tokens.transcript import Prompt, Step, Transcript, Weights

DEFAULT_MAX_TOKENS = 4096
"""Tokens of one turn where neither the spec nor the server bounds it."""
LARGE = 20_000
"""Characters of a conversation from which it is rendered in a thread."""
_TAIL = 256


class CannotRender(AttemptFailed):
    """The template does not take the conversation: images, for example."""


class TokenServer:
    """One server of a role; used from one event loop at a time.

    Args:
        source: where its tokens come from.
        make_renderer: gives the renderer, in a thread; default: the one that the configuration names.
    """

    def __init__(
        self, config: ServerConfig, source: TokenSource, make_renderer: Callable[[], Renderer] | None = None
    ) -> None:
        self._config = config
        self._source = source
        self._make_renderer = make_renderer or self._load_renderer
        self._renderer: Renderer | None = None
        self._context: int | None = None

    @property
    def config(self) -> ServerConfig:
        return self._config

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Render, sample, parse; adds to the request's transcript when the answer is good."""
        renderer = await self._ready()
        transcript = request.transcript if request.transcript is not None else Transcript()
        if request.prompt is not None:
            return await self._complete(renderer, transcript, request)
        prompt = await self._prompt(renderer, transcript, request)
        room = self._room(request, prompt.ids)
        run = await self._source.sample(Sampling.of(request, prompt.ids, room, renderer.stop_ids, prompt.text), request)
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

    async def _complete(self, renderer: Renderer, transcript: Transcript, request: ChatRequest) -> ChatReply:
        """Go on with a text or with token ids as they are: nothing is rendered, and nothing parsed."""
        assert request.prompt is not None
        given = renderer.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        prompt = Prompt(ids(given))
        room = self._room(request, prompt.ids)
        run = await self._source.sample(Sampling.of(request, prompt.ids, room, renderer.stop_ids, prompt.text), request)
        step = Step(prompt.ids, run.ids, run.logprobs, run.finish, Weights(run.before, run.after))
        transcript.add(step)
        message = {"role": "assistant", "content": renderer.tokenizer.decode(step.completion)}
        return self._reply(step, run, message, None)

    async def renderer(self) -> Renderer:
        """How conversations become tokens; raises UserError where that is not possible."""
        return await self._ready()

    async def sample(self, sampling: Sampling) -> Sampled:
        """One bare request; raises as `attempt`."""
        run = await self._source.sample(sampling, ChatRequest(()))
        return Sampled(run.ids.tolist(), run.logprobs.tolist(), run.finish, run.after, run.model)

    async def weights(self) -> int | None:
        """The version of the server's weights now; None where it does not tell."""
        return await self._source.weights()

    async def close(self) -> None:
        await self._source.close()

    async def _ready(self) -> Renderer:
        if self._renderer is None:
            renderer = await asyncio.to_thread(self._make_renderer)
            self._context = await self._source.context_length()
            self._renderer = renderer
        return self._renderer

    def _load_renderer(self) -> Renderer:
        return load_renderer(self._tokenizer_name(), RendererSettings.of(self._config.renderer))

    def _tokenizer_name(self) -> str | None:
        if self._config.type == "scripted":
            return self._config.tokenizer
        name = self._config.tokenizer or self._config.model
        if not name:
            raise UserError(f"a server of type {self._config.type!r} needs a model or a tokenizer")
        return name

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

    def _reply(self, step: Step, run: Run, message: dict[str, Any], texts: list[str] | None) -> ChatReply:
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
            sampled=LedgerEntry.of(step),
            sampling=run.sampling,
            timing=run.timing,
        )


def _characters(request: ChatRequest) -> int:
    return sum(len(content) for one in request.messages if isinstance(content := one.get("content"), str))
