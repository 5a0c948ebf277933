"""`Policy`: the model that acts, named in Python instead of in a spec; a `ModelClient` answers for it like for any
other."""

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
from hermes_rl.server_types import server_type
from hermes_rl.servers.base import CALLABLE, Secret, ServerConfig
from hermes_rl.servers.client import AnsweredByFunction, ChatFunction, ModelClient, SampledByFunction, SampleFunction
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

logger = logging.getLogger(__name__)

ALARM = 0.1
"""Mean difference of log-probabilities from which on it is warned of; rounding to 16 bits makes some hundredths."""

_NUMBERS = count(1)
_TOLD = frozenset({"naming", "version"})
"""What of a server's configuration changes with the weights; `WeightsTold` has it."""


@dataclass(frozen=True)
class WeightsTold:
    """What a trainer has told of the weights, as it travels to the processes that play.

    Attributes:
        order: rises with every change, so that a word that comes late is known to be old.
        version: of the weights; None: the servers are asked.
        models: the name of the model at each server.
    """

    order: int = 0
    version: int | None = None
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyDescription:
    """A policy as it travels to another process, which makes the same clients of it. It holds keys, and shows none.

    Attributes:
        number: tells it from the other policies of the process that it comes from.
        servers: their configurations, without what changes with the weights.
        captured: whether it is an `endpoint`.
    """

    number: int
    servers: tuple[Mapping[str, Any], ...] = field(repr=False)
    captured: bool = False


class LogprobDifference:
    """How far a trainer's log-probabilities of trained tokens are from those that were sampled, as it has told last.

    Attributes:
        mean: of the absolute differences over a step's tokens, in nats; None before a trainer has told it.
        largest: of them; None where it is not told.
    """

    def __init__(self) -> None:
        self.mean: float | None = None
        self.largest: float | None = None

    def tell(self, mean: float, largest: float | None = None) -> None:
        """Take note of a step's difference. The first one above `ALARM` is warned of, also after some that were not."""
        before, self.mean, self.largest = self.mean, mean, largest
        if not mean <= ALARM and (before is None or before <= ALARM):  # a mean that is no number is an alarm too
            most = "" if largest is None else f", at most {largest:.3g}"
            logger.warning(
                "the trainer's log-probabilities differ from the sampled ones by %.3g on average%s: it trains on other "
                "probabilities than were sampled from. Compare temperature, chat template, precision and version of "
                "the weights on both sides",
                mean,
                most,
            )


class Policy:
    """The model that acts. Make one with `Policy.sampling`, `.chat`, `.server`, `.of_spec` or `.endpoint`.

    Attributes:
        role: the client that answers the calls.
        captured: whether a trainer captures the tokens itself, so that rollouts get none here.
        version: the version of the weights that a trainer has told; None where it has told none. Versions only rise.
    """

    def __init__(
        self, role: ModelClient, source: VersionSource, tokenizer: Any = None, *, captured: bool = False
    ) -> None:
        self.role, self._source, self.captured = role, source, captured
        self.tokenizer = tokenizer
        """Gives tokens to the rollouts of a policy that answers messages; None where there is none."""
        self.number = next(_NUMBERS)
        """Tells it from the other policies of this process."""
        self.logprob_difference = LogprobDifference()
        """What the trainer has told of how far its log-probabilities are from the sampled ones."""
        self._users = 0
        self._news = WeightsTold()

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
        source = VersionSource(version)
        settings = RendererSettings.of({"name": renderer} if isinstance(renderer, str) else renderer)

        def make() -> Renderer:
            return renderer_for(tokenizer, settings)

        name = tokenizer if isinstance(tokenizer, str | Path) else getattr(tokenizer, "name_or_path", None)
        config = ServerConfig(CALLABLE, model=str(name or ""), max_concurrency=_AT_ONCE, version=source)
        server = TokenServer(config, SampledByFunction(sample, context, source), make, response)
        return cls(_unbounded(ModelClient(ROLE, [server], PATIENCE)), source)

    @classmethod
    def chat(cls, chat: ChatFunction, *, tokenizer: Any = None, model: str = "") -> Policy:
        """Make a policy of a function that answers messages: `async chat(messages, tools) -> message`, or its text.

        Its rollouts have tokens only where there is a `tokenizer`, and these are never certified as exact.
        """
        source = VersionSource(None)
        server = AnsweredByFunction(ServerConfig(CALLABLE, model=model, max_concurrency=_AT_ONCE), chat)
        return cls(_unbounded(ModelClient(ROLE, [server], PATIENCE)), source, tokenizer)

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
            raise UserError("a policy whose model's name changes needs a `tokenizer`: the name says nothing about it")
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
        return cls(create_client(ROLE, [config]), source)

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
        source = VersionSource(version)
        variables = os.environ if environ is None else environ
        key = spec.policy_api_key.get_secret_value() if spec.policy_api_key is not None else None
        configs = []
        for server in spec.servers[ROLE]:
            config = config_from_spec(server, variables, api_key=key, seed=spec.seed)
            configs.append(replace(config, version=source, naming=_named(model, config.model)))
        return cls(create_client(ROLE, configs), source)

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

    # ------------------------------------------------------------------ the way to another process

    def described(self) -> PolicyDescription:
        """Return what another process makes the same policy of (`of_description`); UserError where a function here
        answers."""
        configs = self.role.configs
        if any(config.type == CALLABLE for config in configs):
            raise UserError(
                "workers: this policy is a function of this process, which other processes cannot call. Leave workers "
                "and Ray out, or serve the model and name its server with hermes_rl.Policy.server"
            )
        return PolicyDescription(self.number, tuple(map(_settings, configs)), self.captured)

    def told(self) -> WeightsTold:
        """Return what a trainer has told of the weights by now; call it from one thread."""
        version, models = self.version, tuple(config.current().model for config in self.role.configs)
        if (version, models) != (self._news.version, self._news.models):
            self._news = WeightsTold(self._news.order + 1, version, models)
        return self._news

    @classmethod
    def of_description(cls, description: PolicyDescription) -> Policy:
        """Make the policy that another process has described; `take` tells it of new weights."""
        source = VersionSource(None)
        policies: list[Policy] = []

        def name(place: int) -> str:
            return policies[0]._news.models[place]

        configs = [
            ServerConfig(
                **{
                    **settings,
                    "api_key": None if settings["api_key"] is None else Secret(settings["api_key"]),
                    "headers": {header: Secret(value) for header, value in settings["headers"].items()},
                },
                naming=partial(name, place),
                version=source,
            )
            for place, settings in enumerate(description.servers)
        ]
        retry = AT_ENDPOINT if description.captured else None
        policies.append(cls(create_client(ROLE, configs, retry), source, captured=description.captured))
        policies[0].take(WeightsTold(models=tuple(config.model for config in configs)))
        return policies[0]

    def take(self, news: WeightsTold) -> None:
        """Take up what was told where the policy comes from; what is older than what is known says nothing."""
        if news.order >= self._news.order:
            self._news, self._source.version = news, news.version

    # ------------------------------------------------------------------ what it is asked

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
        return self._source()

    @version.setter
    def version(self, version: int) -> None:
        self._source.version = version

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


def _settings(config: ServerConfig) -> dict[str, Any]:
    """Return a configuration as plain values, its keys among them."""
    plain = {field.name: getattr(config, field.name) for field in fields(config) if field.name not in _TOLD}
    key, headers = config.api_key, config.headers
    return {
        **plain,
        "api_key": None if key is None else key.reveal(),
        "headers": {header: value.reveal() for header, value in headers.items()},
    }


def _unbounded(role: ModelClient) -> ModelClient:
    role.fix()
    return role
