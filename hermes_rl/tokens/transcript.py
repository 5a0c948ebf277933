"""The transcript of a rollout: its sampled steps, merged into sequences as they happen.

A step extends the longest sequence that is an exact prefix of its prompt; otherwise it opens a new one. So every
sampled token lies in exactly one span of one sequence, in the context that the model saw.

Owns the merging, and which conversation a sequence holds. Servers, harnesses and templates rewrite a message without
changing what it says (ids of calls, spaces in the JSON of arguments, None for an empty text, dropped reasoning); it
stays the same message all the same. Leaves the tokens of messages to `rendering`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hermes_rl.tokens.sequence import SampledSpan, TokenSequence, ids, listed, numbers

Call = tuple[str, Any]
How = Literal["first", "extended", "anew"]
"""How a prompt was made: it was the first of the rollout, it extended the tokens before it, or it was rendered anew."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of what a message says; later changes to the message itself do not reach it."""

    role: str
    content: Any
    calls: tuple[Call, ...] = ()
    thought: bool = False
    """Whether the message has reasoning, which templates may drop later on."""

    def same(self, message: Mapping[str, Any]) -> bool:
        """Whether the message says the same."""
        if message.get("role") != self.role or (message.get("content") or "") != self.content:
            return False
        calls = _calls(message)
        return calls == self.calls or _canonical(calls) == _canonical(self.calls)


def snapshot(message: Mapping[str, Any]) -> Snapshot:
    """Take the snapshot of a message."""
    thought = bool(message.get("reasoning_content") or message.get("reasoning"))
    return Snapshot(str(message.get("role")), message.get("content") or "", _calls(message), thought)


class History:
    """The messages that a sequence holds.

    Recognising a known message costs next to nothing: it is the same object with the same content and calls. Any other
    message is compared by what it says.
    """

    __slots__ = ("_calls", "_contents", "_messages", "snapshots")

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self._messages: list[Any] = []
        self._contents: list[Any] = []
        self._calls: list[Any] = []

    def __len__(self) -> int:
        return len(self.snapshots)

    def begins(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a conversation begins with these messages."""
        head = list(messages[: len(self)])
        contents = [message.get("content") for message in head]
        calls = [message.get("tool_calls") for message in head]
        # Lists are equal at once where they hold the same objects.
        if head == self._messages and contents == self._contents and calls == self._calls:
            return True
        if len(head) < len(self) or not all(map(Snapshot.same, self.snapshots, head)):
            return False
        self._messages, self._contents, self._calls = head, contents, calls
        return True

    def follow(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Become this conversation: append its new messages, or begin anew where it is another conversation."""
        if not self.begins(messages):
            for column in (self.snapshots, self._messages, self._contents, self._calls):
                column.clear()
        self.extend(messages)

    def extend(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append the new messages of a conversation that is known to begin with these."""
        for message in messages[len(self) :]:
            self.snapshots.append(snapshot(message))
            self._messages.append(message)
            self._contents.append(message.get("content"))
            self._calls.append(message.get("tool_calls"))


def _calls(message: Mapping[str, Any]) -> tuple[Call, ...]:
    calls = message.get("tool_calls")
    if not calls:
        return ()
    functions = [call.get("function") or {} for call in calls if isinstance(call, Mapping)]
    return tuple((str(function.get("name")), function.get("arguments")) for function in functions)


def _canonical(calls: tuple[Call, ...]) -> list[tuple[str, str]]:
    return [(name, _canonical_arguments(arguments)) for name, arguments in calls]


def _canonical_arguments(arguments: Any) -> str:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(parsed, sort_keys=True, default=str)
    except (ValueError, RecursionError):
        return str(arguments)


@dataclass(frozen=True, slots=True)
class WeightVersions:
    """The versions of the weights before and after a step was sampled. None: not known."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One model call as the server answered it; ids and log-probabilities have one length."""

    prompt: array[int]
    completion: array[int]
    logprobs: array[float]
    finish: str
    weights: WeightVersions = WeightVersions()

    @classmethod
    def of(
        cls,
        prompt: Iterable[int],
        completion: Iterable[int],
        logprobs: Iterable[float],
        finish: str = "stop",
        weights: WeightVersions | None = None,
    ) -> Step:
        return cls(ids(prompt), ids(completion), numbers(logprobs), finish, weights or WeightVersions())

    def __post_init__(self) -> None:
        if len(self.completion) != len(self.logprobs):
            raise ValueError(f"{len(self.completion)} sampled tokens have {len(self.logprobs)} log-probabilities")


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """The place of a step: tokens `start` to `stop` of sequence `sequence`; `how` its prompt was made."""

    number: int
    sequence: int
    start: int
    stop: int
    finish: str
    weights: WeightVersions
    how: How


@dataclass(slots=True, eq=False)
class Branch:
    """A sequence that grows, and the messages that its tokens hold."""

    tokens: array[int] = field(default_factory=ids)
    sampled: array[float] = field(default_factory=numbers)
    spans: list[SampledSpan] = field(default_factory=list)
    history: History = field(default_factory=History)
    text: tuple[bytes, ...] = ()
    """The first tokens as parts of a JSON list; they are kept because each request of the rollout repeats them."""
    listed: int = 0
    """How many tokens `text` holds."""

    def is_prefix_of(self, prompt: array[int]) -> bool:
        size = len(self.tokens)
        return size <= len(prompt) and prompt[:size].tobytes() == self.tokens.tobytes()

    def extend(self, context: array[int], completion: array[int]) -> None:
        """Append tokens."""
        self.tokens.extend(context)
        self.tokens.extend(completion)

    def sequence(self) -> TokenSequence:
        return TokenSequence(self.tokens, tuple(self.spans), self.sampled)


@dataclass(frozen=True)
class RenderedPrompt:
    """The ids of a prompt; `onto` is the branch whose tokens they extend, None where they were rendered anew."""

    ids: array[int]
    onto: Branch | None = None

    @cached_property
    def text(self) -> tuple[bytes, ...]:
        """The ids as parts of a JSON list without its brackets; the parts that the branch has are used again."""
        text, done = ((), 0) if self.onto is None else (self.onto.text, self.onto.listed)
        return (*text, listed(self.ids[done:]))


class Transcript:
    """The steps of one rollout. Not safe for concurrent steps: a rollout makes one model call at a time."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []
        self.turns: list[TranscriptTurn] = []

    def add(
        self, step: Step, messages: Sequence[Any] | None = None, prompt: RenderedPrompt | None = None
    ) -> TranscriptTurn:
        """Merge a step; `messages` are the conversation that it answers and, last, its answer.

        `prompt` is the step's own prompt: where it extends a branch, neither tokens nor messages are compared.
        """
        onto = None if prompt is None else prompt.onto
        place = self._longest_prefix(step.prompt) if onto is None else self.branches.index(onto)
        how: How = "first" if not self.turns else "extended" if place is not None else "anew"
        if place is None:
            place = len(self.branches)
            self.branches.append(Branch())
        branch = self.branches[place]
        start = len(step.prompt)
        branch.extend(step.prompt[len(branch.tokens) :], step.completion)
        if prompt is not None and "text" in vars(prompt):  # a request has used it
            branch.text, branch.listed = prompt.text, start
        branch.sampled.extend(step.logprobs)
        number = len(self.turns)
        branch.spans.append(SampledSpan(number, start, len(branch.tokens)))
        if messages is not None:
            (branch.history.follow if onto is None else branch.history.extend)(messages)
        turn = TranscriptTurn(number, place, start, len(branch.tokens), step.finish, step.weights, how)
        self.turns.append(turn)
        return turn

    def holding(self, messages: Sequence[Any]) -> Branch | None:
        """Find the branch that holds the longest beginning of a conversation, up to and with an answer of the model."""
        found: Branch | None = None
        for branch in self.branches:
            size = len(branch.history)
            longer = found is None or size > len(found.history)
            if longer and 0 < size < len(messages) and branch.history.begins(messages):
                found = branch
        return found

    def sequences(self) -> list[TokenSequence]:
        """Return the merged sequences, in the order in which they were opened."""
        for branch in self.branches:
            branch.text, branch.listed = (), 0  # a rollout that goes on all the same makes it again
        return [branch.sequence() for branch in self.branches]

    def _longest_prefix(self, prompt: array[int]) -> int | None:
        by_length = sorted(range(len(self.branches)), key=lambda place: -len(self.branches[place].tokens))
        return next((place for place in by_length if self.branches[place].is_prefix_of(prompt)), None)


def merge(steps: Iterable[Step]) -> list[TokenSequence]:
    """Merge steps that are there already."""
    transcript = Transcript()
    for step in steps:
        transcript.add(step)
    return transcript.sequences()
