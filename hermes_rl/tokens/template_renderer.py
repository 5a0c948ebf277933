"""A renderer for any chat template, without knowing the model.

The first prompt is what the template gives. For each further one a small conversation with an anchor in its assistant
turn is rendered, and what follows the anchor from the end of that turn on is put behind the sampled tokens. Whether the
template would leave those tokens as they are is found out once for each kind of continuation, with a conversation of
the same shape. Control tokens in texts that are not the model's stay text.
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
from hermes_rl.tokens.rendering import RendererRefused, RendererSettings
from hermes_rl.tokens.sequence import ids
from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, Tokenizer, Tools
from hermes_rl.tokens.transcript import Branch

ANCHOR = "ANCHORxq7z"
_RESULT = "resultxq7z"
_QUESTION = {"role": "user", "content": "u"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "toolxq7z",
        "description": "d",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Join:
    """One kind of continuation: what the template may let decide whether it rewrites what was before."""

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
        closers = _closers(tokenizer)
        self._stops = tuple(dict.fromkeys([*closers, *self._settings.stop]))
        self.stop_ids = tuple(_single(tokenizer, stop) for stop in self._stops)

    @functools.cached_property
    def parser(self) -> Parser:
        """What reads the model's tool calls; raises UserError where it has to be named."""
        return parser_for(self._settings.tool_parser, self.tokenizer)

    def first(self, messages: Messages, tools: Tools | None) -> array[int]:
        guard = Guard(self.tokenizer, [for_template(message) for message in messages], tools)
        text = self.tokenizer.render(guard.messages, guard.tools, add_generation_prompt=True)
        if guard.escaped(text):
            raise TemplateRefused("it escapes characters, so that control tokens cannot be told from text")
        return ids(guard.encode(text))

    def following(self, branch: Branch, new: Messages, tools: Tools | None) -> array[int] | None:
        join = self._join(branch, new, tools)
        if not self._allows(join):
            return None
        suffix = self._suffix(join, new, tools if self._needs_tools[join] else None)
        if suffix is None or branch.tokens[-1] not in self.stop_ids:
            return suffix  # of a turn that was cut, the end is context
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

    def _allows(self, join: Join) -> bool:
        if join not in self._allowed:
            allowed = self._probe(join)
            self._allowed[join] = allowed
        return self._allowed[join]

    def _probe(self, join: Join) -> bool:
        """Whether the template leaves a conversation of this shape as it is when it goes on."""
        before = _conversation(join)
        after: list[dict[str, Any]] = [{"role": role, "content": "n", **_answering(role)} for role in join.roles]
        tools = [_TOOL] if join.tools else None
        try:
            ended = self.tokenizer.render(before, tools, add_generation_prompt=False)
            whole = self.tokenizer.render([*before, *after], tools, add_generation_prompt=True)
            with_tools, without = (self._suffix(join, after, given) for given in (tools, None))
        except TemplateRefused:
            return False
        self._needs_tools[join] = with_tools != without
        return with_tools is not None and whole.startswith(self._without_end(ended))

    def _without_end(self, text: str) -> str:
        """The text up to the last thing that was said: how a turn ends may depend on what follows."""
        said = text.rstrip()
        for stop in sorted(self._stops, key=len, reverse=True):
            if said.endswith(stop):
                return said[: -len(stop)]
        return said

    def _suffix(self, join: Join, new: Messages, tools: Tools | None) -> array[int] | None:
        """Tokens from the end of an assistant turn to the beginning of the next, with the new messages in between."""
        calls = [message for message in new if message.get("role") == "tool"]
        anchored: list[dict[str, Any]] = [_QUESTION, _anchored(calls) if join.called and calls else _said(ANCHOR)]
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


def require_tools(tokenizer: Tokenizer) -> None:
    """Refuse a template that leaves out tools, calls or their results: the model would not see them.

    Raises:
        RendererRefused: what it leaves out.
    """
    call = _call("toolxq7z", {"x": "argxq7z"})
    messages: list[dict[str, Any]] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": call["id"], "name": "toolxq7z", "content": "resultxq7z"})
    try:
        told = tokenizer.render([_QUESTION], [_TOOL], add_generation_prompt=True)
        text = tokenizer.render(messages, [_TOOL], add_generation_prompt=True)
    except TemplateRefused as error:
        raise RendererRefused(f"the chat template of {tokenizer.name} refuses tools: {error}") from error
    for what, found in (
        ("the tools", "toolxq7z" in told),
        ("the arguments of calls", "argxq7z" in text),
        ("the results of calls", "resultxq7z" in text),
    ):
        if not found:
            raise RendererRefused(f"the chat template of {tokenizer.name} leaves out {what}")


def _closers(tokenizer: Tokenizer) -> list[str]:
    """Control tokens that end an assistant turn: after text, before another message, after calls."""
    call = _call("toolxq7z", {"x": ANCHOR})
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "name": "toolxq7z", "content": _RESULT}
    shapes: list[tuple[list[dict[str, Any]], Tools | None]] = [
        ([_QUESTION, _said(ANCHOR)], None),
        ([_QUESTION, _said(ANCHOR), _QUESTION], None),
        ([_QUESTION, called, result], [_TOOL]),
    ]
    found: list[str] = []
    refusals: list[str] = []
    for messages, tools in shapes:
        try:
            text = tokenizer.render(messages, tools, add_generation_prompt=False)
        except TemplateRefused as error:
            refusals.append(str(error))
            continue
        ended = text.rpartition(ANCHOR)[2].partition(_RESULT)[0]
        # Behind a call its own tokens come first; the turn ends as others do, or with what only calls end with.
        if not any(stop in ended for stop in found):
            found += _first_control(ended, tokenizer)
    if not found:
        why = f" ({refusals[0]})" if refusals else ""
        raise RendererRefused(
            f"the chat template of {tokenizer.name} ends a turn with no control token{why}, so its tokens cannot be "
            "told from the next message; use another tokenizer, or `type: openai`"
        )
    return list(dict.fromkeys(found))


def _first_control(text: str, tokenizer: Tokenizer) -> list[str]:
    places = [(text.find(token), -len(token), token) for token in tokenizer.control if token in text]
    return [min(places)[2]] if places else []


def _single(tokenizer: Tokenizer, stop: str) -> int:
    found = tokenizer.encode(stop)
    if len(found) != 1:
        raise RendererRefused(f"renderer.stop: {stop!r} is {len(found)} tokens of {tokenizer.name}, not one")
    return found[0]


def _conversation(join: Join) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}] if join.system else []
    messages.append(_QUESTION)
    last = _said("said" if join.said else "")
    if join.earlier:
        # What was called before was answered; a model thinks before it calls.
        earlier = {**_said(""), "tool_calls": [_call("toolxq7z", {"x": "e"})]} if join.tools else _said("early")
        messages.append(_thinking(earlier, join.thought))
        messages.append({"role": "tool", "content": "r", **_answering("tool")} if join.tools else _QUESTION)
    if join.called:
        last["tool_calls"] = [_call("toolxq7z", {"x": "v"})]
    messages.append(_thinking(last, join.thought))
    return messages


def _thinking(message: dict[str, Any], thought: bool) -> dict[str, Any]:
    return {**message, "reasoning_content": "thoughtxq7z"} if thought else message


def _anchored(results: Messages) -> dict[str, Any]:
    calls = [
        _call(str(result.get("name") or "toolxq7z"), {"x": ANCHOR}, str(result.get("tool_call_id") or "callxq7z0"))
        for result in results
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _said(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _call(name: str, arguments: dict[str, Any], identity: str = "callxq7z0") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _answering(role: str) -> dict[str, Any]:
    return {"tool_call_id": "callxq7z0", "name": "toolxq7z"} if role == "tool" else {}
