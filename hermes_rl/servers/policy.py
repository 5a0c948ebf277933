"""Define `Policy`: the acting model, named in Python instead of in a spec, and called through a `ModelClient`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.servers.base import CALLABLE, POLICY, Secret, ServerConfig
from hermes_rl.servers.client import AnsweredByFunction, ChatFunction, ModelClient, SampledByFunction, SampleFunction
from hermes_rl.servers.factory import config_from_spec, create_client
from hermes_rl.servers.token_level import TokenServer
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.spec.model import Spec
from hermes_rl.spec.server_types import server_type
from hermes_rl.tokens.load import renderer_for
from hermes_rl.tokens.rendering import Renderer, RendererSettings

PATIENCE = RetryPolicy(attempts=3, base=0.1, cap=2.0)
"""Retries of a function in this process, which does not recover like a server, so the pauses are short."""
AT_ENDPOINT = RetryPolicy(attempts=3, timeouts=1, outage=0.0)
"""Retries of an endpoint, which lives as long as its rollout, so outages are not awaited."""
_UNLIMITED_CALLS = 1_000_000
"""Maximum concurrent calls of a function: only the function itself knows its best concurrency."""

Version = int | Callable[[], int | None] | None
"""A version of the weights, or a function that returns it."""

logger = logging.getLogger(__name__)

ALARM = 0.1
"""Mean difference of log-probabilities that triggers a warning; rounding to 16 bits causes some hundredths."""

_NUMBERS = count(1)
_TOLD = frozenset({"naming", "version"})
"""Configuration fields that change with the weights; `WeightUpdate` has them."""


@dataclass(frozen=True)
class WeightUpdate:
    """Information of a trainer about the weights, as sent to the processes that run rollouts.

    Attributes:
        order: increases with every change, so that a late message is known to be outdated.
        version: version of the weights; None: the servers are asked.
        models: name of the model at each server.
    """

    order: int = 0
    version: int | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyDescription:
    """A policy as sent to another process, which creates the same clients from it. It contains keys, and shows none.

    Attributes:
        policy_id: distinguishes it from the other policies of its process of origin.
        servers: server configurations, without the fields that change with the weights.
        captured: True if it is an `endpoint`.
    """

    policy_id: int
    servers: tuple[Mapping[str, Any], ...] = field(repr=False)
    captured: bool = False


class LogprobDifference:
    """Difference between a trainer's log-probabilities of trained tokens and the sampled ones, as last reported.

    Attributes:
        mean: mean absolute difference over a step's tokens, in nats; None before the first report.
        largest: maximum absolute difference; None if not reported.
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self.largest: float | None = None

    def tell(self, mean: float, largest: float | None = None) -> None:
        """Record a step's difference; log a warning when it rises above `ALARM`."""
        before, self.mean, self.largest = self.mean, mean, largest
        if not mean <= ALARM and (before is None or before <= ALARM):  # NaN is an alarm too
            largest_text = "" if largest is None else f", at most {largest:.3g}"
            logger.warning(
                "the trainer's log-probabilities differ from the sampled ones by %.3g on average%s: it trains on other "
                "probabilities than were sampled from. Compare temperature, chat template, precision and version of "
                "the weights on both sides",
                mean,
                largest_text,
            )


class Policy:
    """The acting model. Create one with `Policy.sampling`, `.chat`, `.server`, `.of_spec` or `.endpoint`.

    Attributes:
        role: the client that makes the calls.
        captured: True if a trainer captures the tokens itself, so that rollouts get none here.
        version: version of the weights set by a trainer, or None. Versions only rise.
    """

    def __init__(
        self, role: ModelClient, source: VersionSource, tokenizer: Any = None, *, captured: bool = False
    ) -> None:
        self.role, self._source, self.captured = role, source, captured
        self.tokenizer = tokenizer
        """Tokenizer for the rollouts of a policy that replies to messages, or None."""
        self.policy_id = next(_NUMBERS)
        """Distinguishes it from the other policies of this process."""
        self.logprob_difference = LogprobDifference()
        """Difference between the trainer's log-probabilities and the sampled ones, as reported by the trainer."""
        self._users = 0
        self._news = WeightUpdate()

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
        """Return a policy that samples token ids with a function; these tokens are trained on exactly.

        An exception of the function is a failed attempt; after three of them the rollout stops with `server_failure`.

        Args:
            sample: `async sample(ids, sampling) -> Sampled(ids, logprobs, finish, version)`; see `Sampling`.
            tokenizer: a hub name, a directory, a tokenizer object of `transformers`; None: the small built-in one.
            renderer: same as `renderer` of a server in a spec; its name is enough.
            context: maximum tokens of a conversation; None: no limit.
            response: maximum tokens of a response, which is everything after the first prompt of a sequence. If either
                limit is reached, the rollout stops with `token_budget`, or with `length` within a turn.
            version: version of the weights; the version in a result overrides it.
        """
        source = VersionSource(version)
        settings = RendererSettings.from_mapping({"name": renderer} if isinstance(renderer, str) else renderer)

        def make() -> Renderer:
            return renderer_for(tokenizer, settings)

        name = tokenizer if isinstance(tokenizer, str | Path) else getattr(tokenizer, "name_or_path", None)
        config = ServerConfig(CALLABLE, model=str(name or ""), max_concurrency=_UNLIMITED_CALLS, version=source)
        server = TokenServer(config, SampledByFunction(sample, context, source), make, response)
        return cls(_remove_bound(ModelClient(POLICY, [server], PATIENCE)), source)

    @classmethod
    def chat(cls, chat: ChatFunction, *, tokenizer: Any = None, model: str = "") -> Policy:
        """Return a policy that replies to messages with a function: `async chat(messages, tools) -> message`, or its
        text.

        Its rollouts have tokens only if there is a `tokenizer`, and these are never proven to be token-exact."""
        source = VersionSource(None)
        server = AnsweredByFunction(ServerConfig(CALLABLE, model=model, max_concurrency=_UNLIMITED_CALLS), chat)
        return cls(_remove_bound(ModelClient(POLICY, [server], PATIENCE)), source, tokenizer)

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
        session_header: bool = True,
    ) -> Policy:
        """Return a policy for a model server, of one of the types of a spec.

        Args:
            type: vllm, sglang, atropos, openai, scripted, or one of a package.
            base_url: its address.
            model: its model, or a function that returns the name for each request, such as the name of the newest
                adapter. None is the only model of a token-level server, whose `tokenizer` must then be given.
            api_key: sent as a bearer token, and never shown.
            tokenizer: a hub name or a directory; default: the model's own.
            renderer: same as `renderer` of a server in a spec, for token-level types; its name is enough.
            version: version of the weights; default: the server is asked, if its type reports it.
            weights_path: path at the server that returns the version; default: its type's own.
            session_header: send `X-Session-ID`, which names the rollout of a call, for routers.

        Raises:
            UserError: there is no such type, or a setting that the type needs is missing.
        """
        for key in server_type(type).needs:
            only = key == "model" and tokenizer is not None and server_type(type).dialects
            if not only and not {"base_url": base_url, "model": model}.get(key, "given"):
                raise UserError(f"a server of type {type} needs `{key}`")
        source = VersionSource(version)
        if callable(model) and tokenizer is None and not server_type(type).embedded:
            raise UserError("a policy whose model's name changes needs a `tokenizer`: the name does not determine it")
        config = ServerConfig(
            type,
            base_url=base_url,
            model=model() if callable(model) else model or "",
            naming=model if callable(model) else None,
            api_key=Secret(api_key) if api_key is not None else None,
            tokenizer=str(tokenizer) if tokenizer is not None else None,
            weights_path=weights_path,
            session_header=session_header,
            renderer={"name": renderer} if isinstance(renderer, str) else renderer,
            version=source,
        )
        return cls(create_client(POLICY, [config]), source)

    @classmethod
    def of_spec(
        cls,
        spec: Spec,
        *,
        environ: Mapping[str, str] | None = None,
        model: Callable[[], str | None] | None = None,
        version: Version = None,
    ) -> Policy:
        """Return a policy for the servers that the spec names, so that a trainer can set the fields that change with
        the weights.

        Args:
            spec: the spec.
            environ: variables that hold the keys; default: the process's environment.
            model: returns the model's name for each request; the spec's own if it returns None.
            version: version of the weights; default: the server is asked, if its type reports it.

        Raises:
            UserError: the spec names no policy, or the variable of a key is not set.
        """
        if POLICY not in spec.servers:
            raise UserError("servers.policy is missing: name the model that acts")
        source = VersionSource(version)
        variables = os.environ if environ is None else environ
        key = spec.policy_api_key.get_secret_value() if spec.policy_api_key is not None else None
        configs = []
        for server in spec.servers[POLICY]:
            config = config_from_spec(server, variables, api_key=key, seed=spec.seed)
            configs.append(replace(config, version=source, naming=_with_fallback(model, config.model)))
        return cls(create_client(POLICY, configs), source)

    @classmethod
    def endpoint(cls, base_url: str, model: str, *, api_key: str | None = None) -> Policy:
        """Return a policy for a chat endpoint that a trainer opens for one rollout, and that captures the tokens.

        Rollouts have no tokens here, so no tokenizer is loaded. A call is tried three times, and outages are not
        awaited: the trainer retries failures. Call `close` when the rollout has ended.

        Args:
            base_url: its address.
            model: name of the model at the endpoint.
            api_key: sent as a bearer token, and never shown.
        """
        key = Secret(api_key) if api_key is not None else None
        config = ServerConfig("openai", base_url=base_url, model=model, api_key=key)
        return cls(create_client(POLICY, [config], AT_ENDPOINT), VersionSource(None), captured=True)

    # ------------------------------------------------------------------ transfer to another process

    def describe(self) -> PolicyDescription:
        """Return the description from which another process creates the same policy (`of_description`).

        Raises:
            UserError: the policy is a function in this process.
        """
        configs = self.role.configs
        if any(config.type == CALLABLE for config in configs):
            raise UserError(
                "workers: this policy is a function of this process, which other processes cannot call. Leave workers "
                "and Ray out, or serve the model and name its server with hermes_rl.Policy.server"
            )
        return PolicyDescription(self.policy_id, tuple(map(_plain_settings, configs)), self.captured)

    def get_weight_update(self) -> WeightUpdate:
        """Return the trainer's current information about the weights; call it from one thread."""
        version, models = self.version, tuple(config.current().model for config in self.role.configs)
        if (version, models) != (self._news.version, self._news.models):
            self._news = WeightUpdate(self._news.order + 1, version, models)
        return self._news

    @classmethod
    def of_description(cls, description: PolicyDescription) -> Policy:
        """Return the policy that another process has described; `take` updates its weights."""
        source = VersionSource(None)
        policies: list[Policy] = []

        def name(index: int) -> str:
            return policies[0]._news.models[index]

        configs = [
            ServerConfig(
                **{
                    **settings,
                    "api_key": None if settings["api_key"] is None else Secret(settings["api_key"]),
                    "headers": {header: Secret(value) for header, value in settings["headers"].items()},
                },
                naming=partial(name, server_index),
                version=source,
            )
            for server_index, settings in enumerate(description.servers)
        ]
        retry = AT_ENDPOINT if description.captured else None
        policies.append(cls(create_client(POLICY, configs, retry), source, captured=description.captured))
        policies[0].take(WeightUpdate(models=tuple(config.model for config in configs)))
        return policies[0]

    def take(self, news: WeightUpdate) -> None:
        """Apply information about the weights from the process of origin, unless newer information is known."""
        if news.order >= self._news.order:
            self._news, self._source.version = news, news.version

    # ------------------------------------------------------------------ queries

    @property
    def exact(self) -> bool:
        """True if the servers report the tokens that they sampled, so that a group can be token-exact."""
        return self.role.exact

    async def prepare(self) -> None:
        """Load tokenizer and renderer now, without calling a server, instead of with the first call.

        Raises:
            UserError: the tokenizer is not available, or conversations cannot be converted to exact tokens with it.
        """
        await self.role.prepare()

    async def weights(self) -> int | None:
        """Return the current version of the weights: the one set, else a server's; None if unknown."""
        return self.version if self.version is not None else await self.role.weights()

    @property
    def version(self) -> int | None:
        """Version of the weights set by a trainer, or None."""
        return self._source()

    @version.setter
    def version(self, version: int) -> None:
        self._source.version = version

    async def close(self) -> None:
        """Close the connections of an `endpoint`; other policies close with their environments."""
        await self.role.close()

    def enter(self) -> None:
        """Register one more environment that uses the policy."""
        self._users += 1

    async def leave(self) -> None:
        """Unregister an environment; the last one closes the connections."""
        self._users -= 1
        if self._users <= 0:
            await self.role.close()


class VersionSource:
    """Version set by a trainer: a number, or a function that returns it."""

    def __init__(self, version: Version) -> None:
        self.version = version

    def __call__(self) -> int | None:
        return self.version() if callable(self.version) else self.version


def _with_fallback(model: Callable[[], str | None] | None, default: str) -> Callable[[], str] | None:
    return None if model is None else lambda: model() or default


def _plain_settings(config: ServerConfig) -> dict[str, Any]:
    """Return a configuration as plain values, including its keys."""
    setting_values = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _TOLD}
    key, headers = config.api_key, config.headers
    return {
        **setting_values,
        "api_key": None if key is None else key.reveal(),
        "headers": {header: value.reveal() for header, value in headers.items()},
    }


def _remove_bound(role: ModelClient) -> ModelClient:
    role.fix()
    return role
