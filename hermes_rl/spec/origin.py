"""Report faults of a loaded spec at the positions where its parts were written, and hide secrets.

A `Fault` is a path and a message. Keys that hold a secret are refused, and their values never appear in messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote_plus

from hermes_rl.errors import Problem
from hermes_rl.spec import nodes
from hermes_rl.spec.nodes import MappingNode, Mark, Node, NodePath, ScalarNode, locate, walk


def find_position(root: Node, path: NodePath, part: str) -> Mark:
    """Return the mark of the key or of the value; the root itself is line 1, column 1."""
    written, key, node = locate(root, path)
    if not written:
        return root.position._replace(line=1, column=1)
    stands_for = isinstance(node, ScalarNode) and path[:1] == ("state",)  # `state: x` is short for `{python: x}`
    return key if part == "key" or (len(written) < len(path) and not stands_for) else node.position


def line_mark(node: Node, line: int, near: str | None = None) -> Mark:
    """Return the position of one line of a scalar: inside its block, or the scalar itself if it is not a block."""
    if not isinstance(node, ScalarNode) or node.block is None:
        return node.position
    index = _folded_line(node, line, near) if node.block.folded else line - 1
    if not 0 <= index < len(node.block.lines):
        return node.position
    written = node.block.lines[index]
    column = max(written.find("{{"), written.find("{%"), 0) or len(written) - len(written.lstrip())
    return node.position._replace(line=node.block.line + index, column=column + 1)


def _folded_line(node: ScalarNode, line: int, near: str | None) -> int:
    """Return the raw line in which a line of the folded text starts, or the first after it that contains `near`."""
    assert node.block is not None
    start = len("\n".join(node.text.split("\n")[: line - 1]))
    position, first = 0, None
    for index, written in enumerate(node.block.lines):
        offset = node.text.find(written.strip(), position) if written.strip() else -1
        if offset < 0:
            continue
        position = offset + len(written.strip())
        if position < start:
            continue
        first = index if first is None else first
        if near is None or near in written:
            return index
    return first or 0


# -------------------------------------------------------------------------------------------------------- Faults


class Fault(NamedTuple):
    """Something impossible at a path, to be shown at its key or its value."""

    path: NodePath
    message: str
    part: Literal["key", "value"] = "value"


def section(data: Any, *path: str) -> dict[str, Any]:
    """Return the mapping at a path, or an empty one if there is none."""
    for step in path:
        if not isinstance(data, dict):
            return {}
        data = data.get(step)
    return data if isinstance(data, dict) else {}


def entries(data: Any, *path: str) -> Iterator[tuple[NodePath, Any]]:
    """Yield the items of the list, or the values of the mapping, at a path, each with its own path."""
    for step in path:
        data = data.get(step) if isinstance(data, dict) else None
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key), value


def check_address(path: NodePath, url: Any, instead: str) -> Iterator[Fault]:
    """Yield a fault if a value is not an HTTP address, or contains a secret; `instead` names the keys for secrets."""
    if isinstance(url, str) and not url.startswith(("http://", "https://")):
        yield Fault(path, "expected an address that starts with http:// or https://")
    elif isinstance(url, str) and holds_secret(url):
        yield Fault(path, f"an address must not hold a password, key or token; use {instead}")


def exactly_one(value: Any, path: NodePath, names: tuple[str, ...], subject: str) -> Iterator[Fault]:
    """Yield a fault where none or several of the keys are there."""
    if not isinstance(value, dict):
        return
    present_names = [name for name in value if name in names]
    alternatives = f"{', '.join(names[:-1])} or {names[-1]}"
    if not present_names:
        yield Fault(path, f"{subject} needs one of {alternatives}", part="key")
    for name in present_names[1:]:
        yield Fault(
            (*path, name), f"{subject} takes one of {alternatives}; `{present_names[0]}` is there already", part="key"
        )


# ------------------------------------------------------------------------------------------------------- Secrets

_SECRET_NAMES = frozenset(
    {"api_key", "apikey", "token", "password", "authorization", "proxy_authorization", "x_api_key"}
)
_PARAMETER_WORDS = frozenset(
    {
        "key", "apikey", "token", "accesstoken", "password", "passwd", "pwd", "secret", "sig", "signature", "auth",
        "authorization", "credential", "credentials", "jwt", "code",
    }
)  # fmt: skip
"""Words that make the name of a parameter in an address the name of a secret."""


def is_secret_key(name: str) -> bool:
    """Return True for a key that holds a secret, however it is written."""
    return name.lower().replace("-", "_") in _SECRET_NAMES


def holds_secret(address: str) -> bool:
    """Return True for an address with a password, key or token in it, which would be recorded with the run.

    Broader than for keys of a spec: in a query any kind of key, token or signature is one.
    """
    base, _, query = address.partition("#")[0].partition("?")
    if "@" in base.partition("://")[2].partition("/")[0]:
        return True
    for pair in re.split("[&;]", query):
        name, _, value = pair.partition("=")
        name = unquote_plus(name)
        name_words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
        if value and (is_secret_key(name) or not _PARAMETER_WORDS.isdisjoint(name_words)):
            return True
    return False


def literal_secrets(root: MappingNode) -> Iterator[Problem]:
    """Yield a problem per secret that is written out, anywhere but in rows and arguments."""
    for path, _, node in walk(root):
        key = str(path[-1])
        if not is_secret_key(key) or nodes.is_row(path) or nodes.is_in(path, nodes.ARGS):
            continue
        if (
            not isinstance(node, ScalarNode)
            or node.value is None
            or node.text.startswith(("${", "{{"))
            or not node.text
        ):
            continue
        # The value of a header is the name of its variable; `Bearer …`, written out, is none.
        if not node.text or (nodes.is_in(path, nodes.HEADERS) and re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", node.text)):
            continue
        advice = "name the environment variable that holds it instead"
        if path[:1] == ("servers",):
            advice += ", in `api_key_env` or `headers_env`"
        elif path[:1] == ("dataset",):
            advice = "log in to the hub, or set HF_TOKEN in the environment"
        yield node.position.problem(f"a secret is written in `{key}`; {advice}")
