"""A model server as the rest of the program sees it: a request, a reply, two protocols, a configuration.

Owns the plain types that cross the room's door. Leaves sending to `transport`, repeating to `retry`, the choice among
servers to `pool`, and the making of clients to `factory`. These types are dataclasses and not pydantic models because
they are made for every model call.
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
from hermes_rl.tokens.transcript import Step, Transcript, WeightVersions

Message = Mapping[str, Any]
"""One message as the chat-completions API has it."""


class Secret:
    """A value that may be sent to a server but never shown: neither `repr` nor `str` reveals it."""

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
    """The configuration of one server, with its secrets resolved."""

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
    """The path on which a token-level server tells the version of its weights; None: the usual one of its type."""
    deviate: float = 0.0
    """Share of a group's rollouts that a `scripted` server plays wrong."""
    seed: int = 0
    """Seed of the deviations."""
    naming: Callable[[], str] | None = None
    """Returns the model's name for each request, where a trainer changes it with the weights."""
    version: Callable[[], int | None] | None = None
    """Returns the version of the weights, where a trainer tells it; None, or an answer of None: ask the server."""

    def current(self) -> ServerConfig:
        """Return the configuration with the model's name as it is now."""
        return self if self.naming is None else replace(self, model=self.naming())


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Thinking settings; how they travel depends on the server (see `wire`)."""

    effort: str | None = None
    """none, minimal, low, medium, high or xhigh; wins over `max_tokens`, as only one may be sent."""
    max_tokens: int | None = None
    """Tokens that the model may spend on thinking."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call. A field that is None is not sent, so that the server's own default holds."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tool schemas as the API has them: ``{"type": "function", "function": {...}}``."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Tokens of this one turn."""
    seed: int | None = None
    """Seed of this one call; see `drawn_seed`."""
    stop: Sequence[str] | None = None
    extra_body: Mapping[str, Any] | None = None
    """Merged into the top level of the JSON body, last, as the openai client does."""
    reasoning: ReasoningOptions | None = None
    """None: no thinking field is sent. `ReasoningOptions()`: thinking is switched on, without a limit."""
    logprobs: bool = False
    """Ask for the log-probability of each sampled token."""
    rollout_id: str | None = None
    """Calls with one id go to one server, because that server has the rollout's prefix in its cache."""
    transcript: Transcript | None = None
    """The tokens that the rollout has sampled so far; a token-level server extends them and adds its own."""
    prompt: str | Sequence[int] | None = None
    """A text or token ids to continue as they are, instead of messages; only token-level servers can do that."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How one call spent its seconds. Only `generating` is working time of an agent."""

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
    """A digest of the tokens that a token-level server sampled in one call, to be compared with what is trained on."""

    count: int
    """Tokens."""
    digest: bytes
    """Digest of their ids and log-probabilities."""
    prompt: int
    """Tokens of the prompt that was sent."""
    prompt_check: int
    """CRC-32 of the ids of that prompt."""
    weights: WeightVersions = field(default_factory=WeightVersions)

    @classmethod
    def of(cls, step: Step) -> LedgerEntry:
        """Make the entry of a step."""
        digest = sampled_digest(step.completion, step.logprobs)
        return cls(len(step.completion), digest, len(step.prompt), zlib.crc32(step.prompt), step.weights)


_THINKING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


def without_thinking(text: str) -> str:
    """Remove the thinking that some servers leave in front of an answer."""
    return _THINKING.sub("", text)


def drawn_seed(seed: int | None, *place: str | int) -> int | None:
    """Draw the sampling seed of one request, 31 bits, from a rollout's seed and the request's place in it.

    An engine that makes one generator per request gives token *k* of two requests with one seed the same noise. Two
    turns of a rollout would then not be drawn independently, and their trajectory not from the policy. The same
    request, sent again after a failure, has the same place and keeps its seed. Without a seed there is none to draw.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sampled_digest(ids: array[int], logprobs: array[float]) -> bytes:
    """Return 16 bytes that stand for sampled tokens and their log-probabilities."""
    return hashlib.blake2b(ids.tobytes() + logprobs.tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The server's answer; `message` is the assistant message exactly as the server sent it."""

    message: dict[str, Any]
    """Has everything that came: content, tool_calls, reasoning_content, reasoning, reasoning_details."""
    finish_reason: str | None
    usage: dict[str, Any]
    """Empty where the server counted nothing."""
    model: str
    """The name that the server gives, else the one in the request."""
    server_type: str
    logprobs: list[float] | None = None
    """One per sampled token, where they were asked for and sent."""
    tokens: list[str] | None = None
    """The text of each sampled token, beside `logprobs`."""
    sampled: LedgerEntry | None = None
    """Only token-level servers give it."""
    sampling: Mapping[str, Any] | None = None
    """The parameters of sampling that a token-level server got, under its own names, without seed and limit."""
    attempts: int = 1
    timing: Timing = Timing()


class ContextLengthExceeded(HermesRLError):
    """The conversation no longer fits the model's context. That is the policy's doing and therefore no `Failure`."""


class ChatServer(Protocol):
    """Answers chat requests and repeats failed attempts by itself; `client.ModelClient` is the implementation."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answer; raises `ServerFailure` when every attempt failed, or `ContextLengthExceeded`."""
        ...

    async def close(self) -> None:
        """Release connections and whatever was started; may be called twice."""
        ...


class Backend(Protocol):
    """One server behind a client. It tries once: the client alone decides whether a call is repeated."""

    @property
    def config(self) -> ServerConfig: ...

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Send once; raises `retry.AttemptFailed` or `ContextLengthExceeded`."""
        ...

    async def close(self) -> None:
        """Release connections and whatever was started; may be called twice."""
        ...
