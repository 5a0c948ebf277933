"""Policies that requests name, and a trainer's announcements of their weights.

A policy is defined by its server: type, address, tokenizer, source of its version, and key. The parts that change with
the weights (version, and the model's name if there is a tokenizer) are announced, by a request that names the policy or
by PUT /v1/policy, and apply to every call from then on, including calls of running rollouts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from hermes_rl import LogprobDifference, Policy, Spec
from hermes_rl.errors import UserError
from hermes_rl.service.bodies import PolicyRequest, PolicyUpdate
from hermes_rl.service.refusals import wrong

MAX_POLICIES = 64
"""Maximum policies of a service; each has open connections and maybe a tokenizer."""


@dataclass
class Weights:
    """Last announcement; None if there was none."""

    version: int | None = None
    model: str | None = None

    def tell(self, version: int | None, model: str | None) -> None:
        """Apply the announcement of a request; one that is older than the last is ignored."""
        if version is not None and self.version is not None and version < self.version:
            return
        self.version = self.version if version is None else version
        self.model = model or self.model


class Policies:
    """Policies of one service.

    Args:
        spec: the spec; its policy acts if a request names none.
        environ: where keys are looked up.
        keys: variables that requests may name for any address, in addition to the ones that the spec names for its
            addresses.
    """

    def __init__(self, spec: Spec, environ: Mapping[str, str], keys: frozenset[str] = frozenset()) -> None:
        self._spec, self._environ, self._keys = spec, environ, keys
        self._last = Weights()
        """Last announcement of PUT, for policies that are named later."""
        self._policies: dict[PolicyRequest | None, tuple[Policy, Weights]] = {}
        """Named policies; the one that was named last comes last."""
        self.forgotten: list[Policy] = []
        """Policies that were removed to make room; the caller that named the new ones closes them."""
        self.difference = LogprobDifference()
        """Trainer's reports on its log-probabilities."""

    @property
    def versions(self) -> list[int]:
        """Versions of all policies that a trainer has announced."""
        return [weights.version for _, weights in self._policies.values() if weights.version is not None]

    def tell(self, news: PolicyUpdate) -> None:
        """Apply new weights to every policy; raises `Refused` if the version is older than an announced one."""
        self.require_newer_version(news)
        for weights in (self._last, *(weights for _, weights in self._policies.values())):
            weights.tell(news.version, news.model)
        if news.logprob_difference is not None:
            self.difference.tell(news.logprob_difference.mean, news.logprob_difference.largest)

    def require_newer_version(self, news: PolicyUpdate) -> None:
        """Raise `Refused` if the version is lower than the newest one that was reported."""
        newest = max([*self.versions, self._last.version or 0])
        if news.version < newest:
            raise wrong(
                "version_falls",
                "version",
                f"version {newest} was reported before, and versions only rise; to continue from older weights, "
                "restart the service",
            )

    def resolve_policy(self, request: PolicyRequest | None, playing: Collection[Policy] = ()) -> Policy:
        """Return the policy that a request names, the same object for the same server.

        Raises `Refused` if its key may not be used. If there are many, a new one replaces the one that was named
        longest ago; `playing` ones stay.
        """
        if request is None:
            return self._get_spec_policy()
        if request.version is not None and request.weights_path is not None:
            raise wrong(
                "policy", "policy.weights_path", "give `version` or `weights_path`: either you tell it or the server"
            )
        renamed = request.tokenizer is not None
        identity = request.model_copy(update={"version": None, **({"model": None} if renamed else {})})
        entry = self._policies.pop(identity, None)
        if entry is None:
            weights = replace(self._last)
            entry = self._policy_of(request, weights), weights
            self._make_room(playing)
        self._policies[identity] = entry
        policy, weights = entry
        weights.tell(request.version, request.model if renamed else None)
        return policy

    def _make_room(self, playing: Collection[Policy]) -> None:
        if len(self._policies) < MAX_POLICIES:
            return
        for identity, (policy, _) in self._policies.items():
            if identity is not None and policy not in playing:
                del self._policies[identity]
                self.forgotten.append(policy)
                return
        raise wrong(
            "too_many_policies",
            "policy",
            f"{MAX_POLICIES} policies are in use already; a policy whose name changes with its weights needs "
            "`tokenizer`, and is one policy then",
        )

    def _get_spec_policy(self) -> Policy:
        if None not in self._policies:
            if "policy" not in self._spec.servers:
                raise wrong(
                    "no_policy", "policy", "name a `policy` in the request, or servers.policy in the service's spec"
                )
            weights = replace(self._last)
            policy = Policy.of_spec(
                self._spec, environ=self._environ, model=lambda: weights.model, version=lambda: weights.version
            )
            self._policies[None] = policy, weights
        return self._policies[None][0]

    def _policy_of(self, request: PolicyRequest, weights: Weights) -> Policy:
        name = request.model or ""
        try:
            return Policy.server(
                request.type,
                request.base_url,
                (lambda: weights.model or name) if request.tokenizer is not None and name else name,
                api_key=self._key(request),
                tokenizer=request.tokenizer,
                version=None if request.weights_path is not None else lambda: weights.version,
                weights_path=request.weights_path,
            )
        except UserError as error:
            raise wrong("policy", "policy", str(error)) from error

    def _key(self, request: PolicyRequest) -> str | None:
        """Return the value of the variable, if this address may have it."""
        if request.api_key_env is None:
            return None
        spec_keys = {
            (server.api_key_env, _origin(server.base_url))
            for servers in self._spec.servers.values()
            for server in servers
        }
        if request.api_key_env not in self._keys and (request.api_key_env, _origin(request.base_url)) not in spec_keys:
            raise wrong(
                "key_not_allowed",
                "policy.api_key_env",
                "a request may name a variable that the spec names for the same address, or one that the service was "
                "started with: hermes-rl serve-http … --key-env NAME",
            )
        value = self._environ.get(request.api_key_env, "").strip()
        if not value or any(character in value for character in "\r\n\0"):
            raise wrong("key_not_set", "policy.api_key_env", "the variable is not set in the service's environment")
        return value


def _origin(url: str | None) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url or "")
        port = parts.port
    except ValueError:
        return "", None, None
    return parts.scheme, parts.hostname, port or {"http": 80, "https": 443}.get(parts.scheme)
