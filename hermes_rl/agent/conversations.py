"""Which conversations an agent program has held: what each of its calls of the model continues, and what kind it is.

A program works on its main line, and beside it asks for sub-agents, summaries and titles, or asks again for what it has
thrown away. No request says so. It is found out by what later requests repeat: the ids of calls, which only one answer
of the rollout has, and texts. The tokens are placed by the transcript, which compares more strictly; here digests
are kept, and the last request alone, since each has all that was said before it.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
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


@dataclass
class ProgramCall:
    """One request of a program that the policy has answered."""

    root: bytes
    """Digest of how its conversation began."""
    asked: bytes
    """Digest of the whole request."""
    tools: bool
    text: str
    continues: int | None
    """The call whose answer it goes on from."""
    before: int
    """How many calls had been answered when it was made."""
    begins: str = ""
    """How its answer begins, for people: its text, or the tools that it calls."""
    continued: bool = False
    quoted: bool = False
    """Its text stands in a later request, elsewhere than as an answer of the model in its own conversation."""
    returned: bool = False
    """Its text or one of its tool calls stands in a later request."""
    changed: bool = False
    delivered: bool = False


class Conversations:
    """The calls of one rollout, in the order in which they were answered."""

    def __init__(self) -> None:
        self.calls: list[ProgramCall] = []
        self._after: dict[bytes, list[int]] = {}
        """Digest of a conversation up to and with an answer → the calls that gave it."""
        self._roots, self._equipped = Counter[bytes](), set[bytes]()
        """How many calls each conversation has, by its root; those that have tools."""
        self._minted: dict[str, tuple[int, str]] = {}
        """Id of a tool call → the call of the model that made it, and what it says."""
        self._last: tuple[list[Message], list[list[str]], list[bytes]] = [], [], [b""]
        """The messages of the last request, with what `_digested` returns of them."""

    def add(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        answer: Message,
        before: int | None = None,
    ) -> ProgramCall:
        """Add a request with the answer that the program was given; `before`: calls answered when it was made, None:
        all that are known."""
        calls, digests = self._digested(list(messages))
        calls = [*calls, canonical_calls(answer)]
        digests = [*digests, _digest(digests[-1], answer, calls[-1])]
        answered = [place for place, message in enumerate(messages, 1) if message["role"] == "assistant"]
        deepest = next((place for place in reversed(answered) if digests[place] in self._after), None)
        continues = None if deepest is None else self._giver(digests[deepest], messages[deepest - 1])
        root = digests[answered[0] - 1] if answered else digests[-2]
        origin = self._look_back(messages, calls, root, bool(tools))
        if root not in self._roots and origin is not None:
            # Its beginning was rewritten, or a summary of the main line has taken its place.
            root = self.calls[origin].root if self.calls[origin].tools or not tools else self.main
        if continues is not None:
            self.calls[continues].continued = True
        request = _digest(digests[-2], {"role": "tools", "content": list(tools)}, [])
        before = len(self.calls) if before is None else before
        text = text_of(answer.get("content")).strip()
        begins = " ".join((text or ", ".join(calls[-1]))[: 2 * SHOWN].split())[:SHOWN]
        call = ProgramCall(root, request, bool(tools), text, continues, before, begins)
        self._after.setdefault(digests[-1], []).append(len(self.calls))
        for minted, sampled in zip(answer.get("tool_calls") or (), calls[-1], strict=True):
            self._minted[minted["id"]] = len(self.calls), sampled
        self.calls.append(call)
        self._roots[root] += 1
        self._equipped |= {root} if call.tools else set()
        return call

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

    def _giver(self, digest: bytes, answer: Message) -> int:
        """Return which of the calls that said the same gave an answer: by the ids of its calls, else the last."""
        ids = [call["id"] for call in answer.get("tool_calls") or ()]
        minted = [self._minted[each][0] for each in ids if each in self._minted]
        return next((number for number in minted if number in self._after[digest]), self._after[digest][-1])

    def _look_back(
        self, messages: Sequence[Message], calls: Sequence[list[str]], root: bytes, equipped: bool
    ) -> int | None:
        """Note which answers a request holds; returns the last of them whose conversation it goes on with.

        Args:
            root: digest of how its conversation begins.
            equipped: whether it has tools.
        """
        origin = None
        for message, texts in zip(messages, calls, strict=False):
            for call_sent, text in zip(message.get("tool_calls") or (), texts, strict=True):
                number, sampled = self._minted.get(call_sent["id"], (-1, text))
                if number >= 0:
                    origin = number
                    self.calls[number].returned = True
                    self.calls[number].changed |= text != sampled
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

    @property
    def main(self) -> bytes:
        """The root of the main line: the conversation with tools, if any has them, that has the most calls."""
        roots = self._roots
        return max(roots, key=lambda root: (root in self._equipped, roots[root])) if roots else b""

    def kinds(self) -> list[Kind]:
        """Return what each call was."""
        main = self.main
        equipped = main in self._equipped
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
            if not call.delivered:
                kinds.append("undelivered")
            elif asked_again and not call.continued and not call.returned:
                kinds.append("rejected")
            elif call.changed:
                kinds.append("changed")
            elif not call.continued and call.quoted and (beside or call.root == main):
                kinds.append("summaries")
            elif beside and not call.continued and not call.returned:
                kinds.append("side_calls")
            else:
                kinds.append("main" if call.root == main else "subagents")
        return kinds


def _digest(before: bytes, message: Mapping[str, Any], calls: Sequence[str]) -> bytes:
    """Continue the digest of a conversation by what a message says; an answer without its reasoning says the same."""
    content = message.get("content") or ""
    if message["role"] == "assistant":
        content = text_of(content).strip()
    written = write_message([message["role"], content, calls])
    return hashlib.blake2b(before + written, digest_size=16).digest()
