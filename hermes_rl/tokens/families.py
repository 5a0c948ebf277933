"""Hand-written renderers of model families: the only module that imports `renderers` (0.1.12).

Owns everything that is particular to that package: its tokenizers, its names, its results. Messages are guarded before
they reach it, so that control tokens in texts stay text. Our rules hold for its results too: arguments may be text, and
a quoted passage calls nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean
from hermes_rl.tokens.hub import without_advice
from hermes_rl.tokens.parsers import Parsed, ParsedCall, Status, load_parser, parse_ids
from hermes_rl.tokens.parsers.base import made, quoted
from hermes_rl.tokens.rendering import RendererRefused, RendererSettings, for_template
from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, Tokenizer, Tools
from hermes_rl.tokens.transcript import Branch, Guard, ids

_TAIL = 256
"""How many tokens of a prompt a family gets: it looks back only to the end of the last turn."""
_STATUS = {
    "ok": Status.OK,
    "invalid_json": Status.INVALID_JSON,
    "unclosed_block": Status.UNCLOSED,
    "missing_name": Status.MISSING_NAME,
    "malformed_structure": Status.MALFORMED,
    "unknown_tool": Status.OK,  # the answer to the call tells the model which tools there are
}


def family_names() -> list[str]:
    """List the names of the families, as `renderer.name` takes them."""
    without_advice()
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return sorted(name for name in RENDERER_REGISTRY if name != "default")


def family_of(model: str) -> str | None:
    """Return the family of a model of the hub; None where it is in none."""
    without_advice()
    from renderers.base import MODEL_RENDERER_MAP

    found: str | None = MODEL_RENDERER_MAP.get(model)
    return found


def family_renderer(name: str, tokenizer: Tokenizer, settings: RendererSettings) -> FamilyRenderer:
    """Make the renderer of a family.

    Raises:
        UserError: there is no such family.
        RendererRefused: the family needs tokens that the tokenizer does not have.
    """
    return FamilyRenderer(require_family(name), tokenizer, settings)


def require_family(name: str) -> str:
    """Return the family's own name for a name that people write with or without dots and dashes.

    Raises:
        UserError: there is no such family.
    """
    names = family_names()
    known = {one.replace(".", "").replace("-", ""): one for one in names}
    wanted = known.get(name.replace(".", "").replace("-", "").replace("_", ""))
    if wanted is None:
        raise UserError(f"there is no renderer {name!r}{did_you_mean(name, names)} (template, {', '.join(names)})")
    return wanted


class FamilyRenderer:
    """See `rendering.Renderer`."""

    def __init__(self, family: str, tokenizer: Tokenizer, settings: RendererSettings) -> None:
        from renderers import config_from_name, create_renderer

        self.name = family
        self.tokenizer = tokenizer
        self._adapter = _FamilyTokenizer(tokenizer)
        retention = {"thinking_retention": settings.thinking_retention} if settings.thinking_retention else {}
        try:
            config = config_from_name(family)
            self._renderer = create_renderer(self._adapter, config.model_copy(update=retention))
            stops = self._renderer.get_stop_token_ids()
        except (AssertionError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise RendererRefused(
                f"the renderer {family!r} does not fit the tokenizer {tokenizer.name}: {error}. "
                "`renderer: {name: template}` works with any template that allows exact tokens"
            ) from error
        further = [tokenizer.encode(stop) for stop in settings.stop]
        self.stop_ids = tuple(dict.fromkeys([*stops, *(one[0] for one in further if len(one) == 1)]))
        self._parser = load_parser(settings.tool_parser) if settings.tool_parser else None

    def first(self, messages: Messages, tools: Tools | None) -> array[int]:
        guard = Guard(self.tokenizer, [_plain(message) for message in messages], tools)
        with self._adapter.guarded(guard):
            try:
                return ids(self._renderer.render_ids(guard.messages, tools=guard.tools, add_generation_prompt=True))
            except (ValueError, TypeError, KeyError, LookupError, AttributeError) as error:
                raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def following(self, branch: Branch, new: Messages, tools: Tools | None) -> array[int] | None:
        guard = Guard(self.tokenizer, [_plain(message) for message in new], tools)
        last = branch.spans[-1]
        before = branch.tokens[max(0, last.start - _TAIL) : last.start].tolist()
        said = branch.tokens[last.start :].tolist()
        with self._adapter.guarded(guard):
            try:
                bridged = self._renderer.bridge_to_next_turn(before, said, guard.messages, tools=guard.tools)
            except (ValueError, TypeError, KeyError, LookupError, AttributeError):
                return None
        size = len(before) + len(said)
        if bridged is None or bridged.token_ids[:size] != before + said:
            return None
        return ids(bridged.token_ids[size:])

    def parse(self, completion: Sequence[int], prompt: Sequence[int], tools: Tools | None) -> Parsed:
        if self._parser is not None:
            return parse_ids(self._parser, self.tokenizer, completion, prompt, self.stop_ids, tools)
        said, before = list(completion), list(prompt[-_TAIL:])
        try:
            found = self._renderer.parse_response(said, tools=list(tools) if tools else None, prompt_ids=before)
        except (ValueError, TypeError, KeyError, LookupError, AttributeError, RecursionError):
            return Parsed(self.tokenizer.decode(said))
        return self._read(found, said)

    def _read(self, found: Any, said: list[int]) -> Parsed:
        calls: list[ParsedCall] = []
        aside: list[str] = []
        done = 0
        for one in found.tool_calls:
            start, end = one.token_span or (done, done)
            before, after = self.tokenizer.decode(said[done:start]), self.tokenizer.decode(said[end:])
            if one.token_span and quoted(before.rpartition("</think>")[2], after):
                aside.append(self.tokenizer.decode(said[start:end]))
                continue
            calls.append(_call(one))
            done = end
        content = "\n".join([found.content or "", *aside]) if aside else found.content or ""
        return Parsed(content, found.reasoning_content or None, calls)


def _call(one: Any) -> ParsedCall:
    status = _STATUS.get(str(one.status.value), Status.MALFORMED)
    if status is not Status.OK:
        return ParsedCall(one.raw, status, one.name or "", id=one.id)
    return made(one.raw, one.name, one.arguments, one.id)


def _plain(message: Any) -> dict[str, Any]:
    """Return the message as families take it: its content is a text, and arguments are an object."""
    prepared = for_template(message)
    if prepared.get("content") is None:
        prepared["content"] = ""
    return prepared


class _FamilyTokenizer:
    """Our tokenizer in the form that the package wants. It encodes texts between the breaks of the guard in force."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._guard: ContextVar[Guard | None] = ContextVar("guard", default=None)
        self.name_or_path = tokenizer.name
        self.unk_token_id = None
        self.eos_token_id = None
        self.bos_token = None

    @contextmanager
    def guarded(self, guard: Guard) -> Iterator[None]:
        token = self._guard.set(guard)
        try:
            yield
        finally:
            self._guard.reset(token)

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        guard = self._guard.get()
        return self._tokenizer.encode(text) if guard is None else guard.encode(text)

    def decode(self, token_ids: Any, **_: Any) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._tokenizer.encode(tokens)
        return found[0] if len(found) == 1 else None
