"""What was sampled in one rollout, step by step, merged into sequences as it happens.

A step extends the longest sequence that is an exact prefix of its prompt; otherwise it opens a new one. So every
sampled token lies in exactly one span of one sequence, in the context that the model saw. Owns the merging
and which conversation a sequence holds; leaves tokens of messages to `rendering`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from hermes_rl.tokens.identity import History
from hermes_rl.tokens.sequence import Sequence as TokenSequence
from hermes_rl.tokens.sequence import Span, ids, listed, numbers

How = Literal["first", "extended", "anew"]
"""How a prompt came about: the first of the rollout; the tokens before it with new ones behind; rendered anew."""


@dataclass(frozen=True, slots=True)
class WeightVersions:
    """Versions of the weights that a step was sampled with: what was true before it, and after. None: not known."""

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
    """Where a step went: tokens `start` to `stop` of sequence `sequence`; how its prompt came about."""

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
    spans: list[Span] = field(default_factory=list)
    history: History = field(default_factory=History)
    text: tuple[bytes, ...] = ()
    """The first tokens as parts of a JSON list, kept while the rollout goes on, as each request repeats them."""
    listed: int = 0
    """How many tokens those are."""

    def is_prefix_of(self, prompt: array[int]) -> bool:
        size = len(self.tokens)
        return size <= len(prompt) and prompt[:size].tobytes() == self.tokens.tobytes()

    def extend(self, context: array[int], completion: array[int]) -> None:
        """Put tokens behind those that are there."""
        self.tokens.extend(context)
        self.tokens.extend(completion)

    def sequence(self) -> TokenSequence:
        return TokenSequence(self.tokens, tuple(self.spans), self.sampled)


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt; `onto` is the branch whose tokens it extends, None where it was rendered anew."""

    ids: array[int]
    onto: Branch | None = None

    @cached_property
    def text(self) -> tuple[bytes, ...]:
        """The ids as parts of a JSON list, without its brackets; of a branch, only what is new in it is written."""
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

        `prompt` is what its prompt was made as: where that extends a branch, neither tokens nor messages are compared.
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
        if prompt is not None and "text" in vars(prompt):  # it was made for a request
            branch.text, branch.listed = prompt.text, start
        branch.sampled.extend(step.logprobs)
        number = len(self.turns)
        branch.spans.append(Span(number, start, len(branch.tokens)))
        if messages is not None:
            (branch.history.follow if onto is None else branch.history.extend)(messages)
        turn = TranscriptTurn(number, place, start, len(branch.tokens), step.finish, step.weights, how)
        self.turns.append(turn)
        return turn

    def holding(self, messages: Sequence[Any]) -> Branch | None:
        """The branch that holds the longest beginning of a conversation, up to and with an answer of the model."""
        found: Branch | None = None
        for branch in self.branches:
            size = len(branch.history)
            longer = found is None or size > len(found.history)
            if longer and 0 < size < len(messages) and branch.history.begins(messages):
                found = branch
        return found

    def sequences(self) -> list[TokenSequence]:
        """The merged sequences, in the order in which they were opened."""
        for branch in self.branches:
            branch.text, branch.listed = (), 0  # made again where the rollout goes on all the same
        return [branch.sequence() for branch in self.branches]

    def _longest_prefix(self, prompt: array[int]) -> int | None:
        by_length = sorted(range(len(self.branches)), key=lambda place: -len(self.branches[place].tokens))
        return next((place for place in by_length if self.branches[place].is_prefix_of(prompt)), None)


def merge(steps: Iterable[Step]) -> list[TokenSequence]:
    """The sequences of steps that are there already."""
    transcript = Transcript()
    for step in steps:
        transcript.add(step)
    return transcript.sequences()
