"""Group the model calls of an agent program into conversations, and classify each call.

A program has one main conversation. In addition, it may call the model for sub-agents, summaries and titles, or repeat
a call whose reply it discarded. Requests do not state this. It is inferred from the content that later requests repeat:
messages, texts, and tool-call ids, each of which belongs to one reply of the rollout. The transcript places the tokens
and compares more strictly. This module keeps only digests and the last request, since each request contains the
conversation before it.

The policy can send requests too: a command that it runs may send any messages to the program's endpoint. Therefore the
main conversation is determined by the requests made before the policy could run anything, and a message of a request is
attributed to the policy only if it was sampled in this rollout and delivered to the program.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from hermes_rl.agent.result import Message, text_of
from hermes_rl.tokens.transcript import canonical_calls
from hermes_rl.values import write_message

Kind = Literal["main", "subagents", "summaries", "side_calls", "rejected", "changed", "undelivered"]
"""Kind of a call: in the main conversation, in another conversation with tools, a summary whose text was reused, a call
whose reply was never reused, a call that was rejected and repeated, a call whose tool calls were changed, or a call
that the program did not wait for.
"""
SHORTEST = 8
"""Minimum length in characters of a text that is searched for in later requests."""
SHOWN = 120
"""Characters of a reply that are recorded as its preview."""
OPEN = 16
"""Number of most recent calls without continuation whose texts are searched for."""
MOST_EARLY = 16
"""Maximum number of candidates for the main conversation. Programs start few before the policy can run anything."""


@dataclass
class ProgramCall:
    """One request of a program to which the policy replied."""

    root: bytes
    """Identifies its conversation: the digest of the first request of the conversation."""
    request_digest: bytes
    """Digest of the whole request."""
    tools: bool
    answer: Message
    """The reply as delivered to the program."""
    tool_calls: Sequence[str]
    """Tool calls of the reply in canonical form."""
    text: str
    continues: int | None
    """Index of the call whose reply this request continues."""
    before: int
    """Number of calls with a reply at the time of this request."""
    delivered: float = math.inf
    """Time of delivery to the program, as counted by `Conversations.tick`; infinite if the reply was not delivered."""
    continued: bool = False
    quoted: bool = False
    """True if its text appears in a later request, other than as a model reply in its own conversation."""
    returned: bool = False
    """True if its text or one of its tool calls appears in a later request."""
    came_back: bool = False
    """True if a later request contained the reply unchanged at its position."""
    was_replaced: bool = False
    """True if a later request contained other tool calls instead of the reply's, or with the same ids."""

    @property
    def preview(self) -> str:
        """Preview of the reply for display: its text, or the tools that it calls."""
        return " ".join((self.text or ", ".join(self.tool_calls))[: 2 * SHOWN].split())[:SHOWN]

    @property
    def is_changed(self) -> bool:
        """True if the tool calls were changed in a later request and never came back unchanged.

        Requests may also come from the policy, which could otherwise exclude its own replies from training.
        """
        return self.was_replaced and not self.came_back


@dataclass
class _Conversation:
    """The calls that continue one first request."""

    started_at: int
    """Time of its first request, as counted by `Conversations.tick`."""
    latest: int
    """Time of its last request."""
    tools: bool
    after: bytes | None
    """Root of the conversation whose reply or summary its first request contains; `UNKNOWN` if a side call wrote the
    summary; None if the conversation is new.
    """
    delivered: float = math.inf
    """Time at which one of its replies was first delivered to the program."""
    is_continued: bool = False


UNKNOWN = b""


class Conversations:
    """The calls of one rollout, in the order of their replies."""

    def __init__(self) -> None:
        self.calls: list[ProgramCall] = []
        self.sampled: dict[int, int] = {}
        """Index of each message in the last request that is a policy reply → the call that returned it."""
        self._after: dict[bytes, list[int]] = {}
        """Digest of a conversation including a reply → the calls that returned the reply."""
        self._calls_by_prompt: dict[bytes, list[int]] = {}
        """Digest of a conversation before a reply → the calls that requested the reply."""
        self._conversations: dict[bytes, _Conversation] = {}
        """Conversations by root."""
        self._successors: dict[bytes, list[bytes]] = {}
        """Conversation → conversations whose first request contains a reply or a summary of it."""
        self.early: list[bytes] = []
        """Conversations that started before the policy could run anything, as far as known at their start."""
        self._now = 0
        self._texts: dict[str, int] = {}
        """Text of a reply without tool calls → the last call that returned it."""
        self._minted: dict[str, tuple[int, str]] = {}
        """Id of a tool call → the model call that returned it, and its canonical form."""
        self._last: tuple[list[Message], list[list[str]], list[bytes]] = [], [], [b""]
        """Messages of the last request, with the result of `_digests_of` for them."""

    def tick(self) -> int:
        """Return the next time stamp for a request or a delivery; larger than all earlier ones."""
        self._now += 1
        return self._now

    def add(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        answer: Message,
        before: int | None = None,
        requested_at: int | None = None,
    ) -> ProgramCall:
        """Add a request and the policy's reply.

        Args:
            before: number of calls with a reply at the time of the request; None: all known calls.
            requested_at: time of the request, as counted by `tick`; None: now.
        """
        requested_at = self.tick() if requested_at is None else requested_at
        calls, digests = self._digests_of(list(messages))
        tool_calls = canonical_calls(answer)
        call_index, after = len(self.calls), _extend_digest(digests[-1], answer, tool_calls)
        self.sampled = self._policy_replies(messages, calls, digests)
        exact = [message_index for message_index in self.sampled if digests[message_index + 1] in self._after]
        continues = self.sampled[exact[-1]] if exact else None
        replaced = self._compare(messages, calls, digests)
        continued_root = None if continues is None else self.calls[continues].root
        origin = self._look_back(messages, calls, continued_root, bool(tools))
        origin = replaced if origin is None else origin
        if continues is not None:
            self.calls[continues].continued = True
            root = self.calls[continues].root
        else:
            root = digests[-1]
        self._enter(root, origin, requested_at, tools=bool(tools), is_continuing=continues is not None)
        request = _extend_digest(digests[-1], {"role": "tools", "content": list(tools)}, [])
        text = text_of(answer.get("content")).strip()
        before = call_index if before is None else before
        call = ProgramCall(root, request, bool(tools), answer, tool_calls, text, continues, before)
        self._after.setdefault(after, []).append(call_index)
        self._calls_by_prompt.setdefault(digests[-1], []).append(call_index)
        for minted, each in zip(answer.get("tool_calls") or (), tool_calls, strict=True):
            self._minted[minted["id"]] = call_index, each
        if not tool_calls and text:
            self._texts[text] = call_index
        self.calls.append(call)
        return call

    def deliver(self, call: ProgramCall) -> None:
        """Record the delivery of a call's reply to the program."""
        call.delivered = min(call.delivered, self.tick())
        conversation = self._conversations[call.root]
        conversation.delivered = min(conversation.delivered, call.delivered)

    def _enter(self, root: bytes, origin: int | None, requested_at: int, *, tools: bool, is_continuing: bool) -> None:
        """Assign a request to its conversation, creating the conversation if needed."""
        conversation = self._conversations.get(root)
        if conversation is None:
            after = None
            if origin is not None:
                # Its start was rewritten, or a summary of the main conversation replaced it.
                after = self.calls[origin].root if self.calls[origin].tools or not tools else UNKNOWN
                self._successors.setdefault(after, []).append(root)
            conversation = self._conversations[root] = _Conversation(requested_at, requested_at, tools, after)
            if requested_at < self._first_action_time() and len(self.early) < MOST_EARLY:
                self.early.append(root)
        conversation.started_at, conversation.latest = (
            min(conversation.started_at, requested_at),
            max(conversation.latest, requested_at),
        )
        conversation.tools |= tools
        conversation.is_continued |= is_continuing

    def _first_action_time(self) -> float:
        """Return the time at which the policy was first able to run something.

        This is the first delivery in a conversation with tools, or in one that the program continued, because some
        programs read commands from texts. Neither applies to a title.
        """
        able = (each for each in map(self._conversations.__getitem__, self.early) if each.tools or each.is_continued)
        return min((each.delivered for each in able), default=math.inf)

    def _digests_of(self, messages: list[Message]) -> tuple[list[list[str]], list[bytes]]:
        """Return the canonical tool calls of each message, and the digests of all prefixes of the conversation.

        Results for the messages shared with the last request are reused.
        """
        previous_messages, calls, digests = self._last
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(messages, previous_messages, strict=False))
        shared_count = sum(1 for _ in pairs)
        calls, digests = calls[:shared_count], digests[: shared_count + 1]
        for message in messages[shared_count:]:
            calls.append(canonical_calls(message))
            digests.append(_extend_digest(digests[-1], message, calls[-1]))
        self._last = messages, calls, digests
        return calls, digests

    def _policy_replies(
        self, messages: Sequence[Message], calls: Sequence[list[str]], digests: Sequence[bytes]
    ) -> dict[int, int]:
        """Return the indexes of messages that are replies of this rollout's policy, each with the call that returned
        it.

        Such a message repeats a reply: in the same conversation or, if the start was rewritten, with the ids of the
        reply's tool calls, or with the same text.
        """
        sampled: dict[int, int] = {}
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            minted = [self._minted[each][0] for each in ids if each in self._minted]
            givers = self._after.get(digests[index + 1])
            if givers is not None:
                sampled[index] = next((call_index for call_index in minted if call_index in givers), givers[-1])
            elif minted and calls[index] == list(self.calls[minted[0]].tool_calls):
                sampled[index] = minted[0]
            elif not ids and (call_index := self._texts.get(text_of(message.get("content")).strip())) is not None:
                sampled[index] = call_index
        return sampled

    def _compare(self, messages: Sequence[Message], calls: Sequence[list[str]], digests: Sequence[bytes]) -> int | None:
        """Record the replies that a request contains unchanged, and the ones with changed tool calls.

        Return the last changed reply.
        """
        replaced = None
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if (giver := self.sampled.get(index)) is not None:
                self.calls[giver].came_back |= digests[index + 1] in self._after
                continue
            # The position identifies the replaced reply: ids may have been dropped or rewritten.
            candidates = [
                call_index
                for call_index in self._calls_by_prompt.get(digests[index], ())
                if not self.calls[call_index].came_back
            ]
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            id_matches = (
                call_index
                for call_index in candidates
                if any(self._minted.get(each, (-1,))[0] == call_index for each in ids)
            )
            delivered_calls = (
                call_index for call_index in reversed(candidates) if self.calls[call_index].delivered < math.inf
            )
            replaced = next(id_matches, next(delivered_calls, replaced))
            if replaced in candidates:
                self.calls[replaced].was_replaced |= calls[index] != list(self.calls[replaced].tool_calls)
        return replaced

    def _look_back(
        self, messages: Sequence[Message], calls: Sequence[list[str]], root: bytes | None, equipped: bool
    ) -> int | None:
        """Record the replies that a request contains; return the last one whose conversation it continues.

        Args:
            root: conversation of the request, if it continues one.
            equipped: True if the request has tools.
        """
        origin = None
        for message, texts in zip(messages, calls, strict=True):
            for call_sent, text in zip(message.get("tool_calls") or (), texts, strict=True):
                call_index, sampled = self._minted.get(call_sent["id"], (-1, text))
                if call_index >= 0:
                    origin = call_index
                    self.calls[call_index].returned = True
                    self.calls[call_index].was_replaced |= text != sampled
        unfinished = [
            (call_index, call)
            for call_index, call in enumerate(self.calls)
            if not call.continued and not call.quoted and len(call.text) >= SHORTEST
        ]
        for call_index, call in unfinished[-OPEN:]:
            roles = {each["role"] for each in messages if call.text in text_of(each.get("content"))}
            call.returned |= bool(roles)
            # A summary may also appear as a reply of the conversation that replaces the old one.
            moved = bool(roles) and equipped and not call.tools and call.root != root
            if moved or roles - {"assistant"}:
                call.quoted, origin = True, call_index
        return origin

    def main_line(self) -> list[bytes]:
        """Return the roots of the graded conversations in order; empty before the first delivery.

        The first one is the earliest conversation that started before the policy could run anything, with tools if any
        of these has tools. Each following one replaces its predecessor: its first request contains a reply or a summary
        of the predecessor, which was not continued afterwards.
        """
        acted, conversations = self._first_action_time(), self._conversations
        early = [
            root
            for root in self.early
            if conversations[root].started_at < acted and conversations[root].delivered < math.inf
        ]
        if not early:
            return []
        line = [min(early, key=lambda root: (not conversations[root].tools, conversations[root].started_at))]
        while True:
            last = conversations[line[-1]]
            following = [
                root
                for root in (*self._successors.get(line[-1], ()), *self._successors.get(UNKNOWN, ()))
                if conversations[root].started_at > last.latest
                and conversations[root].delivered < math.inf
                and root not in line
            ]
            if not following:
                return line
            line.append(min(following, key=lambda root: conversations[root].started_at))

    def kinds(self) -> list[Kind]:
        """Return the kind of each call."""
        line = set(self.main_line())
        equipped = any(self._conversations[root].tools for root in line)
        kinds: list[Kind] = []
        calls_by_position: dict[tuple[bytes, int | None], list[int]] = {}
        for index, call in enumerate(self.calls):
            calls_by_position.setdefault((call.root, call.continues), []).append(index)
        for index, call in enumerate(self.calls):
            # The next call at the same position, made after this reply; a call made in parallel is not a retry.
            position_calls = calls_by_position[call.root, call.continues]
            later = (
                self.calls[position_calls[offset]]
                for offset in range(bisect_right(position_calls, index), len(position_calls))
            )
            following = next((each for each in later if each.before > index), None)
            asked_again = following is not None and following.request_digest == call.request_digest
            is_side_call = equipped and not call.tools
            if call.delivered == math.inf:
                kinds.append("undelivered")
            elif asked_again and not call.continued and not call.returned:
                kinds.append("rejected")
            elif call.is_changed:
                kinds.append("changed")
            elif not call.continued and call.quoted and (is_side_call or call.root in line):
                kinds.append("summaries")
            elif is_side_call and not call.continued and not call.returned:
                kinds.append("side_calls")
            else:
                kinds.append("main" if call.root in line else "subagents")
        return kinds


def _extend_digest(before: bytes, message: Mapping[str, Any], calls: Sequence[str]) -> bytes:
    """Extend the digest of a conversation by a message; reasoning is ignored."""
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = text_of(content).strip()
    written = write_message([message["role"], content, calls])
    return hashlib.blake2b(before + written, digest_size=16).digest()
