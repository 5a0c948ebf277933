"""Tokenizers of the Hugging Face hub or of a folder, through `transformers`; no code of a repository ever runs."""

from __future__ import annotations

import copy
import functools
import logging
import os
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from jinja2 import TemplateError

from hermes_rl.tokens.tokenizer import Messages, TemplateRefused, TokenizerUnavailable, Tools
from hermes_rl.values import whole_text

_IMPORTING = Lock()
"""A library that another thread is importing cannot be used yet."""
PATIENCE = 5.0
"""Seconds that the hub may take to accept a connection."""


class HubTokenizer:
    """See `tokenizer.Tokenizer`."""

    def __init__(self, name_or_path: str, tokenizer: Any = None, *, local: bool = False) -> None:
        self.name = name_or_path
        self._tokenizer = _load(name_or_path, local) if tokenizer is None else tokenizer
        self._engine = _engine_of(self._tokenizer)
        self._lock = Lock()
        added = self._tokenizer.added_tokens_decoder.values()
        self.control = frozenset(token.content for token in added if token.special)
        self.markup = frozenset(token.content for token in added if not token.special)

    @property
    def vocabulary(self) -> Mapping[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def encode(self, text: str) -> list[int]:
        if self._engine is not None:
            (encoded,) = self._engine.encode_batch_fast([whole_text(text)], add_special_tokens=False)
            return list(encoded.ids)
        # The wrapper sets padding and truncation in each call, which two threads must not do at once.
        with self._lock:
            return list(self._tokenizer.encode(whole_text(text), add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        with self._lock:
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def render(self, messages: Messages, tools: Tools | None, *, add_generation_prompt: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # A template is foreign code; whatever it raises means that it refuses the messages.
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error
        return text


def wrapped(tokenizer: Any) -> HubTokenizer:
    """Wrap a copy of a tokenizer object of `transformers`, since its padding and truncation are switched off.
    TokenizerUnavailable: it has no chat template."""
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    return HubTokenizer(name, _with_template(copy.deepcopy(tokenizer), name))


@functools.cache
def hub_reachable() -> bool:
    """Whether a connection to the hub can be made; it is tried once.

    The library itself would try again and again for most of a minute, also for a tokenizer in its cache.
    """
    parts = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    if parts.scheme in urllib.request.getproxies():
        return True  # only the proxy knows
    try:
        socket.create_connection((str(parts.hostname), parts.port or 443), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def without_advice() -> None:
    """Keep the library from saying, when it is imported, that models need PyTorch: only tokenizers are wanted of it."""
    logging.getLogger("transformers").addFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in str(record.msg)


def _engine_of(tokenizer: Any) -> Any:
    """Return the engine of a wrapper that adds nothing to it, else None: alone it takes two thirds of the time."""
    from transformers import PreTrainedTokenizerFast as Wrapper

    plain = isinstance(tokenizer, Wrapper) and all(
        getattr(type(tokenizer), method, None) is getattr(Wrapper, method, tokenizer)
        for method in ("encode", "_encode_plus")
    )
    if not plain or tokenizer.split_special_tokens:
        return None
    engine = tokenizer.backend_tokenizer
    engine.no_truncation()
    engine.no_padding()
    return engine


def _load(name_or_path: str, local: bool) -> Any:
    without_advice()
    try:
        with _IMPORTING:
            from transformers import AutoTokenizer

        offline = local or (not Path(name_or_path).exists() and not hub_reachable())
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False, local_files_only=offline)
    except (ImportError, OSError, ValueError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TokenizerUnavailable(
            f"the tokenizer {name_or_path!r} cannot be had: {first_line}\n"
            "Name one that can be had under `tokenizer` of the server (a hub name or a folder)."
        ) from error
    return _with_template(tokenizer, name_or_path)


def _with_template(tokenizer: Any, name: str) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        raise TokenizerUnavailable(f"the tokenizer {name!r} has no chat template")
    return tokenizer
