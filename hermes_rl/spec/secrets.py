"""Secrets do not belong in a spec: keys that hold one are refused, and the value is never shown."""

from __future__ import annotations

from collections.abc import Iterator

from hermes_rl.errors import Problem
from hermes_rl.spec import places
from hermes_rl.spec.nodes import MappingNode, NodePath, ScalarNode, walk

_NAMES = frozenset({"api_key", "apikey", "token", "password", "authorization", "proxy_authorization", "x_api_key"})


def is_secret_key(name: str) -> bool:
    """True for a key that holds a secret, however it is written."""
    return name.lower().replace("-", "_") in _NAMES


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
