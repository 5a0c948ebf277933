"""Rules on agent, rewards, endings, solution, servers, and the environment's other fields."""

from __future__ import annotations

import difflib
import keyword
from collections.abc import Iterator
from typing import Any

from hermes_rl.endings import OURS, POLICYS
from hermes_rl.spec.env_fields import check_field
from hermes_rl.spec.fault import Fault, address, entries, exactly_one, section
from hermes_rl.spec.model.scoring import INJECTED
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.suggest import choices

SCRIPTED_ONLY = ("deviate", "seed")
REAL_ONLY = ("base_url", "api_key_env", "headers_env")
"""Keys of a server that scripted ones alone have, and that they alone do not have."""
TOKEN_LEVEL = ("vllm", "sglang", "atropos")


def _reasoning(data: dict[str, Any]) -> Iterator[Fault]:
    for path in (("agent",), ("evaluate", "agent")):
        if "reasoning" in section(data, *path):
            reasoning = section(data, *path)["reasoning"]
            yield from exactly_one(reasoning, (*path, "reasoning"), ("effort", "max_tokens"), "reasoning")


def _extra_body(data: dict[str, Any]) -> Iterator[Fault]:
    types = [section(server).get("type") for path, server in servers(data) if path[1] == "policy"]
    exact = [name for name in types if isinstance(name, str) and name in TOKEN_LEVEL]
    for path in (("agent", "extra_body"), ("evaluate", "agent", "extra_body")):
        if exact and section(data, *path):
            yield Fault(path, f"extra_body is for chat servers; the policy's type is {exact[0]}", at="key")


def _rewards(data: dict[str, Any]) -> Iterator[Fault]:
    for path, reward in entries(data, "rewards"):
        if not isinstance(reward, dict):
            continue
        if reward.get("gate") is True and "weight" in reward:
            yield Fault((*path, "weight"), "a gate multiplies the score; it has no weight", at="key")
        fn = reward.get("fn", "")
        if isinstance(fn, str) and fn.partition(":")[0].endswith(".py") and not fn.rpartition(":")[2].isidentifier():
            yield Fault((*path, "fn"), "expected file.py:function")


def _code(data: dict[str, Any]) -> Iterator[Fault]:
    places: list[tuple[NodePath, Any]] = [
        (("dataset", "generator"), section(data, "dataset").get("generator")),
        (("state",), data.get("state")),
    ]
    for owner in (("tools",), ("user", "tools")):
        places.extend(((*path, "python"), section(tool).get("python")) for path, tool in entries(data, *owner))
    for path, reference in places:
        if isinstance(reference, str):
            file, _, name = reference.rpartition(":")
            if not file.endswith(".py") or not name.isidentifier():
                kind = "Class" if path == ("state",) else "function"
                yield Fault(path, f"expected file.py:{kind}")


def _clamp(data: dict[str, Any]) -> Iterator[Fault]:
    clamp = section(data, "score").get("clamp")
    if not isinstance(clamp, list) or not all(isinstance(bound, int | float) for bound in clamp):
        return
    if len(clamp) == 2 and clamp[0] >= clamp[1]:
        yield Fault(("score", "clamp"), "the first bound must be lower than the second")


def _endings(data: dict[str, Any]) -> Iterator[Fault]:
    names = [str(ending) for ending in POLICYS]
    for path, _ in entries(data, "endings"):
        name = str(path[-1])
        if name in {str(ending) for ending in OURS}:
            yield Fault(path, f"`{name}` is a failure of ours and never graded", at="key")
        elif name not in names:
            yield Fault(path, f"there is no ending `{name}`{choices(name, names)}", at="key")


def _solution(data: dict[str, Any]) -> Iterator[Fault]:
    for path, _ in entries(data, "solution"):
        name = str(path[-1])
        if name not in ("turns", "patch") and difflib.get_close_matches(name, ["turns", "patch"], cutoff=0.75):
            yield Fault(path, f"unknown key `{name}`{choices(name, ['turns', 'patch'])}", at="key")
    for path, turn in entries(data, "solution", "turns"):
        if isinstance(turn, dict) and not {"tools", "say", "user"} & turn.keys():
            yield Fault(path, "a turn needs `tools`, `say`, or the `user` that answers", at="key")


def servers(data: dict[str, Any]) -> Iterator[tuple[NodePath, Any]]:
    """Every server with its path, whether its role has one or a list."""
    for path, role in entries(data, "servers"):
        if isinstance(role, list):
            yield from (((*path, index), server) for index, server in enumerate(role))
        else:
            yield path, role


def _roles(data: dict[str, Any]) -> Iterator[Fault]:
    for path, listed in entries(data, "servers"):
        role = str(path[-1])
        if listed == []:
            yield Fault(path, "there must be at least one server")
        if not role.isidentifier() or keyword.iskeyword(role) or role in INJECTED:
            message = f"`{role}` cannot be a role: rewards name it as a parameter"
            yield Fault(path, message, at="key")
    user = data.get("user")
    role = section(data, "user").get("server", "user")
    if isinstance(user, dict) and isinstance(role, str) and role not in section(data, "servers"):
        message = f"there is no server role `{role}`{choices(role, section(data, 'servers'))}"
        yield Fault(("user", "server"), message) if "server" in user else Fault(("user",), message, at="key")


def _servers(data: dict[str, Any]) -> Iterator[Fault]:
    for path, server in servers(data):
        if not isinstance(server, dict):
            continue
        kind = server.get("type", "openai")
        unfit, needed = _server_keys(str(kind))
        for key in unfit:
            if key in server:
                yield Fault((*path, key), f"`{key}` has no meaning for type {kind}", at="key")
        for key in needed:
            if key not in server:
                yield Fault(path, f"missing key `{key}`", at="key")


def _server_keys(kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Keys that have no meaning for a type, and keys that it needs."""
    if kind == "scripted":
        return REAL_ONLY, ()
    return SCRIPTED_ONLY, ("base_url", "model") if kind in ("openai", "vllm") else ("base_url",)


def _urls(data: dict[str, Any]) -> Iterator[Fault]:
    places = [((*path, "base_url"), section(server).get("base_url")) for path, server in servers(data)]
    places.append((("serve", "api_url"), section(data, "serve").get("api_url")))
    for path, url in places:
        yield from address(path, url, "api_key_env or headers_env")


def _env(data: dict[str, Any]) -> Iterator[Fault]:
    for path, value in entries(data, "env"):
        for message, at in check_field(str(path[-1]), value):
            yield Fault(path, message, at="key" if at == "key" else "value")


RUN_RULES = (
    _reasoning, _extra_body, _rewards, _code, _clamp, _endings, _solution, _roles, _servers, _urls, _env,
)  # fmt: skip
