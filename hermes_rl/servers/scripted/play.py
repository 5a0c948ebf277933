"""Build scripted replies, in messages or in token ids.

For a prompt of token ids, the turn is found by counting its assistant headers; a prompt that already contains the start
of the turn gets its rest. In messages every log-probability is 0.0, as a script has no alternatives.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple, Self

from hermes_rl.tokens.chat import turn_ids
from hermes_rl.tokens.probes import QUESTION
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer

# -------------------------------- The script of a scripted policy: turns that call tools, send text, or both
# The deviating rollouts of a group, and their deviations, follow from the seed alone, on every host. A deviating script
# differs in every text and number that a reward could use (tool arguments and messages), so that its score differs.

UNSCRIPTED = "This is a scripted server without a model; no solution is written for this conversation."
FINISHED = "That was all."
"""Reply in a conversation that continues after the last turn of its script."""
_ADDED = " wrong"
"""Appended if nothing else can be changed: a text without letters and digits."""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """A tool call. `args` is normally a mapping; other values are sent as JSON unchanged."""

    name: str
    args: Any


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One assistant message."""

    say: str | None = None
    tools: tuple[ScriptedCall, ...] = ()

    @classmethod
    def from_spec(cls, turn: Mapping[str, Any]) -> Self:
        """Return a turn from the form in a spec: ``{tools: [{name, args}]}``, ``{say: text}``, or both."""
        say = turn.get("say")
        calls = (ScriptedCall(str(call["name"]), call.get("args") or {}) for call in turn.get("tools") or ())
        return cls(None if say is None else str(say), tuple(calls))

    def message(self, turn_index: int) -> dict[str, Any]:
        """Return the assistant message. The ids of its calls are unique in a conversation and equal in every run."""
        message: dict[str, Any] = {"role": "assistant", "content": self.say}
        if self.tools:
            message["tool_calls"] = [
                {
                    "id": f"call_{turn_index}_{call_index}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.args, ensure_ascii=False, default=str),
                    },
                }
                for call_index, call in enumerate(self.tools)
            ]
        return message


class ScriptedHistory(NamedTuple):
    """A conversation as used by a script: hashes of all of it and of its opening, up to the first reply."""

    answers: int
    full_hash: int
    opening: int
    opening_text: Callable[[], str]
    """Returns the text of the opening."""


@dataclass(slots=True)
class Script:
    """The turns of one rollout.

    The number of completed turns equals the number of the script's replies in a conversation. A program may drop old
    ones, or start a new conversation with a summary that the script returned: then the script continues from there.
    """

    turns: tuple[ScriptedTurn, ...] = ()
    prior: int | None = 0
    """Number of assistant messages that are not turns, because the prompt contains them (examples); None: those that
    the first request contains.
    """
    _numbers: dict[int, int] = field(default_factory=dict)
    """Turn that followed each conversation, so that a repeated request gets the same turn."""
    _next: dict[int, int] = field(default_factory=dict)
    """Minimum next turn in conversations with each opening."""

    @classmethod
    def from_turns(cls, turns: Iterable[Mapping[str, Any]], prior: int = 0) -> Self:
        """Return a script from turns in the form of a spec, already rendered for a row."""
        return cls(tuple(ScriptedTurn.from_spec(turn) for turn in turns), prior)

    def next_message(self, history: ScriptedHistory) -> dict[str, Any]:
        """Return the assistant message that follows the history."""
        if self.prior is None:
            self.prior = history.answers
        if not self.turns:
            return ScriptedTurn(UNSCRIPTED).message(max(0, history.answers - self.prior))
        turn_index = self._numbers.get(history.full_hash)
        if turn_index is None:
            turn_index = self._numbers[history.full_hash] = self._follows(history, self.prior)
        turn = self.turns[turn_index] if turn_index < len(self.turns) else ScriptedTurn(FINISHED)
        return turn.message(turn_index)

    def _follows(self, history: ScriptedHistory, prior: int) -> int:
        """Return the turn that follows a conversation without a reply yet."""
        if history.opening not in self._next:
            numbers = [turn_index for turn_index in set(self._numbers.values()) if turn_index < len(self.turns)]
            answers = max(0, history.answers - prior)
            texts = {
                turn_index: self.turns[turn_index].say or ""
                for turn_index in numbers
                if not self.turns[turn_index].tools
            }
            opening_text = (
                history.opening_text() if texts and answers < len(numbers) else ""
            )  # otherwise no replies were dropped
            next_indices = [
                turn_index + 1 for turn_index, text in texts.items() if text.strip() and text.strip() in opening_text
            ]
            self._next[history.opening] = max(next_indices, default=0) + answers
        turn_index = max(self._next[history.opening], history.answers - prior)
        self._next[history.opening] = turn_index + 1
        return turn_index


def deviations(n: int, error_rate: float, seed: int, group_key: str) -> frozenset[int]:
    """Return the deviating members of a group of `n`: ``clamp(round(error_rate × n), 1, n − 1)`` of them.

    No member deviates if `error_rate` is 0, or in a group of one, which has no other member to differ from.
    """
    if error_rate <= 0 or n < 2:
        return frozenset()
    count = min(max(round(error_rate * n), 1), n - 1)
    return frozenset(Random(f"{seed}:{group_key}").sample(range(n), count))


def deviate_script(turns: Sequence[ScriptedTurn], rng: Random) -> tuple[ScriptedTurn, ...]:
    """Return the turns with other arguments and other texts; the tools stay the same."""
    by, turned = rng.randint(1, 9), rng.randint(1, 25)

    def wrong(value: Any) -> Any:
        return _falsify(value, by, turned)

    return tuple(
        replace(
            turn,
            say=None if turn.say is None else wrong(turn.say),
            tools=tuple(ScriptedCall(call.name, wrong(call.args)) for call in turn.tools),
        )
        for turn in turns
    )


def _falsify(value: Any, by: int, turned: int) -> Any:
    if isinstance(value, str):
        return _wrong_text(value, by, turned)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + by if value + by != value else -value
    if isinstance(value, Mapping):
        return {key: _falsify(item, by, turned) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_falsify(item, by, turned) for item in value]
    return value


def _wrong_text(text: str, by: int, turned: int) -> str:
    """Shift the digits and rotate the letters of the alphabet: a command becomes one that does not exist."""
    changed = "".join(_wrong_character(character, by, turned) for character in text)
    return changed if changed != text else text + _ADDED


def _wrong_character(character: str, by: int, turned: int) -> str:
    if character.isascii() and character.isdigit():
        return str((int(character) + by) % 10)
    for first in ("a", "A"):
        if character.isascii() and 0 <= ord(character) - ord(first) < 26:
            return chr(ord(first) + (ord(character) - ord(first) + turned) % 26)
    return "x" if character.isalnum() and not character.isascii() else character


# -------------------------------------------------------------------------------- replies


def completion(script: Script, body: Mapping[str, Any], model: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the response to the body of a chat request."""
    message = script.next_message(_history_of(body["messages"]))
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        "logprobs": None,
    }
    answer = {
        "id": "scripted",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [choice],
    }
    try:
        prompt, ids = turn_ids(tokenizer, body["messages"], body.get("tools"), message)
    except TemplateRefused:
        # For example, the tokens of a message with an image cannot be counted.
        return answer
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if isinstance(limit, int) and limit < len(ids):
        ids = ids[:limit]
        # An incomplete call is not a call, so a cut turn is text.
        choice["message"] = {"role": "assistant", "content": tokenizer.decode(ids).rstrip("\ufffd")}
        choice["finish_reason"] = "length"
    if body.get("logprobs"):
        choice["logprobs"] = {
            "content": [
                {"token": tokenizer.decode([token]), "logprob": 0.0, "bytes": None, "top_logprobs": []} for token in ids
            ]
        }
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    return answer | {"usage": {**counts, "total_tokens": sum(counts.values())}}


_RANGE = 256
"""Number of ids that stand for a vocabulary: every tokenizer has as many."""


def continuation(
    script: Script, prompt: list[int], body: Mapping[str, Any], model: str, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the response to the body of a completions request whose prompt is these token ids, in vLLM's form."""
    scored = body.get("prompt_logprobs")
    continued = (prompt[:1], "length") if scored is not None else _next_turn(script, prompt, body, tokenizer)
    choice = {
        "index": 0,
        "text": "",
        "token_ids": continued[0],
        "prompt_token_ids": prompt,
        "finish_reason": continued[1],
        "logprobs": {"token_logprobs": [0.0] * len(continued[0])},
    }
    if scored is not None:
        choice["prompt_logprobs"] = [None, *(_invented_logprobs(token, scored) for token in prompt[1:])]
    count = {"prompt_tokens": len(prompt), "completion_tokens": len(continued[0])}
    answer = {"id": "scripted", "object": "text_completion", "model": model, "choices": [choice], "usage": count}
    return {**answer, "weight_version": "0"}  # scripts do not learn


def _next_turn(
    script: Script, prompt: list[int], body: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[list[int], str]:
    """Return the turn that follows the prompt, or the rest of a turn that it has started, and the finish reason."""
    history, partial_turn = _locate_turn(prompt, tokenizer)
    message = script.next_message(history)
    turn_tokens = turn_ids(tokenizer, [QUESTION], None, message)[1]
    ids, limit = (
        turn_tokens[len(partial_turn) :] if turn_tokens[: len(partial_turn)] == partial_turn else turn_tokens,
        body.get("max_tokens"),
    )
    return (ids[:limit], "length") if limit is not None and limit < len(ids) else (ids, "stop")


def _invented_logprobs(token: int, count: int) -> dict[str, dict[str, float]]:
    """Return log-probabilities of a token and others, each half as probable as the one before it."""
    tokens = [token, *[other for other in range(_RANGE) if other != token][: max(count - 1, 0)]]
    return {str(each): {"logprob": rank * math.log(0.5)} for rank, each in enumerate(tokens, 1)}


def _history_of(messages: Sequence[Mapping[str, Any]]) -> ScriptedHistory:
    answers = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    opening = [str(message.get("content")) for message in messages[: answers[0] if answers else None]]
    return ScriptedHistory(len(answers), hash(repr(messages)), hash(tuple(opening)), lambda: "\n".join(opening))


def _locate_turn(prompt: list[int], tokenizer: Tokenizer) -> tuple[ScriptedHistory, list[int]]:
    """Return the conversation before the requested turn, and the ids of that turn in the prompt."""
    header = _turn_header(tokenizer)
    size = len(header)
    header_offsets = [
        i for i in range(len(prompt) - size + 1) if prompt[i] == header[0] and tuple(prompt[i : i + size]) == header
    ]
    first, last = (header_offsets[0], header_offsets[-1]) if header_offsets else (len(prompt), len(prompt))
    opening = prompt[:first]
    answers, history_hash, partial_turn = (
        max(0, len(header_offsets) - 1),
        hash(tuple(prompt[:last])),
        prompt[last + size :],
    )
    return ScriptedHistory(answers, history_hash, hash(tuple(opening)), lambda: tokenizer.decode(opening)), partial_turn


@functools.lru_cache(maxsize=8)
def _turn_header(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the ids with which the template starts an assistant turn."""
    prompt = tokenizer.render([QUESTION], None, add_generation_prompt=True)
    unasked = tokenizer.render([QUESTION], None, add_generation_prompt=False)
    return tuple(tokenizer.encode(prompt[len(unasked) :] if prompt.startswith(unasked) else prompt[-1:]))
