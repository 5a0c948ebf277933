"""What the loop gives back.

`AgentResult` keeps the fields that rewards of the reference design read (messages, managed_state, turns_used,
finished_naturally, reasoning_per_turn, tool_errors) and adds the ending by name, the calls, usage and timings. Tokens
have the form that hand-written environments read, `managed_state["nodes"]`. How a result is stored on disk is decided
in `hermes_rl.runs`. Each process of rewards imports this module, so it imports little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hermes_rl.endings import Ending
from hermes_rl.errors import ToolError
from hermes_rl.foreign.process import current_runner
from hermes_rl.foreign.stand_ins import lives_in_runner
from hermes_rl.values import count_of, is_number, own_copy

if TYPE_CHECKING:
    from hermes_rl.servers.base import ChatReply
    from hermes_rl.tokens.transcript import TokenSequence, Transcript

Message = dict[str, Any]
"""A message of the OpenAI chat format; it always has `role` and `content`.

In the conversation of an agent program `context` is True in a message that the program has made up: it is no answer of
the policy, no result of one of its calls, and not what the program was to do at first.
"""


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
    repaired: int = 0
    """Values of its arguments that were converted to the type that the tool's schema asks for."""
    executed_by: Literal["hermes_rl", "program"] = "hermes_rl"
    """`program`: a tool of an agent program's own; its arguments and result are as the program has sent them back."""


@dataclass(slots=True)
class Usage:
    """Tokens as the server counted them, summed over the turns; 0 where it counted none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None
    """US dollars, where the server reports them (`usage.cost`)."""

    def add(self, usage: Mapping[str, Any] | None) -> None:
        cost = (usage or {}).get("cost")
        if is_number(cost):
            self.cost = (self.cost or 0.0) + cost
        self.prompt_tokens += tokens_of(usage, "prompt_tokens")
        self.completion_tokens += tokens_of(usage, "completion_tokens")

    def record(self) -> dict[str, float]:
        counts: dict[str, float] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        return counts if self.cost is None else {**counts, "cost": self.cost}


@dataclass(slots=True)
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
class ProgramRun:
    """What is known of the agent program that drove a rollout, beside its conversation."""

    KEPT: ClassVar[int] = 4_000
    """Characters of its output that are kept, the last ones."""
    exit_code: int | None = None
    """None where it was ended by us."""
    output: str = ""
    requests: int = 0
    refused: int = 0
    """Requests that no answer could be given to, because of their form or their path."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """One for each answer of the model, in the order in which they came: its `kind`, the number of the call that it
    `continues`, None for none, its sampled `tokens`, whether they are `trained` on, and how the answer `begins`."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Sampled tokens that are not trained on, by the kind of their calls."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """What it asked for of sampling, by name, at last; the spec's was sent."""
    refusal: str = ""
    """What was wrong with the last request that was refused."""

    @property
    def untrained(self) -> list[int]:
        """The numbers of the answers that are not trained on."""
        return [number for number, call in enumerate(self.calls) if not call["trained"]]


@dataclass(frozen=True)
class GradedStep:
    """A step of a rollout that the rewards have looked at while it was played."""

    turns: int
    """Model calls from the rollout's beginning to the step's end."""
    rewards: Mapping[str, Mapping[str, Any]]
    """By the name of each reward that looks at steps what a rollout's line has of it: value, reason, metrics."""


@dataclass
class AgentResult:
    """One conversation from the prompt to its ending.

    `turns_used` counts completed model calls. `reasoning_per_turn` has one entry per turn, None without reasoning.
    `replies` are the server's answers as they came; `transcript` holds the tokens that a token-level server sampled.
    The first `prompt_length` messages are the prompt; `tool_schemas` describe the tools that the model may call; no
    sequence of it has more than `max_trajectory_tokens`.
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
    max_trajectory_tokens: int | None = None
    tool_schemas: list[dict[str, Any]] = field(default_factory=list, repr=False)
    world_rewards: list[tuple[int, float]] = field(default_factory=list)
    """What a user by code gave for turns: the turn that it answered, from 1, and how much."""
    steps: list[GradedStep] = field(default_factory=list)
    """The steps behind which the user has gone on, or ended the rollout; the last one of others is not among them."""
    program: ProgramRun | None = None
    """Set where an agent program has driven the rollout."""
    seat: str = ""
    """Whose conversation it is, where an episode has several seats."""
    outcome: Any = None
    """What the schedule of such an episode has returned, as plain values."""

    @property
    def trained_share(self) -> float | None:
        """Fraction of the sampled tokens that is trained on; None if tokens are not known, or none was sampled."""
        sampled = sum(reply.sampled.count for reply in self.replies if reply.sampled is not None)
        left_out = sum(self.program.left_out.values()) if self.program is not None else 0
        return 1 - left_out / sampled if sampled else None

    def for_rewards(self) -> AgentResult:
        """Return the result without what no reward sees: raw answers, the transcript, and the tools themselves."""
        return replace(self, replies=[], transcript=None, tool_schemas=list(self.tool_schemas))

    def copied(self) -> AgentResult:
        """Copy the result for code that may change it; what is recorded and trained on stays as it is."""
        return replace(
            self.for_rewards(),
            messages=own_copy(self.messages),
            reasoning_per_turn=list(self.reasoning_per_turn),
            tool_errors=list(self.tool_errors),
            tool_calls=list(self.tool_calls),
            world_rewards=list(self.world_rewards),
            steps=list(self.steps),
            usage=replace(self.usage),
            timings=replace(self.timings),
        )

    def answering(self, text: str) -> AgentResult:
        """Copy the result with one answer to its prompt instead of what the agent did, at the same step."""
        return AgentResult(
            messages=[*own_copy(self.messages[: self.prompt_length]), {"role": "assistant", "content": text}],
            turns_used=1,
            finished_naturally=True,
            reasoning_per_turn=[None],
            ending=Ending.FINISHED,
            prompt_length=self.prompt_length,
            tool_schemas=self.tool_schemas,
            steps=list(self.steps),
        )

    @property
    def texts(self) -> list[str]:
        """The text of each turn of the policy, without the assistant messages of the prompt and of a program."""
        own = (message for message in self.messages[self.prompt_length :] if not message.get("context"))
        return [text_of(message.get("content")) for message in own if message.get("role") == "assistant"]

    @property
    def final_response(self) -> str:
        """The text of the policy's last turn; empty if it had none."""
        return next(reversed(self.texts), "")


def first_answer(messages: list[Message]) -> int:
    """Return how many messages stand before the first one of the model."""
    return next((place for place, each in enumerate(messages) if each["role"] == "assistant"), len(messages))


def text_of(content: object) -> str:
    """Return the text of a content, which may be None, a string, or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))


def tokens_of(usage: Mapping[str, Any] | None, name: str) -> int:
    """Return a count of the server's usage; 0 where it is none."""
    return count_of((usage or {}).get(name))


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


@lives_in_runner("hermes_rl.agent.result:fetched_state")
class ManagedState(Mapping[str, list[Node]]):
    """``{"nodes": […]}``: every sequence of the rollout, not only the last.

    It makes the nodes when they are asked for: as lists of Python numbers they take several times the memory.
    """

    def __init__(self, sequences: Callable[[], Iterable[TokenSequence]]) -> None:
        self.sequences = sequences

    def stand_in_fields(self) -> dict[str, Any]:
        """Return nothing: the tokens are fetched by the few who look at them."""
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


def fetched_state(number: int) -> ManagedState:
    """Stand for the `ManagedState` of this number in a process of foreign code."""
    return ManagedState(lambda: current_runner().ask(number, "fetch").result())
