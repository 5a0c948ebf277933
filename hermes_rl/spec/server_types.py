"""Define the types of model servers: the properties that specs, checks and messages need, and their implementations.

This module owns the table of the built-in types, and finds types of other packages. A package publishes a type as an
entry point of the group `hermes_rl.servers`: a `ServerType`. Names of built-in types cannot be replaced. The table
names code by reference, so that a spec is checked without importing any server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean, load_object, load_published, published

SERVERS = "hermes_rl.servers"
"""Group of entry points for packages with their own type of server."""
TEXT_PARTS = frozenset({"text"})
"""Types of content parts that are converted to token ids."""
CHAT_PARTS = TEXT_PARTS | {"image_url", "input_audio"}
"""Types of content parts that a chat request may contain."""
Code = str | Callable[..., Any]
"""A class or a function, or a reference to it: ``package.module:name``."""


@dataclass(frozen=True)
class ServerType:
    """One type of server: token-level if it has `dialects`, else the server that `backend` creates.

    Attributes:
        backend: takes a `ServerConfig` and returns a `hermes_rl.servers.base.Backend`.
        dialects: classes of `hermes_rl.servers.base.Dialect`, tried in order until a server supports one. Such a server
            reports the tokens that it sampled, so its policy needs a tokenizer.
        tells_version: True if it reports the version of its weights without `weights_path`.
        embedded: True if it runs scripts inside this process, so it has no address and ignores the model's name.
        needs: keys that a spec must set.
        rates: True if it is a reward model, which returns only numbers for a conversation.
        parts: types of content parts in its requests. A message with another one is refused.
    """

    backend: Code | None = None
    dialects: tuple[Code, ...] = ()
    tells_version: bool = False
    embedded: bool = False
    needs: tuple[str, ...] = ("base_url",)
    rates: bool = False
    parts: frozenset[str] = TEXT_PARTS

    @property
    def token_level(self) -> bool:
        """True if conversations are rendered locally, and the server receives and returns token ids."""
        return bool(self.dialects)

    @property
    def exact(self) -> bool:
        """True if it reports the tokens that it sampled; an embedded one does if its tokenizer allows that."""
        return self.token_level or self.embedded


_OPENAI_CLASS = "hermes_rl.servers.openai:OpenAIServer"
_RATING = "hermes_rl.servers.reward_model"
_COMPLETIONS = "hermes_rl.servers.vllm:Completions"
_LEGACY = "hermes_rl.servers.atropos:LegacyGenerate"
SERVER_TYPES: Mapping[str, ServerType] = MappingProxyType(
    {
        "openai": ServerType(_OPENAI_CLASS, needs=("base_url", "model"), parts=CHAT_PARTS),
        "vllm": ServerType(dialects=(_COMPLETIONS, _LEGACY), needs=("base_url", "model")),
        "sglang": ServerType(dialects=("hermes_rl.servers.sglang:Generate",), tells_version=True),
        "atropos": ServerType(dialects=(_LEGACY,), tells_version=True),
        "vllm-score": ServerType(f"{_RATING}:ScorePath", needs=("base_url", "model"), rates=True),
        "vllm-classify": ServerType(
            f"{_RATING}:ClassifyPath", needs=("base_url", "model"), rates=True, parts=CHAT_PARTS
        ),
        "vllm-pooling": ServerType(f"{_RATING}:PoolingPath", needs=("base_url", "model"), rates=True, parts=CHAT_PARTS),
        "scripted": ServerType(
            "hermes_rl.servers.scripted.server:ScriptedBackend", embedded=True, needs=(), parts=CHAT_PARTS
        ),
    }
)
"""The built-in types. Stock vLLM's own version counts only weights that were loaded through its own interface, so it
reports none.
"""
DEFAULT = "openai"
_ELSEWHERE = {"trl": "TRL's server is stock vLLM; use `type: vllm`, with /v1 at the end of base_url"}
"""Types that users ask for, and the reason why they do not exist."""


def refused_part(messages: Sequence[Mapping[str, Any]], parts: frozenset[str]) -> str | None:
    """Return a message about the first content part of another type, or None.

    A text part must have no other keys if only texts are allowed, because templates also detect images by their keys.
    """
    for position, message in enumerate(messages, start=1):
        content = message.get("content")
        if isinstance(content, str):  # nearly all are
            continue
        for part in [content] if isinstance(content, Mapping) else content or ():
            fields = (
                {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
            )
            kind = fields.get("type")
            is_text = kind == "text" and isinstance(fields.get("text"), str)
            if (is_text and (len(fields) == 2 or parts != TEXT_PARTS)) or (kind != "text" and str(kind) in parts):
                continue
            keys, sent = ", ".join(map(str, fields)), ", ".join(sorted(parts))
            return f"message {position} has a part of type {kind!r:.50} (with {keys:.99}), and only {sent} can be sent"
    return None


def server_type(name: str) -> ServerType:
    """Return the type of that name. Raises `UserError` if there is none, or its package cannot be loaded."""
    if name in SERVER_TYPES:
        return SERVER_TYPES[name]
    points = published(SERVERS, "type of server", SERVER_TYPES)
    if name not in points:
        type_names = [*SERVER_TYPES, *points]
        reason = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, type_names)
        raise UserError(f"there is no type {name}{reason} (there are {', '.join(type_names)})")
    published_type = load_published(points[name], "type of server")
    if not isinstance(published_type, ServerType):
        raise UserError(
            f"the type of server {name!r} ({points[name].value}): expected a hermes_rl.spec.server_types.ServerType, "
            f"not {type(published_type).__name__}"
        )
    return published_type


def type_names() -> tuple[str, ...]:
    """Return the name of every type, with types of other packages last."""
    return (*SERVER_TYPES, *published(SERVERS, "type of server", SERVER_TYPES))


def code_of(code: Code) -> Callable[..., Any]:
    """Return the class or function of a reference."""
    loaded: Callable[..., Any] = load_object(code) if isinstance(code, str) else code
    return loaded
