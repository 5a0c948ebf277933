"""The tokenizer of a policy, with its chat template.

Owns the protocol and its errors. Leaves the two implementations to `hub` and `small_tokenizer`, the choice between them
to `load`, and masks and sequences to `chat`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hermes_rl.errors import UserError

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class TokenizerUnavailable(UserError):
    """The tokenizer cannot be had, or has no chat template. Callers that can do without it catch this."""


class TemplateRefused(ValueError):
    """The chat template raised on these messages."""


class Tokenizer(Protocol):
    """A tokenizer with its chat template. Safe to use from several threads."""

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


def encodable(text: str) -> str:
    """Replace the lone surrogates of a text, which have no UTF-8 form, by replacement characters."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
