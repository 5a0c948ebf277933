"""Load tokenizers and renderers by name, from a directory, or from an object of the caller.

An unavailable tokenizer is an error and is never replaced by another one, and so is a template that does not allow
exact tokens.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.tokens.families import family_of, family_renderer
from hermes_rl.tokens.hub import HubTokenizer, wrapped
from hermes_rl.tokens.probes import QUESTION, TOOL
from hermes_rl.tokens.rendering import (
    AUTO,
    Renderer,
    RendererRefused,
    RendererSettings,
    TemplateRenderer,
)
from hermes_rl.tokens.tokenizer import TemplateRefused, Tokenizer, small_tokenizer, small_tokenizer_path

TEMPLATE = "template"
OWN = "hermes-rl/"
"""Prefix of the names of the bundled tokenizers, which no family knows."""
_LOADING = Lock()
"""Lock: servers of one model load concurrently, and a library that another thread is importing cannot be used yet."""


def load_tokenizer(name_or_path: str | None = None, *, local: bool = False) -> Tokenizer:
    """Return the tokenizer of a hub name or directory, or the small one; raises `TokenizerUnavailable`.

    The first call is slow (an import, possibly a download): call it once and in a thread. With `local` the hub is not
    contacted: the tokenizer must be on this host.
    """
    if name_or_path is None or Path(name_or_path) == small_tokenizer_path():
        return small_tokenizer()
    return HubTokenizer(name_or_path, local=local)


def as_tokenizer(source: Any) -> Tokenizer:
    """Return a tokenizer by hub name or directory, the small one (None), or a wrapped one of `transformers`.

    Raises:
        UserError: it is none of these.
        TokenizerUnavailable: it is not available or has no chat template.
    """
    if source is None or isinstance(source, str | Path):
        return load_tokenizer(None if source is None else str(source))
    if hasattr(source, "apply_chat_template"):
        return wrapped(source)
    if all(hasattr(source, name) for name in ("encode", "decode", "render", "control", "markup")):
        return source  # type: ignore[no-any-return]
    raise UserError(
        f"a tokenizer is a hub name, a folder, or a tokenizer object of transformers, not {type(source).__name__}"
    )


def make_renderer(tokenizer: Tokenizer, settings: RendererSettings | None = None) -> Renderer:
    """Return the renderer that the settings request. Takes a moment: call it once and in a thread.

    Raises:
        RendererRefused: the template does not allow exact tokens, or the family does not fit the tokenizer.
        UserError: there is no renderer or no parser of that name.
    """
    settings = settings or RendererSettings()
    name = settings.name
    if name == AUTO:
        name = TEMPLATE if tokenizer.name.startswith(OWN) else family_of(tokenizer.name) or TEMPLATE
    if name != TEMPLATE and settings.name != AUTO:
        return family_renderer(name, tokenizer, settings)
    if name != TEMPLATE:
        with suppress(RendererRefused):  # a model of that name with another tokenizer
            family = family_renderer(name, tokenizer, settings)
            if _family_agrees(family, tokenizer):
                return family
    renderer = TemplateRenderer(tokenizer, settings)
    _ = renderer.parser  # if no parser reads the template's calls, this raises now and not in the first turn
    return renderer


def _family_agrees(family: Renderer, tokenizer: Tokenizer) -> bool:
    """Return True if a family guessed from the model's name renders a prompt like the tokenizer's own template."""
    messages = [{"role": "system", "content": "s"}, QUESTION]
    for tools in (None, [TOOL]):
        try:
            template_ids = tokenizer.encode(tokenizer.render(messages, tools, add_generation_prompt=True))
            if family.first(messages, tools).tolist() != template_ids:
                return False
        except TemplateRefused:
            return False
    return True


def load_renderer(tokenizer: str | None, settings: RendererSettings) -> Renderer:
    """Return the cached renderer for a tokenizer name (None: the small one). Call it in a thread.

    Raises:
        TokenizerUnavailable: the tokenizer is not available.
        RendererRefused: its template does not allow exact tokens.
    """
    with _LOADING:
        return _load_renderer(tokenizer, settings)


def renderer_for(tokenizer: Any, settings: RendererSettings) -> Renderer:
    """Return the renderer for any tokenizer of `as_tokenizer`; raises as `as_tokenizer` and `load_renderer`."""
    if tokenizer is None or isinstance(tokenizer, str | Path):
        return load_renderer(None if tokenizer is None else str(tokenizer), settings)
    with _LOADING:
        return make_renderer(as_tokenizer(tokenizer), settings)


@functools.lru_cache(maxsize=16)
def _load_renderer(tokenizer: str | None, settings: RendererSettings) -> Renderer:
    return make_renderer(load_tokenizer(tokenizer), settings)
