"""Messages → one sequence with a true assistant mask, for servers that speak text.

Owns the cut between what a model wrote and what it was given, found by rendering the history up to
each turn. Nothing is invented: where the template does not allow one sequence, there is none, and a
reason. The ids are those of the rendered text, not the ones that the server sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from hermes_rl.tokens.guard import Guard
from hermes_rl.tokens.sequence import MASKED, MASKED_LOGPROB, Sequence
from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, Tokenizer, Tools

__all__ = ["ChatTokens", "SampledTurn", "Sequence", "chat_tokens", "turn_ids"]


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """What the server said about one assistant turn beside its message."""

    finish_reason: str | None = None
    """``length``: the turn was cut, so that its end was not sampled and is not trained on."""
    logprobs: list[float] | None = None
    tokens: list[str] | None = None
    """The text of each sampled token; compared, so that other tokens' logprobs are never taken."""


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """Either a sequence, or the reason why there is none."""

    sequence: Sequence | None
    reason: str | None = None


class _NoSequence(Exception):
    """The template does not allow one sequence; the message is the reason."""


@dataclass(frozen=True, slots=True)
class _Turn:
    context: str
    """Rendered text since the previous turn, ending with the header of this one."""
    completion: str


def chat_tokens(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Tools | None = None,
    *,
    sampled_from: int = 0,
    turns: Many[SampledTurn] = (),
) -> ChatTokens:
    """The sequence of a conversation. Takes milliseconds: call it in a thread.

    Assistant messages from index `sampled_from` on were sampled, earlier ones belong to the prompt;
    `turns` tells about the sampled ones in order, and may be left out.
    """
    prepared = [_for_template(message) for message in messages]
    guard = Guard(tokenizer, prepared, tools)
    try:
        rendered = list(_turns(tokenizer, guard, sampled_from, turns))
    except (_NoSequence, TemplateRefused) as problem:
        return ChatTokens(None, str(problem))
    if not rendered:
        return ChatTokens(None, "no assistant turn was sampled")
    return ChatTokens(_sequence(tokenizer, guard, rendered, turns))


def turn_ids(
    tokenizer: Tokenizer, messages: Messages, tools: Tools | None, reply: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """Ids of a prompt and of the reply to it, up to and including the stop; raises `TemplateRefused`."""
    prepared = [_for_template(message) for message in (*messages, reply)]
    guard = Guard(tokenizer, prepared, tools)
    try:
        turn = _turn(tokenizer, guard, len(messages), "", cut=False)
    except _NoSequence as problem:
        raise TemplateRefused(str(problem)) from None
    return guard.encode(turn.context), guard.encode(turn.completion)


def _turns(tokenizer: Tokenizer, guard: Guard, sampled_from: int, turns: Many[SampledTurn]) -> Iterator[_Turn]:
    sampled = (
        index
        for index, message in enumerate(guard.messages)
        if index >= sampled_from and message.get("role") == "assistant"
    )
    done = ""
    for number, index in enumerate(sampled):
        cut = number < len(turns) and turns[number].finish_reason == "length"
        turn = _turn(tokenizer, guard, index, done, cut=cut)
        done += turn.context + turn.completion
        yield turn


def _turn(tokenizer: Tokenizer, guard: Guard, index: int, done: str, *, cut: bool) -> _Turn:
    """The turn at `index`, given the text that is `done`."""
    prompt = tokenizer.render(guard.messages[:index], guard.tools, add_generation_prompt=True)
    if not prompt.startswith(done):
        raise _NoSequence("the chat template rewrites earlier turns (it drops thinking, for example)")
    whole = tokenizer.render(guard.messages[: index + 1], guard.tools, add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise _NoSequence("the chat template renders a turn otherwise than it asks for one")
    if guard.escaped(whole):
        raise _NoSequence("the chat template escapes characters, so that control tokens cannot be told from text")
    return _Turn(prompt[len(done) :], _until_stop(whole[len(prompt) :], tokenizer.control, cut=cut))


def _until_stop(completion: str, control: frozenset[str], *, cut: bool) -> str:
    """The completion up to and including the token that ends the turn (without it where it was cut)."""
    ended = completion.rstrip()
    stop = max((token for token in control if ended.endswith(token)), key=len, default=None)
    if stop is None:
        raise _NoSequence("the chat template does not end a turn with a control token")
    return ended[: -len(stop)] if cut else ended


def _sequence(tokenizer: Tokenizer, guard: Guard, rendered: list[_Turn], turns: Many[SampledTurn]) -> Sequence:
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] | None = [] if len(turns) == len(rendered) else None
    for number, turn in enumerate(rendered):
        context, completion = guard.encode(turn.context), guard.encode(turn.completion)
        tokens += context + completion
        masks += [MASKED] * len(context) + completion
        if logprobs is not None:
            sampled = _fitting_logprobs(tokenizer, completion, turns[number])
            logprobs = None if sampled is None else [*logprobs, *[MASKED_LOGPROB] * len(context), *sampled]
    return Sequence(tokens, masks, logprobs)


def _fitting_logprobs(tokenizer: Tokenizer, ids: list[int], turn: SampledTurn) -> list[float] | None:
    """The turn's logprobs if they belong to these ids."""
    if turn.logprobs is None or len(turn.logprobs) != len(ids):
        return None
    if turn.tokens is None:
        return turn.logprobs
    pairs = zip(ids, turn.tokens, strict=True)
    return turn.logprobs if all(_same(tokenizer.decode([one]), sent) for one, sent in pairs) else None


def _same(ours: str, sent: str) -> bool:
    """Servers leave control tokens out of their texts, and half characters have no text."""
    return not sent or ours == sent or "\ufffd" in ours + sent


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates want it: arguments of tool calls as a mapping, where they are one."""
    prepared = dict(message)
    if prepared.get("tool_calls"):
        prepared["tool_calls"] = [_call_for_template(call) for call in prepared["tool_calls"]]
    return prepared


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
