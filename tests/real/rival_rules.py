"""Rules by which two other recorders place the calls of a program in sequences.

verifiers (0.4) keeps a graph of messages: a request goes on from the call whose messages and answer it begins with, all
of them equal but for the form of the JSON in calls, and what is new may be results and one message of the user. OpenEnv
(0.10) has the engine render each request: it goes on from the call whose tokens it begins with. What goes on nowhere is
rendered anew and begins a sequence. Both rules train on what was sampled; they differ from ours in how often a
conversation breaks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.agent.result import Message
from hermes_rl.tokens.rendering import Renderer, next_prompt
from hermes_rl.tokens.transcript import Transcript

END = "<|im_end|>\n"
"""How the small tokenizer's template ends a message."""


@dataclass(frozen=True)
class RecordedCall:
    """A request of a program as read, with the reply that the program received."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]]
    answer: Message
    sampled: list[int]

    @property
    def conversation(self) -> list[Any]:
        """Return the parts of messages and reply that verifiers compares."""
        return [_compared(message) for message in [*self.messages, self.answer]]


@dataclass(eq=False)
class PlacedCall:
    """A call with its tokens, the reply's last."""

    call: RecordedCall
    ids: list[int]
    onto: PlacedCall | None
    """The call that it goes on from."""
    followed: bool = False


def by_verifiers(calls: Iterable[RecordedCall], renderer: Renderer) -> list[PlacedCall]:
    """Place calls as verifiers does."""
    placed: list[PlacedCall] = []
    for call in calls:
        asked = call.conversation[:-1]
        known = [
            each
            for each in placed
            if list(each.call.tools) == list(call.tools)
            and asked[: len(each.call.messages) + 1] == each.call.conversation
            and _may_follow(call.messages[len(each.call.messages) + 1 :])
        ]
        onto = max(reversed(known), key=lambda each: len(each.call.messages), default=None)
        _place(placed, call, onto, _rendered(call, renderer) if onto is None else _extended(onto, call, renderer))
    return placed


def by_openenv(calls: Iterable[RecordedCall], renderer: Renderer) -> list[PlacedCall]:
    """Place calls as OpenEnv does."""
    placed: list[PlacedCall] = []
    for call in calls:
        ids = _rendered(call, renderer)
        known = [each for each in placed if ids[: len(each.ids)] == each.ids]
        _place(placed, call, max(known, key=lambda each: len(each.ids), default=None), ids)
    return placed


def lengths(placed: Iterable[PlacedCall]) -> list[int]:
    """Return the number of tokens of each sequence: one for each call that no other call continues."""
    return [len(each.ids) for each in placed if not each.followed]


def _place(placed: list[PlacedCall], call: RecordedCall, onto: PlacedCall | None, prompt: list[int]) -> None:
    if onto is not None:
        onto.followed = True
    placed.append(PlacedCall(call, prompt + call.sampled, onto))


def _compared(message: Message) -> Any:
    calls = [(each["id"], each["function"]["name"], _canonical(each["function"]["arguments"]))
             for each in message.get("tool_calls") or ()]  # fmt: skip
    content, thought = message.get("content") or "", message.get("reasoning_content") or message.get("reasoning")
    return [message["role"], content, thought or "", calls, message.get("tool_call_id")]


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments


def _may_follow(messages: Sequence[Message]) -> bool:
    """Return True if verifiers renders these messages after a reply: results, and then at most one user message."""
    roles = [message["role"] for message in messages]
    return bool(roles) and set(roles[:-1]) <= {"tool"} and roles[-1] in ("tool", "user")


def _rendered(call: RecordedCall, renderer: Renderer) -> list[int]:
    return next_prompt(renderer, Transcript(), call.messages, list(call.tools) or None).ids.tolist()


def _extended(onto: PlacedCall, call: RecordedCall, renderer: Renderer) -> list[int]:
    """Return the tokens of the continued call, followed by the new ones."""
    tools, before = list(call.tools) or None, call.messages[: len(onto.call.messages) + 1]
    whole = renderer.tokenizer.render(call.messages, tools, add_generation_prompt=True)
    start = len(renderer.tokenizer.render(before, tools, add_generation_prompt=False).removesuffix(END))
    new = renderer.tokenizer.encode(whole[start:])
    return onto.ids + (new[1:] if onto.ids[-1] == new[0] else new)
