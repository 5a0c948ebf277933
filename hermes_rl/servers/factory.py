"""Create the clients of a spec's roles with their keys; `hermes_rl.spec.server_types` has the table of types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.servers.base import Backend, Secret, ServerConfig
from hermes_rl.servers.client import ModelClient, TokenServerClient
from hermes_rl.servers.token_level import TokenServer
from hermes_rl.servers.transport import RetryPolicy
from hermes_rl.spec.server_types import code_of

_PLAIN = frozenset(field.name for field in fields(ServerConfig)) - {"api_key", "headers", "naming", "version"}


def create_client(name: str, configs: Sequence[ServerConfig], retry: RetryPolicy | None = None) -> ModelClient:
    """Return the client of a role; it connects and starts nothing before its first call."""
    if not configs:
        raise UserError(f"the role {name!r} has no server")
    return ModelClient(name, [_make_backend(name, config) for config in configs], retry)


def config_from_spec(
    server: Any, environ: Mapping[str, str], *, api_key: str | None = None, seed: int = 0
) -> ServerConfig:
    """Return the configuration of a server of the spec, with its keys taken from `environ`.

    `api_key` comes from the command line and overrides `api_key_env`; `seed` is the spec's, for a server without its
    own.
    """
    settings = {"seed": seed} | {name: value for name in _PLAIN if (value := getattr(server, name, None)) is not None}
    key_env = getattr(server, "api_key_env", None)
    if api_key is None and key_env is not None:
        api_key = variable(environ, key_env, "api_key_env")
    headers = getattr(server, "headers_env", None) or {}
    return ServerConfig(
        **{name: _to_builtins(value) for name, value in settings.items()},
        api_key=Secret(api_key) if api_key is not None else None,
        headers={header: Secret(variable(environ, name, f"headers_env.{header}")) for header, name in headers.items()},
    )


def token_server(config: ServerConfig) -> TokenServer:
    """Return a token-level server without a client; its type must be token-level."""
    return TokenServer(config, TokenServerClient(config, [code_of(dialect)() for dialect in config.kind.dialects]))


def _make_backend(role: str, config: ServerConfig) -> Backend:
    try:
        kind = config.kind
    except UserError as error:
        raise UserError(f"servers.{role}: {error}") from None
    if kind.token_level:
        return token_server(config)
    if kind.backend is None:
        raise UserError(f"servers.{role}: the type {config.type} has neither a backend nor a dialect")
    backend: Backend = code_of(kind.backend)(config)
    return backend


class UnsetVariable(UserError):
    """A variable that the spec names is not set on this host."""


def variable(environ: Mapping[str, str], name: str, key: str) -> str:
    """Return the value of a variable that `key` of a server names.

    Raises:
        UnsetVariable: it is not set.
        UserError: it cannot be sent.
    """
    value = environ.get(name, "").strip()
    if not value:
        raise UnsetVariable(f"the environment variable {name}, named by {key} of a server, is not set")
    if any(character in value for character in "\r\n\0"):
        raise UserError(f"the value of {name} has a line break in it and cannot be sent as a header")
    return value


def _to_builtins(value: Any) -> Any:
    """Return a section of the spec, such as that of prices, as plain data."""
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
