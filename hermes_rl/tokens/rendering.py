"""Convert messages to tokens: the protocol of a renderer, and a renderer for any chat template.

The latter probes the behaviour of a template with small conversations.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from hermes_rl.errors import UserError
from hermes_rl.threads import run_exclusively
from hermes_rl.tokens import probes
from hermes_rl.tokens.parsers.base import Parsed, Parser, parse_ids
from hermes_rl.tokens.parsers.table import parser_for
from hermes_rl.tokens.texts import Guard, guarded, stand_in
from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, Tokenizer, Tools
from hermes_rl.tokens.transcript import Branch, RenderedPrompt, Transcript, ids
from hermes_rl.values import read_object

# -------------------------------------------------------------------------- Messages in the form of chat templates


def for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with the keys that templates read, and with the arguments of its calls as mappings.

    Servers send a call without text as `content: null`, but templates expect a text, and some use the key `reasoning`
    for thinking. Arguments that are not a JSON object stay unchanged.
    """
    prepared = dict(message)
    if prepared.get("role") == "assistant":
        if prepared.get("content") is None:
            prepared["content"] = ""
        if prepared.get("reasoning") and not prepared.get("reasoning_content"):
            prepared["reasoning_content"] = prepared["reasoning"]
    if prepared.get("tool_calls"):
        prepared["tool_calls"] = [_call(call) for call in prepared["tool_calls"]]
    return prepared


def add_tool_names(new: Sequence[Mapping[str, Any]], tools_called: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return messages with the tool's name in each result that has none; results follow the order of the calls."""
    names = iter(tools_called)
    return [_add_name(message, next(names, None)) if message.get("role") == "tool" else message for message in new]


def history_named(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a whole conversation with the tool's name in each result, found by the ids of its calls."""
    names = {
        call.get("id"): (call.get("function") or {}).get("name")
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    return [
        _add_name(message, names.get(message.get("tool_call_id"))) if message.get("role") == "tool" else message
        for message in messages
    ]


def _add_name(message: Mapping[str, Any], name: Any) -> Mapping[str, Any]:
    return message if message.get("name") or not name else {**message, "name": name}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    written = function.get("arguments") or "{}"
    arguments = read_object(written) if isinstance(written, str) else None
    return dict(call) if arguments is None else {**call, "function": {**function, "arguments": arguments}}


# -------------------------------------------------------------------------------------------------- The protocol

AUTO = "auto"
"""Name for automatic selection of the renderer."""


class RendererRefused(UserError):
    """The tokenizer or its template does not allow exact tokens; the message is the reason."""


@dataclass(frozen=True, slots=True)
class RendererSettings:
    """`renderer` of a server in a spec."""

    name: str = AUTO
    tool_parser: str | None = None
    thinking_retention: str | None = None
    """``all``: earlier reasoning stays in the prompt although the template would drop it."""
    stop: tuple[str, ...] = ()

    @classmethod
    def from_mapping(cls, written: Mapping[str, Any] | None) -> RendererSettings:
        """Return the settings from the mapping in a server's configuration."""
        written = written or {}
        if not isinstance(written, Mapping):
            raise UserError(f"renderer is {written!r:.60}: write its name, or a mapping with `name`")
        return cls(
            name=written.get("name", AUTO),
            tool_parser=written.get("tool_parser"),
            thinking_retention=written.get("thinking_retention"),
            stop=tuple(written.get("stop") or ()),
        )


IN_THREAD = 4096
"""Number of tokens from which a turn is parsed in a thread."""
T = TypeVar("T")


async def parse_in_thread(work: Callable[[], T], size: int) -> T:
    """Return the result of `work` on a turn of `size` tokens, computed in a thread if it is long."""
    return work() if size <= IN_THREAD else await run_exclusively(work)


class Renderer(Protocol):
    """Convert conversations of one model to tokens. Safe to use from several threads."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""

    def first(self, messages: Messages, tools: Tools | None) -> array[int]:
        """Return the prompt of a conversation in the tokenizer's own template; raises `TemplateRefused`."""

    def following(self, branch: Branch, new: Messages, tools: Tools | None) -> array[int] | None:
        """Return the tokens that append `new` and a new turn to a branch; None: the template rewrites it."""

    async def parse(self, completion: Sequence[int], prompt: Sequence[int], tools: Tools | None) -> Parsed:
        """Parse a completion; never raises. The end of `prompt` is enough."""


def next_prompt(renderer: Renderer, transcript: Transcript, messages: Messages, tools: Tools | None) -> RenderedPrompt:
    """Return the prompt for a conversation; it extends the sampled tokens if possible. Raises `TemplateRefused`."""
    branch = transcript.holding(messages, tools)
    prompt = None if branch is None else extend_prompt(branch, renderer, messages, tools)
    return prompt or render_prompt(renderer, messages, tools)


def extend_prompt(branch: Branch, renderer: Renderer, messages: Messages, tools: Tools | None) -> RenderedPrompt | None:
    """Return a prompt that extends the branch with the start of the conversation, or None if that is impossible."""
    new = messages[len(branch.history) :]
    if any(message.get("role") == "assistant" for message in new):
        return None
    called = [name for name, _ in branch.history.snapshots[-1].calls]
    continuation = renderer.following(branch, add_tool_names(new, called), tools)
    return None if continuation is None else RenderedPrompt(branch.tokens + continuation, branch, tools)


def render_prompt(renderer: Renderer, messages: Messages, tools: Tools | None) -> RenderedPrompt:
    """Render a whole conversation; raises `TemplateRefused`."""
    return RenderedPrompt(renderer.first(history_named(messages), tools), tools=tools)


# ----------------------------------------------------------------------- The behaviour of a chat template
# Does it show tools, and how does it end a turn?


def require_tools(tokenizer: Tokenizer) -> None:
    """Refuse a template that omits tools, calls or their results, because the model would not see them.

    Raises:
        RendererRefused: the template omits something; the message names it.
    """
    try:
        prompt = tokenizer.render([probes.QUESTION], [probes.TOOL], add_generation_prompt=True)
        text = tokenizer.render(probes.with_call("", probes.ARGUMENT), [probes.TOOL], add_generation_prompt=True)
    except TemplateRefused as error:
        raise RendererRefused(f"the chat template of {tokenizer.name} refuses tools: {error}") from error
    for subject, is_there in (
        ("the tools", probes.TOOL_NAME in prompt),
        ("the arguments of calls", probes.ARGUMENT in text),
        ("the results of calls", probes.RESULT in text),
    ):
        if not is_there:
            raise RendererRefused(f"the chat template of {tokenizer.name} omits {subject}")


def closers(tokenizer: Tokenizer) -> list[str]:
    """Return the control tokens that end an assistant turn: after text, before another message, after calls."""
    shapes: list[tuple[list[dict[str, Any]], Tools | None]] = [
        ([probes.QUESTION, probes.make_reply(probes.ANCHOR)], None),
        ([probes.QUESTION, probes.make_reply(probes.ANCHOR), probes.QUESTION], None),
        (probes.with_call("", probes.ANCHOR), [probes.TOOL]),
    ]
    stops: list[str] = []
    refusals: list[str] = []
    for messages, tools in shapes:
        try:
            text = tokenizer.render(messages, tools, add_generation_prompt=False)
        except TemplateRefused as error:
            refusals.append(str(error))
            continue
        ended = text.rpartition(probes.ANCHOR)[2].partition(probes.RESULT)[0]
        # After a call its own tokens come first; the turn ends like others, or with a token that only calls end with.
        if not any(stop in ended for stop in stops):
            stop_matches = [(ended.find(token), -len(token), token) for token in tokenizer.control if token in ended]
            stops += [min(stop_matches)[2]] if stop_matches else []
    if not stops:
        refusal_note = f" ({refusals[0]})" if refusals else ""
        raise RendererRefused(
            f"the chat template of {tokenizer.name} ends a turn with no control token{refusal_note}, so its tokens "
            "cannot be distinguished from the next message; use another tokenizer, or `type: openai`"
        )
    return list(dict.fromkeys(stops))


# ------------------------------------------------------------------------------ A renderer for any chat template
# The template itself renders the first prompt. For each further one it renders a small conversation with an anchor in
# its assistant turn, and the text from the end of that turn on is appended to the sampled tokens. Once for each kind of
# continuation, a conversation of the same shape shows if the template would leave the sampled tokens unchanged. Control
# tokens in texts that are not the model's remain text.


KEPT_PIECE, KEPT_PIECES = 1 << 16, 64
"""Maximum characters of a message whose tokens are cached, and number of cached messages: prompts of one run share
their start, and a prompt rendered again repeats most of another.
"""


@dataclass(frozen=True, slots=True)
class ContinuationKind:
    """One kind of continuation: all properties by which a template may decide to rewrite earlier turns."""

    system: bool
    earlier: bool
    """True if there were assistant turns before the last one."""
    thought: bool
    called: bool
    has_text: bool
    roles: tuple[str, ...]
    """Roles of the new messages; consecutive equal roles count as one."""
    tools: bool


class TemplateRenderer:
    """Renderer for any chat template; see `rendering.Renderer`."""

    name = "template"

    def __init__(self, tokenizer: Tokenizer, settings: RendererSettings | None = None) -> None:
        self.tokenizer = tokenizer
        self._settings = settings or RendererSettings()
        self._allowed: dict[ContinuationKind, bool] = {}
        self._needs_tools: dict[ContinuationKind, bool] = {}
        self._stops = tuple(dict.fromkeys([*closers(tokenizer), *self._settings.stop]))
        encoded = {stop: tokenizer.encode(stop) for stop in self._stops}
        for stop, tokens in encoded.items():
            if len(tokens) != 1:
                raise RendererRefused(f"renderer.stop: {stop!r} is {len(tokens)} tokens of {tokenizer.name}, not one")
        self.stop_ids = tuple(tokens[0] for tokens in encoded.values())
        ends = [stop for stop in self._stops if _begins_anew(tokenizer, stop)]
        self._boundary_pattern = re.compile(f"(?={'|'.join(map(re.escape, ends))})") if ends else re.compile(r"\A")
        self._encoded = functools.lru_cache(KEPT_PIECES)(lambda piece: ids(tokenizer.encode(piece)))

    @functools.cached_property
    def parser(self) -> Parser:
        """Parser of the model's tool calls; raises UserError if the spec must name it."""
        return parser_for(self._settings.tool_parser, self.tokenizer)

    def first(self, messages: Messages, tools: Tools | None) -> array[int]:
        def encoded(guard: Guard) -> array[int]:
            return ids(guard.encode(written(guard.messages, guard.tools), self._encode))

        written = partial(self.tokenizer.render, add_generation_prompt=True)
        return guarded(self.tokenizer, [for_template(message) for message in messages], tools, encoded, written)

    def _encode(self, text: str) -> array[int]:
        tokens = ids()
        for chunk in self._boundary_pattern.split(text):
            tokens += self._encoded(chunk) if len(chunk) <= KEPT_PIECE else ids(self.tokenizer.encode(chunk))
        return tokens

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

    async def parse(self, completion: Sequence[int], prompt: Sequence[int], tools: Tools | None) -> Parsed:
        work = partial(parse_ids, self.parser, self.tokenizer, completion, prompt, self.stop_ids, tools)
        return await parse_in_thread(work, len(completion))

    def _join(self, branch: Branch, new: Messages, tools: Tools | None) -> ContinuationKind:
        spoken = [snapshot for snapshot in branch.history.snapshots if snapshot.role == "assistant"]
        roles = [str(message.get("role")) for message in new]
        return ContinuationKind(
            system=branch.history.snapshots[0].role == "system",
            earlier=len(spoken) > 1,
            thought=any(message.thought for message in spoken) and self._settings.thinking_retention != "all",
            called=bool(spoken[-1].calls),
            has_text=bool(spoken[-1].content),
            roles=tuple(role for index, role in enumerate(roles) if index == 0 or roles[index - 1] != role),
            tools=bool(tools),
        )

    def _probe(self, join: ContinuationKind) -> bool:
        """Return True if the template leaves a conversation of this shape unchanged when it continues."""
        before = _conversation(join)
        after: list[dict[str, Any]] = [{"role": role, "content": "n", **probes.answering(role)} for role in join.roles]
        tools = [probes.TOOL] if join.tools else None
        try:
            ended = self.tokenizer.render(before, tools, add_generation_prompt=False)
            full_text = self.tokenizer.render([*before, *after], tools, add_generation_prompt=True)
            opening = self.tokenizer.render(before[:-1], tools, add_generation_prompt=True)
            with_tools, without = (self._suffix(join, after, offered) for offered in (tools, None))
        except TemplateRefused:
            return False
        self._needs_tools[join] = with_tools != without
        if with_tools is None:
            return False
        return full_text.startswith(self._without_end(ended)) or self._stands_as_written(full_text, opening, before[-1])

    def _stands_as_written(self, full_text: str, opening: str, turn: dict[str, Any]) -> bool:
        """Return True if `full_text` contains the turn in the form that a model writes after `opening`.

        Some templates render the last turn differently from earlier ones: Qwen3's inserts an empty thinking block,
        which no model has sampled. So the form of the turn as the last one proves nothing. This method searches for the
        turn with all its parts, and without a thinking block if it has none.
        """
        if not full_text.startswith(opening):
            return False
        rest = full_text[len(opening) :]
        ends = [rest.find(stop) for stop in self._stops if stop in rest]
        if not ends:
            return False
        body = rest[: min(ends)]
        thought, called = turn.get("reasoning_content"), (probes.TOOL_NAME, '"v"') if turn.get("tool_calls") else ()
        required_parts = [part for part in (thought, turn.get("content"), *called) if part]
        if not required_parts or not all(part in body for part in required_parts):
            return False
        return bool(thought) or self._thinking_mark is None or self._thinking_mark not in body

    @functools.cached_property
    def _thinking_mark(self) -> str | None:
        """Text that the template writes before a turn's thinking, or None if it writes no thinking."""
        turn = probes.thinking(probes.make_reply("said"), True)
        anchored = {**turn, "reasoning_content": probes.ANCHOR}
        try:
            opening = self.tokenizer.render([probes.QUESTION], None, add_generation_prompt=True)
            text = self.tokenizer.render([probes.QUESTION, anchored], None, add_generation_prompt=False)
        except TemplateRefused:
            return None
        anchor_start = text.find(probes.ANCHOR)
        start = len(opening) if text.startswith(opening) else 0
        return text[start:anchor_start].strip() or None if anchor_start >= 0 else None

    def _without_end(self, text: str) -> str:
        """Remove the token that ends the last turn, because it may depend on the message after the turn."""
        spoken = text.rstrip()
        for stop in sorted(self._stops, key=len, reverse=True):
            if spoken.endswith(stop):
                return spoken[: -len(stop)]
        return spoken

    def _suffix(self, join: ContinuationKind, new: Messages, tools: Tools | None) -> array[int] | None:
        """Return the tokens from the end of an assistant turn to the start of the next, with the new messages."""
        results = [message for message in new if message.get("role") == "tool"]
        answered = [
            (str(result.get("name") or probes.TOOL_NAME), str(result.get("tool_call_id") or probes.CALL_ID))
            for result in results
        ]
        anchor = stand_in(answered, new, tools)
        calls = [probes.call(name, {"x": anchor}, identity) for name, identity in answered]
        anchored = (
            {**probes.make_reply(""), "tool_calls": calls} if join.called and calls else probes.make_reply(anchor)
        )

        def written(messages: Messages, offered: Tools | None) -> str:
            text = self.tokenizer.render(messages, offered, add_generation_prompt=True)
            *turn, rest = text.split(anchor)
            ends = [rest.find(stop) for stop in self._stops if stop in rest]
            # If a turn ends before its last anchor, messages precede it, which would be missing.
            if not turn or not ends or any(stop in part for stop in self._stops for part in turn[1:]):
                raise TemplateRefused("the chat template puts new messages before the model turn that they follow")
            return rest[min(ends) :]

        def encoded(guard: Guard) -> array[int]:
            return ids(guard.encode(written(guard.messages, guard.tools)))

        messages = [probes.QUESTION, anchored, *map(for_template, new)]
        try:
            return guarded(self.tokenizer, messages, tools, encoded, written, since=2)
        except TemplateRefused:
            return None


def _begins_anew(tokenizer: Tokenizer, stop: str) -> bool:
    """Return True if text before a stop token, blanks included, does not affect its tokens and those after it."""
    parts = [(before, f"{stop}{suffix}") for before in ("a", "a ", "a\n", ".\n\n") for suffix in ("", "b", " b", "\nb")]
    encode = tokenizer.encode
    return all(encode(before + suffix) == [*encode(before), *encode(suffix)] for before, suffix in parts)


def _conversation(join: ContinuationKind) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}] if join.system else []
    messages.append(probes.QUESTION)
    last = probes.make_reply("said" if join.has_text else "")
    if join.earlier:
        # An earlier call has its result, and a model thinks before it calls.
        earlier = (
            {**probes.make_reply(""), "tool_calls": [probes.call(probes.TOOL_NAME, {"x": "e"})]}
            if join.tools
            else probes.make_reply("early")
        )
        messages.append(probes.thinking(earlier, join.thought))
        messages.append({"role": "tool", "content": "r", **probes.answering("tool")} if join.tools else probes.QUESTION)
    if join.called:
        last["tool_calls"] = [probes.call(probes.TOOL_NAME, {"x": "v"})]
    messages.append(probes.thinking(last, join.thought))
    return messages
