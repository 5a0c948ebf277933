"""Define the tokenizer of a policy with its chat template: the protocol, its errors, and the package's small tokenizer.

Tokenizers of a hub or a directory are in `hermes_rl.tokens.hub`; `hermes_rl.tokens.load` selects between them. The
small one does not use `transformers`, so it is ready in milliseconds instead of seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from jinja2 import Environment, TemplateError
from jinja2.ext import loopcontrols

from hermes_rl.errors import HermesRLError, UserError, is_panic
from hermes_rl.values import replace_surrogates

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as Engine


Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class TokenizerUnavailable(UserError):
    """The tokenizer is not available, or has no chat template. Callers that do not depend on it catch this."""


class TemplateRefused(ValueError):
    """The chat template raised on these messages, or their text cannot be converted to tokens."""


@contextmanager
def refusals(name: str) -> Iterator[None]:
    """Convert any exception of a tokenizer or its template to `TemplateRefused`.

    Templates and tokenizers are external code and data. A panic of the library `tokenizers`, for example of its regular
    expressions at ten million blanks, is not an `Exception`: it would stop the event loop.
    """
    try:
        yield
    except (TemplateRefused, HermesRLError):
        raise
    except BaseException as error:
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        raise TemplateRefused(f"{name}: {type(error).__name__}: {error}") from error


class Tokenizer(Protocol):
    """A tokenizer with its chat template. Safe to use from several threads."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """Hub name or path, for records."""

    @property
    def control(self) -> frozenset[str]:
        """Tokens that only a template or the end of a turn may produce, such as ``<|im_end|>``."""

    @property
    def markup(self) -> frozenset[str]:
        """Further tokens of one piece that a model may write itself, such as ``<tool_call>``."""

    @property
    def vocabulary(self) -> Mapping[str, int]:
        """Id of every token."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of the text; control and markup strings in it become their ids. Nothing is added.

        Raises:
            TemplateRefused: the tokenizer fails on the text.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, control tokens included."""

    def render(self, messages: Messages, tools: Tools | None, *, add_generation_prompt: bool) -> str:
        """Return the chat template's text; raises `TemplateRefused`."""


# ------------------------------------------------------------------------------------------- The small tokenizer
# `scripts/train_small_tokenizer.py` creates the files of `small/`. Its template belongs to hermes-rl, and needs no
# sandbox.

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


class SmallTokenizer:
    """The package's small tokenizer; see `tokenizer.Tokenizer`."""

    name = "hermes-rl/small"
    control = frozenset(CONTROL)
    markup = frozenset(MARKUP)

    def __init__(self, engine: Engine, template: Template) -> None:
        self._engine = engine
        self._template = template

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        return self._engine.get_vocab(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        # Only this call omits the position of each token in the text, which would take a quarter of the time.
        with refusals(self.name):
            (encoded,) = self._engine.encode_batch_fast([replace_surrogates(text)], add_special_tokens=False)
        return list(encoded.ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self._engine.decode(list(ids), skip_special_tokens=False)

    def render(self, messages: Messages, tools: Tools | None, *, add_generation_prompt: bool) -> str:
        with refusals(self.name):
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt
            )


def small_tokenizer_path() -> Path:
    """Return the directory of the bundled tokenizer; `transformers` loads it without a network."""
    return Path(__file__).parent / "small"


@cache
def small_tokenizer() -> SmallTokenizer:
    """Return the single instance of the process; it has no state."""
    from tokenizers import Tokenizer as Engine

    folder = small_tokenizer_path()
    source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return SmallTokenizer(Engine.from_file(str(folder / "tokenizer.json")), _environment().from_string(source))


def _environment() -> Environment:
    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    return environment
