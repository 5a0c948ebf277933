"""Tokens of finished rollouts: those that a token-level server sampled, else those of the rendered messages.

Where a chat server's tokenizer cannot be had, or its template does not allow exact sequences, a rollout keeps its
messages and has no tokens; the reasons are counted, for the user to hear.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from hermes_rl.agent.result import AgentResult
from hermes_rl.rollouts.certificate import certify
from hermes_rl.rollouts.rollout import Group, Rollout
from hermes_rl.tokens.chat import SampledTurn, chat_tokens
from hermes_rl.tokens.load import load_tokenizer
from hermes_rl.tokens.tokenizer import Tokenizer, TokenizerUnavailable


class Encoder:
    """Encodes rollouts with one tokenizer; `missing` says why there is none."""

    def __init__(self, tokenizer: Tokenizer | None, missing: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.missing = missing
        self._missing: dict[str, str] = {}

    @classmethod
    def load(cls, name: str | None) -> Encoder:
        """With the tokenizer of a hub name or folder (None: the small one); slow, call it in a thread."""
        try:
            return cls(load_tokenizer(name))
        except TokenizerUnavailable as error:
            return cls(None, str(error))

    def missing_tokens(self) -> Counter[str]:
        """How many rollouts have no tokens, by the reason."""
        return Counter(self._missing.values())

    async def encode(self, rollout: Rollout) -> None:
        """Set the `sequences` of a rollout that has none, off the event loop."""
        result = rollout.result
        if result is None or rollout.sequences is not None:
            return
        if result.transcript is not None and result.transcript.turns:
            rollout.sequences = result.transcript.sequences()
        elif self.tokenizer is None:
            self._missing[rollout.id] = self.missing or "there is no tokenizer"
        else:
            await asyncio.to_thread(self._render, self.tokenizer, rollout, result)

    async def encode_group(self, group: Group) -> None:
        """The same for every member, and the group's certificate."""
        for rollout in group.rollouts:
            await self.encode(rollout)
        if group.certificate is None:
            group.certificate = await asyncio.to_thread(certify, group)

    def _render(self, tokenizer: Tokenizer, rollout: Rollout, result: AgentResult) -> None:
        turns = [SampledTurn(reply.finish_reason, reply.logprobs, reply.tokens) for reply in result.replies]
        encoded = chat_tokens(
            tokenizer,
            result.messages,
            result.tool_schemas or None,
            sampled_from=result.prompt_length,
            turns=turns,
        )
        rollout.sequences = encoded.sequences
        if encoded.reason is not None:
            self._missing[rollout.id] = encoded.reason
