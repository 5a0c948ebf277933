"""Functions of the caller as model servers: token ids in and out, or messages in and out.

Owns what HTTP and a dialect do for a real server: it checks the answers, makes a failed attempt of every exception, and
notes the versions of the weights around each piece. Leaves repeating to `retry`, and the tokens of a conversation to
`token_level`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.servers.asking import Generation
from hermes_rl.servers.base import ChatReply, ChatRequest, ContextLengthExceeded, ServerConfig, Timing
from hermes_rl.servers.generation import ABORT, Sampled, Sampling, generated
from hermes_rl.servers.retry import AttemptFailed
from hermes_rl.servers.wire import Malformed

SampleFunction = Callable[[list[int], Sampling], Awaitable[Sampled]]
"""Samples what follows the ids of a prompt."""
ChatFunction = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], Awaitable[Mapping[str, Any] | str]]
"""Answers messages, with the schemas of the tools that may be called."""
CALLABLE = "callable"
"""The type of such a server in records."""
_MOST_ABORTS = 1000


class SampledByFunction:
    """Tokens that a function samples: a `TokenSource`.

    Args:
        function: the function.
        context: tokens of the longest conversation; None: not known.
        version: returns the version of the weights, for answers that do not tell it.
    """

    def __init__(self, function: SampleFunction, context: int | None, version: Callable[[], int | None]) -> None:
        self._function, self._context, self._version = function, context, version
        self._heard: int | None = None
        """The newest version that an answer has told so far."""

    async def sample(self, sampling: Sampling, request: ChatRequest) -> Generation:
        """Call the function, and again where it broke off for new weights; raises `AttemptFailed`."""
        generation = Generation(before=self._now())
        generation.sampling = _asked(sampling)
        for _ in range(_MOST_ABORTS):
            piece, timing = await self._piece(sampling.after(generation.ids) if generation.ids else sampling)
            generation.append(piece, timing)
            self._note(piece.version, generation)
            if piece.finish != ABORT:
                return generation
            if len(generation.ids) >= sampling.max_tokens:
                generation.finish = "length"
                return generation
            if not piece.ids:
                await asyncio.sleep(0.1)
        raise AttemptFailed(f"the policy's function broke off {_MOST_ABORTS} times")

    async def weights(self) -> int | None:
        """Return the newest version that the trainer or an answer has told."""
        return self._now()

    async def context_length(self) -> int | None:
        """Return the length that the caller gave."""
        return self._context

    async def close(self) -> None:
        """There is nothing to close."""

    def _now(self) -> int | None:
        told = [version for version in (self._version(), self._heard) if version is not None]
        return max(told, default=None)

    def _note(self, told: int | None, generation: Generation) -> None:
        """Note a version. Versions only rise: the known one is a lower bound, unless the answer tells a lower one."""
        if told is None:
            generation.after = self._now()
        else:
            self._heard = told if self._heard is None else max(told, self._heard)
            generation.after = told if generation.after is None else max(told, generation.after)
            generation.before = told if generation.before is None else min(told, generation.before)

    async def _piece(self, sampling: Sampling) -> tuple[Sampled, Timing]:
        started = time.monotonic()
        answer = await _called(self._function, sampling.prompt.tolist(), sampling)
        if not isinstance(answer, Sampled):
            raise UserError(
                f"the policy's function returned {type(answer).__name__}: return hermes_rl.Sampled(ids, logprobs, "
                "finish), with a log-probability for each id"
            )
        try:
            ids, logprobs = numbers_of(answer.ids, int), numbers_of(answer.logprobs, float)
            piece = generated(ids, logprobs, answer.finish, answer.version, answer.model)
        except (Malformed, TypeError, ValueError) as error:
            raise AttemptFailed(f"the policy's function gave a wrong answer: {error}") from error
        return piece, Timing(generating=time.monotonic() - started)


class AnsweredByFunction:
    """Messages that a function answers: a `Backend`."""

    def __init__(self, config: ServerConfig, function: ChatFunction) -> None:
        self._config, self._function = config, function

    @property
    def config(self) -> ServerConfig:
        return self._config

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Call the function once; raises `AttemptFailed`."""
        started = time.monotonic()
        tools = [dict(tool) for tool in request.tools] if request.tools else None
        message = await _called(self._function, [dict(message) for message in request.messages], tools)
        return ChatReply(
            message=assistant(message),
            finish_reason="tool_calls" if isinstance(message, Mapping) and message.get("tool_calls") else "stop",
            usage={},
            model=self._config.model,
            server_type=self._config.type,
            timing=Timing(generating=time.monotonic() - started),
        )

    async def close(self) -> None:
        """There is nothing to close."""


def assistant(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Make an assistant message from a message or from its text.

    Raises:
        UserError: `given` is neither.
    """
    if isinstance(given, str):
        return {"role": "assistant", "content": given}
    known = isinstance(given, Mapping) and given.get("role", "assistant") == "assistant"
    if not known or not {"content", "tool_calls"} & given.keys():
        raise UserError(
            'an answer is a text, or an assistant message such as {"content": "…", "tool_calls": […]}, not '
            f"{given!r:.200}"
        )
    return {"role": "assistant", "content": None, **given}


async def _called(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    """Call a function; what it raises is a failed attempt, except for errors that say that the call was wrong."""
    try:
        return await function(*arguments)
    except (AttemptFailed, ContextLengthExceeded, UserError):
        raise
    except Exception as error:
        raise AttemptFailed(f"the policy's function raised {type(error).__name__}: {error}") from error


def numbers_of(values: Any, kind: Callable[[Any], Any]) -> list[Any]:
    """Turn a list, an array or a tensor into a list of Python's own numbers."""
    listed: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else values
    return [kind(value) for value in listed]


def _asked(sampling: Sampling) -> dict[str, Any]:
    """Return the parameters that shape the distribution, for records."""
    given = {"temperature": sampling.temperature, "top_p": sampling.top_p, **sampling.further}
    return {name: value for name, value in given.items() if value is not None}
