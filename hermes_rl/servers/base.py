"""What a model server is to the rest of the program: a request, a reply, a protocol, a configuration.

Owns the plain types that cross the room's door. Leaves the transport (`openai`), what is tried again
(`retry`), which of several servers answers (`balance`) and the making of roles (`factory`) to others.
These types are dataclasses, not pydantic models: they are built once per model call.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hermes_rl.errors import HermesRLError
from hermes_rl.tokens.transcript import Step, Transcript, Weights

Message = Mapping[str, Any]
"""One message as the chat-completions API has it."""


class Secret:
    """A value that may be sent to a server and never shown: neither `repr` nor `str` reveals it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The value itself; call it only where the value leaves for its server."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Secret cannot be pickled")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server of a role, with its secrets resolved."""

    type: str
    """openai, vllm, sglang, atropos or scripted."""
    base_url: str | None = None
    """Address that `/chat/completions` is appended to; None for `scripted`."""
    model: str = ""
    api_key: Secret | None = None
    """None sends no Authorization header."""
    headers: Mapping[str, Secret] = field(default_factory=dict)
    timeout: float = 1200.0
    """Seconds for one attempt of a call, from sending to the last byte."""
    max_concurrency: int = 512
    """Requests in flight to this server."""
    tokenizer: str | None = None
    """Hub name or path; None is the model's own (the small one for `scripted`)."""
    renderer: Mapping[str, Any] | None = None
    """Settings of the renderer, for token-level types."""
    weights_path: str | None = None
    """Where a token-level server tells the version of its weights; None: where its type usually does."""
    deviate: float = 0.0
    """Share of a group's rollouts that a `scripted` server plays wrong."""
    seed: int = 0
    """Seed of the deviations."""
    naming: Callable[[], str] | None = None
    """Says the model's name for each request, where a trainer changes it with the weights."""
    version: Callable[[], int | None] | None = None
    """Says the version of the weights, where a trainer tells it; None, or an answer of None: the server is asked."""

    def current(self) -> ServerConfig:
        """The configuration with the model's name as it is now."""
        return self if self.naming is None else replace(self, model=self.naming())


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking settings; how they travel depends on the server (see `wire`)."""

    effort: str | None = None
    """none, minimal, low, medium, high or xhigh; wins over `max_tokens`, as only one may be sent."""
    max_tokens: int | None = None
    """Tokens that the model may spend on thinking."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call. What is None is not sent, so that the server's own default holds."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tool schemas as the API has them: ``{"type": "function", "function": {...}}``."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Tokens of this one turn."""
    seed: int | None = None
    """Of this one call; see `drawn_seed`."""
    stop: Sequence[str] | None = None
    extra_body: Mapping[str, Any] | None = None
    """Merged into the top level of the JSON body, last, as the openai client does."""
    reasoning: Reasoning | None = None
    """None: no thinking field is sent. `Reasoning()`: thinking is switched on, without a limit."""
    logprobs: bool = False
    """Ask for the log-probability of each sampled token."""
    rollout_id: str | None = None
    """Calls of one rollout go to one server of the role, for its prefix cache."""
    transcript: Transcript | None = None
    """What the rollout has sampled so far; a token-level server goes on from it, and adds to it."""
    prompt: str | Sequence[int] | None = None
    """A text, or token ids, that is gone on with as it is, instead of messages; token-level servers alone can."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the seconds of one call went. Only `generating` is working time of an agent."""

    queued: float = 0.0
    """Waiting for a free place among `max_concurrency`."""
    retrying: float = 0.0
    """Failed attempts and the pauses between them."""
    generating: float = 0.0
    """The attempt that succeeded, from sending to the last byte, without pauses."""
    paused: float = 0.0
    """The server had stopped to take new weights."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What a token-level server said that it sampled in one call, kept to be compared with what is trained on."""

    count: int
    """Tokens."""
    digest: bytes
    """Of their ids and log-probabilities."""
    prompt: int
    """Tokens of the prompt that was sent."""
    prompt_check: int
    """CRC-32 of the ids of that prompt."""
    weights: Weights = field(default_factory=Weights)

    @classmethod
    def of(cls, step: Step) -> LedgerEntry:
        """What a step is to be found with again."""
        digest = sampled_digest(step.completion, step.logprobs)
        return cls(len(step.completion), digest, len(step.prompt), zlib.crc32(step.prompt), step.weights)


_THINKING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


def without_thinking(text: str) -> str:
    """An answer without the thinking that some servers leave in front of it."""
    return _THINKING.sub("", text)


def drawn_seed(seed: int | None, *place: str | int) -> int | None:
    """The sampling seed of one request, 31 bits, drawn from a rollout's seed and the request's place in it.

    An engine that makes one generator per request gives token *k* of two requests with one seed the same noise. Two
    turns of a rollout would then not be drawn independently, and their trajectory not from the policy. The same
    request, sent again after a failure, has the same place and keeps its seed. Without a seed there is none to draw.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sampled_digest(ids: array[int], logprobs: array[float]) -> bytes:
    """16 bytes that stand for sampled tokens and their log-probabilities."""
    return hashlib.blake2b(ids.tobytes() + logprobs.tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The server's answer; `message` is the assistant message exactly as the server sent it."""

    message: dict[str, Any]
    """Holds content, tool_calls, reasoning_content, reasoning, reasoning_details: whatever came."""
    finish_reason: str | None
    usage: dict[str, Any]
    """Empty where the server counted nothing."""
    model: str
    """As the server names it, else as it was asked for."""
    server_type: str
    logprobs: list[float] | None = None
    """One per sampled token, where they were asked for and sent."""
    tokens: list[str] | None = None
    """The text of each sampled token, beside `logprobs`."""
    sampled: LedgerEntry | None = None
    """From token-level servers."""
    sampling: Mapping[str, Any] | None = None
    """How a token-level server was asked to sample, in its own terms, without seed and limit of tokens."""
    attempts: int = 1
    timing: Timing = Timing()


class ContextLengthExceeded(HermesRLError):
    """The conversation no longer fits the model's context. The policy's doing, hence not a `Failure`."""


class ChatServer(Protocol):
    """Whatever answers chat requests with all its retries done; `balance.Role` is the one in use."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answer; raises `ServerFailure` when every attempt failed, or `ContextLengthExceeded`."""
        ...

    async def close(self) -> None:
        """Release connections and whatever was started; may be called twice."""
        ...


class Backend(Protocol):
    """One server behind a role. It tries once: what is tried again is decided by the role alone."""

    @property
    def config(self) -> ServerConfig: ...

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Send once; raises `retry.AttemptFailed` or `ContextLengthExceeded`."""
        ...

    async def close(self) -> None:
        """Release connections and whatever was started; may be called twice."""
        ...
