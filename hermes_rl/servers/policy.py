"""`Policy`: the model that acts, named in Python instead of in a spec.

Owns the ways to name one. Every policy answers through a `ModelClient` like any other, over a server (`factory`) or
over the caller's own function (`calling`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.server_types import server_type
from hermes_rl.servers.base import CALLABLE, Secret, ServerConfig
from hermes_rl.servers.client import (
    AnsweredByFunction,
    ChatFunction,
    ModelClient,
    SampledByFunction,
    SampleFunction,
)
from hermes_rl.servers.factory import config_from_spec, create_client
from hermes_rl.servers.token_level import TokenServer
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.spec.model import Spec
from hermes_rl.tokens.load import renderer_for
from hermes_rl.tokens.rendering import Renderer, RendererSettings

ROLE = "policy"
PATIENCE = RetryPolicy(attempts=3, base=0.1, cap=2.0)
"""A function in this process is no server that may come back, so the pauses are short."""
AT_ENDPOINT = RetryPolicy(attempts=3, timeouts=1, outage=0.0)
"""An endpoint lives as long as its rollout, so its outage is not waited for."""
_AT_ONCE = 1_000_000
"""Calls of a function at a time: only the function itself knows how many are good for it."""

Version = int | Callable[[], int | None] | None
"""A version of the weights, or a function that returns it."""


class Policy:
    """The model that acts. Make one with `Policy.sampling`, `.chat`, `.server`, `.of_spec` or `.endpoint`.

    Attributes:
        role: the client that answers the calls.
        captured: whether a trainer captures the tokens itself, so that rollouts get none here.
        version: the version of the weights that a trainer has told; None where it has told none. Versions only rise.
    """

    def __init__(
        self, role: ModelClient, told: VersionSource, tokenizer: Any = None, *, captured: bool = False
    ) -> None:
        self.role, self._told, self.captured = role, told, captured
        self.tokenizer = tokenizer
        """Gives tokens to the rollouts of a policy that answers messages; None where there is none."""
        self._users = 0

    @classmethod
    def sampling(
        cls,
        sample: SampleFunction,
        tokenizer: Any,
        *,
        renderer: str | Mapping[str, Any] | None = None,
        context: int | None = None,
        response: int | None = None,
        version: Version = None,
    ) -> Policy:
        """Make a policy of a function that samples token ids; they are trained on to the last bit.

        An exception of the function is a failed attempt; after three of them the rollout ends as `server_failure`.

        Args:
            sample: `async sample(ids, sampling) -> Sampled(ids, logprobs, finish, version)`; see `Sampling`.
            tokenizer: a hub name, a folder, a tokenizer object of `transformers`; None: the small built-in one.
            renderer: as `renderer` of a server in a spec; its name is enough.
            context: tokens of the longest conversation; None: no bound.
            response: tokens of the longest response, which is all that follows the first prompt of a sequence. Where
                either is used up, the rollout ends as `token_budget`, or as `length` in the middle of a turn.
            version: of the weights; the version in an answer wins over it.
        """
        told = VersionSource(version)
        settings = RendererSettings.of({"name": renderer} if isinstance(renderer, str) else renderer)

        def make() -> Renderer:
            return renderer_for(tokenizer, settings)

        name = tokenizer if isinstance(tokenizer, str | Path) else getattr(tokenizer, "name_or_path", None)
        config = ServerConfig(CALLABLE, model=str(name or ""), max_concurrency=_AT_ONCE, version=told)
        server = TokenServer(config, SampledByFunction(sample, context, told), make, response)
        return cls(_unbounded(ModelClient(ROLE, [server], PATIENCE)), told)

    @classmethod
    def chat(cls, chat: ChatFunction, *, tokenizer: Any = None, model: str = "") -> Policy:
        """Make a policy of a function that answers messages: `async chat(messages, tools) -> message`, or its text.

        Its rollouts have tokens only where there is a `tokenizer`, and these are never certified as exact.
        """
        told = VersionSource(None)
        server = AnsweredByFunction(ServerConfig(CALLABLE, model=model, max_concurrency=_AT_ONCE), chat)
        return cls(_unbounded(ModelClient(ROLE, [server], PATIENCE)), told, tokenizer)

    @classmethod
    def server(
        cls,
        type: str,  # noqa: A002 - the name in a spec
        base_url: str | None,
        model: str | Callable[[], str] | None,
        *,
        api_key: str | None = None,
        tokenizer: str | None = None,
        renderer: str | Mapping[str, Any] | None = None,
        version: Version = None,
        weights_path: str | None = None,
    ) -> Policy:
        """Make a policy of a model server, by the types that a spec knows.

        Args:
            type: vllm, sglang, atropos, openai, scripted, or one of a package.
            base_url: its address.
            model: its model, or a function that says the name for each request, such as that of the newest adapter.
                None is the only one of a token-level server, whose `tokenizer` is then named.
            api_key: sent as a bearer token, and never shown.
            tokenizer: a hub name or a folder; default: the model's own.
            renderer: as `renderer` of a server in a spec, for token-level types; its name is enough.
            version: of the weights; default: the server is asked, where its type tells it.
            weights_path: path at the server that answers with the version; default: its type's own.

        Raises:
            UserError: there is no such type, or a setting that the type needs is missing.
        """
        for key in server_type(type).needs:
            only = key == "model" and tokenizer is not None and server_type(type).dialects
            if not only and not {"base_url": base_url, "model": model}.get(key, "given"):
                raise UserError(f"a server of type {type} needs `{key}`")
        told = VersionSource(version)
        if callable(model) and tokenizer is None and not server_type(type).embedded:
            raise UserError("a policy whose model's name changes needs a `tokenizer`: the name says nothing about it")
        config = ServerConfig(
            type,
            base_url=base_url,
            model=model() if callable(model) else model or "",
            naming=model if callable(model) else None,
            api_key=Secret(api_key) if api_key is not None else None,
            tokenizer=str(tokenizer) if tokenizer is not None else None,
            weights_path=weights_path,
            renderer={"name": renderer} if isinstance(renderer, str) else renderer,
            version=told,
        )
        return cls(create_client(ROLE, [config]), told)

    @classmethod
    def of_spec(
        cls,
        spec: Spec,
        *,
        environ: Mapping[str, str] | None = None,
        model: Callable[[], str | None] | None = None,
        version: Version = None,
    ) -> Policy:
        """Make a policy of the servers that the spec names, so that a trainer can tell what changes with the weights.

        Args:
            spec: the spec.
            environ: where keys are looked up; default: the process's environment.
            model: returns the model's name for each request; the spec's own where it returns None.
            version: of the weights; default: the server is asked, where its type tells it.

        Raises:
            UserError: the spec names no policy, or the variable of a key is not set.
        """
        if ROLE not in spec.servers:
            raise UserError("servers.policy is missing: name the model that acts")
        told = VersionSource(version)
        found = os.environ if environ is None else environ
        key = spec.policy_api_key.get_secret_value() if spec.policy_api_key is not None else None
        configs = []
        for server in spec.servers[ROLE]:
            config = config_from_spec(server, found, api_key=key, seed=spec.seed)
            configs.append(replace(config, version=told, naming=_named(model, config.model)))
        return cls(create_client(ROLE, configs), told)

    @classmethod
    def endpoint(cls, base_url: str, model: str, *, api_key: str | None = None) -> Policy:
        """Make a policy of a chat endpoint that a trainer opens for one rollout, and where it captures the tokens.

        Rollouts have no tokens here, so no tokenizer is loaded. A call is tried three times, and nobody waits for an
        endpoint that is down: the trainer repeats what failed. Call `close` when the rollout has ended.

        Args:
            base_url: its address.
            model: the name that it knows the model by.
            api_key: sent as a bearer token, and never shown.
        """
        key = Secret(api_key) if api_key is not None else None
        config = ServerConfig("openai", base_url=base_url, model=model, api_key=key)
        return cls(create_client(ROLE, [config], AT_ENDPOINT), VersionSource(None), captured=True)

    @property
    def exact(self) -> bool:
        """Whether the servers say which tokens they sampled, so that a group can be certified as exact."""
        return self.role.exact

    async def prepare(self) -> None:
        """Load tokenizer and renderer now, without asking a server for anything, instead of with the first call.

        Raises:
            UserError: the tokenizer cannot be had, or conversations cannot become exact tokens with it.
        """
        await self.role.prepare()

    async def weights(self) -> int | None:
        """Return the version of the weights now: the one that was told, else what a server says; None: unknown."""
        return self.version if self.version is not None else await self.role.weights()

    @property
    def version(self) -> int | None:
        """The version of the weights that a trainer has told; None where it has told none."""
        return self._told()

    @version.setter
    def version(self, version: int) -> None:
        self._told.version = version

    async def close(self) -> None:
        """Close the connections of an `endpoint`; those of other policies close with the environments they act in."""
        await self.role.close()

    def enter(self) -> None:
        """Note that one more environment uses the policy."""
        self._users += 1

    async def leave(self) -> None:
        """Note that an environment has ended; the last one closes the connections."""
        self._users -= 1
        if self._users <= 0:
            await self.role.close()


class VersionSource:
    """The version that a trainer tells: a number, or a function that returns it."""

    def __init__(self, version: Version) -> None:
        self.version = version

    def __call__(self) -> int | None:
        return self.version() if callable(self.version) else self.version


def _named(model: Callable[[], str | None] | None, own: str) -> Callable[[], str] | None:
    return None if model is None else lambda: model() or own


def _unbounded(role: ModelClient) -> ModelClient:
    role.fix()
    return role
