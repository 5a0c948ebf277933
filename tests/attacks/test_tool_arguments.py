"""Calls of tools with odd arguments: each is answered within its time, and the rollout is graded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hermes_rl
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import ONLY_SEAT
from hermes_rl.servers.scripted.play import Script
from hermes_rl.spec.load import parse_spec

CODE = """
from enum import Enum
from typing import Any, Literal
from pydantic import BaseModel

class Point(BaseModel):
    x: int
    near: "list[Point]" = []

class Colour(Enum):
    RED = "red"

def add(a: float, b: int = 1, c: Literal["x", 1] = "x", point: Point | None = None, more: dict[str, Any] = {},
        colour: Colour = Colour.RED) -> str:
    "Add."
    return str((a, b, c, point, more, colour))

class World:
    def __init__(self, item): self.items = {}
    def put(self, key: str, value: float) -> str:
        "Put."
        self.items[key] = value
        return "ok"
"""
SPEC = """
dataset: {items: [{n: 1}]}
prompt: {user: "Go."}
servers: {policy: {type: scripted}}
toolsets: {enabled: [terminal, file, todo]}
tools: [{python: "code.py:add"}, {state: put}]
state: {python: "code.py:World"}
agent: {max_turns: 2000, tool_timeout: 3, max_tokens: 10000000}
rewards: {right: {fn: exact_match, args: {target: done}}}
"""
ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 10**30, 1.5, float("nan"), float("inf"), 1e308, [], [None], {}, {"": None}, {"__class__": 1}),
    *(
        "",
        "\0",
        "\ud800",
        "a\nb",
        "/",
        "/dev/zero",
        "/proc/self/mem",
        "../" * 50,
        "~",
        "$HOME",
        "x" * 300,
        "x" * 3000,
    ),
    *("(a+)+$", "**/**/**", "-rf", "--help", "\x1b[2J", "\u202e"),
)
RAW = ("", "[]", "null", "{", '{"a":' * 500, '{"a": NaN}', "{}{}", '{"a": 1, "a": 2}', "\ud800", "1" * 5000)
TOOLS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "terminal": ({"command": "echo hi"}, ("timeout", "background", "workdir", "pty", "check_interval")),
    "process": ({"action": "list"}, ("session_id", "data", "timeout", "limit", "offset")),
    "read_file": ({"path": "a"}, ("offset", "limit")),
    "write_file": ({"path": "a", "content": "x"}, ()),
    "patch": ({"mode": "replace", "path": "a", "old_string": "x", "new_string": "y"}, ("replace_all", "patch")),
    "search_files": ({"pattern": "x"}, ("path", "file_glob", "limit", "offset", "context", "output_mode", "target")),
    "todo": ({"todos": [{"id": "1", "content": "x", "status": "pending"}]}, ("merge",)),
    "add": ({"a": 1}, ("b", "c", "point", "more", "colour")),
    "put": ({"key": "a", "value": 1}, ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", TOOLS)
async def test_odd_arguments_are_answered_and_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str
) -> None:
    (tmp_path / "code.py").write_text(CODE)
    right, more = TOOLS[tool]
    calls = [{"name": tool, "args": {**right, key: odd}} for key in (*right, *more) for odd in ODD]
    calls += [{"name": name, "args": raw} for raw in RAW for name in (tool, f"{tool} ", tool.upper())]
    turns = [*({"tools": [call]} for call in calls), {"say": "done"}]
    monkeypatch.setattr(
        CompiledSpec, "script", lambda self, key, prior, seat=ONLY_SEAT: Script.from_turns(turns, prior)
    )
    async with hermes_rl.open_env(parse_spec(SPEC, folder=tmp_path)) as env:
        rollout = await env.run(next(iter(env.rows())), retries=0)
    assert (rollout.error, rollout.score) == (None, 1.0)
    assert rollout.result is not None
    assert len(rollout.result.tool_calls) == len(calls)
