"""The token state of a rollout in the form that hand-written environments read: `managed_state["nodes"]`.

A node has the fields of Atropos' SequenceNode. Nodes are made when they are asked for: lists of Python numbers take
several times the memory of what they are made from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hermes_rl.tokens.sequence import MASKED_LOGPROB
from hermes_rl.tokens.transcript import Transcript


@dataclass(frozen=True)
class Node:
    """One sequence: lists of one length; masks are -100 or the token, log-probabilities 1.0 where masked."""

    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any]


class ManagedState(Mapping[str, list[Node]]):
    """``{"nodes": […]}``: every sequence of the rollout, not only the last."""

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript

    def __getitem__(self, key: str) -> list[Node]:
        if key != "nodes":
            raise KeyError(key)
        return [
            Node(
                sequence.tokens,
                sequence.masks,
                sequence.logprobs or [MASKED_LOGPROB] * len(sequence),
                {"turns": [span.turn for span in sequence.spans]},
            )
            for sequence in self._transcript.sequences()
        ]

    def __iter__(self) -> Iterator[str]:
        return iter(("nodes",))

    def __len__(self) -> int:
        return 1
