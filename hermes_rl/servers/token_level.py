"""Token-level servers: the conversation is rendered here, the server gets token ids and gives token ids.

Owns one model call: the prompt extends what the rollout has sampled so far, the answer is checked, parsed into a
message and added to the rollout's transcript. Leaves asking to `asking`, the servers' JSON to their dialects,
tokens to `hermes_rl.tokens`, repeating to `retry`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.servers.asking import Asker, HeadersFor, Run
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, Sampled, ServerConfig
from hermes_rl.servers.generation import Dialect, Generated, Sampling
from hermes_rl.servers.retry import AttemptFailed
from hermes_rl.servers.transport import Transport
from hermes_rl.servers.turns import assistant_message, cut_message
from hermes_rl.tokens.rendering import Renderer, RendererSettings, load_renderer, next_prompt
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
        dialects: ways to ask it, tried in order until the server knows one.
    """

    def __init__(
        self, config: ServerConfig, dialects: Sequence[Dialect], headers_for: HeadersFor | None = None
    ) -> None:
        self._config = config
        self._transport = Transport(config)
        self._asker = Asker(self._transport, config, dialects, headers_for)
        self._renderer: Renderer | None = None
        self._context: int | None = None

    @property
    def config(self) -> ServerConfig:
        return self._config

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Render, sample, parse; adds to the request's transcript when the answer is good."""
        renderer = await self._ready()
        transcript = request.transcript if request.transcript is not None else Transcript()
        prompt = await self._prompt(renderer, transcript, request)
        room = self._room(request, prompt.ids)
        run = await self._asker.sample(Sampling.of(request, prompt.ids, room, renderer.stop_ids, prompt.text), request)
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
        run = await self._asker.sample(sampling, ChatRequest(()))
        return Generated(run.ids.tolist(), run.logprobs.tolist(), run.finish, run.after, run.model)

    async def weights(self) -> int | None:
        """The version of the server's weights now; None where it does not tell."""
        return await self._asker.weights()

    async def close(self) -> None:
        await self._transport.close()

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
            sampled=Sampled.of(step),
            sampling=run.sampling,
            timing=run.timing,
        )


def _characters(request: ChatRequest) -> int:
    return sum(len(content) for one in request.messages if isinstance(content := one.get("content"), str))
