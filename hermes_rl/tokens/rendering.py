"""Messages → tokens and back: the protocol, and which of its implementations a server gets.

Owns `Renderer` and the choice. `template` renders with any chat template; `families` has the hand-written ones of
the `renderers` package. A template or tokenizer that cannot do it is refused, with the reason.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from hermes_rl.errors import UserError
from hermes_rl.tokens.messages import history_named, named
from hermes_rl.tokens.parsers import Parsed
from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, Tokenizer, Tools, as_tokenizer, load_tokenizer
from hermes_rl.tokens.transcript import Branch, Prompt, Transcript

AUTO, TEMPLATE = "auto", "template"
OWN = "hermes-rl/"
"""Begins the names of the package's own tokenizers, which no family knows."""
_LOADING = Lock()


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
    def of(cls, given: Mapping[str, Any] | None) -> RendererSettings:
        """From the mapping that a server's configuration holds."""
        given = given or {}
        return cls(
            name=given.get("name", AUTO),
            tool_parser=given.get("tool_parser"),
            thinking_retention=given.get("thinking_retention"),
            stop=tuple(given.get("stop") or ()),
        )


class Renderer(Protocol):
    """Tokens of one model's conversations. Safe to use from several threads."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    def first(self, messages: Messages, tools: Tools | None) -> array[int]:
        """The prompt of a conversation, as the tokenizer's own template has it; raises `TemplateRefused`."""
        ...

    def following(self, branch: Branch, new: Messages, tools: Tools | None) -> array[int] | None:
        """What comes behind a branch's tokens so that the model answers `new`; None: the template rewrites them."""
        ...

    def parse(self, completion: Sequence[int], prompt: Sequence[int], tools: Tools | None) -> Parsed:
        """What the model said; never raises. Of `prompt` the end is enough."""
        ...


def make_renderer(tokenizer: Tokenizer, settings: RendererSettings | None = None) -> Renderer:
    """The renderer that the settings ask for. Takes a moment: call it once and in a thread.

    Raises:
        RendererRefused: the template does not allow exact tokens, or the family does not fit the tokenizer.
        UserError: there is no renderer or no parser of that name.
    """
    settings = settings or RendererSettings()
    from hermes_rl.tokens.families import family_of, family_renderer
    from hermes_rl.tokens.template_renderer import TemplateRenderer

    name = settings.name
    if name == AUTO:
        name = TEMPLATE if tokenizer.name.startswith(OWN) else family_of(tokenizer.name) or TEMPLATE
    if name != TEMPLATE and settings.name != AUTO:
        return family_renderer(name, tokenizer, settings)
    if name != TEMPLATE:
        with suppress(RendererRefused):  # a model of that name with another tokenizer
            family = family_renderer(name, tokenizer, settings)
            if _agrees(family, tokenizer):
                return family
    renderer = TemplateRenderer(tokenizer, settings)
    _ = renderer.parser  # a format that nothing reads is told now
    return renderer


def _agrees(family: Renderer, tokenizer: Tokenizer) -> bool:
    """Whether a family that was guessed by the model's name begins as the tokenizer's own template does."""
    from hermes_rl.tokens.probing import QUESTION, TOOL

    messages = [{"role": "system", "content": "s"}, QUESTION]
    for tools in (None, [TOOL]):
        try:
            own = tokenizer.encode(tokenizer.render(messages, tools, add_generation_prompt=True))
            if family.first(messages, tools).tolist() != own:
                return False
        except TemplateRefused:
            return False
    return True


def load_renderer(tokenizer: str | None, settings: RendererSettings) -> Renderer:
    """The renderer for a tokenizer by its name (None: the small one); made once. Slow: call it in a thread.

    Raises:
        TokenizerUnavailable: the tokenizer cannot be had.
        RendererRefused: its template does not allow exact tokens.
    """
    with _LOADING:  # servers of one model ask at once, and a library that is being imported is not there yet
        return _loaded(tokenizer, settings)


def renderer_for(tokenizer: Any, settings: RendererSettings) -> Renderer:
    """The same for a tokenizer by its name or folder, or for one that is there (`tokenizer.as_tokenizer`).

    Raises:
        UserError: it is nothing of that; else as `load_renderer`.
    """
    if tokenizer is None or isinstance(tokenizer, str | Path):
        return load_renderer(None if tokenizer is None else str(tokenizer), settings)
    with _LOADING:
        return make_renderer(as_tokenizer(tokenizer), settings)


@functools.lru_cache(maxsize=16)
def _loaded(tokenizer: str | None, settings: RendererSettings) -> Renderer:
    return make_renderer(load_tokenizer(tokenizer), settings)


def next_prompt(renderer: Renderer, transcript: Transcript, messages: Messages, tools: Tools | None) -> Prompt:
    """The prompt for a conversation, extending what was sampled where that is possible. Raises `TemplateRefused`."""
    branch = transcript.holding(messages)
    further = None if branch is None else _further(renderer, branch, messages, tools)
    if branch is None or further is None:
        return Prompt(renderer.first(history_named(messages), tools))
    return Prompt(branch.tokens + further, branch)


def _further(renderer: Renderer, branch: Branch, messages: Messages, tools: Tools | None) -> array[int] | None:
    new = messages[len(branch.history) :]
    if any(one.get("role") == "assistant" for one in new):
        return None
    return renderer.following(branch, named(new, [name for name, _ in branch.history.snapshots[-1].calls]), tools)
