"""Define `Session`: one rollout whose turns come from the caller, one `step` at a time.

It is an ordinary rollout with a policy whose replies wait for `step`: tools, simulated user, budgets, stop reasons and
rewards are the spec's. This module owns the handover between the rollout and the caller.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.rollouts.rollout import ONLY_SEAT, Encoder, Rollout
from hermes_rl.runs.renderer_check import renderer_of, tokenizer_of
from hermes_rl.servers.base import (
    CALLABLE,
    UNREADABLE,
    ChatReply,
    ChatRequest,
    Sampling,
    ServerConfig,
    Timing,
    generated,
)
from hermes_rl.servers.client import Generation, ModelClient, assistant, numbers_of
from hermes_rl.servers.token_level import TokenServer
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.spec.model import Spec
from hermes_rl.threads import OfThisProcess, end_tasks
from hermes_rl.tokens.load import renderer_for
from hermes_rl.tokens.rendering import Renderer, RendererRefused, RendererSettings
from hermes_rl.tokens.tokenizer import Tokenizer, TokenizerUnavailable

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """Request to the policy; `Session.step` responds to it."""

    messages: list[Message]
    """The whole conversation so far."""
    tools: list[dict[str, Any]]
    """OpenAI schemas of the tools that may be called."""
    max_tokens: int | None
    """Maximum tokens of this turn; None: no limit."""
    prompt_ids: list[int] | None = None
    """The conversation as tokens, or None if there is no tokenizer."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a turn."""
    seat: str = ""
    """The speaking seat if there are several agents; the conversation is the one that this seat sees."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """Reply given by the caller: a message, or its tokens."""

    message: Message | None = None
    ids: array[int] | None = None
    logprobs: array[float] | None = None
    finish: str = "stop"
    version: int | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A turn that waits for its reply, and the request that token ids must satisfy."""

    turn: SessionTurn
    sampling: Sampling | None
    """None if there is no tokenizer."""
    answer: asyncio.Future[_Answer]


class _Reply(Exception):
    def __init__(self, message: Message) -> None:
        self.message = message


class ExternalPolicy:
    """The policy of a session: it passes requests to the caller of `step`, and waits for the replies.

    It is a `Backend` for messages, and the `TokenSource` of a token server if there is a tokenizer. Concurrent seats
    are processed one after the other.
    """

    def __init__(self, renderer: Renderer | None, context: int | None, *, seats: bool = False) -> None:
        self.config, self._context = ServerConfig(CALLABLE, model="stepped"), context
        self._encoder = Encoder(
            renderer.tokenizer if renderer is not None else None, "the session has no tokenizer and no token ids"
        )
        self._tokens = TokenServer(self.config, self, lambda: renderer) if renderer is not None else None
        self.role = ModelClient("policy", [self], RetryPolicy(attempts=1))
        self._seats, self._alone = seats, asyncio.Lock()
        self.turns: asyncio.Queue[_Asked] = asyncio.Queue()
        """Pending requests; their rollout may have ended meanwhile."""
        self.unknown_logprobs = False
        """True if some token was given without its log-probability."""

    @classmethod
    async def make(
        cls, spec: Spec, tokenizer: Any, renderer: str | Mapping[str, Any] | None, context: int | None
    ) -> ExternalPolicy:
        """Return a policy with the given tokenizer, else with the spec's if available."""
        settings = RendererSettings.from_mapping({"name": renderer} if isinstance(renderer, str) else renderer)
        new = partial(cls, context=context, seats=bool(spec.agents))
        if tokenizer is not None:
            return new(await asyncio.to_thread(lambda: renderer_for(tokenizer, settings)))
        policy = spec.servers.get("policy")
        if not policy or not policy[0].kind.exact:
            return new(None)
        make = (lambda: renderer_of(spec)) if renderer is None else lambda: renderer_for(tokenizer_of(spec), settings)
        try:
            return new(await asyncio.to_thread(make))
        except (TokenizerUnavailable, RendererRefused):
            return new(None)

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Wait for the caller's turn."""
        started = time.monotonic()
        try:
            if self._tokens is not None:
                return await self._tokens.attempt(request)
            message = (await self._ask(request, None)).message
            assert message is not None, "without a tokenizer a turn is a message"
        except _Reply as reply:
            message = reply.message
        return ChatReply(
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else "stop",
            usage={},
            model=self.config.model,
            server_type=self.config.type,
            timing=Timing(queued=time.monotonic() - started),
        )

    async def sample(self, sampling: Sampling, request: ChatRequest) -> Generation:
        """Return the ids given by the caller. The time until then is not the agent's working time."""
        started = time.monotonic()
        answer = await self._ask(request, sampling)
        if answer.message is not None:
            raise _Reply(answer.message)
        assert answer.ids is not None
        has_logprobs = answer.logprobs is not None
        self.unknown_logprobs = self.unknown_logprobs or not has_logprobs
        run = Generation(ids=answer.ids, finish=answer.finish, before=answer.version, after=answer.version)
        run.logprobs = answer.logprobs if answer.logprobs is not None else array("d", bytes(8 * len(answer.ids)))
        run.timing = Timing(queued=time.monotonic() - started)
        return run

    async def _ask(self, request: ChatRequest, sampling: Sampling | None) -> _Answer:
        async with self._alone:
            answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
            turn = SessionTurn(
                messages=[dict(message) for message in request.messages],
                tools=[dict(tool) for tool in request.tools or ()],
                max_tokens=request.max_tokens if sampling is None else sampling.max_tokens,
                prompt_ids=None if sampling is None else sampling.prompt.tolist(),
                stop_ids=() if sampling is None else sampling.stop_ids,
                seat=(request.rollout_id or "").rpartition("@")[2] if self._seats else "",
            )
            self.turns.put_nowait(_Asked(turn, sampling, answer))
            return await answer

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the session; None if a turn is a message."""
        return self._encoder.tokenizer

    async def encode(self, rollout: Rollout) -> None:
        """Set the tokens of the rollout; log-probabilities only if all of them are known."""
        await self._encoder.encode(rollout)
        for seat in rollout.seats if self.unknown_logprobs else ():
            if seat.sequences is not None and seat.seat.role == ONLY_SEAT.role:
                seat.sequences = [replace(sequence, sampled=None) for sequence in seat.sequences]

    async def weights(self) -> int | None:
        """Return None: the version is unknown here; each step may contain one."""
        return None

    async def context_length(self) -> int | None:
        """Return the given context length."""
        return self._context

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Session(OfThisProcess, AbstractAsyncContextManager["Session"]):
    """One rollout that is stepped by the caller; close it, or leave its `async with`, to release its sandbox."""

    def __init__(self, stepped: ExternalPolicy, play: Callable[[], Coroutine[Any, Any, Rollout]]) -> None:
        self._stepped, self._play = stepped, play
        self._task: asyncio.Task[Rollout] | None = None
        self._latest_request: _Asked | None = None
        """The latest turn; None before the first."""
        self._closed = False
        self.rollout: Rollout | None = None
        """The rollout with its score after it has ended; None before, and if the session was closed before."""

    async def start(self) -> SessionTurn | None:
        """Start the rollout; return the first turn, or None if it ended before (`rollout.error` gives the cause).

        Raises:
            UserError: it was started already, or something in the spec does not work for the row.
        """
        if self._task is not None or self._closed:
            raise UserError("a session is started once; env.session gives another one")
        self._task = asyncio.create_task(self._play())
        return await self._next(self._task)

    async def step(
        self,
        answer: Message | str | Sequence[int],
        *,
        logprobs: Sequence[float] | None = None,
        finish: str | None = None,
        version: int | None = None,
    ) -> SessionTurn | None:
        """Respond to the turn; return the next one, or None if the rollout has ended (see `rollout`).

        The next turn may belong to another seat.

        Args:
            answer: an assistant message, its text, or the token ids of the turn, which are used exactly.
            logprobs: a log-probability for each of the ids, if known.
            finish: "stop", or "length" for ids that were cut; default: derived from the last id.
            version: version of the weights that sampled the ids.

        Raises:
            UserError: no turn waits for a reply; the reply is invalid; ids are given without a tokenizer; there are
                more ids than the turn allows, or one is outside the vocabulary. The turn then still waits.
        """
        waiting = self._latest_request.answer if self._latest_request is not None else None
        if self._task is not None and not (self.done or self._closed) and waiting is not None and waiting.cancelled():
            # the request was cancelled, for example because another seat has failed
            return await self._next(self._task)
        if self._task is None or waiting is None or waiting.done():
            raise UserError("no turn waits for an answer: the session has not been started, or has ended")
        if isinstance(answer, Mapping | str):
            if logprobs is not None:
                raise UserError("log-probabilities belong to token ids, not to a message")
            reply = _Answer(assistant(answer))
        else:
            reply = self._sampled(answer, logprobs, finish, version)
        waiting.set_result(reply)
        return await self._next(self._task)

    @property
    def done(self) -> bool:
        """True if the rollout has ended."""
        return self.rollout is not None

    async def close(self) -> None:
        """Stop the rollout if it has not ended, and wait until its sandbox is released; may be called twice."""
        self._closed = True
        if self._task is not None:
            await end_tasks([self._task])

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _sampled(
        self, answer: Any, logprobs: Sequence[float] | None, finish: str | None, version: int | None
    ) -> _Answer:
        sampling = self._latest_request.sampling if self._latest_request is not None else None
        if sampling is None:
            raise UserError("this session has no tokenizer, so a turn is a message: give env.session a `tokenizer`")
        try:
            ids = numbers_of(answer)
            values = [0.0] * len(ids) if logprobs is None else numbers_of(logprobs)
            ended = bool(ids) and ids[-1] in sampling.stop_ids
            cut = len(ids) >= sampling.max_tokens and not ended
            generation = sampling.checked(generated(ids, values, finish or ("length" if cut else "stop")))
        except UNREADABLE as error:
            raise UserError(f"step takes a message, a text, or token ids: {error}") from error
        sampled_logprobs = None if logprobs is None else array("d", generation.logprobs)
        return _Answer(
            ids=array("i", generation.ids), logprobs=sampled_logprobs, finish=generation.finish, version=version
        )

    async def _next(self, playing: asyncio.Task[Rollout]) -> SessionTurn | None:
        while True:
            asking = asyncio.create_task(self._stepped.turns.get())
            try:
                await asyncio.wait({asking, playing}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    self.rollout = playing.result()
                    return None
                turn_request = asking.result()
                if not turn_request.answer.cancelled():
                    self._latest_request = turn_request
                    return turn_request.turn
            finally:
                asking.cancel()
