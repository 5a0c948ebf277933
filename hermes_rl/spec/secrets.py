"""Secrets do not belong in a spec: keys that hold one are refused, and the value is never shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote_plus

from hermes_rl.errors import Problem
from hermes_rl.spec import places
from hermes_rl.spec.nodes import MappingNode, NodePath, ScalarNode, walk

_NAMES = frozenset({"api_key", "apikey", "token", "password", "authorization", "proxy_authorization", "x_api_key"})
_PARAMETER_WORDS = frozenset(
    {
        "key", "apikey", "token", "accesstoken", "password", "passwd", "pwd", "secret", "sig", "signature", "auth",
        "authorization", "credential", "credentials", "jwt", "code",
    }
)  # fmt: skip
"""Words that make the name of a parameter in an address the name of a secret."""


def is_secret_key(name: str) -> bool:
    """True for a key that holds a secret, however it is written."""
    return name.lower().replace("-", "_") in _NAMES


def holds_secret(address: str) -> bool:
    """True for an address with a password, or with a key or token in its query: both would be kept with the run."""
    place, _, query = address.partition("#")[0].partition("?")
    if "@" in place.partition("://")[2].partition("/")[0]:
        return True
    return any(value and _is_secret_parameter(name) for name, value in _pairs(query))


def _pairs(query: str) -> Iterator[tuple[str, str]]:
    for pair in re.split("[&;]", query):
        name, _, value = pair.partition("=")
        yield unquote_plus(name), value


def _is_secret_parameter(name: str) -> bool:
    """Broader than for keys of a spec: in a query any kind of key, token or signature is one."""
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return is_secret_key(name) or not _PARAMETER_WORDS.isdisjoint(words)


def _is_free(path: NodePath) -> bool:
    return places.is_row(path) or places.is_in(path, places.ARGS)


def _is_literal(node: object) -> bool:
    if not isinstance(node, ScalarNode):
        return False
    return node.value is not None and node.text != "" and not node.text.startswith(("${", "{{"))


def literal_secrets(root: MappingNode) -> Iterator[Problem]:
    """A problem per secret that is written out, anywhere but in rows and arguments."""
    for path, _, node in walk(root):
        key = str(path[-1])
        if is_secret_key(key) and not _is_free(path) and _is_literal(node):
            yield node.mark.problem(_advice(key, path))


def _advice(key: str, path: NodePath) -> str:
    advice = "name the environment variable that holds it instead"
    if path[:1] == ("servers",):
        advice += ", in `api_key_env` or `headers_env`"
    elif path[:1] == ("dataset",):
        advice = "log in to the hub, or set HF_TOKEN in the environment"
    return f"a secret is written in `{key}`; {advice}"
