"""What a trainer gets of a rollout: tokens, what is trained on, and the log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

MASKED = -100
"""The mask of a token that is not trained on."""
MASKED_LOGPROB = 1.0
"""The log-probability at masked positions: a value that no sampled token can have."""


@dataclass(frozen=True, slots=True)
class Sequence:
    """Lists of one length. A mask is `MASKED` or the token itself."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float] | None = None
    """`MASKED_LOGPROB` where masked; None where the server gave none that fit."""

    def __post_init__(self) -> None:
        lengths = {len(self.tokens), len(self.masks), len(self.logprobs or self.tokens)}
        if len(lengths) != 1:
            raise ValueError(f"tokens, masks and logprobs differ in length: {sorted(lengths)}")

    @property
    def trained(self) -> list[int]:
        """The tokens that are trained on, in order."""
        return [token for token, mask in zip(self.tokens, self.masks, strict=True) if mask != MASKED]
