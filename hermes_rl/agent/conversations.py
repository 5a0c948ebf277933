"""Which conversations an agent program has held: what each of its calls of the model continues, and what kind it is.

A program works on its main line, and beside it asks for sub-agents, summaries and titles, or asks again for what it has
thrown away. No request says so. It is found out by what later requests repeat: messages, the ids of calls, which only
one answer of the rollout has, and texts. The tokens are placed by the transcript, which compares more strictly; here
digests are kept, and the last request alone, since each has all that was said before it.

A policy can make requests of its own: a command that it calls may send any messages to the program's address. So which
conversation is the main one is decided by what was asked before the policy could run anything, and of the messages of
a request only those are the policy's that it has sampled in this rollout and that the program was given.
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
"""What a call was: of the main line, of another conversation with tools, a summary that came back as a text, one whose
answer never came back, one that was thrown away and asked again, one whose tool calls came back changed, or one that
the program did not wait for."""
SHORTEST = 8
"""Characters of a text from which on it is known again."""
SHOWN = 120
"""Characters of an answer that are written down."""
OPEN = 16
"""The last calls that nothing goes on from whose texts are looked for."""
MOST_EARLY = 16
"""Conversations of which one can be the main one: programs begin few before the policy can run anything."""


@dataclass
class ProgramCall:
    """One request of a program that the policy has answered."""

    root: bytes
    """Names its conversation: the digest of the first request in it."""
    asked: bytes
    """Digest of the whole request."""
    tools: bool
    answer: Message
    """As the program was given it."""
    said: Sequence[str]
    """What the tool calls of the answer say, in one form."""
    text: str
    continues: int | None
    """The call whose answer it goes on from."""
    before: int
    """How many calls had been answered when it was made."""
    delivered: float = math.inf
    """When the program was given its answer, as `Conversations.tick` counts; infinite where it was not."""
    continued: bool = False
    quoted: bool = False
    """Its text stands in a later request, elsewhere than as an answer of the model in its own conversation."""
    returned: bool = False
    """Its text or one of its tool calls stands in a later request."""
    came_back: bool = False
    """A later request has had the answer in its place as it was given."""
    was_replaced: bool = False
    """A later request has had other tool calls in the place of the answer's, or with their ids."""

    @property
    def begins(self) -> str:
        """How its answer begins, for people: its text, or the tools that it calls."""
        return " ".join((self.text or ", ".join(self.said))[: 2 * SHOWN].split())[:SHOWN]

    @property
    def is_changed(self) -> bool:
        """Whether its tool calls came back changed, and never as they were given.

        Other requests beside those of the program may be the policy's own, which would take its answers out of the
        training by them.
        """
        return self.was_replaced and not self.came_back


@dataclass
class _Conversation:
    """The calls that go on from one first request."""

    began: int
    """When its first request came, as `Conversations.tick` counts."""
    latest: int
    """When its last one did."""
    tools: bool
    after: bytes | None
    """The conversation of which its first request holds an answer or a summary; `UNKNOWN` where a side call has made
    that summary; None: it has begun anew."""
    delivered: float = math.inf
    """When the program was first given one of its answers."""
    is_continued: bool = False


UNKNOWN = b""


class Conversations:
    """The calls of one rollout, in the order in which they were answered."""

    def __init__(self) -> None:
        self.calls: list[ProgramCall] = []
        self.sampled: dict[int, int] = {}
        """Places of the messages of the last request that are answers of the policy → the calls that gave them."""
        self._after: dict[bytes, list[int]] = {}
        """Digest of a conversation up to and with an answer → the calls that gave it."""
        self._asked: dict[bytes, list[int]] = {}
        """Digest of a conversation up to an answer → the calls that were to give it."""
        self._conversations: dict[bytes, _Conversation] = {}
        """By their roots."""
        self._successors: dict[bytes, list[bytes]] = {}
        """Conversation → those whose first request holds an answer or a summary of it."""
        self.early: list[bytes] = []
        """Conversations that began before the policy could run anything, as far as was known when they began."""
        self._now = 0
        self._texts: dict[str, int] = {}
        """Text of an answer without tool calls → the last call that gave it."""
        self._minted: dict[str, tuple[int, str]] = {}
        """Id of a tool call → the call of the model that made it, and what it says."""
        self._last: tuple[list[Message], list[list[str]], list[bytes]] = [], [], [b""]
        """The messages of the last request, with what `_digested` returns of them."""

    def tick(self) -> int:
        """Return a number that is larger than any before: the time of a request, or of a delivery."""
        self._now += 1
        return self._now

    def add(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        answer: Message,
        before: int | None = None,
        came: int | None = None,
    ) -> ProgramCall:
        """Add a request with the answer that the policy gave.

        Args:
            before: how many calls had been answered when the request was made; None: all that are known.
            came: when it came, as `tick` counts; None: now.
        """
        came = self.tick() if came is None else came
        calls, digests = self._digested(list(messages))
        said = canonical_calls(answer)
        number, after = len(self.calls), _digest(digests[-1], answer, said)
        self.sampled = self._sampled(messages, calls, digests)
        exact = [place for place in self.sampled if digests[place + 1] in self._after]
        continues = self.sampled[exact[-1]] if exact else None
        replaced = self._compare(messages, calls, digests)
        own = None if continues is None else self.calls[continues].root
        origin = self._look_back(messages, calls, own, bool(tools))
        origin = replaced if origin is None else origin
        if continues is not None:
            self.calls[continues].continued = True
            root = self.calls[continues].root
        else:
            root = digests[-1]
        self._enter(root, origin, came, tools=bool(tools), is_continuing=continues is not None)
        request = _digest(digests[-1], {"role": "tools", "content": list(tools)}, [])
        text = text_of(answer.get("content")).strip()
        before = number if before is None else before
        call = ProgramCall(root, request, bool(tools), answer, said, text, continues, before)
        self._after.setdefault(after, []).append(number)
        self._asked.setdefault(digests[-1], []).append(number)
        for minted, each in zip(answer.get("tool_calls") or (), said, strict=True):
            self._minted[minted["id"]] = number, each
        if not said and text:
            self._texts[text] = number
        self.calls.append(call)
        return call

    def deliver(self, call: ProgramCall) -> None:
        """Note that the program was given the answer of a call."""
        call.delivered = min(call.delivered, self.tick())
        conversation = self._conversations[call.root]
        conversation.delivered = min(conversation.delivered, call.delivered)

    def _enter(self, root: bytes, origin: int | None, came: int, *, tools: bool, is_continuing: bool) -> None:
        """Count a request to its conversation, which may be a new one."""
        conversation = self._conversations.get(root)
        if conversation is None:
            after = None
            if origin is not None:
                # Its beginning was rewritten, or a summary of the main line has taken its place.
                after = self.calls[origin].root if self.calls[origin].tools or not tools else UNKNOWN
                self._successors.setdefault(after, []).append(root)
            conversation = self._conversations[root] = _Conversation(came, came, tools, after)
            if came < self._acted() and len(self.early) < MOST_EARLY:
                self.early.append(root)
        conversation.began, conversation.latest = min(conversation.began, came), max(conversation.latest, came)
        conversation.tools |= tools
        conversation.is_continued |= is_continuing

    def _acted(self) -> float:
        """Return when the policy was first able to run something.

        That is when the program was given an answer of a conversation with tools, or of one that it has gone on with,
        as there are programs that read commands in texts. Neither is so of a title.
        """
        able = (each for each in map(self._conversations.__getitem__, self.early) if each.tools or each.is_continued)
        return min((each.delivered for each in able), default=math.inf)

    def _digested(self, messages: list[Message]) -> tuple[list[list[str]], list[bytes]]:
        """Return what the calls of each message say, and the digests of the conversation up to each, from none on.

        They are known for the messages with which the last request has begun too.
        """
        known, calls, digests = self._last
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(messages, known, strict=False))
        same = sum(1 for _ in pairs)
        calls, digests = calls[:same], digests[: same + 1]
        for message in messages[same:]:
            calls.append(canonical_calls(message))
            digests.append(_digest(digests[-1], message, calls[-1]))
        self._last = messages, calls, digests
        return calls, digests

    def _sampled(
        self, messages: Sequence[Message], calls: Sequence[list[str]], digests: Sequence[bytes]
    ) -> dict[int, int]:
        """Return the places of messages that are answers of this rollout's policy, each with the call that gave it.

        Such a message says what a call has answered: in the same conversation, or, where its beginning was rewritten,
        with the ids of that answer's tool calls, or as the same text.
        """
        found: dict[int, int] = {}
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            minted = [self._minted[each][0] for each in ids if each in self._minted]
            givers = self._after.get(digests[place + 1])
            if givers is not None:
                found[place] = next((number for number in minted if number in givers), givers[-1])
            elif minted and calls[place] == list(self.calls[minted[0]].said):
                found[place] = minted[0]
            elif not ids and (number := self._texts.get(text_of(message.get("content")).strip())) is not None:
                found[place] = number
        return found

    def _compare(self, messages: Sequence[Message], calls: Sequence[list[str]], digests: Sequence[bytes]) -> int | None:
        """Note which answers stand in a request unchanged, and which have other tool calls in their place.

        Returns the last of those that have.
        """
        replaced = None
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if (giver := self.sampled.get(place)) is not None:
                self.calls[giver].came_back |= digests[place + 1] in self._after
                continue
            # Where it stands tells which answer it takes the place of: ids may have been dropped or rewritten.
            asked = [number for number in self._asked.get(digests[place], ()) if not self.calls[number].came_back]
            ids = [call["id"] for call in message.get("tool_calls") or ()]
            named = (number for number in asked if any(self._minted.get(each, (-1,))[0] == number for each in ids))
            given = (number for number in reversed(asked) if self.calls[number].delivered < math.inf)
            replaced = next(named, next(given, replaced))
            if replaced in asked:
                self.calls[replaced].was_replaced |= calls[place] != list(self.calls[replaced].said)
        return replaced

    def _look_back(
        self, messages: Sequence[Message], calls: Sequence[list[str]], root: bytes | None, equipped: bool
    ) -> int | None:
        """Note which answers a request holds; returns the last of them whose conversation it goes on with.

        Args:
            root: its conversation, where it goes on with one.
            equipped: whether it has tools.
        """
        origin = None
        for message, texts in zip(messages, calls, strict=True):
            for call_sent, text in zip(message.get("tool_calls") or (), texts, strict=True):
                number, sampled = self._minted.get(call_sent["id"], (-1, text))
                if number >= 0:
                    origin = number
                    self.calls[number].returned = True
                    self.calls[number].was_replaced |= text != sampled
        unfinished = [
            (number, call)
            for number, call in enumerate(self.calls)
            if not call.continued and not call.quoted and len(call.text) >= SHORTEST
        ]
        for number, call in unfinished[-OPEN:]:
            roles = {each["role"] for each in messages if call.text in text_of(each.get("content"))}
            call.returned |= bool(roles)
            # A summary may also come back as if it had been said in the conversation that takes the old one's place.
            moved = bool(roles) and equipped and not call.tools and call.root != root
            if moved or roles - {"assistant"}:
                call.quoted, origin = True, number
        return origin

    def main_line(self) -> list[bytes]:
        """Return the roots of the conversations that are graded, in their order; empty before the first delivery.

        The first is that with tools, if any has them, which began first of those that began before the policy could run
        anything. Behind it come those that took the place of the one before: with an answer or a summary of it in their
        first request, behind which it was never gone on with.
        """
        acted, known = self._acted(), self._conversations
        early = [root for root in self.early if known[root].began < acted and known[root].delivered < math.inf]
        if not early:
            return []
        line = [min(early, key=lambda root: (not known[root].tools, known[root].began))]
        while True:
            last = known[line[-1]]
            following = [
                root
                for root in (*self._successors.get(line[-1], ()), *self._successors.get(UNKNOWN, ()))
                if known[root].began > last.latest and known[root].delivered < math.inf and root not in line
            ]
            if not following:
                return line
            line.append(min(following, key=lambda root: known[root].began))

    def kinds(self) -> list[Kind]:
        """Return what each call was."""
        line = set(self.main_line())
        equipped = any(self._conversations[root].tools for root in line)
        kinds: list[Kind] = []
        places: dict[tuple[bytes, int | None], list[int]] = {}
        for number, call in enumerate(self.calls):
            places.setdefault((call.root, call.continues), []).append(number)
        for number, call in enumerate(self.calls):
            # What was asked next in its place, once it was answered; what was asked beside it is no retry.
            same = places[call.root, call.continues]
            later = (self.calls[same[at]] for at in range(bisect_right(same, number), len(same)))
            following = next((each for each in later if each.before > number), None)
            asked_again = following is not None and following.asked == call.asked
            beside = equipped and not call.tools
            if call.delivered == math.inf:
                kinds.append("undelivered")
            elif asked_again and not call.continued and not call.returned:
                kinds.append("rejected")
            elif call.is_changed:
                kinds.append("changed")
            elif not call.continued and call.quoted and (beside or call.root in line):
                kinds.append("summaries")
            elif beside and not call.continued and not call.returned:
                kinds.append("side_calls")
            else:
                kinds.append("main" if call.root in line else "subagents")
        return kinds


def _digest(before: bytes, message: Mapping[str, Any], calls: Sequence[str]) -> bytes:
    """Continue the digest of a conversation by what a message says; an answer without its reasoning says the same."""
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = text_of(content).strip()
    written = write_message([message["role"], content, calls])
    return hashlib.blake2b(before + written, digest_size=16).digest()
