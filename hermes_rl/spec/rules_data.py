"""Rules on dataset, prompt, toolsets and tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hermes_rl.spec.fault import Fault, address, entries, exactly_one, section
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.paths import FILE_FORMATS, file_format

SOURCES = ("path", "items", "generator")
PATH_KEYS = ("name", "split", "data_files", "revision", "streaming")
"""Keys that say more about `path` and mean nothing without it."""


def _sources(data: dict[str, Any]) -> Iterator[Fault]:
    for path in (("dataset",), ("dataset", "fallback")):
        source = section(data, *path)
        if not source and not (isinstance(data.get("dataset"), dict) and path == ("dataset",)):
            continue
        yield from exactly_one(source, path, SOURCES, path[-1])
        if "path" not in source:
            for key in PATH_KEYS:
                if key in source:
                    yield Fault((*path, key), f"`{key}` goes with `path`", at="key")


def _formats(data: dict[str, Any]) -> Iterator[Fault]:
    for path in (("dataset",), ("dataset", "fallback")):
        source = section(data, *path)
        name = source.get("path")
        if isinstance(name, str) and name in FILE_FORMATS and "data_files" not in source:
            yield Fault((*path, "path"), f"`{name}` is a format of files; say which in `data_files`")
        elif isinstance(name, str) and (kind := file_format(name)) and "data_files" in source:
            message = f"`path` names a file already; leave one out, or write `path: {kind}`"
            yield Fault((*path, "data_files"), message, at="key")


def _fallback(data: dict[str, Any]) -> Iterator[Fault]:
    dataset = section(data, "dataset")
    if "fallback" in dataset and "path" not in dataset:
        yield Fault(("dataset", "fallback"), "a fallback is for a dataset on the hub; there is no `path`", at="key")
    if "generator" in section(dataset, "fallback"):
        yield Fault(("dataset", "fallback", "generator"), "a fallback is items or path", at="key")


def _eval(data: dict[str, Any]) -> Iterator[Fault]:
    dataset = section(data, "dataset")
    rows = section(dataset, "eval")
    path: NodePath = ("dataset", "eval")
    if isinstance(dataset.get("eval"), dict):
        yield from exactly_one(rows, path, ("split", "fraction", "only"), "eval")
    if "split" in rows and "items" in dataset:
        yield Fault((*path, "split"), "items have no splits; use {fraction: 0.1}")
    if isinstance(rows.get("split"), str) and rows["split"] == dataset.get("split", "train"):
        yield Fault((*path, "split"), "the rows of this split are trained on; name another one, or use fraction")
    if rows.get("only") is False:
        yield Fault((*path, "only"), "`only` is true or absent")


def _empty_items(data: dict[str, Any]) -> Iterator[Fault]:
    for path in (("dataset",), ("dataset", "fallback")):
        if section(data, *path).get("items") == []:
            yield Fault((*path, "items"), "there must be at least one row")


def _prompt(data: dict[str, Any]) -> Iterator[Fault]:
    prompt = data.get("prompt")
    if not isinstance(prompt, dict):
        return
    pair = [key for key in ("system", "user") if key in prompt]
    if "messages" in prompt:
        for key in pair:
            yield Fault(("prompt", key), f"`{key}` and `messages` exclude each other", at="key")
    elif "user" not in prompt and section(data, "user").get("opens") is not True:
        yield Fault(("prompt",), "prompt needs `user` or `messages` (or a simulated user that opens)", at="key")
    if prompt.get("messages") == []:
        yield Fault(("prompt", "messages"), "there must be at least one message")


def _parts(data: dict[str, Any]) -> Iterator[Fault]:
    contents: list[tuple[NodePath, Any]] = [(("prompt", "user"), section(data, "prompt").get("user"))]
    for path, message in entries(data, "prompt", "messages"):
        contents.append(((*path, "content"), section(message).get("content")))
    for path, content in contents:
        for index, part in enumerate(content if isinstance(content, list) else []):
            yield from exactly_one(part, (*path, index), ("text", "image", "image_url"), "a part")


def _toolsets(data: dict[str, Any]) -> Iterator[Fault]:
    toolsets = section(data, "toolsets")
    if "distribution" in toolsets and "enabled" in toolsets:
        message = "`distribution` and `enabled` exclude each other"
        yield Fault(("toolsets", "distribution"), message, at="key")
    if "record" in toolsets and "replay" in toolsets:
        yield Fault(("toolsets", "replay"), "`record` and `replay` exclude each other", at="key")


def tool_entries(data: dict[str, Any]) -> Iterator[tuple[NodePath, Any]]:
    """The tools of the agent and of the simulated user."""
    yield from entries(data, "tools")
    yield from entries(data, "user", "tools")


def _tools(data: dict[str, Any]) -> Iterator[Fault]:
    for path, tool in tool_entries(data):
        yield from exactly_one(tool, path, ("python", "state", "mcp"), "a tool")
        if isinstance(tool, dict) and "state" in tool and "state" not in data:
            yield Fault((*path, "state"), "there is no `state:` in this spec to take tools from")
        if isinstance(tool, dict) and "outside" in tool and "python" not in tool:
            yield Fault((*path, "outside"), "`outside` goes with `python`; of other tools it is known", at="key")
        if isinstance(tool, dict) and isinstance(tool.get("mcp"), dict):
            yield from _mcp((*path, "mcp"), tool["mcp"])


def _mcp(path: NodePath, server: dict[str, Any]) -> Iterator[Fault]:
    yield from exactly_one(server, path, ("command", "url"), "an MCP server")
    if "url" in server:
        yield from address((*path, "url"), server["url"], "headers_env")
        for key in ("files", "where", "env"):
            if key in server:
                yield Fault((*path, key), f"`{key}` is for a server started by `command`", at="key")
        if server.get("scope") == "rollout":
            yield Fault((*path, "scope"), "a server at a `url` is shared by all rollouts", at="key")
        return
    if server.get("scope") == "shared" and server.get("where", "sandbox") == "sandbox":
        yield Fault((*path, "scope"), "a server in the rollout's sandbox cannot be shared; `where: host` can", at="key")
    if "headers_env" in server:
        yield Fault((*path, "headers_env"), "`headers_env` is for a server at a `url`", at="key")


def _tool_names(data: dict[str, Any]) -> Iterator[Fault]:
    for owner in (("tools",), ("user", "tools")):
        seen: dict[str, str] = {}
        for path, tool in entries(data, *owner):
            for kind, name in _names(tool):
                where = seen.setdefault(name, f"{kind} number {int(path[-1]) + 1}")
                if where != f"{kind} number {int(path[-1]) + 1}":
                    yield Fault((*path, kind), f"the name `{name}` is taken by {where}; tools need different names")


def _names(tool: Any) -> Iterator[tuple[str, str]]:
    if isinstance(tool, dict) and isinstance(tool.get("python"), str):
        yield "python", tool["python"].rpartition(":")[2]
    if isinstance(section(tool).get("mcp"), dict) and isinstance(tool["mcp"].get("name"), str):
        yield "mcp", tool["mcp"]["name"]


DATA_RULES = (_sources, _formats, _fallback, _eval, _empty_items, _prompt, _parts, _toolsets, _tools, _tool_names)
