"""Define the interface of a model server: request, reply, two protocols and a configuration, and the JSON of both APIs.

The types are dataclasses and not pydantic models because one is created for every model call.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

from hermes_rl.errors import HermesRLError, ServerFailure
from hermes_rl.spec.server_types import CHAT_PARTS, ServerType, refused_part, server_type
from hermes_rl.tokens.transcript import Step, TokenLogprobs, Transcript, WeightVersions, format_ids, ids, numbers
from hermes_rl.values import LARGEST_COUNT, MOST_VALUES, is_number, parse_count, read_bounded, write_message

T = TypeVar("T")

Message = Mapping[str, Any]
"""One message in the form of the chat-completions API."""


POLICY = "policy"
"""Role of the model that acts."""
CALLABLE = "callable"
"""Type of a function in the caller's process that acts as a server."""


class Secret:
    """A value that may be sent to a server but never shown: neither `repr` nor `str` reveals it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the value itself; call it only immediately before the value is sent to its server."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash((Secret, self._value))

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a Secret cannot be pickled")


SESSION_HEADER = "X-Session-ID"
"""Header with the rollout of a call, so that a router can send all calls of a rollout to one engine. It is optional."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configuration of one server, with its secrets resolved."""

    type: str
    """Type as in a spec (see `hermes_rl.spec.server_types`), or `CALLABLE`."""
    base_url: str | None = None
    """Address that `/chat/completions` is appended to; None for `scripted`."""
    model: str = ""
    api_key: Secret | None = None
    """API key; None sends no Authorization header."""
    headers: Mapping[str, Secret] = field(default_factory=dict)
    timeout: float = 1200.0
    """Timeout in seconds of one attempt of a call, from sending to the last byte."""
    max_concurrency: int = 512
    """Maximum number of requests in flight to this server."""
    tokenizer: str | None = None
    """Hub name or path; None is the model's own (the small one for `scripted`)."""
    renderer: Mapping[str, Any] | None = None
    """Settings of the renderer, for token-level types."""
    weights_path: str | None = None
    """Path at which a token-level server reports the version of its weights; None: the usual one of its type."""
    prices: Mapping[str, float | None] | None = None
    """US dollars per million `prompt` and `completion` tokens; None: unknown."""
    session_header: bool = True
    """If True, send `SESSION_HEADER` with each call of a rollout."""
    error_rate: float = 0.0
    """Fraction of a group's rollouts that a `scripted` server runs incorrectly."""
    seed: int = 0
    """Seed of the deviations."""
    naming: Callable[[], str] | None = None
    """Returns the model's name for each request, if a trainer changes it with the weights."""
    version: Callable[[], int | None] | None = None
    """Returns the version of the weights, if a trainer sets it; if None, or if it returns None, the server is asked."""

    @property
    def kind(self) -> ServerType:
        """Properties of its type; none for a function."""
        return ServerType(parts=CHAT_PARTS) if self.type == CALLABLE else server_type(self.type)

    def current(self) -> ServerConfig:
        """Return the configuration with the current name of the model."""
        return self if self.naming is None else replace(self, model=self.naming())


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Thinking settings; their form in a request depends on the server (see `_add_thinking`)."""

    effort: str | None = None
    """none, minimal, low, medium, high or xhigh; overrides `max_tokens`, because only one may be sent."""
    max_tokens: int | None = None
    """Maximum number of thinking tokens."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call. A field that is None is not sent, so that the server's own default applies."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tool schemas in the form of the API: ``{"type": "function", "function": {...}}``."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    """Maximum tokens of this turn."""
    max_trajectory_tokens: int | None = None
    """Maximum tokens of the prompt and this turn together. Only token-level servers, which count the prompt, enforce
    it.
    """
    seed: int | None = None
    """Seed of this call; see `drawn_seed`."""
    stop: Sequence[str] | None = None
    extra_body: Mapping[str, Any] | None = None
    """Fields merged into the top level of the JSON body, last, as in the openai client."""
    reasoning: ReasoningOptions | None = None
    """None: no thinking field is sent. `ReasoningOptions()`: thinking is enabled without a limit."""
    logprobs: bool = False
    """If True, request the log-probability of each sampled token."""
    rollout_id: str | None = None
    """Id of the rollout. All its calls go to one server, which has the rollout's prefix in its cache."""
    resent: int = 0
    """Bytes of the agent program's request that contains the whole conversation; 0: the loop wrote the messages."""
    transcript: Transcript | None = None
    """Tokens of the rollout so far; a token-level server extends them and adds its samples."""
    prompt: str | Sequence[int] | None = None
    """Text or token ids to continue unchanged, instead of messages; requires a token-level server."""
    scored: int | None = None
    """Sample nothing; return the log-probability of each id of `prompt`, and this number of most probable tokens."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Use of time in one call, in seconds. Only `generating` is working time of an agent."""

    queued: float = 0.0
    """Waiting for a slot among `max_concurrency`."""
    retrying: float = 0.0
    """Failed attempts and the pauses between them."""
    generating: float = 0.0
    """The successful attempt, from sending to the last byte, without pauses."""
    paused: float = 0.0
    """Time for which the server was paused to load new weights."""


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """Digest of the tokens that a token-level server sampled in one call, for comparison with the trained tokens."""

    count: int
    """Number of sampled tokens."""
    digest: bytes
    """Digest of their ids and log-probabilities."""
    prompt: int
    """Number of tokens of the prompt that was sent."""
    prompt_check: int
    """CRC-32 of the ids of that prompt."""
    weights: WeightVersions = field(default_factory=WeightVersions)

    @classmethod
    def from_step(cls, step: Step) -> LedgerEntry:
        """Return the entry of a step."""
        digest = sampled_digest(step.completion, step.logprobs)
        return cls(len(step.completion), digest, len(step.prompt), zlib.crc32(step.prompt), step.weights)


_THINKING = re.compile(r"\A\s*<think>.*?</think>\s*", re.DOTALL)


def without_thinking(text: str) -> str:
    """Remove the thinking that some servers leave at the start of a reply."""
    return _THINKING.sub("", text)


def drawn_seed(seed: int | None, *position: str | int) -> int | None:
    """Return the sampling seed of one request, 31 bits, from a rollout's seed and the request's position in it.

    An engine with one generator per request gives token *k* of two requests with the same seed the same noise. Two
    turns of a rollout would then not be independent samples, and their trajectory not a sample of the policy. A retried
    request has the same position and keeps its seed. Without a seed, None is returned.
    """
    if seed is None:
        return None
    digest = hashlib.blake2b(repr((seed, *position)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def sampled_digest(ids: array[int], logprobs: array[float]) -> bytes:
    """Return a 16-byte digest of sampled tokens and their log-probabilities."""
    return hashlib.blake2b(ids.tobytes() + logprobs.tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class ChatReply:
    """Reply of a server; `message` is the assistant message exactly as the server sent it."""

    message: dict[str, Any]
    """All received fields: content, tool_calls, reasoning_content, reasoning, reasoning_details."""
    finish_reason: str | None
    usage: dict[str, Any]
    """Token counts; empty if the server counted nothing."""
    model: str
    """Name given by the server, else the one in the request."""
    server_type: str
    logprobs: list[float] | None = None
    """One value per sampled token, if requested and sent."""
    tokens: list[str] | None = None
    """Text of each sampled token, parallel to `logprobs`."""
    sampled: LedgerEntry | None = None
    """Set only by token-level servers."""
    sampling: Mapping[str, Any] | None = None
    """Sampling parameters that a token-level server received, under its own names, without seed and limit."""
    scored: TokenLogprobs | None = None
    """Result of a request with `scored`."""
    prompt: Sequence[int] = ()
    """The scored tokens; empty for a sampled reply."""
    numbers: Sequence[float] = ()
    """Result of a reward model, which returns nothing else."""
    attempts: int = 1
    timing: Timing = Timing()


class ContextLengthExceeded(HermesRLError):
    """The conversation exceeds the model's context. The policy caused this, so it is not a `Failure`.

    `size` is the prompt's size and `context` the model's limit, in tokens, if known.
    """

    def __init__(self, message: str = "", size: int | None = None, context: int | None = None) -> None:
        super().__init__(message)
        self.size, self.context = size, context


class TrajectoryFull(ContextLengthExceeded):
    """The prompt of a turn, of `size` tokens, leaves no room within the limit of the trajectory."""

    def __init__(self, size: int | str, bound: int) -> None:
        super().__init__(f"the prompt has {size} tokens, and agent.max_trajectory_tokens is {bound}")


class ChatServer(Protocol):
    """Serve chat requests and retry failed attempts; implemented by `client.ModelClient`."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Return the reply. Raises `ServerFailure` if every attempt failed, or `ContextLengthExceeded`."""

    async def close(self) -> None:
        """Release connections and other started resources; may be called twice."""


@runtime_checkable
class ContextLengthProvider(Protocol):
    """A server, or a client of several, that may know the maximum length of a conversation."""

    async def context_length(self) -> int | None:
        """Return the maximum tokens of a conversation, or None if unknown."""


class Backend(Protocol):
    """One server of a client. It makes one attempt: only the client decides about retries."""

    @property
    def config(self) -> ServerConfig: ...

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Send once. Raises `transport.AttemptFailed` or `ContextLengthExceeded`."""

    async def close(self) -> None:
        """Release connections and other started resources; may be called twice."""


# -------------------------------------------------------------------------- A chat request and its reply as JSON

LARGEST_REPLY = 64 << 20
"""Maximum bytes of a reply, for any request."""
LARGEST_SCORES = 512 << 20
"""Maximum bytes of a reply with the log-probabilities of a prompt."""
_OPTIONAL = ("temperature", "top_p", "max_tokens", "seed", "stop")
_DEFAULT_EFFORT = "medium"
_BROKEN_OFF = frozenset({"abort", "aborted", "cancelled", "canceled", "error", "timeout"})
"""Finish reasons of a reply that the server interrupted: a partial reply is discarded."""


class Malformed(ValueError):
    """A server's response is not a chat completion."""


class ErrorBody(Malformed):
    """An error inside a response with status 200, as sent by some gateways."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


def require_parts(request: ChatRequest, parts: frozenset[str], server: str) -> None:
    """Raise `ServerFailure` if a message has a part of another type, which would be dropped silently."""
    if (refused := refused_part(request.messages, parts)) is not None:
        rollout = f" of the rollout {request.rollout_id}" if request.rollout_id else ""
        failure = ServerFailure(f"{server} cannot be sent the conversation{rollout}: {refused}")
        failure.refused = True
        raise failure


def chat_body(request: ChatRequest, config: ServerConfig) -> dict[str, Any]:
    """Return the JSON body: parameters, overridden by `extra_body`, overridden by the thinking fields."""
    body: dict[str, Any] = {"model": config.model} if config.model else {}
    body["messages"] = request.messages
    if request.tools:
        body["tools"] = request.tools
    for name in _OPTIONAL:
        value = getattr(request, name)
        if value is not None:
            body[name] = value
    if request.logprobs:
        body["logprobs"] = True
    if request.extra_body:
        body.update(request.extra_body)
    if request.reasoning is not None:
        _add_thinking(body, request.reasoning, config.base_url or "")
    return body


def _add_thinking(body: dict[str, Any], reasoning: ReasoningOptions, base_url: str) -> None:
    """Add the thinking fields in the form that Atropos sends; OpenAI's own API has a different form."""
    if "api.openai.com" in base_url:
        body["reasoning_effort"] = reasoning.effort or _DEFAULT_EFFORT
        body["temperature"] = 1.0
        if body.get("max_tokens"):
            body["max_completion_tokens"] = body.pop("max_tokens")
        return
    fields: dict[str, Any] = {"enabled": True}
    if reasoning.effort is not None:
        fields["effort"] = reasoning.effort
    elif reasoning.max_tokens is not None:
        fields["max_tokens"] = reasoning.max_tokens
    body["reasoning"] = fields


def encode(body: dict[str, Any]) -> bytes:
    """Return the encoded body; a lone surrogate in a message cannot fail here."""
    return write_message(body, default=dict)


@dataclass(frozen=True, slots=True)
class ReplyBound:
    """Limits of a reply that is read, derived from the request."""

    size: int = LARGEST_REPLY
    """Maximum bytes after decompression."""
    values: int = 10 * MOST_VALUES
    """Maximum number of JSON values; parsing them takes much longer than their bytes suggest."""
    tokens: int | None = None
    """Number of requested tokens; None: the server decides."""

    @classmethod
    def of_chat(cls, body: Mapping[str, Any]) -> ReplyBound:
        """Return the limits of the reply to a chat request.

        A policy may write only the longest tokens of its vocabulary, and a server may escape each character.
        """
        requested_limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
        tokens = next((count for count in requested_limits if type(count) is int and count > 0), None)
        if tokens is None:
            return cls()
        each = (8192, 128) if body.get("logprobs") else (512, 8)
        return cls._from_counts(tokens, each, LARGEST_REPLY)

    @classmethod
    def of_tokens(cls, tokens: int, prompt: int = 0) -> ReplyBound:
        """Return the limits of a reply with `tokens` sampled tokens: an id, a log-probability and a text for each.

        It may contain the ids of a prompt of `prompt` tokens too.
        """
        return cls._from_counts(tokens, (1024, 32), LARGEST_REPLY, prompt)

    @classmethod
    def of_scores(cls, position_count: int, top_k: int) -> ReplyBound:
        """Return the limits of a reply that scores a prompt, from the length of the request."""
        return cls._from_counts(position_count * (top_k + 2), (256, 16), LARGEST_SCORES)

    @classmethod
    def _from_counts(cls, tokens: int, each: tuple[int, int], largest: int, prompt: int = 0) -> ReplyBound:
        size, values = each
        size = min(largest, (1 << 18) + size * tokens + 16 * prompt)
        return cls(size, MOST_VALUES + values * tokens + 2 * prompt, tokens)


def read_reply(raw: bytes, config: ServerConfig, timing: Timing, bound: ReplyBound | None = None) -> ChatReply:
    """Parse the reply in a response with status 200.

    Raises:
        Malformed: it is not a reply, or has more log-probabilities than requested tokens.
    """
    bound = bound or ReplyBound()
    data = _parse_object(raw, bound)
    choice = _first_choice(data)
    logprobs, tokens = _read_logprobs(choice.get("logprobs"), bound.tokens)
    usage, model = data.get("usage"), data.get("model")
    return ChatReply(
        message=choice["message"],
        finish_reason=choice.get("finish_reason"),
        usage=usage if isinstance(usage, dict) else {},
        model=model if isinstance(model, str) else config.model,
        server_type=config.type,
        logprobs=logprobs,
        tokens=tokens,
        timing=timing,
    )


UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)
"""Exceptions raised by using a value with an unexpected form."""


def read_answer(raw: bytes, read: Callable[[Any], T], bound: ReplyBound | None = None) -> T:
    """Return the result of `read` for the JSON of a response; raise `Malformed` if it fails."""
    bound = bound or ReplyBound()
    try:
        return read(read_bounded(raw, bound.size, bound.values))
    except Malformed:
        raise
    except UNREADABLE as error:
        raise Malformed(f"the answer cannot be read ({type(error).__name__})") from error


def _parse_object(raw: bytes, bound: ReplyBound) -> dict[str, Any]:
    try:
        data = read_bounded(raw, bound.size, bound.values)
    except ValueError as error:
        raise Malformed(f"the answer is not JSON ({type(error).__name__})") from None
    if not isinstance(data, dict):
        raise Malformed("the answer is not a JSON object")
    return data


def _first_choice(data: dict[str, Any]) -> dict[str, Any]:
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices:
        _raise_error(data)
        raise Malformed("the answer has no choices")
    choice = choices[0]
    if not isinstance(choice, dict) or not isinstance(choice.get("message"), dict):
        raise Malformed("the answer has no message")
    reason = choice.get("finish_reason")
    if isinstance(reason, str) and reason in _BROKEN_OFF:
        raise Malformed(f"the server broke its answer off ({reason})")
    _raise_error(choice)
    return choice


def _raise_error(data: dict[str, Any]) -> None:
    error = data.get("error")
    if not error:
        return
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else None
    raise ErrorBody("the answer is an error", status)


def _read_logprobs(logprobs: Any, max_tokens: int | None) -> tuple[list[float] | None, list[str] | None]:
    """Return log-probabilities and token texts; None unless every sampled token has both.

    OpenAI sends the sentinel for a very unlikely token.

    Raises:
        Malformed: a log-probability is impossible.
    """
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content:
        return None, None
    try:
        logprobs, tokens = [entry["logprob"] for entry in content], [str(entry["token"]) for entry in content]
    except (KeyError, TypeError):
        return None, None
    if max_tokens is not None and len(tokens) > max_tokens:
        raise Malformed(f"the answer has {len(tokens)} tokens; at most {max_tokens} were requested")
    if not all(map(is_number, logprobs)) or SENTINEL in logprobs:
        return None, None
    return [_check_logprob(value) for value in logprobs], tokens


# Token ids in, token ids and log-probabilities out: the common part of the APIs of token-level servers. An invalid
# response is a failure: the call is retried, and the response is never trained on.

LARGEST_ID = 2**31 - 1
"""Maximum token id; sequences store ids in 32 bits."""
SENTINEL = -9999.0
"""vLLM's log-probability of a token for which it has none."""
ROUNDING = 1e-6
"""Maximum excess of a log-probability above 0, caused by the rounding of some kernels for a certain token; it is
treated as 0.
"""
PROMPT = "@prompt ids@"
"""Placeholder for the ids of the prompt in a body, replaced by `Sampling.written`."""
NAMES = {"temperature": "temperature", "top_p": "top_p", "seed": "seed", "max_tokens": "max_tokens"}
"""Parameter names of `Sampling` on most servers."""
NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""Parameter values that leave a model's distribution unchanged, as defined by vLLM; see `Dialect.neutral`."""
ABORT = "abort"
"""The server interrupted sampling to load new weights; the tokens sampled so far are valid."""
_FINISH = {"stop": "stop", "eos": "stop", "length": "length", "abort": ABORT, "aborted": ABORT, "cancelled": ABORT}


@dataclass(frozen=True, slots=True)
class Sampling:
    """One sampling request: a prompt and the sampling parameters."""

    prompt: array[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """A request's `extra_body`, under the server's own names; only parameters of the dialect are sent."""
    text: Callable[[], tuple[bytes, ...]] | None = None
    """Returns the prompt as parts of a JSON list without its brackets, if the caller caches such parts."""
    rollout: str | None = None
    """Id of the rollout. All its calls share a prefix, which an engine may have cached."""
    largest: int = LARGEST_ID
    """Largest id of the vocabulary, if known."""

    @classmethod
    def from_request(
        cls,
        request: ChatRequest,
        prompt: array[int],
        max_tokens: int,
        stop_ids: tuple[int, ...],
        text: Callable[[], tuple[bytes, ...]] | None = None,
        largest: int = LARGEST_ID,
    ) -> Sampling:
        settings = request.temperature, request.top_p, request.seed, request.extra_body or {}
        return cls(prompt, max_tokens, stop_ids, *settings, text, request.rollout_id, largest)

    def checked(self, sampled: Sampled) -> Sampled:
        """Return the response to this request after validation; every source of tokens uses this method.

        Raises:
            Malformed: it has more tokens than requested, or a token outside the vocabulary.
        """
        if len(sampled.ids) > self.max_tokens:
            raise Malformed(f"the answer has {len(sampled.ids)} tokens; at most {self.max_tokens} were requested")
        if (largest := max(sampled.ids, default=0)) > self.largest:
            raise Malformed(f"the answer has the token {largest}, and the vocabulary ends with {self.largest}")
        return sampled

    def after(self, ids: array[int]) -> Sampling:
        """Return the request for the remaining tokens after `ids`; it has its own seed."""
        return replace(
            self,
            prompt=self.prompt + ids,
            max_tokens=self.max_tokens - len(ids),
            seed=drawn_seed(self.seed, "after", len(ids)),
            text=None,
        )

    def written(self, body: Mapping[str, Any]) -> bytes:
        """Return a body as bytes. Its largest part are the ids, whose text is reused between the turns of a rollout."""
        before, _, suffix = write_message(body).partition(f'"{PROMPT}"'.encode("ascii"))
        ids = b", ".join(filter(None, (format_ids(self.prompt),) if self.text is None else self.text()))
        return b"".join((before, b"[", ids, b"]", suffix))

    def parameters(self, dialect: Dialect) -> dict[str, Any]:
        """Return the parameters under the server's own names: neutral values, overridden by set ones."""
        overrides = {
            theirs: value
            for attribute, theirs in dialect.names.items()
            if (value := getattr(self, attribute)) is not None
        }
        extra = {name: value for name, value in self.extra_body.items() if name in dialect.neutral}
        return {**dialect.neutral, **overrides, **extra}

    def policy(self, dialect: Dialect) -> dict[str, Any]:
        """Return the parameters that shape the distribution from which the server samples."""
        apart = {dialect.names["seed"], dialect.names["max_tokens"]}
        return {name: value for name, value in self.parameters(dialect).items() if name not in apart}


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampling response; ids and log-probabilities have equal length. A sampled token that ends the turn is the
    last id.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str = "stop"
    """stop; length: at `Sampling.max_tokens`; abort: interrupted to load new weights, another request gets the rest."""
    version: int | None = None
    """Version of the weights, if the response contains it."""
    model: str | None = None
    oldest: int | None = None
    """Version that sampled the first token, if the weights have changed since; `version` sampled the last token."""
    cached: int = 0
    """Tokens of the prompt that came from the server's cache, if it reports them; they may have a separate price."""


class Dialect(Protocol):
    """JSON format of one type of server. A path that starts with ``/`` is below the root, others below base_url."""

    path: str
    names: Mapping[str, str]
    """The server's own names of temperature, top_p, seed and max_tokens."""
    neutral: Mapping[str, float]
    """Values that leave the model's distribution unchanged, sent for every parameter that is not set. Otherwise an
    engine takes it from the model's generation_config.json, and samples from a distribution that differs from its
    log-probabilities.
    """
    paused_path: str | None
    """Path that reports if generation is paused, or None."""
    weights_paths: Sequence[str]
    """Paths that may report the version of the weights; they differ between releases of a server."""

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        """Return the JSON of a request."""

    def read(self, data: Any) -> Sampled:
        """Parse the JSON of a response; raises `Malformed`."""


@runtime_checkable
class ScoringDialect(Protocol):
    """A dialect that can also request the log-probabilities of given tokens, on the same path; a teacher needs one."""

    def scoring_body(self, top_k: int, config: ServerConfig) -> dict[str, Any]:
        """Return the JSON of a request, with `PROMPT` for the ids."""

    def read_scores(self, data: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
        """Parse the JSON of a response; raises `Malformed`."""


def scores_of(position_scores: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
    """Validate a response and return its `TokenLogprobs`.

    Args:
        position_scores: for each token, log-probabilities by id at its position, for at least `top_k` tokens and
            itself; the entry of the first token is ignored.
        prompt: the tokens.
        top_k: number of most probable tokens to keep.

    Raises:
        Malformed: a position is missing or incomplete, or a log-probability is invalid.
    """
    if not _is_list(position_scores) or len(position_scores) != len(prompt):
        count = len(position_scores) if _is_list(position_scores) else "no"
        raise Malformed(f"the answer has log-probabilities at {count} places, and {len(prompt)} tokens were sent")
    token_logprobs, top_ids, top_logprobs = numbers(), ids(), numbers()
    for token, scores in zip(prompt[1:], position_scores[1:], strict=True):
        if not isinstance(scores, Mapping) or token not in scores:
            raise Malformed(f"the answer has no log-probability of the token {token} at its place")
        if not is_number(scores[token]):
            raise Malformed(f"the token {token} has the log-probability {scores[token]!r} at its place")
        # JSON cannot represent minus infinity: servers write null, or an impossible number.
        values = {
            candidate: max(value, SENTINEL) if is_number(value) else SENTINEL for candidate, value in scores.items()
        }
        if max(values.values()) > ROUNDING:
            raise Malformed(f"the log-probability {max(values.values())} is above 0, which no token can have")
        if not 0 <= min(values) <= max(values) <= LARGEST_ID:
            raise Malformed(
                f"the answer has the token {min(values)} or {max(values)} at a position, which is not a token id"
            )
        values = {candidate: min(value, 0.0) for candidate, value in values.items()}
        best = sorted(values, key=lambda candidate: -values[candidate])[:top_k]
        if len(best) < top_k:
            raise Malformed(f"the answer has {len(best)} candidate tokens at a position; {top_k} were requested")
        token_logprobs.append(values[token])
        top_ids.extend(best)
        top_logprobs.extend(values[candidate] for candidate in best)
    return TokenLogprobs(token_logprobs, top_k, top_ids, top_logprobs)


def scores_of_prompt(position_scores: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
    """Parse `prompt_logprobs` in vLLM's form: {id: {logprob, …}} or {id: logprob} per position; the first is null.

    Raises the errors of `scores_of`.
    """
    if not _is_list(position_scores):
        raise Malformed("the answer has no prompt_logprobs")
    by_id = [
        {int(token): value["logprob"] if isinstance(value, Mapping) else value for token, value in scores.items()}
        if isinstance(scores, Mapping)
        else None
        for scores in position_scores
    ]
    return scores_of(by_id, prompt, top_k)


def generated(
    ids: Any, logprobs: Any, finish: Any, version: Any = None, model: Any = None, cached: Any = None
) -> Sampled:
    """Validate a response and return a `Sampled`; `Sampling.checked` compares it with the request.

    Raises:
        Malformed: lengths differ, a value is not a number, a log-probability is None, positive or a sentinel, or the
            server interrupted the response for its own reasons.
    """
    if not _is_list(ids) or not set(map(type, ids)) <= {int} or (ids and not 0 <= min(ids) <= max(ids) <= LARGEST_ID):
        raise Malformed("the answer has no list of token ids")
    if not _is_list(logprobs) or len(logprobs) != len(ids):
        count = len(logprobs) if _is_list(logprobs) else "no"
        raise Malformed(f"the answer has {len(ids)} tokens and {count} log-probabilities")
    values: list[Any] = list(logprobs)
    # Checked together first: one by one would take as long as the rest of the response.
    proper = set(map(type, values)) == {float} and min(values) > SENTINEL and max(values) <= 0
    if not proper or math.isnan(sum(values)):
        values = [_check_logprob(value) for value in values]
    reason = _FINISH.get(str(finish))
    if reason is None:
        raise Malformed(f"the server broke its answer off ({finish})")
    if not ids and reason != ABORT:
        raise Malformed("the answer has no tokens")
    name = model if isinstance(model, str) else None
    return Sampled(list(ids), values, reason, version_of(version), name, cached=parse_count(cached))


def version_of(value: Any) -> int | None:
    """Return a version as a number, or None if it is not a version.

    ``default``, the name of the weights with which a server started, is 0.
    """
    if isinstance(value, str):
        value = int(value) if value.isdecimal() and len(value) <= 16 else 0 if value == "default" else None
    is_version = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT
    return value if is_version else None


def _check_logprob(value: Any) -> float:
    if not is_number(value):
        raise Malformed(f"a sampled token has the log-probability {value!r}")
    if value > ROUNDING or value <= SENTINEL:
        raise Malformed(f"a sampled token has the log-probability {value}, which no token can have")
    return min(float(value), 0.0)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
