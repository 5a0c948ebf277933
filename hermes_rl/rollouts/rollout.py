"""Define rollouts and groups: their results, stop reasons and scores.

These are the core's data types. `hermes_rl.runs.store` owns their form in files; each trainer adapter owns its own
form.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Literal

from hermes_rl.agent.result import AgentResult, Message, ProgramRun
from hermes_rl.data.rows import Row
from hermes_rl.errors import Failure, UserError
from hermes_rl.rollouts.advantages import ESTIMATORS, Normalise, of_tokens, of_turns
from hermes_rl.scoring.reward_value import RewardValue
from hermes_rl.servers.base import LedgerEntry, sampled_digest
from hermes_rl.servers.usage import Usage
from hermes_rl.spec.new_names import RenamedAttributes
from hermes_rl.stop_reasons import StopReason
from hermes_rl.terminal_text import pluralize
from hermes_rl.threads import run_in_thread
from hermes_rl.tokens.chat import SampledTurn, chat_tokens
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import Tokenizer, TokenizerUnavailable
from hermes_rl.tokens.transcript import SampledSpan, TokenLogprobs, TokenSequence

NEVER_ASKED = "the policy was never asked, so nothing was sampled"
"""Error of a rollout without training data, such as one whose agent program exited before its first request."""


def never_asked(program: ProgramRun) -> str:
    """Return a message that nothing was sampled, with the program's actions, which the policy did not influence."""
    ended = "was ended" if program.exit_code is None else f"ended with status {program.exit_code}"
    last_line = program.output.strip().rpartition("\n")[2][:200]
    refused = f"{program.refused} refused{program.refusal and f', the last: {program.refusal}'}"
    requests = f"made {pluralize(program.requests, 'request')} ({refused})"
    return f"{NEVER_ASKED}: its program {requests} and {ended}{last_line and f': {last_line}'}"


# Token provenance: the proof that a group may be trained on. The trained tokens must be the tokens that the server
# sampled, in the context that it saw. Both sides are independent: the servers' replies give the sampled tokens
# (`servers.base.LedgerEntry`), and a trainer gets the sequences. A `Certificate` compares them and names each mismatch.


CERTIFIED_HERE = 4_096
"""Number of tokens up to which a group is compared on the event loop; more take milliseconds and use a thread."""


async def group_provenance(group: Group) -> TokenProvenance:
    """Return the result of `attach_provenance`, computed in a thread if the group is large."""
    sequences = (sequence for rollout in group.rollouts for sequence in rollout.sequences or ())
    if sum(map(len, sequences)) <= CERTIFIED_HERE:
        return attach_provenance(group)
    return await run_in_thread(partial(attach_provenance, group))


def attach_provenance(group: Group) -> TokenProvenance:
    """Compare the tokens of a group with the tokens sampled by its servers. Takes milliseconds: call it in a thread."""
    members = [
        rollout
        for rollout in group.rollouts
        if rollout.state is not RolloutState.RETRIES_EXHAUSTED and rollout.seat.trained
    ]
    ledger = [generation for rollout in members for generation in rollout.ledger]
    sequences = [sequence for rollout in members for sequence in rollout.sequences or ()]
    sampling: list[dict[str, Any]] = []
    sampling.extend(entry for rollout in members for entry in rollout.sampling if entry and entry not in sampling)
    has_versions = all(None not in (each.weights.before, each.weights.after) for each in ledger) and bool(ledger)
    return TokenProvenance(
        sampled=sum(generation.count for generation in ledger),
        trained=sum(sequence.trained_length for sequence in sequences),
        excluded=sum(count for rollout in members for count in rollout.excluded.values()),
        turns=sum(rollout.result.turns_used for rollout in members if rollout.result is not None),
        sequences=len(sequences),
        oldest=min(generation.weights.before or 0 for generation in ledger) if has_versions else None,
        newest=max(generation.weights.after or 0 for generation in ledger) if has_versions else None,
        sampling=tuple(sampling),
        problems=tuple(f"{rollout.id}: {text}" for rollout in members for text in _exactness_problems(rollout)),
    )


def _exactness_problems(rollout: Rollout) -> Iterator[str]:
    result = rollout.result
    if result is not None and not result.turns_used:
        return  # nothing was sampled, and nothing is trained
    if result is None or rollout.sequences is None:
        yield "its tokens are not known"
        return
    if any(reply.sampled is None for reply in result.replies) or not result.replies:
        yield "a chat server does not report which tokens it sampled"
        return
    if result.program is None:  # a program may record replies differently; they are context
        yield from _message_problems(rollout)
    turns = [(sequence, span) for sequence in rollout.sequences for span in sequence.spans]
    ledger = rollout.ledger
    excluded = result.program.untrained if result.program is not None else ()
    if sorted([*(span.turn for _, span in turns), *excluded]) != list(range(len(ledger))):
        yield (
            f"{len(ledger)} turns were sampled, {len(excluded)} of them are excluded, and the sequences hold "
            f"{[span.turn for _, span in turns]}"
        )
        return
    for sequence, span in turns:
        yield from _turn_problems(sequence, span, ledger[span.turn])


def _message_problems(rollout: Rollout) -> Iterator[str]:
    """Yield a problem unless the assistant messages after the prompt are the servers' replies, in order."""
    assert rollout.result is not None
    result = rollout.result
    answers = [message for message in result.messages[result.prompt_length :] if message.get("role") == "assistant"]
    if len(answers) != len(result.replies):
        yield f"it has {len(answers)} assistant messages of {len(result.replies)} answers"
    for index, (message, reply) in enumerate(zip(answers, result.replies, strict=False)):
        if (message.get("content") or "") != (reply.message.get("content") or ""):
            yield f"the assistant message {index} is not what was sampled"


def _turn_problems(sequence: TokenSequence, span: SampledSpan, sampled: LedgerEntry) -> Iterator[str]:
    if sequence.sampled is None:
        yield f"turn {span.turn} has no log-probabilities"
        return
    if span.stop - span.start != sampled.count:
        yield f"turn {span.turn} has {span.stop - span.start} tokens, {sampled.count} were sampled"
        return
    if sampled_digest(sequence.ids[span.start : span.stop], _span_logprobs(sequence, span)) != sampled.digest:
        yield f"the tokens or log-probabilities of turn {span.turn} differ from the sampled ones"
    if span.start != sampled.prompt or zlib.crc32(sequence.ids[: span.start]) != sampled.prompt_check:
        yield f"the context of turn {span.turn} is not the one that it was sampled in"


def _span_logprobs(sequence: TokenSequence, span: SampledSpan) -> array[float]:
    assert sequence.sampled is not None
    before = sum(other.stop - other.start for other in sequence.spans if other.start < span.start)
    return sequence.sampled[before : before + span.stop - span.start]


# --------------------------------------------- Examples: a rollout in the list format that nearly every trainer accepts
# A sequence becomes a prompt (all tokens before the first sampled token) and a response, with a mask of 0 and 1 over
# the response. `hermes_rl.runs.groups` owns the format for Atropos.


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of a rollout. `response_ids`, `mask` and `logprobs` have equal length."""

    prompt_ids: list[int]
    """Tokens that the model saw before its first sampled token."""
    response_ids: list[int]
    """Sampled tokens, and the tokens of tools and users between them."""
    mask: list[int]
    """1 if a token was sampled and is trained on; all 0 for a rollout that the spec masks."""
    logprobs: list[float] | None
    """Log-probabilities at sampling, 0.0 where the mask is 0; None if the server gave none."""
    weights: tuple[int | None, int | None]
    """Oldest and newest version of the sampling weights; None if unknown."""
    spans: tuple[SampledSpan, ...] = ()
    """Tokens of the response sampled in each model call of the rollout; turns count from 0."""

    def of_turns(self, per_turn: Sequence[float]) -> list[float]:
        """Return one value for each token of the response: the value of its turn, 0.0 where the mask is 0."""
        values = of_tokens(self.spans, per_turn, len(self.response_ids))
        return [value if trained else 0.0 for value, trained in zip(values, self.mask, strict=True)]


def example_of(sequence: TokenSequence, ledger: Sequence[LedgerEntry], *, masked: bool) -> Example:
    """Return the example of a sequence.

    Args:
        sequence: its tokens.
        ledger: samples of each call of its rollout.
        masked: True if none of its tokens is trained on.
    """
    first = sequence.spans[0].start if sequence.spans else len(sequence)
    mask, logprobs = [0] * len(sequence), None
    if not masked:
        for span in sequence.spans:
            mask[span.start : span.stop] = [1] * (span.stop - span.start)
    if sequence.sampled is not None:
        logprobs = [0.0] * len(sequence) if masked else sequence.spread(sequence.sampled, 0.0)
    tokens = sequence.tokens
    return Example(
        prompt_ids=tokens[:first],
        response_ids=tokens[first:],
        mask=mask[first:],
        logprobs=None if logprobs is None else logprobs[first:],
        weights=_weight_range(sequence, ledger),
        spans=tuple(SampledSpan(span.turn, span.start - first, span.stop - first) for span in sequence.spans),
    )


def _weight_range(sequence: TokenSequence, ledger: Sequence[LedgerEntry]) -> tuple[int | None, int | None]:
    """Return the oldest and newest weights of the turns in this sequence; None if unknown for any turn."""
    turns = [ledger[span.turn].weights for span in sequence.spans if span.turn < len(ledger)]
    before = [weights.before for weights in turns if weights.before is not None]
    after = [weights.after for weights in turns if weights.after is not None]
    if not turns or len(before) < len(turns) or len(after) < len(turns):
        return None, None
    return min(before), max(after)


# -------------------------------------------------------------------------------- rollout


class RolloutState(StrEnum):
    """Processing state of a rollout; the value is the `state` of its record."""

    WAITING = "waiting"
    """It has run, and gets its score together with the other members of its group."""
    SCORED = "scored"
    EXCLUDED = "excluded"
    """The spec's `on_stop` drops its stop reason, so it has no score and never gets one."""
    FAILED = "failed"
    """Infrastructure failed; a later start of the run runs it again."""
    RETRIES_EXHAUSTED = "retries_exhausted"
    """Infrastructure failed in all retries; it has no score, stays in its group, and counts as the worst there."""

    @property
    def final(self) -> bool:
        """True if it is never run or scored again."""
        return self in (RolloutState.SCORED, RolloutState.EXCLUDED, RolloutState.RETRIES_EXHAUSTED)

    @property
    def abandoned(self) -> bool:
        """True if its retries were exhausted by infrastructure failures."""
        return self in (RolloutState.FAILED, RolloutState.RETRIES_EXHAUSTED)


Baseline = Literal["seat", "row", "episode"]
"""Rollouts with which a seat's rollout is compared: rollouts of the same seat in the other episodes of the group;
rollouts of all seats with this setting in all episodes of the group; or rollouts of all seats with this setting in its
own episode.
"""


@dataclass(frozen=True)
class Seat:
    """One agent of an episode of several agents: its role, and the use of its rollouts."""

    name: str = ""
    role: str = "policy"
    """Name of the servers that act for it."""
    trained: bool = True
    baseline: Baseline = "seat"

    def part(self, index: int) -> str | None:
        """Return the suffix of the group in which its rollout is compared, or None if it is not compared."""
        if not self.trained:
            return None
        return {"row": "@row", "episode": f"-{index}@episode"}.get(self.baseline, f"@{self.name}")

    def record(self, group: str) -> dict[str, Any]:
        """Return the JSON form, with the group of the episode."""
        return {**asdict(self), "of": group}


ONLY_SEAT = Seat()
"""The seat of a rollout of one agent."""


@dataclass(frozen=True)
class RolloutKey:
    """Identity of a rollout: row, group, index and size of the group, and attempt (from 0).

    `epoch` counts the passes over the rows from 0. `mark` distinguishes two runs of one member if the same group may
    run again, even concurrently; it is part of the id and of the seed. `seat` is the name of a seat of an episode other
    than the first.
    """

    row: Row
    group: str
    index: int
    size: int
    attempt: int = 0
    epoch: int = 0
    id_marker: str = ""
    seat: str = ""

    @property
    def id(self) -> str:
        """Id that is stable across restarts; each attempt has its own id."""
        attempt = f"r{self.attempt}" if self.attempt else ""
        return f"{self.group}-{self.index}{attempt}{self.id_marker}{seat_suffix(self.seat)}"

    def seed(self, base: int) -> int:
        """Return the seed for the seeds of the rollout's model calls, 31 bits.

        It depends on the spec's seed, the group and the member. Every attempt has the same seed, so if a server honours
        seeds, a retry gives the same result as an attempt without failure.
        """
        name = f"{self.group}-{self.index}{self.id_marker}{seat_suffix(self.seat)}"
        digest = hashlib.sha256(f"{base}:{name}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def seat_suffix(name: str) -> str:
    """Return the id suffix of a seat; empty for the first seat."""
    return f"@{name}" if name else ""


def cost_of(usage: Mapping[str, Any], roles: Mapping[str, Mapping[str, float]]) -> float | None:
    """Return the cost in US dollars of all model calls of a rollout, or None if the cost of one is not known.

    `usage` is the policy's, and `roles` the usage of other roles.
    """
    total = Usage.from_record(usage)
    for counts in roles.values():
        total += Usage.from_record(counts)
    return total.cost


@dataclass
class Rollout(RenamedAttributes):
    """One rollout. `score` is None if and only if it was not scored; `error` gives the cause, unless it waits for its
    group.

    `timings` are seconds by part: sandbox, queue, generation, tools, rewards, total. `masked`: it counts for its
    group's baseline and is not trained on.
    """

    key: RolloutKey
    seed: int
    stop_reason: StopReason = StopReason.CANCELLED
    result: AgentResult | None = None
    rewards: dict[str, RewardValue] = field(default_factory=dict)
    score: float | None = None
    error: str | None = None
    state: RolloutState = RolloutState.FAILED
    masked: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    started_at: float | None = None
    """Time of its start in seconds since 1970; None if unknown."""
    sandbox_start: Mapping[str, float] | None = None
    """Start of its sandbox: `started_at` in seconds since 1970, and `seconds`; None if it used none."""
    roles: dict[str, dict[str, float]] = field(default_factory=dict)
    """Records (`Usage`) of model use in addition to the policy's own turns, by role."""
    artifacts: dict[str, Any] = field(default_factory=dict)
    """Stored artifacts of its sandbox with their locations, by name."""
    image: str | None = None
    """Digest of its sandbox's image, if it used one."""
    sequences: list[TokenSequence] | None = None
    """Its tokens; several sequences if the policy did not see all tokens in one context. None if unknown."""
    credit: tuple[float, ...] | None = None
    """One value per turn, if a reward assigns credit to turns."""
    teacher: list[TokenLogprobs] | None = None
    """Teacher's log-probabilities for each of its sequences; None if there is no teacher."""
    line: Mapping[str, Any] | None = None
    """Its record as written by the process that ran it; None if it ran in this process."""
    worker_died: bool = False
    """True if it failed because its worker processes died."""
    no_tokens: str | None = None
    """Error of an encoder that could not create sequences; None if none has tried or it succeeded."""
    seat: Seat = ONLY_SEAT
    others: list[Rollout] = field(default_factory=list)
    """Rollouts of the other seats of its episode; empty for a single agent, and for each of these."""

    @property
    def seats(self) -> list[Rollout]:
        """Rollouts of all seats of the episode, this one first."""
        return [self, *self.others]

    @property
    def sequence(self) -> TokenSequence | None:
        """The only sequence; None if there are none or several."""
        return self.sequences[0] if self.sequences is not None and len(self.sequences) == 1 else None

    @property
    def trainable(self) -> bool:
        """True if it is trained on: it has a score and a reply, nothing masks it, and its seat is trained."""
        replies = () if self.result is None else self.result.messages[self.result.prompt_length :]
        has_replied = bool(self.sequences) or any(message["role"] == "assistant" for message in replies)
        return self.score is not None and has_replied and not self.masked and self.seat.trained

    @property
    def trained_sequences(self) -> list[TokenSequence] | None:
        """Its sequences as a trainer gets them: without a sampled token if it is not trainable."""
        if self.sequences is None or self.trainable:
            return self.sequences
        return [sequence.without({span.turn for span in sequence.spans}) for sequence in self.sequences]

    @property
    def id(self) -> str:
        return self.key.id

    def add_usage(self, usage: Mapping[str, Usage], *, played: bool) -> None:
        """Add model usage by role; `played`: it includes the policy's own turns."""
        turn_usage: dict[str, Usage] = {}
        for seat in self.seats if played else ():
            role_usage = turn_usage.setdefault(seat.seat.role, Usage())
            role_usage += seat.result.usage if seat.result is not None else Usage()
        for role, used in usage.items():
            other_usage = used - turn_usage.get(role, Usage())
            if other_usage.calls > 0:
                other_usage += Usage.from_record(self.roles.get(role, {}))
                self.roles[role] = other_usage.record()

    @property
    def messages(self) -> list[Message]:
        """The conversation, including the prompt."""
        return self.result.messages if self.result is not None else []

    @property
    def turns(self) -> int:
        """Number of model calls of the policy."""
        return self.result.turns_used if self.result is not None else 0

    @property
    def overrides(self) -> dict[str, Any]:
        """Values that its rewards set for the trainer; later rewards take precedence."""
        return {key: value for reward in self.rewards.values() for key, value in reward.overrides.items()}

    def examples(self, *, one: bool = False, exact: bool = False) -> list[Example]:
        """Return its training examples: one for each of its sequences, none if its tokens are unknown.

        Args:
            one: require exactly one example, for a trainer that accepts no more.
            exact: require token provenance. That takes milliseconds: call it in a thread.

        Raises:
            UserError: `one` is set and there are none or several, or `exact` is set and the tokens are not token-exact.
        """
        sequences = self.sequences or []
        if (
            exact
            and sequences
            and (problems := attach_provenance(Group(self.key.group, self.key.row, [self])).problems)
        ):
            raise UserError(
                "its tokens are not proven to be the sampled tokens, so they are not trained on "
                f"({len(problems)} problems, the first: {problems[0]}). allow_inexact=True trains on them anyway"
            )
        if one and len(sequences) != 1:
            raise UserError(f"rollout {self.id}: {self._why_not_one(len(sequences))}")
        return [example_of(sequence, self.ledger, masked=self.masked) for sequence in sequences]

    def _why_not_one(self, count: int) -> str:
        if count:
            return (
                f"it has {count} sequences and one example is asked for: the policy did not see all of it in one "
                f"context. Train on all of its examples, or {self.one_context}"
            )
        if self.error is not None:
            return f"it has no tokens, because it was not scored ({self.stop_reason}: {self.error})"
        if not self.turns:
            return NEVER_ASKED
        return "its tokens are not known: name a token-level policy, or the tokenizer of the one that there is"

    @property
    def one_context(self) -> str:
        """Advice for getting one sequence per rollout instead of several."""
        if self.result is not None and self.result.program is not None:
            return (
                "keep its program to one conversation: switch sub-agents and summaries off, or leave them out "
                "(agent.program.train: [main])"
            )
        return "choose a renderer that keeps earlier turns (thinking_retention: all)"

    @property
    def ledger(self) -> list[LedgerEntry]:
        """Samples reported by the servers, call by call."""
        replies = self.result.replies if self.result is not None else []
        return [reply.sampled for reply in replies if reply.sampled is not None]

    @property
    def excluded(self) -> dict[str, int]:
        """Number of sampled tokens that are not trained on, by reason."""
        return {} if self.result is None or self.result.program is None else self.result.program.excluded

    def scored(self, score: float) -> None:
        """Set its score."""
        self.score, self.state = score, RolloutState.SCORED

    @property
    def policy(self) -> dict[str, Any]:
        """Model of the rollout as reported by the server, and the sampling options of a token-level server.

        `sampling` is a list with an entry for each turn if turns were sampled differently.
        """
        if self.result is None or not self.result.replies:
            return {}
        last, settings = self.result.replies[-1], self.sampling
        version = last.sampled.weights.after if last.sampled is not None else None
        policy: dict[str, Any] = {"type": last.server_type, "model": last.model, "version": version}
        if any(settings):
            policy["sampling"] = settings[0] if all(each == settings[0] for each in settings) else settings
        return policy

    @property
    def sampling(self) -> list[dict[str, Any]]:
        """Sampling parameters of each turn; empty if a server does not report them."""
        return [dict(reply.sampling or {}) for reply in self.result.replies] if self.result is not None else []

    def fail(self, failure: Failure) -> None:
        """Record an infrastructure failure: there is no score, and it keeps the cause and the partial result.

        An episode of several seats fails as a whole.
        """
        for seat in self.seats:
            seat.stop_reason, seat.error, seat.score = failure.stop_reason, failure.detail, None
            seat.state = RolloutState.FAILED
        if failure.result is not None:
            self.result = failure.result


@dataclass(frozen=True)
class TokenProvenance:
    """Result of comparing a group's tokens with the sampled ones; `exact` if there is no problem."""

    sampled: int
    """Number of tokens that the servers sampled."""
    trained: int
    """Number of tokens that are trained on, before `on_stop` masks any."""
    turns: int
    sequences: int
    excluded: int = 0
    """Number of sampled tokens that are not trained on, for the reasons in the records of their rollouts."""
    oldest: int | None = None
    """Version of the oldest weights of any token; None if a server did not report it for some step."""
    newest: int | None = None
    sampling: tuple[dict[str, Any], ...] = ()
    """All distinct sampling parameters of the turns, in the server's own terms."""
    problems: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.problems

    def record(self) -> dict[str, Any]:
        """Return the JSON form of a record in `groups.jsonl`."""
        return {"exact": self.exact, **asdict(self)}


def baseline(members: Sequence[tuple[float | None, RolloutState]]) -> list[float | None]:
    """Return the value of each member in the comparison of its group, from its score and its state.

    A member whose retries were exhausted counts as the worst scored member: it never gets a score itself.
    """
    worst = min((score for score, _ in members if score is not None), default=None)
    return [worst if state is RolloutState.RETRIES_EXHAUSTED else score for score, state in members]


def are_uniform(parts: Sequence[Sequence[float]]) -> bool:
    """Return True if all scores are equal within each part of a group, so that comparing them teaches nothing."""
    return bool(parts) and all(len(part) > 1 and len(set(part)) == 1 for part in parts)


@dataclass
class Group(RenamedAttributes):
    """All rollouts of one row that are compared with each other.

    `dropped` is the stop reason that made the group incomplete; such a group must not reach a trainer.
    """

    id: str
    row: Row
    rollouts: list[Rollout]
    epoch: int = 0
    dropped: StopReason | None = None
    detail: str | None = None
    provenance: TokenProvenance | None = None
    """Created together with the tokens."""
    parts: list[dict[str, Any]] | None = None
    """Its records, if the environment's own code created them instead of rollouts."""

    def compared(self) -> list[Group]:
        """Return the groups in which scores are compared and trained on: this one, or several if it has several agents.

        Each trained seat of an episode belongs to exactly one group, determined by its `baseline`.
        """
        if not any(other.seat.trained for rollout in self.rollouts for other in rollout.others):
            return [self]
        groups: dict[str, Group] = {}
        for rollout in self.rollouts:
            for seat in rollout.seats:
                part = seat.seat.part(rollout.key.index)
                if part is None:
                    continue
                name = f"{self.id}{part}"
                if name not in groups:
                    groups[name] = Group(name, self.row, [], self.epoch, self.dropped, self.detail)
                groups[name].rollouts.append(seat)
        return list(groups.values())

    @property
    def scores(self) -> list[float]:
        """One score per compared rollout, in order: its own, or the worst if its retries were exhausted."""
        return [score for score in self.baseline if score is not None]

    @property
    def baseline(self) -> list[float | None]:
        """Value of each rollout in the comparison, in order; None if it does not count."""
        return baseline([(rollout.score, rollout.state) for rollout in self.rollouts])

    def advantages(self, normalise: Normalise = "std") -> list[float | None]:
        """Return one advantage per rollout, in order; None for one without a score, which is not trained on.

        If a reward assigns credit to turns, use `turn_advantages`. A rollout without a score is part of the comparison
        only if its retries were exhausted (`on_stop.retries_exhausted: worst`); it counts as the worst.

        Args:
            normalise: "std": the score minus the group's mean, in units of its standard deviation (GRPO); "mean": minus
                the mean (Dr. GRPO); "rloo": minus the mean of the others (RLOO); "none": the score itself. If all
                scores are equal, all but "none" give 0.

        Raises:
            UserError: there is no such estimator.
        """
        if normalise not in ESTIMATORS:
            raise UserError(f"normalise is {', '.join(ESTIMATORS)}, not {normalise!r}")
        counted = iter(ESTIMATORS[normalise](self.scores))
        estimates = [None if score is None else next(counted) for score in self.baseline]
        return [
            None if rollout.score is None else value for rollout, value in zip(self.rollouts, estimates, strict=True)
        ]

    def turn_advantages(self) -> list[list[float]] | None:
        """Return one advantage per turn of each rollout, as sent to Atropos, or None if no reward assigns credit to
        turns.

        `Example.of_turns` assigns a rollout's advantages to its tokens.
        """
        if not any(rollout.credit for rollout in self.rollouts):
            return None
        return of_turns(self.scores, [rollout.credit or (0.0,) * rollout.turns for rollout in self.rollouts])

    @property
    def uniform(self) -> bool:
        """True if there are several scores and all are equal, so that comparing them teaches nothing."""
        return are_uniform([each.scores for each in self.compared()])


# Tokens of finished rollouts: sampled by a token-level server, otherwise encoded from the rendered messages. If a chat
# server's tokenizer is not available, or its template does not allow token-exact sequences, a rollout keeps its
# messages and has no tokens; the reasons are counted and reported to the user.


def update_win_rate(before: tuple[float, int] | None, score: float) -> tuple[float, int]:
    """Return the sum of scores against an opponent and the number of episodes, with one more score from 0 to 1."""
    won, games = before or (0.0, 0)
    return won + min(max(score, 0.0), 1.0), games + 1


class Encoder:
    """Encode rollouts with one tokenizer; `missing` is the reason if there is none."""

    def __init__(self, tokenizer: Tokenizer | None, missing: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.missing = missing
        self._missing: dict[str, str] = {}

    @classmethod
    def load(cls, name: str | None) -> Encoder:
        """Return an encoder with the tokenizer of a hub name or directory (None: the small one). Slow: call it in a
        thread.
        """
        try:
            return cls(load_tokenizer(name))
        except TokenizerUnavailable as error:
            return cls(None, str(error))

    def missing_tokens(self) -> Counter[str]:
        """Return the number of rollouts without tokens, by reason."""
        return Counter(self._missing.values())

    async def encode(self, rollout: Rollout) -> None:
        """Set the `sequences` of a rollout that has none, and of all seats of its episode, off the event loop."""
        for seat in rollout.seats:
            await self._encode(seat)

    async def _encode(self, rollout: Rollout) -> None:
        result = rollout.result
        if result is None or rollout.sequences is not None:
            return
        if result.transcript is not None and result.transcript.turns:
            rollout.sequences = result.transcript.sequences()
        elif not result.turns_used and (rollout.seat.name or result.program is not None):
            rollout.sequences = []  # the seat had no turn, or its program made no request
            rollout.no_tokens = None if rollout.seat.name or result.program is None else never_asked(result.program)
        elif rollout.seat.role != ONLY_SEAT.role:
            rollout.no_tokens = f"the servers of {rollout.seat.role!r} do not report which tokens they sampled"
        elif result.program is not None:
            rollout.no_tokens = "an agent program's requests have exact tokens from a token-level policy alone"
        elif rollout.no_tokens is None and self.tokenizer is not None:
            await run_in_thread(partial(self._render, self.tokenizer, rollout, result))
        elif rollout.no_tokens is None:
            rollout.no_tokens = self.missing or "there is no tokenizer"
        if rollout.no_tokens is not None and rollout.seat.trained:
            self._missing[rollout.id] = rollout.no_tokens

    async def encode_group(self, group: Group) -> None:
        """Set the sequences of every member, and the group's token provenance."""
        for rollout in group.rollouts:
            await self.encode(rollout)
        if group.provenance is None:
            seats = [seat for rollout in group.rollouts for seat in rollout.seats]
            group.provenance = await group_provenance(replace(group, rollouts=seats))

    def _render(self, tokenizer: Tokenizer, rollout: Rollout, result: AgentResult) -> None:
        turns = [SampledTurn(reply.finish_reason, reply.logprobs, reply.tokens) for reply in result.replies]
        encoded = chat_tokens(
            tokenizer,
            result.messages,
            result.tool_schemas or None,
            sampled_from=result.prompt_length,
            turns=turns,
            longest=result.max_trajectory_tokens,
        )
        rollout.sequences, rollout.no_tokens = encoded.sequences, encoded.reason
