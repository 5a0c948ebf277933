"""Call token-level servers: conversations are rendered locally, and the server receives and returns token ids.

The prompt of a call extends the rollout's tokens so far. The reply is validated, parsed into a message and added to the
rollout's transcript.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.servers.base import (
    LARGEST_ID,
    ChatReply,
    ChatRequest,
    ContextLengthExceeded,
    LedgerEntry,
    Message,
    Sampled,
    Sampling,
    ServerConfig,
    TrajectoryFull,
)
from hermes_rl.servers.client import Generation, SampledByFunction, ScoresTokens, TokenSource, VersionListener
from hermes_rl.servers.transport import AttemptFailed
from hermes_rl.threads import run_in_thread
from hermes_rl.tokens.load import load_renderer
from hermes_rl.tokens.parsers.base import Parsed, ParsedCall, without_reasoning
from hermes_rl.tokens.rendering import (
    Renderer,
    RendererSettings,
    extend_prompt,
    next_prompt,
    parse_in_thread,
    render_prompt,
)
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer
from hermes_rl.tokens.transcript import RenderedPrompt, Step, Transcript, WeightVersions, ids

DEFAULT_MAX_TOKENS = 4096
"""Maximum tokens of a turn if neither the spec nor the server sets a limit."""
LARGE = 20_000
"""Number of rendered characters from which rendering runs in a thread."""
RESENT = 1 << 16
"""Bytes of a program's request from which its known prefix is searched in a thread too."""
PADDING = 4096
"""Number of ids beyond the tokenizer's vocabulary that a model may have and sample: vocabularies are padded for the
GPU, by 1,069 ids in gpt-oss, and the tokenizer does not report the amount.
"""
_TAIL = 256
_ID_LENGTH = 9
"""Number of characters; some chat templates require this length."""


class CannotRender(AttemptFailed):
    """The chat template refuses the conversation, for example because of an image."""


class TokenServer:
    """One token-level server, whose `source` samples the tokens; used from one event loop at a time.

    `make_renderer` creates the renderer in a thread (default: the one that the configuration names); `response` is the
    maximum number of tokens of a response.
    """

    def __init__(
        self,
        config: ServerConfig,
        source: TokenSource,
        make_renderer: Callable[[], Renderer] | None = None,
        response: int | None = None,
    ) -> None:
        self.config = config
        self._source = source
        self._make_renderer = make_renderer or self._load_renderer
        self._loaded: Renderer | None = None
        self._renderer: Renderer | None = None
        """The loaded renderer, once the length of the server's context is known too."""
        self._context: int | None = None
        self._largest = LARGEST_ID
        """Largest id that the model can have, once the vocabulary of the renderer is loaded."""
        self._response = response

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Render, sample and parse; a valid reply is added to the request's transcript."""
        if request.scored is not None:
            return await self._score(request, request.scored)
        renderer = await self.renderer()
        transcript = request.transcript if request.transcript is not None else Transcript()
        if request.prompt is not None:
            return await self._complete(renderer, transcript, request)
        async with transcript.lock:
            prompt = await self._prompt(renderer, transcript, request)
        step, generation = await self._sampled(renderer, prompt, transcript, request)
        if step.finish == "length":
            message = cut_message(renderer.tokenizer, step.completion)
        else:
            parsed = await renderer.parse(step.completion, prompt.ids[-_TAIL:], request.tools)
            work = partial(assistant_message, parsed, request.messages)
            message = await parse_in_thread(work, len(step.completion))
        async with transcript.lock:
            transcript.add(step, [*request.messages, message], prompt)
        texts = [renderer.tokenizer.decode([token]) for token in step.completion] if request.logprobs else None
        return self._reply(step, generation, message, texts)

    async def count(self, request: ChatRequest) -> int:
        """Return the token count of the request's prompt, which extends its transcript if possible.

        Raises:
            CannotRender: the chat template refuses the conversation.
        """
        transcript = request.transcript if request.transcript is not None else Transcript()
        async with transcript.lock:
            return len((await self._prompt(await self.renderer(), transcript, request)).ids)

    async def _score(self, request: ChatRequest, top_k: int) -> ChatReply:
        """Return the log-probabilities of the request's tokens: ids, a text, or messages rendered by the template."""
        if not isinstance(self._source, ScoresTokens):
            raise UserError("a function that samples does not report the probability of given tokens; name a server")
        text = request.prompt
        if text is None:
            text = (await self._prompt(await self.renderer(), Transcript(), request)).ids
        elif isinstance(text, str):
            text = _encode_prompt(await self.renderer(), text)
        prompt = ids(text)
        scores, timing = await self._source.score(prompt, top_k, request)
        config = self.config
        # A token that the server samples too, as vLLM must, is not used and not counted.
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 0, "total_tokens": len(prompt)}
        return ChatReply({}, None, usage, config.model, config.type, scored=scores, prompt=prompt, timing=timing)

    async def _complete(self, renderer: Renderer, transcript: Transcript, request: ChatRequest) -> ChatReply:
        """Continue a text or token ids unchanged, without rendering and parsing."""
        assert request.prompt is not None
        tokens = _encode_prompt(renderer, request.prompt) if isinstance(request.prompt, str) else request.prompt
        prompt = RenderedPrompt(ids(tokens))
        step, generation = await self._sampled(renderer, prompt, transcript, request)
        async with transcript.lock:
            transcript.add(step)
        message = {"role": "assistant", "content": renderer.tokenizer.decode(step.completion)}
        return self._reply(step, generation, message, None)

    async def _sampled(
        self, renderer: Renderer, prompt: RenderedPrompt, transcript: Transcript, request: ChatRequest
    ) -> tuple[Step, Generation]:
        room = self._room(request, prompt, transcript)
        sampling = Sampling.from_request(
            request, prompt.ids, room, renderer.stop_ids, lambda: prompt.text, self._largest
        )
        reply = await self._source.sample(sampling, request)
        weights = WeightVersions(reply.before, reply.after)
        return Step(prompt.ids, reply.ids, reply.logprobs, reply.finish, weights), reply

    async def renderer(self) -> Renderer:
        """Load the renderer once. Raises UserError if conversations cannot be converted to exact tokens."""
        if self._renderer is None:
            renderer = await self.load()
            self._context = await self._source.context_length()
            vocabulary = renderer.tokenizer.vocabulary
            self._largest = max(vocabulary.values()) + PADDING
            if isinstance(self._source, SampledByFunction):
                self._source.set_vocabulary(vocabulary[token] for token in renderer.tokenizer.control)
            self._renderer = renderer
        return self._renderer

    async def load(self) -> Renderer:
        """Load the renderer without calling the server; raises as `renderer`."""
        if self._loaded is None:
            self._loaded = await run_in_thread(self._make_renderer)
        return self._loaded

    async def sample(self, sampling: Sampling) -> Sampled:
        """Send one bare request; raises as `attempt`."""
        sampled = await self._source.sample(sampling, ChatRequest(()))
        return Sampled(sampled.ids.tolist(), sampled.logprobs.tolist(), sampled.finish, sampled.after, sampled.model)

    async def weights(self) -> int | None:
        """Return the current version of the server's weights, or None if it does not report it."""
        return await self._source.weights()

    def hear(self, version: int) -> None:
        """Record a version that another process got in a response."""
        if isinstance(self._source, VersionListener):
            self._source.hear(version)

    async def context_length(self) -> int | None:
        """Return the maximum tokens of a conversation, or None if the server does not report it."""
        return await self._source.context_length()

    async def close(self) -> None:
        await self._source.close()

    def _load_renderer(self) -> Renderer:
        config = self.config
        # The model of a scripted server is only a name; without a tokenizer it uses the package's own.
        name = config.tokenizer or (None if config.kind.embedded else config.model)
        if not name and not config.kind.embedded:
            raise UserError(f"a server of type {config.type!r} needs a model or a tokenizer")
        return load_renderer(name, RendererSettings.from_mapping(config.renderer))

    async def _prompt(self, renderer: Renderer, transcript: Transcript, request: ChatRequest) -> RenderedPrompt:
        messages, tools = request.messages, request.tools
        try:
            if request.resent > RESENT:
                return await run_in_thread(partial(next_prompt, renderer, transcript, messages, tools))
            if (branch := transcript.holding(messages, tools)) is not None:
                extend = partial(extend_prompt, branch, renderer, messages, tools)
                large = _character_count(messages[len(branch.history) :]) > LARGE
                if (prompt := await run_in_thread(extend) if large else extend()) is not None:
                    return prompt
            anew = partial(render_prompt, renderer, messages, tools)
            large = (request.resent or _character_count(messages)) > LARGE
            return await run_in_thread(anew) if large else anew()
        except TemplateRefused as error:
            raise CannotRender(f"the chat template refuses the conversation: {error}", retryable=False) from error

    def _room(self, request: ChatRequest, prompt: RenderedPrompt, transcript: Transcript) -> int:
        """Return the maximum number of tokens of this turn."""
        size, room = len(prompt.ids), [request.max_tokens] if request.max_tokens else []
        if (bound := request.max_trajectory_tokens) is not None:
            room.append(bound - size)
            if room[-1] < 1:
                raise TrajectoryFull(size, bound)
        if self._context is not None:
            room.append(self._context - size)
            if room[-1] < 1:
                message = f"the prompt has {size} tokens, the model's context {self._context}"
                raise ContextLengthExceeded(message, size, self._context)
        if self._response is not None:
            so_far = size - transcript.first_sampled(prompt)
            room.append(self._response - so_far)
            if room[-1] < 1:
                raise ContextLengthExceeded(f"the response has {so_far} tokens, and at most {self._response} may be")
        return min(room, default=DEFAULT_MAX_TOKENS)

    def _reply(self, step: Step, generation: Generation, message: dict[str, Any], texts: list[str] | None) -> ChatReply:
        counts = {"prompt_tokens": len(step.prompt), "completion_tokens": len(step.completion)}
        details = {"prompt_tokens_details": {"cached_tokens": min(generation.cached, len(step.prompt))}}
        called = bool(message.get("tool_calls")) and step.finish == "stop"
        return ChatReply(
            message=message,
            finish_reason="tool_calls" if called else step.finish,
            usage={**counts, "total_tokens": sum(counts.values()), **(details if generation.cached else {})},
            model=generation.model or self.config.model,
            server_type=self.config.type,
            logprobs=None if texts is None else step.logprobs.tolist(),
            tokens=texts,
            sampled=LedgerEntry.from_step(step),
            sampling=generation.sampling,
            timing=generation.timing,
        )


def _encode_prompt(renderer: Renderer, text: str) -> list[int]:
    """Return the tokens of a text that is a whole prompt. Raises `CannotRender` if the tokenizer fails on it."""
    try:
        return renderer.tokenizer.encode(text)
    except TemplateRefused as error:
        raise CannotRender(f"the prompt cannot become tokens: {error}", retryable=False) from error


def _character_count(value: object) -> int:
    """Return the number of characters of all texts in messages: content, reasoning and calls are all rendered."""
    if isinstance(value, str):
        return len(value)
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_character_count, children))


def cut_message(tokenizer: Tokenizer, completion: Sequence[int]) -> dict[str, Any]:
    """Return the message of a turn that was cut: text alone, because a call in it may be incomplete."""
    reasoning, content = without_reasoning(tokenizer.decode(completion).rstrip("\ufffd"))
    message: dict[str, Any] = {"role": "assistant", "content": content}
    return {**message, "reasoning_content": reasoning} if reasoning else message


def assistant_message(parsed: Parsed, history: Sequence[Message]) -> dict[str, Any]:
    """Return the message of a turn that follows `history`.

    Every call gets an id that is unique in the conversation. A call that cannot be executed keeps the model's text,
    with the problem, which the model gets as its result.
    """
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        turn = sum(message.get("role") == "assistant" for message in history)
        used = {str(call.get("id")) for message in history for call in message.get("tool_calls") or ()}
        message["tool_calls"] = calls = []
        free = 0
        for call_index, call in enumerate(parsed.calls, turn * 1000):
            identity = call.id or ""
            if not identity or identity in used:
                free = max(call_index, free)  # smaller ones were tried for the previous calls
                while (identity := f"c{free:0{_ID_LENGTH - 1}d}") in used:
                    free += 1
            used.add(identity)
            calls.append(_call_object(call, identity))
    return message


def _call_object(call: ParsedCall, identity: str) -> dict[str, Any]:
    arguments = call.raw if call.arguments is None else json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    problem = {} if call.problem is None else {"error": call.problem}
    return {"id": identity, "type": "function", "function": function, **problem}
