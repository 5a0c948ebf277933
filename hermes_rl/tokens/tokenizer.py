"""The tokenizer of a policy, with its chat template.

Owns the protocol and where a tokenizer comes from: `hub` for the world's, `small` for the package's
own. What cannot be had is refused, never replaced by another. Leaves masks and sequences to `chat`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hermes_rl.errors import UserError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class TokenizerUnavailable(UserError):
    """The tokenizer cannot be had, or has no chat template. Those who can do without it catch this."""


class TemplateRefused(ValueError):
    """The chat template raised on these messages."""


class Tokenizer(Protocol):
    """What the program needs of a tokenizer. Safe to use from several threads."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """Hub name or path, for records."""
        ...

    @property
    def control(self) -> frozenset[str]:
        """Tokens that only a template or the end of a turn may make, such as ``<|im_end|>``."""
        ...

    @property
    def markup(self) -> frozenset[str]:
        """Further tokens of one piece that a model may write itself, such as ``<tool_call>``."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text; control and markup strings in it become their ids. Nothing is added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, control tokens included."""
        ...

    def render(self, messages: Messages, tools: Tools | None, *, add_generation_prompt: bool) -> str:
        """The chat template's text; raises `TemplateRefused`."""
        ...


def small_tokenizer_path() -> Path:
    """The folder of the package's own tokenizer; `transformers` loads it without a network."""
    return Path(__file__).parent / "small"


def load_tokenizer(name_or_path: str | None = None) -> Tokenizer:
    """The tokenizer of that hub name or folder, or the small one; raises `TokenizerUnavailable`.

    Slow the first time (an import, perhaps a download): call it once and in a thread.
    """
    if name_or_path is None or Path(name_or_path) == small_tokenizer_path():
        from hermes_rl.tokens.small_tokenizer import small_tokenizer

        return small_tokenizer()
    from hermes_rl.tokens.hub import HubTokenizer

    return HubTokenizer(name_or_path)


def as_tokenizer(given: Any) -> Tokenizer:
    """The tokenizer that a hub name, a folder or None names, or that a tokenizer object of `transformers` is.

    Raises:
        TokenizerUnavailable: it cannot be had, or has no chat template.
        UserError: it is nothing of that.
    """
    if given is None or isinstance(given, str | Path):
        return load_tokenizer(None if given is None else str(given))
    if hasattr(given, "apply_chat_template"):
        from hermes_rl.tokens.hub import wrapped

        return wrapped(given)
    if all(hasattr(given, name) for name in ("encode", "decode", "render", "control", "markup")):
        return given  # type: ignore[no-any-return]
    raise UserError(
        f"a tokenizer is a hub name, a folder, or a tokenizer object of transformers, not {type(given).__name__}"
    )


def encodable(text: str) -> str:
    """The text with lone surrogates, which have no UTF-8 form, as replacement characters."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
