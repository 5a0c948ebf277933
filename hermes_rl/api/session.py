"""`Session`: one rollout whose turns come from the caller, one `step` at a time.

It is a rollout like any other, with a policy whose answers wait for `step`: tools, simulated user, budgets, endings and
rewards are the spec's. Owns the hand-over between the rollout and the one who steps.
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
from hermes_rl.rollouts.rollout import ALONE, Encoder, Rollout
from hermes_rl.runs.exact import renderer_of, tokenizer_of
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
from hermes_rl.threads import end_tasks
from hermes_rl.tokens.load import renderer_for
from hermes_rl.tokens.rendering import Renderer, RendererRefused, RendererSettings
from hermes_rl.tokens.tokenizer import Tokenizer, TokenizerUnavailable

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """What the policy is asked now; `Session.step` answers it."""

    messages: list[Message]
    """The whole conversation so far."""
    tools: list[dict[str, Any]]
    """OpenAI schemas of the tools that may be called."""
    max_tokens: int | None
    """Of this turn; None: no bound."""
    prompt_ids: list[int] | None = None
    """The conversation as tokens; None where there is no tokenizer."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end a turn."""
    seat: str = ""
    """Who of several agents speaks, whose conversation this is."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the caller stepped with: a message, or the tokens of one."""

    message: Message | None = None
    ids: array[int] | None = None
    logprobs: array[float] | None = None
    finish: str = "stop"
    version: int | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """A turn that waits for its answer, and the request that token ids have to answer."""

    turn: SessionTurn
    sampling: Sampling | None
    """None where there is no tokenizer."""
    answer: asyncio.Future[_Answer]


class _Said(Exception):
    def __init__(self, message: Message) -> None:
        self.message = message


class Stepped:
    """The policy of a session: it asks whoever steps, and waits for the answer.

    It is a `Backend` for messages, and the `TokenSource` of a token server where there is a tokenizer. Seats that speak
    at the same time are asked one after the other.
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
        """What is asked; who asked may have been ended meanwhile."""
        self.unknown_logprobs = False
        """Whether some token was given without its log-probability."""

    @classmethod
    async def make(
        cls, spec: Spec, tokenizer: Any, renderer: str | Mapping[str, Any] | None, context: int | None
    ) -> Stepped:
        """With the tokenizer that is given, else with that of the spec's policy where it can be had."""
        settings = RendererSettings.of({"name": renderer} if isinstance(renderer, str) else renderer)
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
        except _Said as said:
            message = said.message
        return ChatReply(
            message=message,
            finish_reason="tool_calls" if message.get("tool_calls") else "stop",
            usage={},
            model=self.config.model,
            server_type=self.config.type,
            timing=Timing(queued=time.monotonic() - started),
        )

    async def sample(self, sampling: Sampling, request: ChatRequest) -> Generation:
        """Return the ids that the caller stepped with. What it takes to find them is not the agent's working time."""
        started = time.monotonic()
        answer = await self._ask(request, sampling)
        if answer.message is not None:
            raise _Said(answer.message)
        assert answer.ids is not None
        known = answer.logprobs is not None
        self.unknown_logprobs = self.unknown_logprobs or not known
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
        """That of the session; None where a turn is a message."""
        return self._encoder.tokenizer

    async def encode(self, rollout: Rollout) -> None:
        """Give the rollout its tokens; log-probabilities only where all of them are known."""
        await self._encoder.encode(rollout)
        for seat in rollout.seats if self.unknown_logprobs else ():
            if seat.sequences is not None and seat.seat.role == ALONE.role:
                seat.sequences = [replace(sequence, sampled=None) for sequence in seat.sequences]

    async def weights(self) -> int | None:
        """Not known here; each step may carry a version."""
        return None

    async def context_length(self) -> int | None:
        """As it was given."""
        return self._context

    async def close(self) -> None:
        """There is nothing to close."""


class Session(AbstractAsyncContextManager["Session"]):
    """One rollout that is stepped from outside; close it, or leave its `async with`, to release its sandbox."""

    def __init__(self, stepped: Stepped, play: Callable[[], Coroutine[Any, Any, Rollout]]) -> None:
        self._stepped, self._play = stepped, play
        self._task: asyncio.Task[Rollout] | None = None
        self._asked: _Asked | None = None
        """The turn that was handed out last; None before the first."""
        self._closed = False
        self.rollout: Rollout | None = None
        """The rollout with its score, once it has ended; None before, and where the session was closed before."""

    async def start(self) -> SessionTurn | None:
        """Begin; the first turn, or None where the rollout ended before it (`rollout.error` says why).

        Raises:
            UserError: it was begun already, or something in the spec does not work for the row.
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
        """Answer the turn; the next one, or None where the rollout has ended (see `rollout`).

        The turn may be of another seat than the one before.

        Args:
            answer: an assistant message, its text, or the token ids of the turn, which become it exactly.
            logprobs: a log-probability for each of the ids, where they are known.
            finish: "stop", or "length" for ids that were cut; default: what the last of them says.
            version: of the weights that sampled the ids.

        Raises:
            UserError: no turn waits for an answer; it is not one; ids are given where there is no tokenizer; there are
                more of them than the turn may have, or one is not in the vocabulary. The turn then still waits.
        """
        waiting = self._asked.answer if self._asked is not None else None
        if self._task is not None and not (self.done or self._closed) and waiting is not None and waiting.cancelled():
            return await self._next(self._task)  # who asked was ended meanwhile, as where another seat has failed
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
        """Whether the rollout has ended."""
        return self.rollout is not None

    async def close(self) -> None:
        """End the rollout, if it has not ended, and wait until its sandbox is released; may be called twice."""
        self._closed = True
        if self._task is not None:
            await end_tasks([self._task])

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _sampled(
        self, answer: Any, logprobs: Sequence[float] | None, finish: str | None, version: int | None
    ) -> _Answer:
        sampling = self._asked.sampling if self._asked is not None else None
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
        known = None if logprobs is None else array("d", generation.logprobs)
        return _Answer(ids=array("i", generation.ids), logprobs=known, finish=generation.finish, version=version)

    async def _next(self, playing: asyncio.Task[Rollout]) -> SessionTurn | None:
        while True:
            asking = asyncio.create_task(self._stepped.turns.get())
            try:
                await asyncio.wait({asking, playing}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    self.rollout = playing.result()
                    return None
                asked = asking.result()
                if not asked.answer.cancelled():
                    self._asked = asked
                    return asked.turn
            finally:
                asking.cancel()
