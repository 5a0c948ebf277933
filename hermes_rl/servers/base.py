"""A model server as the rest of the program sees it: a request, a reply, two protocols, a configuration; and the JSON
of both APIs. These types are dataclasses and not pydantic models because they are made for every model call."""

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
from hermes_rl.server_types import CHAT_PARTS, ServerType, refused_part, server_type
from hermes_rl.tokens.transcript import Step, TokenLogprobs, Transcript, WeightVersions, ids, listed, numbers
from hermes_rl.values import LARGEST_COUNT, MOST_VALUES, is_number, read_bounded, write_message

T = TypeVar("T")

Message = Mapping[str, Any]
"""One message as the chat-completions API has it."""


CALLABLE = "callable"
"""The type of a function of the caller that answers as a server would."""


class Secret:
    """A value that may be sent to a server but never shown: neither `repr` nor `str` reveals it."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """Return the value itself; call it only where the value leaves for its server."""
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
"""Header with the rollout of a call, so that a router can send all calls of a rollout to one engine. It is a hint."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The configuration of one server, with its secrets resolved."""

    type: str
    """As a spec names it (see `hermes_rl.server_types`), or `CALLABLE`."""
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
    prices: Mapping[str, float] | None = None
    """US dollars for a million `prompt` and `completion` tokens; None: nobody knows."""
    session_header: bool = True
    """Send `SESSION_HEADER` with each call of a rollout."""
    deviate: float = 0.0
    """Share of a group's rollouts that a `scripted` server plays wrong."""
    seed: int = 0
    """Seed of the deviations."""
    naming: Callable[[], str] | None = None
    """Returns the model's name for each request, where a trainer changes it with the weights."""
    version: Callable[[], int | None] | None = None
    """Returns the version of the weights, where a trainer tells it; None, or an answer of None: ask the server."""

    @property
    def kind(self) -> ServerType:
        """What its type says about it; of a function, nothing."""
        return ServerType(parts=CHAT_PARTS) if self.type == CALLABLE else server_type(self.type)

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
    max_trajectory_tokens: int | None = None
    """Tokens of the prompt and this turn together. Token-level servers count the prompt, and alone hold to it."""
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
    resent: int = 0
    """Bytes of the request in which an agent program has sent the whole conversation; 0: it is our own."""
    transcript: Transcript | None = None
    """The tokens that the rollout has sampled so far; a token-level server extends them and adds its own."""
    prompt: str | Sequence[int] | None = None
    """A text or token ids to continue as they are, instead of messages; only token-level servers can do that."""
    scored: int | None = None
    """Nothing is sampled: say how probable each id of `prompt` is, and which so many tokens are the most probable."""


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
    scored: TokenLogprobs | None = None
    """The answer to a request with `scored`."""
    prompt: Sequence[int] = ()
    """The tokens that were scored; empty for an answer that was sampled."""
    numbers: Sequence[float] = ()
    """The answer of a reward model, which says nothing else."""
    attempts: int = 1
    timing: Timing = Timing()


class ContextLengthExceeded(HermesRLError):
    """The conversation no longer fits the model's context. That is the policy's doing and therefore no `Failure`.

    `size` is that of the prompt and `context` that of the model, in tokens, where they are known.
    """

    def __init__(self, message: str = "", size: int | None = None, context: int | None = None) -> None:
        super().__init__(message)
        self.size, self.context = size, context


class TrajectoryFull(ContextLengthExceeded):
    """The prompt of a turn, of `size` tokens, leaves no room below the bound of the trajectory."""

    def __init__(self, size: int | str, bound: int) -> None:
        super().__init__(f"the prompt has {size} tokens, and agent.max_trajectory_tokens is {bound}")


class ChatServer(Protocol):
    """Answers chat requests and repeats failed attempts by itself; `client.ModelClient` is the implementation."""

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Answer; raises `ServerFailure` when every attempt failed, or `ContextLengthExceeded`."""

    async def close(self) -> None:
        """Release connections and whatever was started; may be called twice."""


@runtime_checkable
class TellsContext(Protocol):
    """A server, or a client of several, that may tell how long a conversation can be."""

    async def context_length(self) -> int | None:
        """Return the tokens of the longest conversation; None where it is not known."""


class Backend(Protocol):
    """One server behind a client. It tries once: the client alone decides whether a call is repeated."""

    @property
    def config(self) -> ServerConfig: ...

    async def attempt(self, request: ChatRequest) -> ChatReply:
        """Send once; raises `retry.AttemptFailed` or `ContextLengthExceeded`."""

    async def close(self) -> None:
        """Release connections and whatever was started; may be called twice."""


# -------------------------------------------------------------------------- A chat request and its reply as JSON

LARGEST_REPLY = 64 << 20
"""Bytes of a reply, whatever was asked for."""
LARGEST_SCORES = 512 << 20
"""The same of the log-probabilities of a prompt."""
_OPTIONAL = ("temperature", "top_p", "max_tokens", "seed", "stop")
_DEFAULT_EFFORT = "medium"
_BROKEN_OFF = frozenset({"abort", "aborted", "cancelled", "canceled", "error", "timeout"})
"""Finish reasons of an answer that the server ended, and not the model: half an answer is none."""


class Malformed(ValueError):
    """A server answered with something that is not a chat completion."""


class ErrorBody(Malformed):
    """An error inside an answer of status 200, as some gateways send it."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


def require_parts(request: ChatRequest, parts: frozenset[str], server: str) -> None:
    """Raise `ServerFailure` where a message has a part of another type: it would be left out without a word."""
    if (refused := refused_part(request.messages, parts)) is not None:
        rollout = f" of the rollout {request.rollout_id}" if request.rollout_id else ""
        failure = ServerFailure(f"{server} cannot be sent the conversation{rollout}: {refused}")
        failure.refused = True
        raise failure


def chat_body(request: ChatRequest, config: ServerConfig) -> dict[str, Any]:
    """Make the JSON body: parameters, over them `extra_body`, over it the thinking fields."""
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
        _think(body, request.reasoning, config.base_url or "")
    return body


def _think(body: dict[str, Any], reasoning: ReasoningOptions, base_url: str) -> None:
    """Add the thinking fields as Atropos sends them; OpenAI's own API has another form than all others."""
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
    """Write the body as bytes; a lone surrogate in a message cannot fail here."""
    return write_message(body, default=dict)


@dataclass(frozen=True, slots=True)
class ReplyBound:
    """The largest reply that is read: what a server may need for what it was asked."""

    size: int = LARGEST_REPLY
    """Bytes, after decompression."""
    values: int = 10 * MOST_VALUES
    """Values of its JSON; to read them takes much longer than their bytes tell."""
    tokens: int | None = None
    """The tokens that were asked for; None: the server decides."""

    @classmethod
    def of_chat(cls, body: Mapping[str, Any]) -> ReplyBound:
        """Return the bound of the reply to a chat request. A policy may write the longest tokens of its vocabulary
        alone, and a server may write each character as an escape."""
        asked = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
        tokens = next((count for count in asked if type(count) is int and count > 0), None)
        if tokens is None:
            return cls()
        each = (8192, 128) if body.get("logprobs") else (512, 8)
        return cls._of(tokens, each, LARGEST_REPLY)

    @classmethod
    def of_tokens(cls, tokens: int, prompt: int = 0) -> ReplyBound:
        """Return the bound of an answer with so many sampled tokens: an id, a log-probability and a text for each. The
        ids of a prompt of `prompt` tokens may be in it too."""
        return cls._of(tokens, (1024, 32), LARGEST_REPLY, prompt)

    @classmethod
    def of_scores(cls, places: int, top_k: int) -> ReplyBound:
        """Return the bound of an answer that scores a prompt; our own request says how long it is."""
        return cls._of(places * (top_k + 2), (256, 16), LARGEST_SCORES)

    @classmethod
    def _of(cls, tokens: int, each: tuple[int, int], largest: int, prompt: int = 0) -> ReplyBound:
        size, values = each
        size = min(largest, (1 << 18) + size * tokens + 16 * prompt)
        return cls(size, MOST_VALUES + values * tokens + 2 * prompt, tokens)


def read_reply(raw: bytes, config: ServerConfig, timing: Timing, bound: ReplyBound | None = None) -> ChatReply:
    """Read the reply in an answer of status 200. Raises `Malformed` where it is none, or has more log-probabilities
    than tokens were asked for."""
    bound = bound or ReplyBound()
    data = _object(raw, bound)
    choice = _choice(data)
    logprobs, tokens = _logprobs(choice.get("logprobs"), bound.tokens)
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
"""What a value of another form than was expected raises, wherever it is used."""


def read_answer(raw: bytes, read: Callable[[Any], T], bound: ReplyBound | None = None) -> T:
    """Return what `read` makes of an answer's JSON; raises `Malformed` where it can make nothing of it."""
    bound = bound or ReplyBound()
    try:
        return read(read_bounded(raw, bound.size, bound.values))
    except Malformed:
        raise
    except UNREADABLE as error:
        raise Malformed(f"the answer cannot be read ({type(error).__name__})") from error


def _object(raw: bytes, bound: ReplyBound) -> dict[str, Any]:
    try:
        data = read_bounded(raw, bound.size, bound.values)
    except ValueError as error:
        raise Malformed(f"the answer is not JSON ({type(error).__name__})") from None
    if not isinstance(data, dict):
        raise Malformed("the answer is not a JSON object")
    return data


def _choice(data: dict[str, Any]) -> dict[str, Any]:
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


def _logprobs(logprobs: Any, asked: int | None) -> tuple[list[float] | None, list[str] | None]:
    """Read log-probabilities and token texts; None unless every sampled token has both. Raises `Malformed` for those
    that no model can have given; OpenAI writes the sentinel for a very unlikely token."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content:
        return None, None
    try:
        logprobs, tokens = [entry["logprob"] for entry in content], [str(entry["token"]) for entry in content]
    except (KeyError, TypeError):
        return None, None
    if asked is not None and len(tokens) > asked:
        raise Malformed(f"the answer has {len(tokens)} tokens, and at most {asked} were asked for")
    if not all(map(is_number, logprobs)) or SENTINEL in logprobs:
        return None, None
    return [_logprob(value) for value in logprobs], tokens


# Token ids in, token ids and log-probabilities out: the common part of the dialects of token-level servers
# A wrong answer is a failure: the call is repeated, and the answer is never trained on.

LARGEST_ID = 2**31 - 1
"""Of a token; sequences keep ids in 32 bits."""
SENTINEL = -9999.0
"""vLLM's log-probability of a token for which it has none."""
ROUNDING = 1e-6
"""A log-probability may be above 0 by this much, which some kernels' rounding makes of a certain token; it counts as
0."""
PROMPT = "@prompt ids@"
"""Stands for the ids of the prompt in a body, until `Sampling.written` puts them in."""
NAMES = {"temperature": "temperature", "top_p": "top_p", "seed": "seed", "max_tokens": "max_tokens"}
"""The names of the parameters of `Sampling` at most servers."""
NEUTRAL: Mapping[str, float] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip
"""Parameters that leave a model's distribution as it is, as vLLM has them; see `Dialect.neutral`."""
ABORT = "abort"
"""The server broke off to take new weights; the tokens sampled so far are good."""
_FINISH = {"stop": "stop", "eos": "stop", "length": "length", "abort": ABORT, "aborted": ABORT, "cancelled": ABORT}


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request: a prompt, and the parameters of sampling."""

    prompt: array[int]
    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    further: Mapping[str, Any] = field(default_factory=dict)
    """A request's `extra_body`, under the server's own names; only the parameters that the dialect knows are sent."""
    text: Callable[[], tuple[bytes, ...]] | None = None
    """Returns the prompt as parts of a JSON list without its brackets, where somebody keeps parts of it."""
    rollout: str | None = None
    """The id of the rollout that asks: all its calls begin alike, which an engine may have cached where it was."""
    largest: int = LARGEST_ID
    """The largest id of the vocabulary, where that is known."""

    @classmethod
    def of(
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
        """Return the answer to this request; every source of tokens passes here. Raises `Malformed` where it has more
        tokens than were asked for, or a token that is not in the vocabulary."""
        if len(sampled.ids) > self.max_tokens:
            raise Malformed(f"the answer has {len(sampled.ids)} tokens, and at most {self.max_tokens} were asked for")
        if (largest := max(sampled.ids, default=0)) > self.largest:
            raise Malformed(f"the answer has the token {largest}, and the vocabulary ends with {self.largest}")
        return sampled

    def after(self, ids: array[int]) -> Sampling:
        """Make the request for the rest, when some tokens are there already; it has a seed of its own."""
        return replace(
            self,
            prompt=self.prompt + ids,
            max_tokens=self.max_tokens - len(ids),
            seed=drawn_seed(self.seed, "after", len(ids)),
            text=None,
        )

    def written(self, body: Mapping[str, Any]) -> bytes:
        """Write a body as bytes. Most of it are the ids, which are not written anew for every turn of a rollout."""
        before, _, behind = write_message(body).partition(f'"{PROMPT}"'.encode("ascii"))
        ids = b", ".join(filter(None, (listed(self.prompt),) if self.text is None else self.text()))
        return b"".join((before, b"[", ids, b"]", behind))

    def parameters(self, dialect: Dialect) -> dict[str, Any]:
        """Return the parameters under the server's own names: neutral values, and over them those that are set."""
        own = {theirs: value for ours, theirs in dialect.names.items() if (value := getattr(self, ours)) is not None}
        further = {name: value for name, value in self.further.items() if name in dialect.neutral}
        return {**dialect.neutral, **own, **further}

    def policy(self, dialect: Dialect) -> dict[str, Any]:
        """Return the parameters that shape the distribution from which the server samples."""
        apart = {dialect.names["seed"], dialect.names["max_tokens"]}
        return {name: value for name, value in self.parameters(dialect).items() if name not in apart}


@dataclass(frozen=True, slots=True)
class Sampled:
    """One answer; ids and log-probabilities have one length. A sampled token that ends the turn is the last id."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish: str = "stop"
    """stop; length: at `Sampling.max_tokens`; abort: broken off to take new weights, another request gets the rest."""
    version: int | None = None
    """The version of the weights, where the answer tells it."""
    model: str | None = None
    oldest: int | None = None
    """The version that sampled its first token, where the weights have changed since; `version` is the last one's."""


class Dialect(Protocol):
    """The JSON of one type of server. A path that begins with ``/`` is below the root, any other below base_url."""

    path: str
    names: Mapping[str, str]
    """The server's own names of temperature, top_p, seed and max_tokens."""
    neutral: Mapping[str, float]
    """Values that leave the model's distribution as it is, sent for every parameter that is not set. Otherwise an
    engine takes it from the model's generation_config.json, and samples from another distribution than the one of its
    log-probabilities."""
    paused_path: str | None
    """The path that tells whether generation is stopped; None where there is none."""
    weights_paths: Sequence[str]
    """Paths that may tell the version of the weights; releases of a server differ in which of them they have."""

    def body(self, sampling: Sampling, config: ServerConfig) -> dict[str, Any]:
        """Write the request's JSON."""

    def read(self, data: Any) -> Sampled:
        """Read the answer's JSON; raises `Malformed`."""


@runtime_checkable
class ScoringDialect(Protocol):
    """A dialect that can also ask how probable given tokens are, on the same path; a teacher needs one."""

    def scoring_body(self, top_k: int, config: ServerConfig) -> dict[str, Any]:
        """Write the request's JSON, with `PROMPT` for the ids."""

    def read_scores(self, data: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
        """Read the answer's JSON; raises `Malformed`."""


def scores_of(places: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
    """Check an answer and make `TokenLogprobs` of it.

    Args:
        places: for each token the log-probabilities by id at its place, those of `top_k` tokens or more and its own;
            whatever stands at the first token is passed over.
        prompt: the tokens.
        top_k: how many of the most probable tokens are kept.

    Raises:
        Malformed: a place is missing, or lacks something, or a log-probability is none.
    """
    if not _is_list(places) or len(places) != len(prompt):
        count = len(places) if _is_list(places) else "no"
        raise Malformed(f"the answer has log-probabilities at {count} places, and {len(prompt)} tokens were sent")
    own, top_ids, top_logprobs = numbers(), ids(), numbers()
    for token, place in zip(prompt[1:], places[1:], strict=True):
        if not isinstance(place, Mapping) or token not in place:
            raise Malformed(f"the answer has no log-probability of the token {token} at its place")
        if not is_number(place[token]):
            raise Malformed(f"the token {token} has the log-probability {place[token]!r} at its place")
        # Minus infinity has no form in JSON: servers write null, or a number that no token can have.
        values = {
            candidate: max(value, SENTINEL) if is_number(value) else SENTINEL for candidate, value in place.items()
        }
        if max(values.values()) > ROUNDING:
            raise Malformed(f"the log-probability {max(values.values())} is above 0, which no token can have")
        if not 0 <= min(values) <= max(values) <= LARGEST_ID:
            raise Malformed(f"the answer has the token {min(values)} or {max(values)} at a place, which none can be")
        values = {candidate: min(value, 0.0) for candidate, value in values.items()}
        best = sorted(values, key=lambda candidate: -values[candidate])[:top_k]
        if len(best) < top_k:
            raise Malformed(f"the answer has {len(best)} tokens at a place, and {top_k} were asked for")
        own.append(values[token])
        top_ids.extend(best)
        top_logprobs.extend(values[candidate] for candidate in best)
    return TokenLogprobs(own, top_k, top_ids, top_logprobs)


def scores_of_prompt(places: Any, prompt: array[int], top_k: int) -> TokenLogprobs:
    """Read `prompt_logprobs` as vLLM writes it: at each place {id: {logprob, …}}, or {id: logprob}; the first is null.
    It raises as `scores_of`."""
    if not _is_list(places):
        raise Malformed("the answer has no prompt_logprobs")
    by_id = [
        {int(token): value["logprob"] if isinstance(value, Mapping) else value for token, value in place.items()}
        if isinstance(place, Mapping)
        else None
        for place in places
    ]
    return scores_of(by_id, prompt, top_k)


def generated(ids: Any, logprobs: Any, finish: Any, version: Any = None, model: Any = None) -> Sampled:
    """Check an answer and make a `Sampled` of it; `Sampling.checked` compares it with the request. Raises `Malformed`
    where lengths differ, a value is no number, a log-probability is None, positive or a sentinel, or the server ended
    the answer for a reason of its own."""
    if not _is_list(ids) or not set(map(type, ids)) <= {int} or (ids and not 0 <= min(ids) <= max(ids) <= LARGEST_ID):
        raise Malformed("the answer has no list of token ids")
    if not _is_list(logprobs) or len(logprobs) != len(ids):
        count = len(logprobs) if _is_list(logprobs) else "no"
        raise Malformed(f"the answer has {len(ids)} tokens and {count} log-probabilities")
    values: list[Any] = list(logprobs)
    # Looked at together first: one by one they would take as long as all else that an answer costs.
    proper = set(map(type, values)) == {float} and min(values) > SENTINEL and max(values) <= 0
    if not proper or math.isnan(sum(values)):
        values = [_logprob(value) for value in values]
    reason = _FINISH.get(str(finish))
    if reason is None:
        raise Malformed(f"the server broke its answer off ({finish})")
    if not ids and reason != ABORT:
        raise Malformed("the answer has no tokens")
    return Sampled(list(ids), values, reason, version_of(version), model if isinstance(model, str) else None)


def version_of(value: Any) -> int | None:
    """Return a version as a number; ``default``, the name of the weights that a server started with, is 0. None for
    anything that is not a version."""
    if isinstance(value, str):
        value = int(value) if value.isdecimal() and len(value) <= 16 else 0 if value == "default" else None
    known = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT
    return value if known else None


def _logprob(value: Any) -> float:
    if not is_number(value):
        raise Malformed(f"a sampled token has the log-probability {value!r}")
    if value > ROUNDING or value <= SENTINEL:
        raise Malformed(f"a sampled token has the log-probability {value}, which no token can have")
    return min(float(value), 0.0)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
