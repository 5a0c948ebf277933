"""Tokens and masks of finished rollouts, for policies that speak text.

Where the tokenizer cannot be had, or its template does not allow one exact sequence, a rollout keeps its messages and
has no tokens; the reasons are counted, for the user to hear.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from hermes_rl.agent.result import AgentResult
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.tokens.chat import SampledTurn, chat_tokens
from hermes_rl.tokens.tokenizer import Tokenizer, TokenizerUnavailable, load_tokenizer


class Encoder:
    """Encodes groups with one tokenizer; `missing` says why there is none."""

    def __init__(self, tokenizer: Tokenizer | None, missing: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.missing = missing
        self.reasons: Counter[str] = Counter()

    @classmethod
    def load(cls, name: str | None) -> Encoder:
        """With the tokenizer of a hub name or folder (None: the small one); slow, call it in a thread."""
        try:
            return cls(load_tokenizer(name))
        except TokenizerUnavailable as error:
            return cls(None, str(error))

    async def encode(self, rollout: Rollout) -> None:
        """Set the `sequence` of a rollout that has none, off the event loop."""
        if self.tokenizer is None:
            self.reasons[self.missing or "there is no tokenizer"] += 1
        elif rollout.sequence is None and rollout.result is not None:
            await asyncio.to_thread(self._encode, self.tokenizer, rollout, rollout.result)

    async def encode_group(self, group: Group) -> None:
        """The same for every member."""
        for rollout in group.rollouts:
            await self.encode(rollout)

    def _encode(self, tokenizer: Tokenizer, rollout: Rollout, result: AgentResult) -> None:
        turns = [SampledTurn(reply.finish_reason, reply.logprobs, reply.tokens) for reply in result.replies]
        encoded = chat_tokens(
            tokenizer,
            result.messages,
            result.tool_schemas or None,
            sampled_from=result.prompt_length,
            turns=turns,
        )
        rollout.sequence = encoded.sequence
        if encoded.reason is not None:
            self.reasons[encoded.reason] += 1
