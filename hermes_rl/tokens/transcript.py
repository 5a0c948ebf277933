"""Record the transcript of a rollout: its sampled steps, merged into sequences immediately.

A step extends the longest sequence that is an exact prefix of its prompt; otherwise it starts a new one. So every
sampled token is in exactly one span of one sequence, in the context that the model saw. Servers, programs and templates
rewrite a model's reply without changing its meaning (ids of calls, the JSON of arguments, blanks around the text,
reasoning that is dropped); the transcript treats it as the same reply. All other messages must be unchanged. Renderers
create the tokens of messages, with `hermes_rl.tokens.texts`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import zlib
from array import array
from base64 import b64decode, b64encode
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

if TYPE_CHECKING:
    from hermes_rl.tokens.tokenizer import Tools

# ------------------------------------ Sequences: tokens, the sampled ones among them, and their log-probabilities
# In memory, sequences take 4 bytes per token and 8 more per sampled one; in files usually 4 to 10 per token, at most
# 16. Masks and full-length lists of log-probabilities are views, created on access.

MASKED = -100
"""Mask of a token that is not trained on."""
MASKED_LOGPROB = 1.0
"""Log-probability at masked positions: a value that no sampled token can have."""
Number = TypeVar("Number", int, float)


def ids(values: Iterable[int] = ()) -> array[int]:
    """Return an array of token ids, 4 bytes each."""
    return array("i", values)


def format_ids(tokens: array[int]) -> bytes:
    """Return token ids as a JSON list without its brackets."""
    return str(tokens.tolist())[1:-1].encode("ascii")


def numbers(values: Iterable[float] = ()) -> array[float]:
    """Return an array of log-probabilities, 8 bytes each: a server's values without loss of precision."""
    return array("d", values)


@dataclass(frozen=True, slots=True)
class SampledSpan:
    """Tokens `start` to `stop` (exclusive) of a sequence, sampled in model call `turn`, which counts from 0."""

    turn: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens in order, and the spans of them that were sampled; everything else is context."""

    ids: array[int]
    spans: tuple[SampledSpan, ...]
    sampled: array[float] | None = None
    """One log-probability per sampled token, in order; None if the server gave none that match."""

    def __post_init__(self) -> None:
        end = 0
        for span in self.spans:
            if not end <= span.start <= span.stop <= len(self.ids):
                raise ValueError(f"the span {span} overlaps another, or lies outside of {len(self.ids)} tokens")
            end = span.stop
        if self.sampled is not None and len(self.sampled) != self.trained_length:
            raise ValueError(
                f"tokens and logprobs differ in length: {self.trained_length} sampled tokens, {len(self.sampled)}"
            )

    @classmethod
    def from_lists(cls, tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float] | None = None) -> Self:
        """Return a sequence from lists of equal length; a mask is `MASKED` or the token. Runs of tokens are turns."""
        if len({len(tokens), len(masks), len(tokens if logprobs is None else logprobs)}) != 1:
            raise ValueError("tokens, masks and logprobs differ in length")
        spans = tuple(_runs(masks))
        sampled = None
        if logprobs is not None:
            sampled = numbers(logprobs[i] for span in spans for i in range(span.start, span.stop))
        return cls(ids(tokens), spans, sampled)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def trained_length(self) -> int:
        """Number of sampled tokens."""
        return sum(span.stop - span.start for span in self.spans)

    def without(self, turns: Container[int]) -> TokenSequence:
        """Return the sequence with these turns as context."""
        spans = tuple(span for span in self.spans if span.turn not in turns)
        if self.sampled is None or len(spans) == len(self.spans):
            return replace(self, spans=spans)
        spread = self.spread(self.sampled, MASKED_LOGPROB)
        return TokenSequence(self.ids, spans, numbers(spread[index] for s in spans for index in range(s.start, s.stop)))

    @property
    def tokens(self) -> list[int]:
        return self.ids.tolist()

    @property
    def masks(self) -> list[int]:
        """One value per token: `MASKED` or the token itself."""
        masks = [MASKED] * len(self.ids)
        for span in self.spans:
            masks[span.start : span.stop] = self.ids[span.start : span.stop].tolist()
        return masks

    @property
    def logprobs(self) -> list[float] | None:
        """One value per token, `MASKED_LOGPROB` if it was not sampled."""
        return None if self.sampled is None else self.spread(self.sampled, MASKED_LOGPROB)

    def spread(self, values: Sequence[float], elsewhere: float) -> list[float]:
        """Return a list with the values of sampled tokens at their positions, and `elsewhere` at all others."""
        line, offset = [elsewhere] * len(self.ids), 0
        for span in self.spans:
            count = span.stop - span.start
            line[span.start : span.stop] = values[offset : offset + count]
            offset += count
        return line

    @property
    def trained(self) -> list[int]:
        """Tokens that are trained on, in order."""
        return [token for span in self.spans for token in self.ids[span.start : span.stop]]


def _runs(masks: Sequence[int]) -> Iterator[SampledSpan]:
    start, turn = None, 0
    for index, mask in enumerate([*masks, MASKED]):
        if mask != MASKED and start is None:
            start = index
        elif mask == MASKED and start is not None:
            yield SampledSpan(turn, start, index)
            start, turn = None, turn + 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A model's log-probabilities of given tokens, and the most probable tokens at each position.

    The first token has none, because nothing precedes it. All arrays are flat.
    """

    token_logprobs: array[float]
    """Log-probability of each token except the first."""
    top_k: int
    top_ids: array[int]
    """The `top_k` most probable tokens at the position of each token except the first, the most probable first."""
    top_logprobs: array[float]

    def __post_init__(self) -> None:
        expected_size = len(self.token_logprobs) * self.top_k
        if len(self.top_ids) != expected_size or len(self.top_logprobs) != expected_size:
            raise ValueError(
                f"{len(self.token_logprobs)} places with {self.top_k} tokens each do not make {len(self.top_ids)}"
            )

    @property
    def reference(self) -> list[float]:
        """One log-probability per token, `MASKED_LOGPROB` for the first."""
        return [MASKED_LOGPROB, *self.token_logprobs]

    @property
    def distill_ids(self) -> list[list[int]]:
        """The most probable tokens at each position; none at the first."""
        return self._rows(self.top_ids)

    @property
    def distill_logprobs(self) -> list[list[float]]:
        """Log-probabilities of `distill_ids`."""
        return self._rows(self.top_logprobs)

    def _rows(self, flat: array[Number]) -> list[list[Number]]:
        rows: list[list[Number]] = [[]]
        for index in range(len(self.token_logprobs)):
            rows.append(flat[index * self.top_k : (index + 1) * self.top_k].tolist())
        return rows

    def packed(self) -> dict[str, Any]:
        """Return the JSON form, in the format of `packed` for sequences."""
        arrays = {"own": _text(self.token_logprobs), "ids": _text(self.top_ids), "logprobs": _text(self.top_logprobs)}
        return {"top_k": self.top_k, **arrays}

    @classmethod
    def unpacked(cls, record: Mapping[str, Any]) -> Self:
        """Return the values of a record; raise ValueError if it contains none."""
        try:
            token_logprobs, values = _numbers(record["own"], numbers()), _numbers(record["logprobs"], numbers())
            return cls(token_logprobs, int(record["top_k"]), _numbers(record["ids"], ids()), values)
        except (KeyError, TypeError, zlib.error) as error:
            raise ValueError(f"these are not packed log-probabilities: {type(error).__name__}: {error}") from error


def packed(sequence: TokenSequence) -> dict[str, Any]:
    """Return the JSON form of the sequence; `unpacked` restores it exactly.

    Ids are 32-bit and log-probabilities 64-bit numbers, little-endian, compressed and encoded as base64.
    """
    return {
        "ids": _text(sequence.ids),
        "spans": [[span.turn, span.start, span.stop] for span in sequence.spans],
        "logprobs": None if sequence.sampled is None else _text(sequence.sampled),
    }


LARGEST_PACKED = 1 << 28
"""Maximum bytes of the ids or log-probabilities of a sequence, enough for 32 million tokens."""


def unpacked(record: Mapping[str, Any]) -> TokenSequence:
    """Return the sequence of a record; raise ValueError if it contains none."""
    try:
        spans = tuple(SampledSpan(*map(int, span)) for span in record["spans"])
        sampled = None if record["logprobs"] is None else _numbers(record["logprobs"], numbers())
        return TokenSequence(_numbers(record["ids"], ids()), spans, sampled)
    except (KeyError, TypeError, zlib.error) as error:
        raise ValueError(f"this is not a packed sequence: {type(error).__name__}: {error}") from error


def _text(values: array[Any]) -> str:
    return b64encode(zlib.compress(_little(values).tobytes(), 1)).decode("ascii")


def _numbers(text: str, into: array[Number]) -> array[Number]:
    unpacking = zlib.decompressobj()
    into.frombytes(unpacking.decompress(b64decode(text), LARGEST_PACKED))
    if not unpacking.eof:
        raise zlib.error(f"the packed numbers are truncated or have more than {LARGEST_PACKED} bytes")
    return _little(into)


def _little(values: array[Number]) -> array[Number]:
    """Return the values in the byte order of files."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


# ------------------------------------------------------------------------------------------------ The transcript

Call = tuple[str, Any]
How = Literal["first", "extended", "branched", "anew"]
"""Origin of a prompt: it was the first of the rollout, it extended the tokens before it, it extended an earlier reply
that the conversation had already continued from, or it was rendered again.
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a message's content; later changes to the message do not affect it."""

    role: str
    content: Any
    calls: tuple[Call, ...] = ()
    thought: str = ""
    """Reasoning without surrounding blanks; templates may drop it later on."""

    def has_same_meaning(self, message: Mapping[str, Any]) -> bool:
        """Return True if the message has the same meaning.

        A model's reply may come back without its reasoning and without the blanks around its text; other texts must be
        identical.
        """
        content = message.get("content") or ""
        if message.get("role") != self.role:
            return False
        if content != self.content and not (self.role == "assistant" and _stripped(content) == _stripped(self.content)):
            return False
        if self.role == "assistant" and _thought(message) not in ("", self.thought):
            return False
        calls = _calls(message)
        return calls == self.calls or _canonical(calls) == _canonical(self.calls)


def snapshot(message: Mapping[str, Any]) -> Snapshot:
    """Return the snapshot of a message."""
    return Snapshot(str(message.get("role")), message.get("content") or "", _calls(message), _thought(message))


def _stripped(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def _thought(message: Mapping[str, Any]) -> str:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return str(reasoning).strip() if reasoning else ""


class History:
    """The messages that a sequence contains.

    Recognising a known message is cheap: it is the same object with the same content and calls. Other messages are
    compared by their content.
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
        """Return True if a conversation starts with these messages."""
        head = list(messages[: len(self)])
        contents = [message.get("content") for message in head]
        calls = [message.get("tool_calls") for message in head]
        # Comparing lists with identical objects is fast.
        if head == self._messages and contents == self._contents and calls == self._calls:
            return True
        if len(head) < len(self) or not all(map(Snapshot.has_same_meaning, self.snapshots, head)):
            return False
        self._messages, self._contents, self._calls = head, contents, calls
        return True

    def count_common(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of messages at the start of a conversation that equal these."""
        if self.begins(messages):
            return len(self)
        pairs = zip(self.snapshots, messages, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0].has_same_meaning(pair[1]), pairs))

    def extend(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append the new messages of a conversation that is known to start with these."""
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


def canonical_calls(message: Mapping[str, Any]) -> list[str]:
    """Return the tool calls of a message in a canonical form that is equal for calls of the same meaning."""
    return _canonical(_calls(message))


def _canonical(calls: tuple[Call, ...]) -> list[str]:
    names = [repr(name) if {"(", "'", '"'} & set(name) else name for name, _ in calls]
    return [f"{name}({_canonical_arguments(call[1])})" for name, call in zip(names, calls, strict=True)]


EXACT = 1 << 53
"""Largest absolute value up to which a whole number means the same with and without a decimal point."""


SHORT = 4_096
"""Maximum characters of arguments whose canonical form is cached, because each request of a program repeats them."""


def _canonical_arguments(arguments: Any) -> str:
    if isinstance(arguments, str) and len(arguments) <= SHORT:
        return _canonical_short(arguments)
    return _canonical_written(arguments)


def _canonical_written(arguments: Any) -> str:
    """Return arguments in a canonical form. JSON with duplicate keys is unchanged, because its meaning differs by
    parser.
    """
    try:
        text = (arguments or "{}") if isinstance(arguments, str) else json.dumps(arguments, default=str)
        parsed = json.loads(text, parse_float=_parse_number, object_pairs_hook=_named_once)
        return json.dumps(parsed, sort_keys=True)  # NaN and null differ
    except (ValueError, RecursionError):
        return str(arguments)


_canonical_short = functools.lru_cache(maxsize=1024)(_canonical_written)


def _parse_number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() and abs(value) <= EXACT else value


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    by_name = dict(pairs)
    if len(by_name) < len(pairs):
        raise ValueError("a name occurs twice")
    return by_name


@dataclass(frozen=True, slots=True)
class WeightVersions:
    """Versions of the weights before and after a step was sampled; None: unknown."""

    before: int | None = None
    after: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One model call with its response; ids and log-probabilities have equal length."""

    prompt: array[int]
    completion: array[int]
    logprobs: array[float]
    finish: str
    weights: WeightVersions = WeightVersions()

    @classmethod
    def from_lists(
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
    """Position of a step: tokens `start` to `stop` of sequence `sequence`; `how` its prompt was made."""

    index: int
    sequence: int
    start: int
    stop: int
    finish: str
    weights: WeightVersions
    how: How


@dataclass(slots=True, eq=False)
class Branch:
    """A growing sequence, and the messages that its tokens contain."""

    tokens: array[int] = field(default_factory=ids)
    sampled: array[float] = field(default_factory=numbers)
    spans: list[SampledSpan] = field(default_factory=list)
    history: History = field(default_factory=History)
    tools: Tools | None = None
    """The tools that its prompt shows."""
    answered: list[int] = field(default_factory=list)
    """For each span, the number of messages of the history up to and including its reply."""
    text: tuple[bytes, ...] = ()
    """The first tokens as parts of a JSON list, cached because each request of the rollout repeats them."""
    text_token_count: int = 0
    """Number of tokens in `text`."""

    def until(self, answer: int) -> Branch:
        """Return this branch in its state after reply `answer`."""
        spans, size = self.spans[: answer + 1], self.answered[answer]
        history = History()
        history.snapshots = self.history.snapshots[:size]
        return Branch(self.tokens[: spans[-1].stop], spans=spans, history=history, tools=self.tools)


@dataclass(eq=False)
class RenderedPrompt:
    """The ids of a prompt; `onto` is the branch whose tokens they extend, or None if rendered from scratch."""

    ids: array[int]
    onto: Branch | None = None
    tools: Tools | None = None

    def __post_init__(self) -> None:
        # The current state of the branch: it may grow by the reply to another prompt before this one gets its reply.
        self._answers = 0 if self.onto is None else len(self.onto.spans)
        self._cached_text = ((), 0) if self.onto is None else (self.onto.text, self.onto.text_token_count)

    @property
    def is_stale(self) -> bool:
        """True if the branch has grown since the prompt was made, so that the reply to it starts another one."""
        return self.onto is not None and len(self.onto.spans) != self._answers

    @cached_property
    def text(self) -> tuple[bytes, ...]:
        """The ids as parts of a JSON list without its brackets; the branch's parts are reused."""
        text, done = self._cached_text
        return (*text, format_ids(self.ids[done:]))


class Transcript:
    """The steps of one rollout.

    Several model calls may be in flight concurrently. Code that creates a prompt from the transcript, or adds the reply
    to one, must hold `lock` meanwhile, and must not hold it while the model samples.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.branches: list[Branch] = []
        self.turns: list[TranscriptTurn] = []
        self.excluded: dict[int, str] = {}
        """Turns that are not trained on, and the reason: they are only context."""

    def add(
        self, step: Step, messages: Sequence[Any] | None = None, prompt: RenderedPrompt | None = None
    ) -> TranscriptTurn:
        """Merge a step; `messages` are the conversation that it responds to and, last, its reply.

        `prompt` is the step's own prompt: if it extends a branch, neither tokens nor messages are compared.
        """
        onto = None if prompt is None else prompt.onto
        branch_index = self._find_branch(step.prompt, prompt)
        how: How = (
            "first" if not self.turns else "extended" if branch_index is not None else "branched" if onto else "anew"
        )
        if branch_index is None:
            branch_index = len(self.branches)
            self.branches.append(Branch())
        branch = self.branches[branch_index]
        if prompt is not None:
            branch.tools = prompt.tools
        start = len(step.prompt)
        branch.tokens += step.prompt[len(branch.tokens) :] + step.completion
        if prompt is not None and "text" in vars(prompt):  # a request has used it
            branch.text, branch.text_token_count = prompt.text, start
        branch.sampled.extend(step.logprobs)
        turn_index = len(self.turns)
        branch.spans.append(SampledSpan(turn_index, start, len(branch.tokens)))
        if messages is not None:
            if onto is not branch and not branch.history.begins(messages):
                branch.history = History()  # the same tokens, but another conversation
                branch.answered = [0] * len(branch.answered)
            branch.history.extend(messages)
        branch.answered.append(len(branch.history))
        turn = TranscriptTurn(turn_index, branch_index, start, len(branch.tokens), step.finish, step.weights, how)
        self.turns.append(turn)
        return turn

    def first_sampled(self, prompt: RenderedPrompt) -> int:
        """Return the start of the response in the sequence that a step with this prompt becomes part of."""
        branch_index = self._find_branch(prompt.ids, prompt)
        return len(prompt.ids) if branch_index is None else self.branches[branch_index].spans[0].start

    def holding(self, messages: Sequence[Any], tools: Tools | None = None) -> Branch | None:
        """Return the branch with the longest start of a conversation, up to and including a reply of the model, or
        None.

        It is a branch, or its state at an earlier reply. If several replies with different tokens have the same
        meaning, and the right one is unknown, the result is None.
        """
        deepest, candidates = 0, list[tuple[Branch, int]]()
        for branch in sorted(self.branches, key=lambda branch: -len(branch.history)):
            if len(branch.history) < max(deepest, 1) or (branch.tools or None) != (tools or None):
                continue
            common_length = min(branch.history.count_common(messages), len(messages) - 1)
            answer = max(
                (index for index, size in enumerate(branch.answered) if 0 < size <= common_length), default=None
            )
            if answer is None or branch.answered[answer] < deepest:
                continue
            if branch.answered[answer] > deepest:
                deepest, candidates = branch.answered[answer], []
            candidates.append((branch, answer))
        complete_branches = [branch for branch, answer in candidates if answer == len(branch.spans) - 1]
        beginnings = complete_branches[-1:] or [branch.until(answer) for branch, answer in candidates[-1:]]
        for branch, answer in candidates if len(candidates) > 1 else ():
            if branch.tokens[: branch.spans[answer].stop] != beginnings[0].tokens:
                return None
        return beginnings[0] if beginnings else None

    def sequences(self) -> list[TokenSequence]:
        """Return the merged sequences, in the order of their start.

        Sequences without a trained turn are omitted, unless there is no other.
        """
        for branch in self.branches:
            branch.text, branch.text_token_count = (), 0  # if the rollout continues nevertheless, it is created again
        all_sequences = [TokenSequence(branch.tokens, tuple(branch.spans), branch.sampled) for branch in self.branches]
        if not self.excluded:
            return all_sequences
        parts = [sequence.without(self.excluded) for sequence in all_sequences]
        return [part for part in parts if part.spans] or parts[:1]

    def _find_branch(self, ids: array[int], prompt: RenderedPrompt | None) -> int | None:
        """Return the index of the branch that a prompt extends, or None if it starts one."""
        if prompt is None or prompt.onto is None:
            for index in sorted(range(len(self.branches)), key=lambda place: -len(self.branches[place].tokens)):
                tokens = self.branches[index].tokens
                if len(tokens) <= len(ids) and ids[: len(tokens)].tobytes() == tokens.tobytes():
                    return index
            return None
        return self.branches.index(prompt.onto) if prompt.onto in self.branches and not prompt.is_stale else None


def merge(steps: Iterable[Step]) -> list[TokenSequence]:
    """Return the sequences merged from existing steps."""
    transcript = Transcript()
    for step in steps:
        transcript.add(step)
    return transcript.sequences()
