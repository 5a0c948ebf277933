"""A rollout and a group: what was played, how it ended, what it scored.

These are the core's data. How they look in files is `hermes_rl.runs.store`, how a trainer gets them is up to
its door."""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from statistics import fmean, pstdev
from typing import Any, Literal, get_args

from hermes_rl.agent.result import AgentResult, Message, ProgramRun
from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, UserError
from hermes_rl.scoring.value import RewardValue
from hermes_rl.servers.base import LedgerEntry, sampled_digest
from hermes_rl.threads import in_thread
from hermes_rl.tokens.chat import SampledTurn, chat_tokens
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import Tokenizer, TokenizerUnavailable
from hermes_rl.tokens.transcript import SampledSpan, TokenLogprobs, TokenSequence
from hermes_rl.visible import counted

NEVER_ASKED = "the policy was never asked, so nothing was sampled"
"""Why a rollout has nothing to train on, such as one whose agent program ended before it asked."""


def never_asked(program: ProgramRun) -> str:
    """Say that nothing was sampled, and what a program did instead: the policy has no hand in that."""
    ended = "was ended" if program.exit_code is None else f"ended with status {program.exit_code}"
    last_line = program.output.strip().rpartition("\n")[2][:200]
    refused = f"{program.refused} refused{program.refusal and f', the last: {program.refusal}'}"
    requests = f"made {counted(program.requests, 'request')} ({refused})"
    return f"{NEVER_ASKED}: its program {requests} and {ended}{last_line and f': {last_line}'}"


# The proof that a group may be trained on: what is trained is what the server sampled, in the context it saw. The two
# sides are independent: the servers' answers say what was sampled (`servers.base.LedgerEntry`), the sequences are
# what a trainer gets. A certificate compares them, and names what does not fit.


CERTIFIED_HERE = 4_096
"""Tokens of a group that are compared on the event loop; more take milliseconds, and a thread."""


async def certified(group: Group) -> Certificate:
    """As `certify`, in a thread where the group is large."""
    sequences = (sequence for rollout in group.rollouts for sequence in rollout.sequences or ())
    if sum(map(len, sequences)) <= CERTIFIED_HERE:
        return certify(group)
    return await in_thread(partial(certify, group))


def certify(group: Group) -> Certificate:
    """Compare the tokens of a group with what its servers sampled. Takes milliseconds: call it in a thread."""
    members = [rollout for rollout in group.rollouts if rollout.state is not RolloutState.LOST and rollout.seat.trained]
    ledger = [generation for rollout in members for generation in rollout.ledger]
    sequences = [sequence for rollout in members for sequence in rollout.sequences or ()]
    sampling: list[dict[str, Any]] = []
    sampling.extend(entry for rollout in members for entry in rollout.sampling if entry and entry not in sampling)
    known = all(None not in (each.weights.before, each.weights.after) for each in ledger) and bool(ledger)
    return Certificate(
        sampled=sum(generation.count for generation in ledger),
        trained=sum(sequence.trained_length for sequence in sequences),
        left_out=sum(count for rollout in members for count in rollout.left_out.values()),
        turns=sum(rollout.result.turns_used for rollout in members if rollout.result is not None),
        sequences=len(sequences),
        oldest=min(generation.weights.before or 0 for generation in ledger) if known else None,
        newest=max(generation.weights.after or 0 for generation in ledger) if known else None,
        sampling=tuple(sampling),
        problems=tuple(f"{rollout.id}: {text}" for rollout in members for text in _problems(rollout)),
    )


def _problems(rollout: Rollout) -> Iterator[str]:
    result = rollout.result
    if result is not None and not result.turns_used:
        return  # nothing was sampled, and nothing is trained
    if result is None or rollout.sequences is None:
        yield "its tokens are not known"
        return
    if any(reply.sampled is None for reply in result.replies) or not result.replies:
        yield "a chat server does not say which tokens it sampled"
        return
    if result.program is None:  # what a program says of the policy is its own, and context
        yield from _provenance(rollout)
    turns = [(sequence, span) for sequence in rollout.sequences for span in sequence.spans]
    ledger = rollout.ledger
    left_out = result.program.untrained if result.program is not None else ()
    if sorted([*(span.turn for _, span in turns), *left_out]) != list(range(len(ledger))):
        yield (
            f"{len(ledger)} turns were sampled, {len(left_out)} of them are left out, and the sequences hold "
            f"{[span.turn for _, span in turns]}"
        )
        return
    for sequence, span in turns:
        yield from _turn(sequence, span, ledger[span.turn])


def _provenance(rollout: Rollout) -> Iterator[str]:
    """Every assistant message behind the prompt is an answer of a server, in order."""
    assert rollout.result is not None
    result = rollout.result
    answers = [message for message in result.messages[result.prompt_length :] if message.get("role") == "assistant"]
    if len(answers) != len(result.replies):
        yield f"it has {len(answers)} assistant messages of {len(result.replies)} answers"
    for number, (message, reply) in enumerate(zip(answers, result.replies, strict=False)):
        if (message.get("content") or "") != (reply.message.get("content") or ""):
            yield f"the assistant message {number} is not what was sampled"


def _turn(sequence: TokenSequence, span: SampledSpan, sampled: LedgerEntry) -> Iterator[str]:
    if sequence.sampled is None:
        yield f"turn {span.turn} has no log-probabilities"
        return
    if span.stop - span.start != sampled.count:
        yield f"turn {span.turn} has {span.stop - span.start} tokens, {sampled.count} were sampled"
        return
    if sampled_digest(sequence.ids[span.start : span.stop], _logprobs(sequence, span)) != sampled.digest:
        yield f"the tokens or log-probabilities of turn {span.turn} are not those that were sampled"
    if span.start != sampled.prompt or zlib.crc32(sequence.ids[: span.start]) != sampled.prompt_check:
        yield f"the context of turn {span.turn} is not the one that it was sampled in"


def _logprobs(sequence: TokenSequence, span: SampledSpan) -> array[float]:
    assert sequence.sampled is not None
    before = sum(other.stop - other.start for other in sequence.spans if other.start < span.start)
    return sequence.sampled[before : before + span.stop - span.start]


# ---------------------------------------------------------------- From credit per turn to an advantage per token
# A token's advantage is that of its rollout in the group, in units of the group's standard deviation, as in GRPO (Shao
# et al., 2024), and on top what its turn did better or worse than the turns of this rollout on average. The unit of the
# second part is the standard deviation of these differences over the group, or that of the scores where it is larger:
# so it is never larger than the root of the number of turns, however close the scores are. Summed over the turns of a
# rollout it is zero: credit moves weight within a rollout and never between rollouts. Gates and the clamp act on scores
# and not on credit.


def turn_advantages(group: Group) -> list[list[float]] | None:
    """One advantage per turn of each rollout; None where no reward gives credit to turns."""
    if not any(rollout.credit for rollout in group.rollouts):
        return None
    credit_of = [rollout.credit or (0.0,) * rollout.turns for rollout in group.rollouts]
    differences = [[turn - fmean(credit) for turn in credit] for credit in credit_of]
    scores = group.scores
    within = max(_spread([turn for own in differences for turn in own]), _spread(scores))
    return [
        [between + (turn / within if within else 0.0) for turn in own]
        for between, own in zip(_standardised(scores), differences, strict=True)
    ]


def _spread(values: Sequence[float]) -> float:
    """Return the standard deviation of a population; exactly 0 where all values are equal."""
    return pstdev(values) if values and min(values) < max(values) else 0.0


def _standardised(scores: Sequence[float], unit: float | None = None) -> list[float]:
    """Return the scores less their mean, in a unit, by default their standard deviation; 0 where all are equal."""
    if not _spread(scores):
        return [0.0] * len(scores)
    mean, unit = fmean(scores), unit or _spread(scores)
    return [(score - mean) / unit for score in scores]


def of_turns(spans: Iterable[SampledSpan], per_turn: Sequence[float], length: int) -> list[float]:
    """Return one value for each of so many tokens: that of the turn which sampled it, 0.0 for all others."""
    values = [0.0] * length
    for span in spans:
        values[span.start : span.stop] = [per_turn[span.turn]] * (span.stop - span.start)
    return values


# ---------------------------------------------- Examples: a rollout as the lists that nearly every trainer takes
# A sequence becomes a prompt (all that came before the first sampled token) and a response, with a mask of 0 and 1 over
# the response. How groups look for Atropos is `hermes_rl.runs.groups`.


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of a rollout. `response_ids`, `mask` and `logprobs` have one length."""

    prompt_ids: list[int]
    """What the model saw before it sampled for the first time."""
    response_ids: list[int]
    """What it sampled, and what tools and users said in between."""
    mask: list[int]
    """1 where a token was sampled and is trained on; all 0 for a rollout that the spec masks."""
    logprobs: list[float] | None
    """As they were sampled, 0.0 where the mask is 0; None where the server gave none."""
    weights: tuple[int | None, int | None]
    """The oldest and the newest version of the weights that sampled it; None where it is not known."""
    spans: tuple[SampledSpan, ...] = ()
    """Which tokens of the response each model call of the rollout sampled; turns count from 0."""

    def of_turns(self, per_turn: Sequence[float]) -> list[float]:
        """Return one value for each token of the response: that of its turn, 0.0 where the mask is 0."""
        values = of_turns(self.spans, per_turn, len(self.response_ids))
        return [value if trained else 0.0 for value, trained in zip(values, self.mask, strict=True)]


def example_of(sequence: TokenSequence, ledger: Sequence[LedgerEntry], *, masked: bool) -> Example:
    """Return the example of a sequence.

    Args:
        sequence: its tokens.
        ledger: what was sampled in each call of its rollout.
        masked: nothing of it is trained on.
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
        weights=_weights(sequence, ledger),
        spans=tuple(SampledSpan(span.turn, span.start - first, span.stop - first) for span in sequence.spans),
    )


def _weights(sequence: TokenSequence, ledger: Sequence[LedgerEntry]) -> tuple[int | None, int | None]:
    """Of the turns in this sequence; not known as soon as it is not known of one."""
    turns = [ledger[span.turn].weights for span in sequence.spans if span.turn < len(ledger)]
    before = [weights.before for weights in turns if weights.before is not None]
    after = [weights.after for weights in turns if weights.after is not None]
    if not turns or len(before) < len(turns) or len(after) < len(turns):
        return None, None
    return min(before), max(after)


# -------------------------------------------------------------------------------- rollout

Normalise = Literal["std", "mean", "none"]
"""How scores become advantages."""


class RolloutState(StrEnum):
    """What is left to be done for a rollout; the value is the `state` of its record."""

    WAITING = "waiting"
    """It was played, and gets its score together with the other members of its group."""
    SCORED = "scored"
    LEFT_OUT = "left_out"
    """The spec's `endings` drop how it ended, so it has no score and never gets one."""
    FAILED = "failed"
    """Infrastructure failed it; a later start of the run plays it again."""
    LOST = "lost"
    """Infrastructure failed it again and again; it has no score, stays in its group, and counts as the worst there."""

    @property
    def final(self) -> bool:
        """True where it is never played or scored again."""
        return self in (RolloutState.SCORED, RolloutState.LEFT_OUT, RolloutState.LOST)

    @property
    def given_up(self) -> bool:
        """True where infrastructure failed it for good."""
        return self in (RolloutState.FAILED, RolloutState.LOST)


Baseline = Literal["seat", "row", "episode"]
"""With which others a seat's rollout is compared: those of the same seat in the other episodes of the group; those of
all seats that say so in all episodes of the group; or those of all seats that say so in its own episode."""


@dataclass(frozen=True)
class Seat:
    """An agent's place in an episode of several agents: who plays there, and what its rollouts are for."""

    name: str = ""
    role: str = "policy"
    """Of the servers that play it."""
    trained: bool = True
    baseline: Baseline = "seat"

    def part(self, index: int) -> str | None:
        """Return what ends the name of the group in which its rollout of an episode is compared; None: in none."""
        if not self.trained:
            return None
        return {"row": "@row", "episode": f"-{index}@episode"}.get(self.baseline, f"@{self.name}")

    def record(self, group: str) -> dict[str, Any]:
        """Return the JSON form, with the group of the episode."""
        return {**asdict(self), "of": group}


ALONE = Seat()
"""The seat of a rollout of one agent."""


@dataclass(frozen=True)
class RolloutKey:
    """Which rollout it is: the row, the group, the member of how many, and the attempt at it (from 0).

    `epoch` counts the passes over the rows from 0. `mark` tells two plays of one member apart, where the same group may
    be played again, even at the same time; it is part of the id and of the seed. `seat` is the name of another seat
    than the first of an episode.
    """

    row: Row
    group: str
    index: int
    size: int
    attempt: int = 0
    epoch: int = 0
    mark: str = ""
    seat: str = ""

    @property
    def id(self) -> str:
        """A name that is the same after a restart; each attempt has its own."""
        attempt = f"r{self.attempt}" if self.attempt else ""
        return f"{self.group}-{self.index}{attempt}{self.mark}{at_seat(self.seat)}"

    def seed(self, base: int) -> int:
        """Return the seed from which the rollout's model calls have theirs, 31 bits.

        It is a function of the spec's seed, the group and the member. Every attempt has the same one, so that where a
        server samples by it a failure leaves no trace in the results.
        """
        name = f"{self.group}-{self.index}{self.mark}{at_seat(self.seat)}"
        digest = hashlib.sha256(f"{base}:{name}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def at_seat(name: str) -> str:
    """Return how the id of a rollout or group ends that is of another seat than the first."""
    return f"@{name}" if name else ""


def cost_of(usage: Mapping[str, Any], roles: Mapping[str, Mapping[str, float]]) -> float | None:
    """Return the US dollars of all models that were asked for a rollout; None where those of the policy are not known.

    `usage` is the policy's, and `roles` what others were asked.
    """
    own: float | None = usage.get("cost")
    return None if own is None else own + sum(counts.get("cost", 0.0) for counts in roles.values())


@dataclass
class Rollout:
    """One rollout. `score` is None exactly where it was not scored; `error` says why, unless it waits for its group.

    `timings` are seconds by part: sandbox, queue, generation, tools, rewards, total.
    `masked`: it counts for its group's baseline and is not trained on.
    """

    key: RolloutKey
    seed: int
    ending: Ending = Ending.CANCELLED
    result: AgentResult | None = None
    rewards: dict[str, RewardValue] = field(default_factory=dict)
    score: float | None = None
    error: str | None = None
    state: RolloutState = RolloutState.FAILED
    masked: bool = False
    timings: dict[str, float] = field(default_factory=dict)
    roles: dict[str, dict[str, float]] = field(default_factory=dict)
    """What models were asked beside the policy's own turns, by role: calls, tokens, and US dollars where known."""
    artifacts: dict[str, Any] = field(default_factory=dict)
    """What was kept of its sandbox, and where, by the artifact's name."""
    image: str | None = None
    """The digest of the image that its sandbox was made of, where it used one."""
    sequences: list[TokenSequence] | None = None
    """Its tokens; several where the policy did not see all in one context. None where they are not known."""
    credit: tuple[float, ...] | None = None
    """One value per turn, where a reward gives credit to turns."""
    teacher: list[TokenLogprobs] | None = None
    """What a teacher says of each of its sequences; None where none was asked."""
    line: Mapping[str, Any] | None = None
    """Its record as the process has made it that played it for this one; None where this one did."""
    worker_died: bool = False
    """Whether it failed because the workers that played it died."""
    no_tokens: str | None = None
    """Why an encoder could not give it any sequences; None where none has tried, or it could."""
    seat: Seat = ALONE
    others: list[Rollout] = field(default_factory=list)
    """What the other seats of its episode have played; empty where one agent plays, and for each of these."""

    @property
    def seats(self) -> list[Rollout]:
        """What each seat of the episode has played, this one first."""
        return [self, *self.others]

    @property
    def sequence(self) -> TokenSequence | None:
        """The only sequence; None where there are none or several."""
        return self.sequences[0] if self.sequences is not None and len(self.sequences) == 1 else None

    @property
    def id(self) -> str:
        return self.key.id

    def use(self, usage: Mapping[str, Mapping[str, float]], *, played: bool) -> None:
        """Take into account what models were asked, by role; `played`: the policy's own turns are among it."""
        own: dict[str, dict[str, float]] = {}
        for seat in self.seats if played else ():
            known = own.setdefault(seat.seat.role, {})
            used = {"calls": seat.turns, **(seat.result.usage.record() if seat.result is not None else {})}
            known |= {name: known.get(name, 0) + count for name, count in used.items()}
        for role, counts in usage.items():
            further = {name: count - own.get(role, {}).get(name, 0) for name, count in counts.items()}
            if further["calls"] > 0:
                before = self.roles.get(role, {})
                self.roles[role] = before | {name: before.get(name, 0) + count for name, count in further.items()}

    @property
    def messages(self) -> list[Message]:
        """The conversation, the prompt included."""
        return self.result.messages if self.result is not None else []

    @property
    def turns(self) -> int:
        """Model calls of the policy."""
        return self.result.turns_used if self.result is not None else 0

    @property
    def overrides(self) -> dict[str, Any]:
        """What its rewards tell the trainer about it; a later reward's word counts."""
        return {key: value for reward in self.rewards.values() for key, value in reward.overrides.items()}

    def examples(self, *, one: bool = False, exact: bool = False) -> list[Example]:
        """Return what a trainer gets of it: an example for each of its sequences, none where its tokens are not known.

        Args:
            one: it has to be exactly one, for a trainer that takes no more.
            exact: its tokens have to be proven to be those that were sampled. That takes milliseconds: call it in a
                thread.

        Raises:
            UserError: one is asked for, and there is none, or there are several; or the tokens are not proven.
        """
        sequences = self.sequences or []
        if exact and sequences and (problems := certify(Group(self.key.group, self.key.row, [self])).problems):
            raise UserError(
                "its tokens are not proven to be those that were sampled, so they are not trained on "
                f"({len(problems)} problems, the first: {problems[0]}). allow_inexact=True trains on them all the same"
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
            return f"it has no tokens, because it was not scored ({self.ending}: {self.error})"
        if not self.turns:
            return NEVER_ASKED
        return "its tokens are not known: name a token-level policy, or the tokenizer of the one that there is"

    @property
    def one_context(self) -> str:
        """How rollouts of several sequences may become rollouts of one, in words."""
        if self.result is not None and self.result.program is not None:
            return (
                "keep its program to one conversation: switch sub-agents and summaries off, or leave them out "
                "(agent.program.train: [main])"
            )
        return "choose a renderer that keeps earlier turns (thinking_retention: all)"

    @property
    def ledger(self) -> list[LedgerEntry]:
        """What the servers said that they sampled, call by call."""
        replies = self.result.replies if self.result is not None else []
        return [reply.sampled for reply in replies if reply.sampled is not None]

    @property
    def left_out(self) -> dict[str, int]:
        """How many sampled tokens are not trained on, by the reason."""
        return {} if self.result is None or self.result.program is None else self.result.program.left_out

    def scored(self, score: float) -> None:
        """Give it its score."""
        self.score, self.state = score, RolloutState.SCORED

    @property
    def policy(self) -> dict[str, Any]:
        """Which model played, as the server itself said, and how a token-level server was asked to sample.

        `sampling` is a list with an entry for each turn where not all turns were sampled alike.
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
        """The parameters with which each turn was sampled; empty ones where a server does not say."""
        return [dict(reply.sampling or {}) for reply in self.result.replies] if self.result is not None else []

    def fail(self, failure: Failure) -> None:
        """Note that infrastructure failed: there is no score, and the cause and what was played so far are kept.

        An episode of several seats fails as a whole.
        """
        for seat in self.seats:
            seat.ending, seat.error, seat.score = failure.ending, failure.detail, None
            seat.state = RolloutState.FAILED
        if failure.result is not None:
            self.result = failure.result


@dataclass(frozen=True)
class Certificate:
    """What `rollouts.certificate` found out about the tokens of a group; `exact` where there is no problem."""

    sampled: int
    """Tokens that the servers sampled."""
    trained: int
    """Tokens that are trained on, before `endings` mask any."""
    turns: int
    sequences: int
    left_out: int = 0
    """Sampled tokens that are not trained on, for the reasons that the lines of their rollouts name."""
    oldest: int | None = None
    """Version of the oldest weights of any token; None where no server told it for every step."""
    newest: int | None = None
    sampling: tuple[dict[str, Any], ...] = ()
    """Every set of parameters with which a turn was sampled, in the server's own terms."""
    problems: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.problems

    def record(self) -> dict[str, Any]:
        """Return the JSON form of a line in `groups.jsonl`."""
        return {"exact": self.exact, **asdict(self)}


def baseline(members: Sequence[tuple[float | None, RolloutState]]) -> list[float | None]:
    """Return what each member counts as in the comparison of its group, from its score and its state.

    One that was lost counts as the worst of those that have a score: it never gets one itself.
    """
    worst = min((score for score, _ in members if score is not None), default=None)
    return [worst if state is RolloutState.LOST else score for score, state in members]


def are_uniform(parts: Sequence[Sequence[float]]) -> bool:
    """Return True where comparing the scores of a group, in the parts in which they are compared, teaches nothing."""
    return bool(parts) and all(len(part) > 1 and len(set(part)) == 1 for part in parts)


@dataclass
class Group:
    """All rollouts of one row that are compared with each other.

    `dropped` names the ending that made the group incomplete; then it may not reach a trainer.
    """

    id: str
    row: Row
    rollouts: list[Rollout]
    epoch: int = 0
    dropped: Ending | None = None
    detail: str | None = None
    certificate: Certificate | None = None
    """Made with its tokens."""
    parts: list[dict[str, Any]] | None = None
    """Its lines, where an environment's own code has made them instead of rollouts."""

    def compared(self) -> list[Group]:
        """Return the groups in which scores are compared and trained on: this one, or several where agents share it.

        Of an episode's seats those that are trained belong to one each, as their `baseline` says. None of them is in
        another one.
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
        """One score per rollout that is compared, in order: its own, or that of the worst for one that was lost."""
        return [score for score in self.baseline if score is not None]

    @property
    def baseline(self) -> list[float | None]:
        """What each rollout counts as where scores are compared, in order; None for one that does not count."""
        return baseline([(rollout.score, rollout.state) for rollout in self.rollouts])

    def advantages(self, normalise: Normalise = "std") -> list[float | None]:
        """One advantage per rollout, in order; None for one without a score, which is not trained on.

        Where a reward gives credit to turns, `turn_advantages` has it.

        Only one that was lost (`endings.lost: worst`) is part of the comparison without a score, as the worst.

        Args:
            normalise: "std": the score less the group's mean, in units of its standard deviation; "mean": less the
                mean; "none": the score itself. Where all scores are equal, "std" and "mean" give 0.

        Raises:
            UserError: there is no such way to normalise.
        """
        if normalise not in get_args(Normalise):
            raise UserError(f"normalise is {', '.join(get_args(Normalise))}, not {normalise!r}")
        scores = self.scores
        compared = scores if normalise == "none" else _standardised(scores, None if normalise == "std" else 1.0)
        counted = iter(compared)
        own = [None if score is None else next(counted) for score in self.baseline]
        return [None if rollout.score is None else value for rollout, value in zip(self.rollouts, own, strict=True)]

    def turn_advantages(self) -> list[list[float]] | None:
        """One advantage per turn of each rollout, as Atropos gets them; None where no reward gives credit to turns.

        `Example.of_turns` puts those of a rollout at its tokens.
        """
        return turn_advantages(self)

    @property
    def uniform(self) -> bool:
        """True where all of several scores are equal, so that comparing them teaches nothing."""
        return are_uniform([each.scores for each in self.compared()])


# Tokens of finished rollouts: those that a token-level server sampled, else those of the rendered messages
# Where a chat server's tokenizer cannot be had, or its template does not allow exact sequences, a rollout keeps its
# messages and has no tokens; the reasons are counted, for the user to hear.


def and_won(before: tuple[float, int] | None, score: float) -> tuple[float, int]:
    """Return what was won against a rival, and in how many episodes, with one more: its score, from 0 to 1."""
    won, games = before or (0.0, 0)
    return won + min(max(score, 0.0), 1.0), games + 1


class Encoder:
    """Encodes rollouts with one tokenizer; `missing` says why there is none."""

    def __init__(self, tokenizer: Tokenizer | None, missing: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.missing = missing
        self._missing: dict[str, str] = {}

    @classmethod
    def load(cls, name: str | None) -> Encoder:
        """With the tokenizer of a hub name or folder (None: the small one); slow, call it in a thread."""
        try:
            return cls(load_tokenizer(name))
        except TokenizerUnavailable as error:
            return cls(None, str(error))

    def missing_tokens(self) -> Counter[str]:
        """How many rollouts have no tokens, by the reason."""
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
            rollout.sequences = []  # its turn never came, or its program never asked
            rollout.no_tokens = None if rollout.seat.name or result.program is None else never_asked(result.program)
        elif rollout.seat.role != ALONE.role:
            rollout.no_tokens = f"the servers of {rollout.seat.role!r} do not say which tokens they sampled"
        elif result.program is not None:
            rollout.no_tokens = "an agent program's requests have exact tokens from a token-level policy alone"
        elif rollout.no_tokens is None and self.tokenizer is not None:
            await in_thread(partial(self._render, self.tokenizer, rollout, result))
        elif rollout.no_tokens is None:
            rollout.no_tokens = self.missing or "there is no tokenizer"
        if rollout.no_tokens is not None and rollout.seat.trained:
            self._missing[rollout.id] = rollout.no_tokens

    async def encode_group(self, group: Group) -> None:
        """Give every member its sequences, and the group its certificate."""
        for rollout in group.rollouts:
            await self.encode(rollout)
        if group.certificate is None:
            seats = [seat for rollout in group.rollouts for seat in rollout.seats]
            group.certificate = await certified(replace(group, rollouts=seats))

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
