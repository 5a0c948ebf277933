"""The types of model servers: what a spec, a check or a message has to know of each, and who makes one.

Owns the table of the types that come along, and finding those of other packages. A package publishes a type of its own
as an entry point of the group `hermes_rl.servers`: a `ServerType`. Names that are ours already cannot be taken. The
table names code by reference, so that a spec is checked without importing any server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.plugins import did_you_mean, load_object, load_published, published

SERVERS = "hermes_rl.servers"
"""Entry points of packages that bring a type of server."""
TEXT_PARTS = frozenset({"text"})
"""Types of content parts that become token ids."""
CHAT_PARTS = TEXT_PARTS | {"image_url", "input_audio"}
"""Types of content parts that a chat request carries."""
Code = str | Callable[..., Any]
"""A class or a function, or a reference to it: ``package.module:name``."""


@dataclass(frozen=True)
class ServerType:
    """One type of server: token-level where it has `dialects`, else whatever `backend` makes.

    Attributes:
        backend: takes a `ServerConfig` and returns a `hermes_rl.servers.base.Backend`.
        dialects: classes of `hermes_rl.servers.base.Dialect`, in the order in which a server is asked by them until it
            knows one. Such a server says which tokens it sampled, so its policy needs a tokenizer.
        tells_version: whether it tells the version of its weights without `weights_path`.
        embedded: it plays scripts inside of this process, so it has no address, and a model's name means nothing.
        needs: keys that a spec has to give.
        rates: it is a reward model, which answers a conversation with numbers and says nothing.
        parts: types of content parts that its requests carry. A message with another one is refused.
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
        """Whether conversations are rendered here, and the server gets token ids and gives token ids."""
        return bool(self.dialects)

    @property
    def exact(self) -> bool:
        """Whether it says which tokens it sampled; an embedded one does as far as its tokenizer allows."""
        return self.token_level or self.embedded


_OPENAI = "hermes_rl.servers.openai:OpenAIServer"
_RATING = "hermes_rl.servers.reward_model"
_COMPLETIONS = "hermes_rl.servers.vllm:Completions"
_LEGACY = "hermes_rl.servers.atropos:LegacyGenerate"
TYPES: Mapping[str, ServerType] = MappingProxyType(
    {
        "openai": ServerType(_OPENAI, needs=("base_url", "model"), parts=CHAT_PARTS),
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
"""The types that come along. Stock vLLM's own version counts only weights that were loaded through its own interface,
so it tells none."""
DEFAULT = "openai"
_ELSEWHERE = {"trl": "TRL's server is stock vLLM; use `type: vllm`, with /v1 at the end of base_url"}
"""Types that people ask for, and why there are none."""


def refused_part(messages: Sequence[Mapping[str, Any]], parts: frozenset[str]) -> str | None:
    """Return which part of a message is of none of these types; None if there is no such part.

    A part of text has no other keys where texts alone are carried, since templates find pictures by keys too.
    """
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        for part in [content] if isinstance(content, Mapping) else () if isinstance(content, str) else content or ():
            given = (
                {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
            )
            kind = given.get("type")
            is_text = kind == "text" and isinstance(given.get("text"), str)
            if (is_text and (len(given) == 2 or parts != TEXT_PARTS)) or (kind != "text" and str(kind) in parts):
                continue
            keys, sent = ", ".join(map(str, given)), ", ".join(sorted(parts))
            return f"message {number} has a part of type {kind!r:.50} (with {keys:.99}), and only {sent} can be sent"
    return None


def server_type(name: str) -> ServerType:
    """Return the type of that name. Raises `UserError` where there is none, or its package cannot be loaded."""
    if name in TYPES:
        return TYPES[name]
    points = published(SERVERS, "type of server", TYPES)
    if name not in points:
        known = [*TYPES, *points]
        reason = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, known)
        raise UserError(f"there is no type {name}{reason} (there are {', '.join(known)})")
    published_type = load_published(points[name], "type of server")
    if not isinstance(published_type, ServerType):
        raise UserError(
            f"the type of server {name!r} ({points[name].value}) is no hermes_rl.server_types.ServerType, but "
            f"{type(published_type).__name__}"
        )
    return published_type


def type_names() -> tuple[str, ...]:
    """Return the name of every type, those of other packages last."""
    return (*TYPES, *published(SERVERS, "type of server", TYPES))


def code_of(code: Code) -> Callable[..., Any]:
    """Load the class or function behind a reference."""
    loaded: Callable[..., Any] = load_object(code) if isinstance(code, str) else code
    return loaded
