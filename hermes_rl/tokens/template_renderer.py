"""A renderer for any chat template, without knowing the model.

The template itself renders the first prompt. For each further one it renders a small conversation with an anchor in its
assistant turn, and the text from the end of that turn on goes behind the sampled tokens. A conversation of the same
shape shows, once for each kind of continuation, whether the template would leave the sampled tokens as they are.
Control tokens in texts that are not the model's stay text.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hermes_rl.tokens.guard import Guard
from hermes_rl.tokens.messages import for_template
from hermes_rl.tokens.parsers import Parsed, Parser, parse_ids, parser_for
from hermes_rl.tokens.probing import ANCHOR, QUESTION, TOOL, answering, call, closers, said, thinking
from hermes_rl.tokens.rendering import RendererRefused, RendererSettings
from hermes_rl.tokens.sequence import ids
from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, Tokenizer, Tools
from hermes_rl.tokens.transcript import Branch


@dataclass(frozen=True, slots=True)
class Join:
    """One kind of continuation: everything by which a template may decide to rewrite earlier turns."""

    system: bool
    earlier: bool
    """Whether there were assistant turns before the last one."""
    thought: bool
    called: bool
    said: bool
    roles: tuple[str, ...]
    """Roles of the new messages, runs of one role as one."""
    tools: bool


class TemplateRenderer:
    """See `rendering.Renderer`."""

    name = "template"

    def __init__(self, tokenizer: Tokenizer, settings: RendererSettings | None = None) -> None:
        self.tokenizer = tokenizer
        self._settings = settings or RendererSettings()
        self._allowed: dict[Join, bool] = {}
        self._needs_tools: dict[Join, bool] = {}
        self._stops = tuple(dict.fromkeys([*closers(tokenizer), *self._settings.stop]))
        self.stop_ids = tuple(_single(tokenizer, stop) for stop in self._stops)

    @functools.cached_property
    def parser(self) -> Parser:
        """The parser of the model's tool calls; raises UserError where the spec has to name it."""
        return parser_for(self._settings.tool_parser, self.tokenizer)

    def first(self, messages: Messages, tools: Tools | None) -> array[int]:
        guard = Guard(self.tokenizer, [for_template(message) for message in messages], tools)
        text = self.tokenizer.render(guard.messages, guard.tools, add_generation_prompt=True)
        if guard.escaped(text):
            raise TemplateRefused("it escapes characters, so that control tokens cannot be told from text")
        return ids(guard.encode(text))

    def following(self, branch: Branch, new: Messages, tools: Tools | None) -> array[int] | None:
        join = self._join(branch, new, tools)
        if join not in self._allowed:
            self._allowed[join] = self._probe(join)
        if not self._allowed[join]:
            return None
        suffix = self._suffix(join, new, tools if self._needs_tools[join] else None)
        if suffix is None or branch.tokens[-1] not in self.stop_ids:
            return suffix  # the model did not sample the end of a cut turn, so the end is context
        return suffix[1:] if suffix[0] == branch.tokens[-1] else None

    def parse(self, completion: Sequence[int], prompt: Sequence[int], tools: Tools | None) -> Parsed:
        return parse_ids(self.parser, self.tokenizer, completion, prompt, self.stop_ids, tools)

    def _join(self, branch: Branch, new: Messages, tools: Tools | None) -> Join:
        spoken = [one for one in branch.history.snapshots if one.role == "assistant"]
        roles = [str(message.get("role")) for message in new]
        return Join(
            system=branch.history.snapshots[0].role == "system",
            earlier=len(spoken) > 1,
            thought=any(one.thought for one in spoken) and self._settings.thinking_retention != "all",
            called=bool(spoken[-1].calls),
            said=bool(spoken[-1].content),
            roles=tuple(role for place, role in enumerate(roles) if place == 0 or roles[place - 1] != role),
            tools=bool(tools),
        )

    def _probe(self, join: Join) -> bool:
        """Whether the template leaves a conversation of this shape unchanged when it goes on."""
        before = _conversation(join)
        after: list[dict[str, Any]] = [{"role": role, "content": "n", **answering(role)} for role in join.roles]
        tools = [TOOL] if join.tools else None
        try:
            ended = self.tokenizer.render(before, tools, add_generation_prompt=False)
            whole = self.tokenizer.render([*before, *after], tools, add_generation_prompt=True)
            opening = self.tokenizer.render(before[:-1], tools, add_generation_prompt=True)
            with_tools, without = (self._suffix(join, after, given) for given in (tools, None))
        except TemplateRefused:
            return False
        self._needs_tools[join] = with_tools != without
        if with_tools is None:
            return False
        return whole.startswith(self._without_end(ended)) or self._stands_as_written(whole, opening, before[-1])

    def _stands_as_written(self, whole: str, opening: str, turn: dict[str, Any]) -> bool:
        """Whether the turn stands in `whole` as a model writes it behind `opening`.

        Some templates write the last turn otherwise than an earlier one: Qwen3's puts an empty block of thinking into
        it, which no model has sampled. So the form of the turn as the last one says nothing. This looks for the turn
        with all its parts, and without a block of thinking where it has none.
        """
        if not whole.startswith(opening):
            return False
        rest = whole[len(opening) :]
        ends = [rest.find(stop) for stop in self._stops if stop in rest]
        if not ends:
            return False
        body = rest[: min(ends)]
        thought, called = turn.get("reasoning_content"), ("toolxq7z", '"v"') if turn.get("tool_calls") else ()
        wanted = [part for part in (thought, turn.get("content"), *called) if part]
        if not wanted or not all(part in body for part in wanted):
            return False
        return bool(thought) or self._thinking_mark is None or self._thinking_mark not in body

    @functools.cached_property
    def _thinking_mark(self) -> str | None:
        """The text that the template writes in front of a turn's thinking; None where it writes no thinking."""
        turn = thinking(said("said"), True)
        anchored = {**turn, "reasoning_content": ANCHOR}
        try:
            opening = self.tokenizer.render([QUESTION], None, add_generation_prompt=True)
            text = self.tokenizer.render([QUESTION, anchored], None, add_generation_prompt=False)
        except TemplateRefused:
            return None
        place = text.find(ANCHOR)
        start = len(opening) if text.startswith(opening) else 0
        return text[start:place].strip() or None if place >= 0 else None

    def _without_end(self, text: str) -> str:
        """Cut off the token that ends the last turn, because it may depend on the message behind the turn."""
        spoken = text.rstrip()
        for stop in sorted(self._stops, key=len, reverse=True):
            if spoken.endswith(stop):
                return spoken[: -len(stop)]
        return spoken

    def _suffix(self, join: Join, new: Messages, tools: Tools | None) -> array[int] | None:
        """Return the tokens from the end of an assistant turn to the beginning of the next, with the new messages."""
        calls = [message for message in new if message.get("role") == "tool"]
        anchored: list[dict[str, Any]] = [QUESTION, _anchored(calls) if join.called and calls else said(ANCHOR)]
        guard = Guard(self.tokenizer, [*anchored, *map(for_template, new)], tools)
        try:
            text = self.tokenizer.render(guard.messages, guard.tools, add_generation_prompt=True)
        except TemplateRefused:
            return None
        place = text.rfind(ANCHOR)
        rest = text[place + len(ANCHOR) :]
        ends = [rest.find(stop) for stop in self._stops if stop in rest]
        if place < 0 or not ends or guard.escaped(text):
            return None
        return ids(guard.encode(rest[min(ends) :]))


def _single(tokenizer: Tokenizer, stop: str) -> int:
    found = tokenizer.encode(stop)
    if len(found) != 1:
        raise RendererRefused(f"renderer.stop: {stop!r} is {len(found)} tokens of {tokenizer.name}, not one")
    return found[0]


def _conversation(join: Join) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}] if join.system else []
    messages.append(QUESTION)
    last = said("said" if join.said else "")
    if join.earlier:
        # An earlier call has its answer, and a model thinks before it calls.
        earlier = {**said(""), "tool_calls": [call("toolxq7z", {"x": "e"})]} if join.tools else said("early")
        messages.append(thinking(earlier, join.thought))
        messages.append({"role": "tool", "content": "r", **answering("tool")} if join.tools else QUESTION)
    if join.called:
        last["tool_calls"] = [call("toolxq7z", {"x": "v"})]
    messages.append(thinking(last, join.thought))
    return messages


def _anchored(results: Messages) -> dict[str, Any]:
    calls = [
        call(str(result.get("name") or "toolxq7z"), {"x": ANCHOR}, str(result.get("tool_call_id") or "callxq7z0"))
        for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}
