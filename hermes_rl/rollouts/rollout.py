"""A rollout and a group: what was played, how it ended, what it scored.

These are the core's data. How they look in files is `hermes_rl.runs.records`, how a trainer gets them is up to
its door.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import fmean, pstdev
from typing import Any, Literal, get_args

from hermes_rl.agent.result import AgentResult, Message
from hermes_rl.data.rows import Row
from hermes_rl.endings import Ending
from hermes_rl.errors import Failure, UserError
from hermes_rl.rollouts.examples import Example, example_of
from hermes_rl.scoring.value import RewardValue
from hermes_rl.servers.base import LedgerEntry
from hermes_rl.tokens.sequence import TokenSequence

Normalise = Literal["std", "mean", "none"]
"""How scores become advantages."""
LEAST_SPREAD = 1e-6
"""Scores that differ by less are equal."""


class RolloutState(StrEnum):
    """What is left to be done for a rollout; the value is the `state` of its record."""

    WAITING = "waiting"
    """It was played, and gets its score together with the other members of its group."""
    SCORED = "scored"
    LEFT_OUT = "left_out"
    """The spec's `endings` drop how it ended, so it has no score and never gets one."""
    FAILED = "failed"
    """Infrastructure failed it; a later start of the run plays it again."""

    @property
    def final(self) -> bool:
        """True where it is never played or scored again."""
        return self in (RolloutState.SCORED, RolloutState.LEFT_OUT)


@dataclass(frozen=True)
class RolloutKey:
    """Which rollout it is: the row, the group, the member of how many, and the attempt at it (from 0).

    `epoch` counts the passes over the rows from 0. `mark` tells two plays of one member apart, where the same group may
    be played again, even at the same time; it is part of the id and of the seed.
    """

    row: Row
    group: str
    index: int
    size: int
    attempt: int = 0
    epoch: int = 0
    mark: str = ""

    @property
    def id(self) -> str:
        """A name that is the same after a restart; each attempt has its own."""
        attempt = f"r{self.attempt}" if self.attempt else ""
        return f"{self.group}-{self.index}{attempt}{self.mark}"

    def seed(self, base: int) -> int:
        """The seed from which the rollout's model calls have theirs, 31 bits.

        It is a function of the spec's seed, the group and the member. Every attempt has the same one, so that where a
        server samples by it a failure leaves no trace in the results.
        """
        digest = hashlib.sha256(f"{base}:{self.group}-{self.index}{self.mark}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


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
    artifacts: dict[str, Any] = field(default_factory=dict)
    """What was kept of its sandbox, and where, by the artifact's name."""
    image: str | None = None
    """The digest of the image that its sandbox was made of, where it used one."""
    sequences: list[TokenSequence] | None = None
    """Its tokens; several where the policy did not see all in one context. None where they are not known."""
    credit: tuple[float, ...] | None = None
    """One value per turn, where a reward gives credit to turns."""

    @property
    def sequence(self) -> TokenSequence | None:
        """The only sequence; None where there are none or several."""
        return self.sequences[0] if self.sequences is not None and len(self.sequences) == 1 else None

    @property
    def id(self) -> str:
        return self.key.id

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

    def examples(self, *, one: bool = False) -> list[Example]:
        """What a trainer gets of it: an example for each of its sequences, none where its tokens are not known.

        Args:
            one: it has to be exactly one, for a trainer that takes no more.

        Raises:
            UserError: one is asked for, and there is none, or there are several.
        """
        sequences = self.sequences or []
        if one and len(sequences) != 1:
            raise UserError(f"rollout {self.id}: {self._why_not_one(len(sequences))}")
        return [example_of(sequence, self.ledger, masked=self.masked) for sequence in sequences]

    def _why_not_one(self, count: int) -> str:
        if count:
            return (
                f"it has {count} sequences and one example is asked for: the policy did not see all of it in one "
                "context. Train on all of its examples, or choose a renderer that keeps earlier turns "
                "(thinking_retention: all)"
            )
        if self.error is not None:
            return f"it has no tokens, because it was not scored ({self.ending}: {self.error})"
        return "its tokens are not known: name a token-level policy, or the tokenizer of the one that there is"

    @property
    def ledger(self) -> list[LedgerEntry]:
        """What the servers said that they sampled, call by call."""
        replies = self.result.replies if self.result is not None else []
        return [reply.sampled for reply in replies if reply.sampled is not None]

    def scored(self, score: float) -> None:
        """Give it its score."""
        self.score, self.state = score, RolloutState.SCORED

    @property
    def policy(self) -> dict[str, Any]:
        """Which model played, as the server itself said, and how a token-level server was asked to sample."""
        if self.result is None or not self.result.replies:
            return {}
        last = self.result.replies[-1]
        version = last.sampled.weights.after if last.sampled is not None else None
        sampling = {"sampling": dict(last.sampling)} if last.sampling else {}
        return {"type": last.server_type, "model": last.model, "version": version, **sampling}

    def fail(self, failure: Failure) -> None:
        """Note that infrastructure failed: there is no score, and the cause and what was played so far are kept."""
        self.ending, self.error, self.score = failure.ending, failure.detail, None
        self.state = RolloutState.FAILED
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
    oldest: int | None = None
    """Version of the oldest weights of any token; None where no server told it for every step."""
    newest: int | None = None
    problems: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.problems

    def record(self) -> dict[str, Any]:
        """The JSON form of a line in `groups.jsonl`."""
        return {"exact": self.exact, **asdict(self)}


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

    @property
    def scores(self) -> list[float]:
        """One score per rollout, in order, of those that were graded."""
        return [rollout.score for rollout in self.rollouts if rollout.score is not None]

    def advantages(self, normalise: Normalise = "std") -> list[float | None]:
        """One advantage per rollout, in order; None for one without a score, which is no part of the comparison.

        Args:
            normalise: "std": the score less the group's mean, in units of its standard deviation; "mean": less the
                mean; "none": the score itself. Where all scores are equal, "std" and "mean" give 0.

        Raises:
            UserError: there is no such way to normalise.
        """
        if normalise not in get_args(Normalise):
            raise UserError(f"normalise is {', '.join(get_args(Normalise))}, not {normalise!r}")
        scores = self.scores
        mean = fmean(scores) if scores and normalise != "none" else 0.0
        spread = pstdev(scores) if scores and normalise == "std" else 1.0
        return [None if one.score is None else (one.score - mean) / max(spread, LEAST_SPREAD) for one in self.rollouts]

    @property
    def uniform(self) -> bool:
        """True where all of several scores are equal, so that comparing them teaches nothing."""
        return len(self.rollouts) > 1 and len(set(self.scores)) <= 1
