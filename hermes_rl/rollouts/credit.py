"""From credit per turn to an advantage per token.

A token's advantage is that of its rollout in the group, and on top what its turn did better or worse than the turns of
this rollout on average; both in units of the group's spread. Summed over the turns the second part is zero, so credit
moves weight within a rollout and never between rollouts.
"""

from __future__ import annotations

from statistics import fmean, pstdev

from hermes_rl.rollouts.rollout import LEAST_SPREAD, Group, Rollout
from hermes_rl.tokens.sequence import TokenSequence


def turn_advantages(group: Group) -> list[list[float]] | None:
    """One advantage per turn of each rollout; None where no reward gives credit to turns."""
    if not any(rollout.credit for rollout in group.rollouts):
        return None
    scores = group.scores
    mean, spread = fmean(scores), max(pstdev(scores), LEAST_SPREAD)
    if pstdev(scores) < LEAST_SPREAD:
        spread = max((pstdev(one.credit) for one in group.rollouts if one.credit), default=0.0) or 1.0
    return [_of(rollout, score, mean, spread) for rollout, score in zip(group.rollouts, scores, strict=True)]


def token_advantages(sequence: TokenSequence, per_turn: list[float]) -> list[float]:
    """One per token of a sequence, 0 where it was not sampled."""
    line = [0.0] * len(sequence)
    for span in sequence.spans:
        line[span.start : span.stop] = [per_turn[span.turn]] * (span.stop - span.start)
    return line


def _of(rollout: Rollout, score: float, mean: float, spread: float) -> list[float]:
    turns = rollout.result.turns_used if rollout.result is not None else 0
    credit = rollout.credit if rollout.credit else (0.0,) * turns
    average = fmean(credit) if credit else 0.0
    return [(score - mean + one - average) / spread for one in credit]
