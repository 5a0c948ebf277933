"""The tokens of a recorded rollout, as the model got and said them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.reading.record import RunRecord
from hermes_rl.runs.provenance import tokenizer_hashes
from hermes_rl.tokens.load import OWN, load_tokenizer
from hermes_rl.tokens.tokenizer import Tokenizer, TokenizerUnavailable
from hermes_rl.tokens.transcript import TokenSequence, unpacked


@dataclass(frozen=True)
class RecordedTokens:
    """The sequences of a rollout; `tokenizer` is None where it cannot be had, and `missing` says why.

    `versions` are the weights before and after each turn, as the server told them; None where it did not.
    """

    sequences: tuple[TokenSequence, ...]
    tokenizer: Tokenizer | None
    missing: str | None
    versions: tuple[tuple[int | None, int | None], ...]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; their ids where there is no tokenizer."""
        return " ".join(map(str, ids)) if self.tokenizer is None else self.tokenizer.decode(list(ids))

    def records(self) -> list[dict[str, Any]]:
        """Return the sequences for JSON, each with lists of one length."""
        return [
            {
                "tokens": sequence.tokens,
                "masks": sequence.masks,
                "logprobs": sequence.logprobs,
                "spans": [
                    {"turn": span.turn + 1, "start": span.start, "stop": span.stop, "versions": self.version(span.turn)}
                    for span in sequence.spans
                ],
                "texts": None if self.tokenizer is None else [self.text([token]) for token in sequence.ids],
            }
            for sequence in self.sequences
        ]

    def version(self, turn: int) -> tuple[int | None, int | None]:
        """Return the weights of a turn, which counts from 0."""
        return self.versions[turn] if turn < len(self.versions) else (None, None)


def tokens_of(record: RunRecord, line: Mapping[str, Any]) -> RecordedTokens | None:
    """Return the tokens of a rollout's line; None where the run recorded none. Slow: a tokenizer may be loaded."""
    if not line.get("sequences"):
        return None
    tokenizer, missing = _tokenizer(record.described.get("tokenizer"))
    versions = tuple((before, after) for *_, before, after in line.get("sampled") or ())
    return RecordedTokens(tuple(map(unpacked, line["sequences"])), tokenizer, missing, versions)


def _tokenizer(hashes: Mapping[str, Any] | None) -> tuple[Tokenizer | None, str | None]:
    """Return the tokenizer that run.json names, or why there is none."""
    name = (hashes or {}).get("name")
    if not hashes or not isinstance(name, str):
        return None, "run.json names no tokenizer"
    try:
        tokenizer = load_tokenizer(None if name.startswith(OWN) else name)
    except TokenizerUnavailable as error:
        return None, str(error).splitlines()[0]
    if tokenizer_hashes(tokenizer)["ids"] != hashes.get("ids"):
        return None, f"the tokenizer {name} makes other tokens today than when this was played"
    return tokenizer, None
