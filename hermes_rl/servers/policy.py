"""`Policy`: the model that acts, named in Python instead of in a spec.

Owns the ways to name one. What answers is a role like any other (`balance`), over a server (`factory`) or over the
caller's own function (`calling`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.servers.balance import Role
from hermes_rl.servers.base import Secret, ServerConfig
from hermes_rl.servers.calling import (
    CALLABLE,
    AnsweredByFunction,
    ChatFunction,
    SampledByFunction,
    SampleFunction,
)
from hermes_rl.servers.factory import create_role
from hermes_rl.servers.retry import RetryPolicy
from hermes_rl.servers.token_level import TokenServer
from hermes_rl.tokens.rendering import Renderer, RendererSettings, renderer_for

ROLE = "policy"
PATIENCE = RetryPolicy(attempts=3, base=0.1, cap=2.0)
"""A function in this process is no server that may come back: the pauses are short."""
_AT_ONCE = 1_000_000
"""Calls of a function at a time: how many are good for it is known to itself alone."""

Version = int | Callable[[], int | None] | None
"""A version of the weights, or what says it."""


class Policy:
    """The model that acts. Make one with `Policy.sampling`, `Policy.chat` or `Policy.server`.

    Attributes:
        role: what answers the calls.
        version: of the weights, as a trainer tells it; None where it does not. Versions only rise.
    """

    def __init__(self, role: Role, told: Told, tokenizer: Any = None) -> None:
        self.role, self._told = role, told
        self.tokenizer = tokenizer
        """Of a policy that is asked with messages, so that its rollouts get tokens; None where there is none."""
        self._users = 0

    @classmethod
    def sampling(
        cls,
        sample: SampleFunction,
        tokenizer: Any,
        *,
        renderer: str | Mapping[str, Any] | None = None,
        context: int | None = None,
        version: Version = None,
    ) -> Policy:
        """A function that samples token ids; what it samples is what is trained on, to the last bit.

        What it raises is a failed attempt, which is made again; after three the rollout ends as `server_failure`.

        Args:
            sample: `async sample(ids, sampling) -> Sampled(ids, logprobs, finish, version)`; see `Sampling`.
            tokenizer: a hub name, a folder, a tokenizer object of `transformers`; None: the small built-in one.
            renderer: as `renderer` of a server in a spec; its name is enough.
            context: tokens of the longest conversation; None: no bound.
            version: of the weights; an answer's own version comes before it.
        """
        told = Told(version)
        settings = RendererSettings.of({"name": renderer} if isinstance(renderer, str) else renderer)

        def make() -> Renderer:
            return renderer_for(tokenizer, settings)

        name = tokenizer if isinstance(tokenizer, str | Path) else getattr(tokenizer, "name_or_path", None)
        config = ServerConfig(CALLABLE, model=str(name or ""), max_concurrency=_AT_ONCE, version=told)
        server = TokenServer(config, SampledByFunction(sample, context, told), make)
        return cls(_unbounded(Role(ROLE, [server], PATIENCE)), told)

    @classmethod
    def chat(cls, chat: ChatFunction, *, tokenizer: Any = None, model: str = "") -> Policy:
        """A function that answers messages: `async chat(messages, tools) -> message`, or the text of one.

        Its rollouts have tokens only where there is a tokenizer, and those are never certified as exact.
        """
        told = Told(None)
        server = AnsweredByFunction(ServerConfig(CALLABLE, model=model, max_concurrency=_AT_ONCE), chat)
        return cls(_unbounded(Role(ROLE, [server], PATIENCE)), told, tokenizer)

    @classmethod
    def server(
        cls,
        type: str,  # noqa: A002 - what a spec calls it
        base_url: str | None,
        model: str | Callable[[], str],
        *,
        api_key: str | None = None,
        tokenizer: str | None = None,
        version: Version = None,
    ) -> Policy:
        """A model server, by the types that a spec knows.

        Args:
            type: vllm, sglang, atropos, openai or scripted.
            base_url: its address.
            model: its model, or a function that says the name for each request, such as that of the newest adapter.
            api_key: sent as a bearer token, and never shown.
            tokenizer: a hub name or a folder; default: the model's own.
            version: of the weights; default: the server is asked, where its type tells it.

        Raises:
            UserError: there is no such type, or something that it needs is missing.
        """
        told = Told(version)
        if callable(model) and tokenizer is None and type != "scripted":
            raise UserError("a policy whose model's name changes needs a `tokenizer`: the name says nothing about it")
        config = ServerConfig(
            type,
            base_url=base_url,
            model=model() if callable(model) else model,
            naming=model if callable(model) else None,
            api_key=Secret(api_key) if api_key is not None else None,
            tokenizer=str(tokenizer) if tokenizer is not None else None,
            version=told,
        )
        return cls(create_role(ROLE, [config]), told)

    @property
    def version(self) -> int | None:
        """The version of the weights that a trainer has told."""
        return self._told()

    @version.setter
    def version(self, version: int) -> None:
        self._told.version = version

    def enter(self) -> None:
        """An environment plays with it from now on."""
        self._users += 1

    async def leave(self) -> None:
        """An environment has ended; with the last one the connections are closed."""
        self._users -= 1
        if self._users <= 0:
            await self.role.close()


class Told:
    """A version that a trainer tells: a number, or a function that says it."""

    def __init__(self, version: Version) -> None:
        self.version = version

    def __call__(self) -> int | None:
        return self.version() if callable(self.version) else self.version


def _unbounded(role: Role) -> Role:
    role.fix()
    return role
