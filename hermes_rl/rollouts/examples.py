"""Examples: a rollout as the lists that nearly every trainer takes.

A sequence becomes a prompt (all that came before the first sampled token) and a response, with a mask of 0 and 1 over
the response. How groups look for Atropos is `hermes_rl.runs.group_lines`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hermes_rl.servers.base import LedgerEntry
from hermes_rl.tokens.sequence import TokenSequence


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


def example_of(sequence: TokenSequence, ledger: Sequence[LedgerEntry], *, masked: bool) -> Example:
    """The example of a sequence.

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
    )


def _weights(sequence: TokenSequence, ledger: Sequence[LedgerEntry]) -> tuple[int | None, int | None]:
    """Of the turns in this sequence; not known as soon as it is not known of one."""
    turns = [ledger[span.turn].weights for span in sequence.spans if span.turn < len(ledger)]
    before = [weights.before for weights in turns if weights.before is not None]
    after = [weights.after for weights in turns if weights.after is not None]
    if not turns or len(before) < len(turns) or len(after) < len(turns):
        return None, None
    return min(before), max(after)
