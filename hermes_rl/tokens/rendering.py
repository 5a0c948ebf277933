"""Messages → tokens and back: the protocol, its settings, and the prompt of the next turn.

Owns `Renderer` and how a prompt extends what was sampled. Leaves the implementations to `template_renderer` (any chat
template) and `families` (hand-written ones of the `renderers` package), and the choice between them to `load`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hermes_rl.errors import UserError
from hermes_rl.tokens.messages import history_named, named
from hermes_rl.tokens.parsers import Parsed
from hermes_rl.tokens.tokenizer import Messages, Tokenizer, Tools
from hermes_rl.tokens.transcript import Branch, RenderedPrompt, Transcript

AUTO = "auto"
"""The name that leaves the choice of the renderer to us."""


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
        """Read the mapping that a server's configuration holds."""
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
        """Render the prompt of a conversation with the tokenizer's own template; raises `TemplateRefused`."""
        ...

    def following(self, branch: Branch, new: Messages, tools: Tools | None) -> array[int] | None:
        """Return the tokens to append to a branch so that the model answers `new`; None: the template rewrites it."""
        ...

    def parse(self, completion: Sequence[int], prompt: Sequence[int], tools: Tools | None) -> Parsed:
        """Parse what the model said; never raises. The end of `prompt` is enough."""
        ...


def next_prompt(renderer: Renderer, transcript: Transcript, messages: Messages, tools: Tools | None) -> RenderedPrompt:
    """Make the prompt for a conversation; it extends what was sampled where it can. Raises `TemplateRefused`."""
    branch = transcript.holding(messages)
    further = None if branch is None else _further(renderer, branch, messages, tools)
    if branch is None or further is None:
        return RenderedPrompt(renderer.first(history_named(messages), tools))
    return RenderedPrompt(branch.tokens + further, branch)


def _further(renderer: Renderer, branch: Branch, messages: Messages, tools: Tools | None) -> array[int] | None:
    new = messages[len(branch.history) :]
    if any(one.get("role") == "assistant" for one in new):
        return None
    return renderer.following(branch, named(new, [name for name, _ in branch.history.snapshots[-1].calls]), tools)
