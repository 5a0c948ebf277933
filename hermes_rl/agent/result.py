"""What the loop talks to, and what it gives back.

`AgentResult` keeps the fields that rewards of the reference design read (messages, managed_state, turns_used,
finished_naturally, reasoning_per_turn, tool_errors) and adds the ending by name, the calls, usage and timings. Tokens
have the form that hand-written environments read, `managed_state["nodes"]`. `as_chat_server` adapts a foreign server
object to the loop. How a result is stored on disk is decided in `hermes_rl.runs`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, ServerFailure
from hermes_rl.servers.base import (
    ChatReply,
    ChatRequest,
    ChatServer,
    ContextLengthExceeded,
    ServerConfig,
    Timing,
    chat_body,
)
from hermes_rl.servers.transport import is_context_overflow
from hermes_rl.tokens.transcript import MASKED_LOGPROB, TokenSequence, Transcript
from hermes_rl.tools.base import ToolError

# ------------------------------------- Foreign servers: objects with an OpenAI-style `chat_completion(**kwargs)`
# Owns the adapter around a foreign server object. Leaves our own servers to `hermes_rl.servers`.


def as_chat_server(server: Any) -> ChatServer:
    """Return `server` itself if it has `chat(ChatRequest)`, else an adapter around its `chat_completion`.

    Raises:
        TypeError: `server` has neither.
    """
    if callable(getattr(server, "chat", None)):
        return cast(ChatServer, server)
    if callable(getattr(server, "chat_completion", None)):
        return CompletionAdapter(server)
    raise TypeError(f"{type(server).__name__} is no model server: it has neither chat() nor chat_completion()")


class CompletionAdapter:
    """A foreign server object, such as Atropos' ServerManager or a stub in a test."""

    def __init__(self, server: Any) -> None:
        self._server = server

    async def chat(self, request: ChatRequest) -> ChatReply:
        """Ask the server; whatever it raises is its failure, except for a conversation that became too long."""
        started = time.perf_counter()
        try:
            completion = await self._server.chat_completion(**arguments(request))
            return self._reply(completion, time.perf_counter() - started)
        except (Failure, ContextLengthExceeded):
            raise
        except Exception as error:
            status = getattr(error, "status_code", None)
            if isinstance(status, int) and is_context_overflow(status, str(error)):
                raise ContextLengthExceeded(str(error)) from error
            raise ServerFailure(f"{type(error).__name__}: {error}") from error

    def _reply(self, completion: Any, seconds: float) -> ChatReply:
        plain = _plain(completion)
        choice = plain["choices"][0]
        usage = plain.get("usage")
        return ChatReply(
            message=dict(choice["message"]),
            finish_reason=choice.get("finish_reason"),
            usage=usage if isinstance(usage, dict) else {},
            model=str(plain.get("model") or ""),
            server_type=type(self._server).__name__,
            timing=Timing(generating=seconds),
        )

    def state(self) -> Mapping[str, Any] | None:
        """Return the token state of a foreign server that tracks tokens; None where it tracks none."""
        get_state = getattr(self._server, "get_state", None)
        return get_state() if callable(get_state) else None

    async def close(self) -> None:
        """Leave the server open: its owner closes it."""


def arguments(request: ChatRequest) -> dict[str, Any]:
    """Return the request as keyword arguments of an OpenAI client, without those that are not set."""
    names = ("tools", "temperature", "top_p", "max_tokens", "seed", "stop")
    given = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
    if request.logprobs:
        given["logprobs"] = True
    extra = chat_body(ChatRequest((), extra_body=request.extra_body, reasoning=request.reasoning), ServerConfig(""))
    del extra["messages"]
    if extra:
        given["extra_body"] = extra
    return {"messages": list(request.messages), "n": 1, **given}


def _plain(value: Any) -> Any:
    """Turn pydantic objects, mappings and simple namespaces into dicts and lists, however deep."""
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | float | None):
        return value
    return {key: _plain(item) for key, item in vars(value).items()}


# ---------------------------------------------------------------------------------------------------- The result

Message = dict[str, Any]
"""A message of the OpenAI chat format; it always has `role` and `content`."""


@dataclass(frozen=True)
class ToolCall:
    """One call that the model made: its arguments, its result, and its error, if it failed.

    `turn` counts from 1; `seconds` is wall time; `arguments` are as executed, or the raw text where unreadable.
    """

    turn: int
    id: str
    name: str
    arguments: Mapping[str, Any] | str | None
    result: str
    error: str | None = None
    seconds: float = 0.0


@dataclass
class Usage:
    """Tokens as the server counted them, summed over the turns; 0 where it counted none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """US dollars, where the server reports them (`usage.cost`)."""

    def add(self, usage: Mapping[str, Any] | None) -> None:
        cost = (usage or {}).get("cost")
        if isinstance(cost, int | float) and math.isfinite(cost):
            self.cost = (self.cost or 0.0) + float(cost)
        self.prompt_tokens += tokens_of(usage, "prompt_tokens")
        self.completion_tokens += tokens_of(usage, "completion_tokens")

    def record(self) -> dict[str, float]:
        counts: dict[str, float] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        return counts if self.cost is None else {**counts, "cost": self.cost}


@dataclass
class Timings:
    """Seconds. `generation` and `tools` are working time; `queue`, which includes retries, is not."""

    generation: float = 0.0
    tools: float = 0.0
    queue: float = 0.0

    @property
    def working(self) -> float:
        return self.generation + self.tools

    def record(self) -> dict[str, float]:
        return {"generation": self.generation, "tools": self.tools, "queue": self.queue}


@dataclass
class AgentResult:
    """One conversation from the prompt to its ending.

    `turns_used` counts completed model calls. `reasoning_per_turn` has one entry per turn, None without reasoning.
    `replies` are the server's answers as they came; `transcript` holds the tokens that a token-level server sampled.
    The first `prompt_length` messages are the prompt; `tool_schemas` describe the tools that the model may call.
    """

    messages: list[Message] = field(default_factory=list)
    managed_state: Mapping[str, Any] | None = None
    turns_used: int = 0
    finished_naturally: bool = False
    reasoning_per_turn: list[str | None] = field(default_factory=list)
    tool_errors: list[ToolError] = field(default_factory=list)
    ending: Ending = Ending.CANCELLED
    tool_calls: list[ToolCall] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    replies: list[ChatReply] = field(default_factory=list, repr=False)
    transcript: Transcript | None = field(default=None, repr=False)
    prompt_length: int = 0
    tool_schemas: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def for_rewards(self) -> AgentResult:
        """Copy the result for a reward, which may change its copy; what is recorded and trained on stays as it is."""
        return replace(
            self,
            messages=copy.deepcopy(self.messages),
            reasoning_per_turn=list(self.reasoning_per_turn),
            tool_errors=list(self.tool_errors),
            tool_calls=list(self.tool_calls),
            usage=replace(self.usage),
            timings=replace(self.timings),
            replies=[],
            transcript=None,
        )

    @property
    def texts(self) -> list[str]:
        """The text of each turn of the policy, without the assistant messages of the prompt."""
        own = self.messages[self.prompt_length :]
        return [text_of(message.get("content")) for message in own if message.get("role") == "assistant"]

    @property
    def final_response(self) -> str:
        """The text of the policy's last turn; empty if it had none."""
        return next(reversed(self.texts), "")


def text_of(content: object) -> str:
    """Return the text of a content, which may be None, a string, or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def tokens_of(usage: Mapping[str, Any] | None, name: str) -> int:
    """Return a count of the server's usage; 0 where it is no number."""
    count = (usage or {}).get(name)
    return int(count) if isinstance(count, int | float) and math.isfinite(count) else 0


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of an assistant message from whichever of three fields the server put it in."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str) and message[key]:
            return str(message[key])
    details = message.get("reasoning_details")
    parts = details if isinstance(details, list) else []
    texts = [part.get("text") or part.get("summary") or "" for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str)) or None


@dataclass(frozen=True)
class Node:
    """One sequence with the fields of Atropos' SequenceNode, in lists of one length.

    A mask is -100 or the token; the log-probability at a masked position is 1.0.
    """

    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any]


class ManagedState(Mapping[str, list[Node]]):
    """``{"nodes": […]}``: every sequence of the rollout, not only the last.

    It makes the nodes when they are asked for: as lists of Python numbers they take several times the memory.
    """

    def __init__(self, sequences: Callable[[], Iterable[TokenSequence]]) -> None:
        self.sequences = sequences

    def __getitem__(self, key: str) -> list[Node]:
        if key != "nodes":
            raise KeyError(key)
        return [
            Node(
                sequence.tokens,
                sequence.masks,
                sequence.logprobs or [MASKED_LOGPROB] * len(sequence),
                {"turns": [span.turn for span in sequence.spans]},
            )
            for sequence in self.sequences()
        ]

    def __iter__(self) -> Iterator[str]:
        return iter(("nodes",))

    def __len__(self) -> int:
        return 1
