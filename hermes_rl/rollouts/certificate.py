"""The proof that a group may be trained on: what is trained is what the server sampled, in the context it saw.

The two sides are independent: the servers' answers say what was sampled (`servers.base.LedgerEntry`), the sequences are
what a trainer gets. A certificate compares them, and names what does not fit.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator

from hermes_rl.rollouts.rollout import Certificate, Group, Rollout
from hermes_rl.servers.base import LedgerEntry, sampled_digest
from hermes_rl.tokens.sequence import SampledSpan, TokenSequence


def certify(group: Group) -> Certificate:
    """Compare the tokens of a group with what its servers sampled. Takes milliseconds: call it in a thread."""
    ledger = [one for rollout in group.rollouts for one in rollout.ledger]
    sequences = [one for rollout in group.rollouts for one in rollout.sequences or ()]
    known = all(one.weights.before is not None and one.weights.after is not None for one in ledger) and bool(ledger)
    return Certificate(
        sampled=sum(one.count for one in ledger),
        trained=sum(one.trained_length for one in sequences),
        turns=sum(rollout.result.turns_used for rollout in group.rollouts if rollout.result is not None),
        sequences=len(sequences),
        oldest=min(one.weights.before or 0 for one in ledger) if known else None,
        newest=max(one.weights.after or 0 for one in ledger) if known else None,
        problems=tuple(f"{rollout.id}: {text}" for rollout in group.rollouts for text in _problems(rollout)),
    )


def _problems(rollout: Rollout) -> Iterator[str]:
    result = rollout.result
    if result is None or rollout.sequences is None:
        yield "its tokens are not known"
        return
    if any(reply.sampled is None for reply in result.replies) or not result.replies:
        yield "a chat server does not say which tokens it sampled"
        return
    yield from _provenance(rollout)
    found = list(_turns(rollout.sequences))
    ledger = rollout.ledger
    if sorted(span.turn for _, span in found) != list(range(len(ledger))):
        yield f"{len(ledger)} turns were sampled, and the sequences hold {[span.turn for _, span in found]}"
        return
    for sequence, span in found:
        yield from _turn(sequence, span, ledger[span.turn])


def _provenance(rollout: Rollout) -> Iterator[str]:
    """Every assistant message behind the prompt is an answer of a server, in order."""
    assert rollout.result is not None
    result = rollout.result
    said = [one for one in result.messages[result.prompt_length :] if one.get("role") == "assistant"]
    if len(said) != len(result.replies):
        yield f"it has {len(said)} assistant messages of {len(result.replies)} answers"
    for number, (message, reply) in enumerate(zip(said, result.replies, strict=False)):
        if (message.get("content") or "") != (reply.message.get("content") or ""):
            yield f"the assistant message {number} is not what was sampled"


def _turns(sequences: list[TokenSequence]) -> Iterator[tuple[TokenSequence, SampledSpan]]:
    return ((sequence, span) for sequence in sequences for span in sequence.spans)


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
    before = sum(one.stop - one.start for one in sequence.spans if one.start < span.start)
    return sequence.sampled[before : before + span.stop - span.start]
