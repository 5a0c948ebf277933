"""Result of one conversation, as returned by the agent loop.

`AgentResult` keeps the fields that rewards of the reference design read (messages, managed_state, turns_used,
finished_naturally, reasoning_per_turn, tool_errors) and adds the stop reason, the tool calls, usage and timings. Tokens
have the form that hand-written environments read, `managed_state["nodes"]`. `hermes_rl.runs` owns the storage of
results. This module has few imports, because each process of rewards imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hermes_rl.errors import ToolError
from hermes_rl.servers.usage import Usage
from hermes_rl.spec.new_names import RenamedAttributes
from hermes_rl.stop_reasons import StopReason
from hermes_rl.user_code.process import current_runner
from hermes_rl.user_code.proxies import lives_in_runner
from hermes_rl.values import deep_copy, parse_count

if TYPE_CHECKING:
    from hermes_rl.servers.base import ChatReply
    from hermes_rl.tokens.transcript import TokenSequence, Transcript
    from hermes_rl.tools.execute import ToolOutcome

Message = dict[str, Any]
"""A message of the OpenAI chat format; it always has `role` and `content`.

In the conversation of an agent program, `context` is True for a message that the program invented: neither a policy
reply, nor a result of a policy's tool call, nor part of the initial task.
"""


@dataclass(frozen=True)
class ToolCall:
    """One tool call of the model: its arguments, its result, and its error if it failed.

    `turn` counts from 1; `seconds` is wall time; `arguments` are as executed, or the raw text if unreadable.
    """

    turn: int
    id: str
    name: str
    arguments: Mapping[str, Any] | str | None
    result: str
    error: str | None = None
    seconds: float = 0.0
    repaired: int = 0
    """Number of argument values converted to the type that the tool's schema requires."""
    executed_by: Literal["hermes_rl", "program"] = "hermes_rl"
    """`program`: one of the agent program's own tools; arguments and result are as sent back by the program."""
    started_at: float | None = field(default=None, compare=False)
    """Seconds since 1970; None if unknown, as for a program's own tools."""

    @classmethod
    def from_outcome(cls, outcome: ToolOutcome, turn: int, identity: str) -> ToolCall:
        """Return the record of an executed call."""
        return cls(
            turn,
            identity,
            outcome.name,
            outcome.arguments,
            outcome.content,
            outcome.error.error if outcome.error is not None else None,
            outcome.seconds,
            outcome.repaired,
            started_at=outcome.started_at,
        )


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call of the policy: its start in seconds since 1970, its wall time without waiting, and its tokens."""

    started_at: float
    seconds: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Timings:
    """Times in seconds. `generation` and `tools` are working time; `queue`, which includes retries, is not."""

    generation: float = 0.0
    tools: float = 0.0
    queue: float = 0.0

    @property
    def working(self) -> float:
        return self.generation + self.tools

    def record(self) -> dict[str, float]:
        return {"generation": self.generation, "tools": self.tools, "queue": self.queue}


@dataclass
class ProgramRun:
    """Facts about the agent program that drove a rollout, in addition to its conversation."""

    KEPT: ClassVar[int] = 4_000
    """Number of characters kept from the end of its output."""
    exit_code: int | None = None
    """None if hermes-rl stopped it."""
    output: str = ""
    requests: int = 0
    refused: int = 0
    """Number of requests rejected because of their form or path."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """One record per model reply, in order of arrival: its `kind`, the index of the call that it `continues` or None,
    its sampled `tokens`, True for `trained` if they are trained on, and a preview of the reply (`preview`).
    """
    excluded: dict[str, int] = field(default_factory=dict)
    """Sampled tokens that are not trained on, by kind of call."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Most recent sampling options that it requested, by name; the spec's options were used instead."""
    refusal: str = ""
    """Error message of the last rejected request."""

    @property
    def untrained(self) -> list[int]:
        """Indexes of the replies that are not trained on."""
        return [index for index, call in enumerate(self.calls) if not call["trained"]]


@dataclass(frozen=True)
class GradedStep:
    """A step of a rollout that the rewards graded while the rollout was running."""

    turns: int
    """Model calls from the start of the rollout to the end of the step."""
    rewards: Mapping[str, Mapping[str, Any]]
    """By reward name, the fields stored in the rollout's record: value, reason, metrics."""


@dataclass
class AgentResult(RenamedAttributes):
    """One conversation from the prompt to its stop reason.

    `turns_used` counts completed model calls. `reasoning_per_turn` has one entry per turn, None without reasoning.
    `replies` are the server's original replies; `transcript` holds the tokens that a token-level server sampled. The
    first `prompt_length` messages are the prompt; `tool_schemas` describe the tools that the model may call; no
    sequence has more than `max_trajectory_tokens`.
    """

    messages: list[Message] = field(default_factory=list)
    managed_state: Mapping[str, Any] | None = None
    turns_used: int = 0
    finished_naturally: bool = False
    reasoning_per_turn: list[str | None] = field(default_factory=list)
    tool_errors: list[ToolError] = field(default_factory=list)
    stop_reason: StopReason = StopReason.CANCELLED
    tool_calls: list[ToolCall] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    replies: list[ChatReply] = field(default_factory=list, repr=False)
    model_calls: list[ModelCall] = field(default_factory=list, repr=False)
    """Times of the replies, in the same order; empty if they are unknown."""
    transcript: Transcript | None = field(default=None, repr=False)
    prompt_length: int = 0
    max_trajectory_tokens: int | None = None
    tool_schemas: list[dict[str, Any]] = field(default_factory=list, repr=False)
    environment_rewards: list[tuple[int, float]] = field(default_factory=list)
    """Rewards given by a user implemented in code: the turn that it responded to, from 1, and the amount."""
    steps: list[GradedStep] = field(default_factory=list)
    """Steps after which the user continued, or ended the rollout; the last step of other rollouts is not included."""
    program: ProgramRun | None = None
    """Set if an agent program drove the rollout."""
    seat: str = ""
    """Seat that held the conversation, if an episode has several seats."""
    outcome: Any = None
    """Return value of the episode's schedule, as plain values."""

    @property
    def trained_share(self) -> float | None:
        """Fraction of the sampled tokens that is trained on; None if tokens are unknown or none was sampled."""
        sampled = sum(reply.sampled.count for reply in self.replies if reply.sampled is not None)
        excluded = sum(self.program.excluded.values()) if self.program is not None else 0
        return 1 - excluded / sampled if sampled else None

    def for_rewards(self) -> AgentResult:
        """Return the result without the fields that no reward sees: raw replies, the transcript, and the tools
        themselves.
        """
        return replace(self, replies=[], model_calls=[], transcript=None, tool_schemas=list(self.tool_schemas))

    def copied(self) -> AgentResult:
        """Copy the result for code that may change it; the recorded and trained data stays unchanged."""
        return replace(
            self.for_rewards(),
            messages=deep_copy(self.messages),
            reasoning_per_turn=list(self.reasoning_per_turn),
            tool_errors=list(self.tool_errors),
            tool_calls=list(self.tool_calls),
            environment_rewards=list(self.environment_rewards),
            steps=list(self.steps),
            usage=replace(self.usage),
            timings=replace(self.timings),
        )

    def answering(self, text: str) -> AgentResult:
        """Copy the result with one reply to its prompt instead of the agent's conversation, at the same step."""
        return AgentResult(
            messages=[*deep_copy(self.messages[: self.prompt_length]), {"role": "assistant", "content": text}],
            turns_used=1,
            finished_naturally=True,
            reasoning_per_turn=[None],
            stop_reason=StopReason.FINISHED,
            prompt_length=self.prompt_length,
            tool_schemas=self.tool_schemas,
            steps=list(self.steps),
        )

    @property
    def texts(self) -> list[str]:
        """Text of each policy turn, excluding the assistant messages of the prompt and of a program."""
        rollout_messages = (message for message in self.messages[self.prompt_length :] if not message.get("context"))
        return [text_of(message.get("content")) for message in rollout_messages if message.get("role") == "assistant"]

    @property
    def final_response(self) -> str:
        """Text of the policy's last turn; empty if it had none."""
        return next(reversed(self.texts), "")


def first_answer(messages: list[Message]) -> int:
    """Return the number of messages before the first message of the model."""
    return next((index for index, each in enumerate(messages) if each["role"] == "assistant"), len(messages))


def text_of(content: object) -> str:
    """Return the text of a message content, which may be None, a string, or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def tokens_of(usage: Mapping[str, Any] | None, name: str) -> int:
    """Return a count from the server's usage; 0 if it is missing or invalid."""
    return parse_count((usage or {}).get(name))


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning of an assistant message from any of the three fields that servers use."""
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str) and message[key]:
            return str(message[key])
    details = message.get("reasoning_details")
    parts = details if isinstance(details, list) else []
    texts = [part.get("text") or part.get("summary") or "" for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str)) or None


@dataclass(frozen=True)
class Node:
    """One sequence with the fields of Atropos' SequenceNode, as lists of equal length.

    A mask is -100 or the token; the log-probability at a masked position is 1.0.
    """

    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any]


@lives_in_runner("hermes_rl.agent.result:fetched_state")
class ManagedState(Mapping[str, list[Node]]):
    """``{"nodes": […]}``: all sequences of the rollout.

    Nodes are built on access: as lists of Python numbers they take several times the memory.
    """

    def __init__(self, sequences: Callable[[], Iterable[TokenSequence]]) -> None:
        self.sequences = sequences

    def stand_in_fields(self) -> dict[str, Any]:
        """Return no fields: only code that reads the tokens fetches them."""
        return {}

    def fetch(self) -> list[TokenSequence]:
        """Return the sequences."""
        return list(self.sequences())

    def __getitem__(self, key: str) -> list[Node]:
        if key != "nodes":
            raise KeyError(key)
        from hermes_rl.tokens.transcript import MASKED_LOGPROB

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


def fetched_state(object_id: int) -> ManagedState:
    """Return the proxy of `ManagedState` object `object_id` in a worker process for user code."""
    return ManagedState(lambda: current_runner().ask(object_id, "fetch").result())
