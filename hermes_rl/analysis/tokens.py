"""Tokens of a recorded rollout, as the model received and sampled them: for a terminal, and in parts for a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.runs.provenance import tokenizer_hashes
from hermes_rl.terminal_text import escape_controls
from hermes_rl.tokens.load import OWN, load_tokenizer
from hermes_rl.tokens.tokenizer import Tokenizer
from hermes_rl.tokens.transcript import MASKED_LOGPROB, TokenSequence, unpacked

JOINED = 8
"""Maximum number of tokens that together make one character."""


def tokenizer_of(run_info: Mapping[str, Any], *, local: bool = True) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer that `run.json` names, else why there is none; with `local`, nothing is downloaded."""
    hashes = run_info.get("tokenizer") or {}
    name = hashes.get("name")
    if not isinstance(name, str) or not name:
        return None, "run.json names no tokenizer"
    try:
        tokenizer = load_tokenizer(None if name.startswith(OWN) else name, local=local)
    except UserError as error:
        return None, str(error).splitlines()[0]
    if "ids" in hashes and tokenizer_hashes(tokenizer)["ids"] != hashes["ids"]:
        return None, f"the tokenizer {name} now produces other tokens than when this was recorded"
    return tokenizer, ""


def sequences_of(line: Mapping[str, Any]) -> list[TokenSequence]:
    """Return the sequences of a rollout's record, or an empty list if the run recorded no tokens."""
    return [unpacked(packed) for packed in line.get("sequences") or ()]


def first_prompt(sequences: Sequence[TokenSequence]) -> list[int]:
    """Return the tokens before the first sampled one."""
    first = min(sequences, key=lambda sequence: sequence.spans[0].turn if sequence.spans else math.inf)
    return first.tokens[: first.spans[0].start] if first.spans else first.tokens


def prompt_text(line: Mapping[str, Any], tokenizer: Tokenizer | None) -> str | None:
    """Return the first prompt exactly as the model received it, or None if the run did not record its tokens."""
    sequences = sequences_of(line)
    if tokenizer is None or not any(sequence.spans for sequence in sequences):
        return None
    return tokenizer.decode(first_prompt(sequences))


@dataclass(frozen=True)
class RecordedTokens:
    """Sequences of a rollout; `tokenizer` is None if it is not available, and `missing` is the reason.

    `versions` are the weight versions before and after each turn, as reported by the server, or None if it did not
    report them.
    """

    sequences: tuple[TokenSequence, ...]
    tokenizer: Tokenizer | None
    missing: str
    versions: tuple[tuple[int | None, int | None], ...]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, or their ids if there is no tokenizer."""
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
        """Return the weight versions of a turn, which counts from 0."""
        return self.versions[turn] if turn < len(self.versions) else (None, None)


def tokens_of(run_info: Mapping[str, Any], line: Mapping[str, Any]) -> RecordedTokens | None:
    """Return the tokens of a rollout's record, or None if the run recorded none. Slow: a tokenizer may be loaded."""
    if not (sequences := sequences_of(line)):
        return None
    versions = tuple((before, after) for *_, before, after in line.get("sampled") or ())
    return RecordedTokens(tuple(sequences), *tokenizer_of(run_info, local=False), versions)


def shown_tokens(
    line: Mapping[str, Any], sequence: int, start: int, max_tokens: int, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """Return tokens of a sequence: the text of each, if it was sampled, its turn, and its probability.

    They are `max_tokens` tokens from `start` on; without a tokenizer their ids are shown. Raises `UserError` if there
    is no such sequence.
    """
    packed = line.get("sequences") or []
    if not 0 <= sequence < len(packed):
        raise UserError(f"there is no sequence {sequence}; the rollout has {len(packed)}")
    token_sequence = unpacked(packed[sequence])
    end = min(start + max_tokens, len(token_sequence))
    texts = _token_texts(token_sequence, start, end, tokenizer)
    turns = token_sequence.spread(
        [span.turn for span in token_sequence.spans for _ in range(span.start, span.stop)], -1
    )
    # Tokens that were not sampled, or that no server reported, have no probability.
    logprobs = [
        None if turns[position] < 0 or value == MASKED_LOGPROB or not math.isfinite(value) else round(value, 4)
        for position, value in enumerate(token_sequence.logprobs or [MASKED_LOGPROB] * len(token_sequence))
    ]
    return {
        "sequence": sequence,
        "start": start,
        "end": end,
        "total": len(token_sequence),
        "decoded": tokenizer is not None,
        "versions": [list(entry[4:6]) for entry in line.get("sampled") or ()],
        "tokens": [
            [texts[position - start], int(turns[position]), logprobs[position]] for position in range(start, end)
        ],
    }


def _token_texts(token_sequence: TokenSequence, start: int, end: int, tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of each token. If several make one character, the first of them has it."""
    if tokenizer is None:
        return [str(token) for token in token_sequence.ids[start:end]]
    texts, position = [], start
    while position < end:
        size = 1
        text = alone = tokenizer.decode(token_sequence.ids[position : position + 1])
        while "\ufffd" in text and size < JOINED and position + size < end:
            size += 1
            text = tokenizer.decode(token_sequence.ids[position : position + size])
        if "\ufffd" in text:
            size, text = 1, alone
        texts += [escape_controls(text), *[""] * (size - 1)]
        position += size
    return texts
