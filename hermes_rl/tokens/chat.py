"""Convert messages to sequences with a true assistant mask, for servers that use text.

Each sampled turn becomes a step (the rendered history and the rendered turn), and steps are merged as for a token-level
server. Nothing is invented: if a turn cannot be separated from its context, the result is a reason instead of a
sequence. The ids encode the rendered text and may differ from the sampled ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hermes_rl.tokens.probes import QUESTION
from hermes_rl.tokens.rendering import Renderer, RendererRefused, TemplateRenderer, for_template, next_prompt
from hermes_rl.tokens.texts import Guard, guarded
from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, Tokenizer, Tools, refusals
from hermes_rl.tokens.transcript import Step, TokenSequence, Transcript, ids


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """The server's data about one assistant turn, in addition to its message."""

    finish_reason: str | None = None
    """``length``: the turn was cut, so its end was not sampled and is not trained on."""
    logprobs: list[float] | None = None
    tokens: list[str] | None = None
    """Text of each sampled token, compared so that no token gets the log-probability of another one."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Sequences, or the reason why there are none."""

    sequences: list[TokenSequence] | None
    reason: str | None = None

    @property
    def sequence(self) -> TokenSequence | None:
        """The only sequence; None if there are none or several."""
        return self.sequences[0] if self.sequences is not None and len(self.sequences) == 1 else None


def chat_tokens(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Tools | None = None,
    *,
    sampled_from: int = 0,
    turns: Sequence[SampledTurn] = (),
    renderer: Renderer | None = None,
    longest: int | None = None,
) -> ChatTokens:
    """Return the sequences of a conversation. Takes milliseconds: call it in a thread.

    Args:
        sampled_from: index of the first sampled assistant message; earlier ones belong to the prompt.
        turns: data of the sampled messages in order; may be omitted.
        longest: maximum length of a sequence; longer ones are cut.
    """
    reply_indices = [
        i for i, message in enumerate(messages) if i >= sampled_from and message.get("role") == "assistant"
    ]
    if not reply_indices:
        return ChatTokens(None, "no assistant turn was sampled")
    try:
        with refusals(tokenizer.name):
            steps = _Steps(tokenizer, renderer or _template_renderer(tokenizer), tools, longest)
            for turn_index, reply_index in enumerate(reply_indices):
                turn = turns[turn_index] if turn_index < len(turns) else SampledTurn()
                if not steps.add(messages[: reply_index + 1], turn):
                    break
    except (TemplateRefused, RendererRefused) as problem:
        return ChatTokens(None, str(problem))
    sequences = steps.sequences(len(turns) == len(reply_indices))
    return ChatTokens(sequences) if sequences else ChatTokens(None, f"its prompt has more than {longest} tokens")


def turn_ids(
    tokenizer: Tokenizer, messages: Messages, tools: Tools | None, reply: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt and of the reply to it, with its stop token; raises `TemplateRefused`."""

    def encoded(guard: Guard) -> tuple[list[int], list[int]]:
        prompt = tokenizer.render(guard.messages[:-1], guard.tools, add_generation_prompt=True)
        full_text = tokenizer.render(guard.messages, guard.tools, add_generation_prompt=False)
        if not full_text.startswith(prompt):
            raise TemplateRefused("the chat template renders a turn otherwise than it asks for one")
        ended = full_text[len(prompt) :].rstrip()
        if not ended.endswith(tuple(tokenizer.control)):
            raise TemplateRefused("the chat template does not end a turn with a control token")
        return guard.encode(prompt), guard.encode(ended)

    return guarded(tokenizer, [for_template(message) for message in (*messages, reply)], tools, encoded)


class _Steps:
    """The steps of one conversation."""

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer, tools: Tools | None, longest: int | None) -> None:
        self._tokenizer, self._renderer, self._tools, self._longest = tokenizer, renderer, tools, longest
        self._transcript = Transcript()
        self._logprobs = True

    def add(self, messages: Messages, turn: SampledTurn) -> bool:
        """Add the last message as a turn, up to the available length; return False if no further turn fits."""
        history = messages[:-1]
        prompt = next_prompt(self._renderer, self._transcript, history, self._tools)
        # The turn is rendered alone: a later change of it by the template is not part of the sampled tokens.
        completion = ids(turn_ids(self._tokenizer, [QUESTION], None, messages[-1])[1])
        if turn.finish_reason == "length":
            completion.pop()  # the end of a cut turn was not sampled
        logprobs = _fitting_logprobs(self._tokenizer, completion.tolist(), turn)
        self._logprobs = self._logprobs and logprobs is not None
        room = len(completion) if self._longest is None else self._longest - len(prompt.ids)
        if room > 0:
            values = (logprobs or [0.0] * len(completion))[:room]
            step = Step.from_lists(prompt.ids, completion[:room], values, turn.finish_reason or "stop")
            self._transcript.add(step, messages, prompt)
        return room >= len(completion)

    def sequences(self, with_logprobs: bool) -> list[TokenSequence]:
        """Return the merged steps; without log-probabilities unless the server gave all of them."""
        sequences = self._transcript.sequences()
        if with_logprobs and self._logprobs:
            return sequences
        return [replace(sequence, sampled=None) for sequence in sequences]


@functools.lru_cache(maxsize=8)
def _template_renderer(tokenizer: Tokenizer) -> Renderer:
    return TemplateRenderer(tokenizer)


def _fitting_logprobs(tokenizer: Tokenizer, completion: list[int], turn: SampledTurn) -> list[float] | None:
    """Return the turn's log-probabilities if they match these ids, or None."""
    if turn.logprobs is None or len(turn.logprobs) != len(completion):
        return None
    if turn.tokens is None:
        return turn.logprobs
    pairs = zip(completion, turn.tokens, strict=True)
    return turn.logprobs if all(_is_same_text(tokenizer.decode([token]), sent) for token, sent in pairs) else None


def _is_same_text(expected: str, sent: str) -> bool:
    """Return True if two texts of a token agree. Servers omit control tokens, and partial characters have no text."""
    return not sent or expected == sent or "\ufffd" in expected + sent
