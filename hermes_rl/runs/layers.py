"""Groups whose rollouts have several sequences, as Atropos takes them.

run-api keeps a group whose size is not the registered one for ever, so more sequences cannot be a larger group. Layer
*b* holds sequence *b* of each rollout and has exactly as many entries as the group; where a rollout has no such
sequence there is a filler: one token that is masked, with the rollout's own score, and an override that sets its
advantage to zero.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from hermes_rl.rollouts.credit import token_advantages, turn_advantages
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.tokens.sequence import MASKED, MASKED_LOGPROB, Sequence

FILLER_OVERRIDE = {"set_advantage_to_zero": True}


def token_layers(group: Group) -> list[dict[str, Any]]:
    """The token fields of each layer; one layer without tokens where those of any rollout are not known."""
    if any(not rollout.sequences for rollout in group.rollouts):
        return [{"tokens": None, "masks": None, "inference_logprobs": [], "advantages": None, "overrides": None}]
    turns = turn_advantages(group)
    deepest = max(len(rollout.sequences or ()) for rollout in group.rollouts)
    return [_layer(group.rollouts, turns, number) for number in range(deepest)]


def _layer(rollouts: Many[Rollout], turns: list[list[float]] | None, number: int) -> dict[str, Any]:
    entries = [(rollout, _at(rollout, number)) for rollout in rollouts]
    lines = [(_line(rollout, sequence)) for rollout, sequence in entries]
    logprobs = [line["logprobs"] for line in lines]
    fillers = any(sequence is None for _, sequence in entries)
    return {
        "tokens": [line["tokens"] for line in lines],
        "masks": [line["masks"] for line in lines],
        "inference_logprobs": logprobs if all(line is not None for line in logprobs) else [],
        "advantages": None if turns is None else [_advantages(s, t) for (_, s), t in zip(entries, turns, strict=True)],
        "overrides": [{} if s is not None else dict(FILLER_OVERRIDE) for _, s in entries] if fillers else None,
    }


def _at(rollout: Rollout, number: int) -> Sequence | None:
    sequences = rollout.sequences or []
    return sequences[number] if number < len(sequences) else None


def _line(rollout: Rollout, sequence: Sequence | None) -> dict[str, Any]:
    """Tokens, masks and log-probabilities of one entry."""
    if sequence is None:
        first = (rollout.sequences or [])[0]
        return {"tokens": first.tokens[:1], "masks": [MASKED], "logprobs": [MASKED_LOGPROB]}
    if rollout.masked:
        size = len(sequence)
        known = sequence.sampled is not None
        return {
            "tokens": sequence.tokens,
            "masks": [MASKED] * size,
            "logprobs": [MASKED_LOGPROB] * size if known else None,
        }
    return {"tokens": sequence.tokens, "masks": sequence.masks, "logprobs": sequence.logprobs}


def _advantages(sequence: Sequence | None, turns: list[float]) -> list[float]:
    return [0.0] if sequence is None else token_advantages(sequence, turns)
