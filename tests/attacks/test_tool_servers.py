"""Relatives of a tool server that its own rollout loses: rewards find it as the agent left it, and no other rollout's.

The prefix of each name is the fault's number.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import open_env
from hermes_rl.spec.load import parse_spec
from tests.runs.test_tool_servers import SERVER

SPEC = """
dataset: {items: [{n: 1}, {n: 2}]}
prompt: {user: "Go."}
toolsets: [terminal]
tools: [{mcp: {name: near, command: [python3, server.py], files: [{to: server.py, from: server.py}], allow: [count]}}]
servers: {policy: {type: scripted}}
agent: {max_turns: 9}
user: {turns: USER}
solution: {turns: [{tools: [{name: count}]}, {tools: [{name: terminal, args: ACT}]}, {say: done}, {say: done}]}
rewards:
  seen: {fn: "seen.py:seen", range: [0, 9]MORE}
  again: {fn: "seen.py:seen", range: [0, 9]MORE}
"""
SEEN = """
def seen(ctx) -> float:
    return float(ctx.call_tool("count", {}))
"""
LEFT: dict[str, tuple[str, str]] = {
    "G4 a daemon": ('{command: "setsid sleep 77741 > /dev/null 2>&1 &"}', ""),
    "G4 a process that is deaf to signals": ("{command: \"trap '' TERM HUP INT; sleep 77741 &\"}", ""),
    "G4 a command that runs out of time": ('{command: "sleep 77741", timeout: 1}', ""),
    "G4 a process of the server's name": ('{command: "cp $(command -v sleep) python3; ./python3 77741 &"}', ""),
    "G4 a reward in a sandbox": ("{command: pwd}", ", isolate: sandbox"),
    "G4 a reward in the runner": ("{command: pwd}", ", isolate: none"),
    "G4 a reward of each step": ('{command: "setsid sleep 77741 > /dev/null 2>&1 &"}', ", per_step: last"),
}
"""What the agent runs before the reward looks, and how the reward runs."""


async def rollouts(folder: Path, act: str, more: str) -> list[Any]:
    shutil.copy(SERVER, folder / "server.py")
    (folder / "seen.py").write_text(SEEN)
    text = SPEC.replace("ACT", act).replace("MORE", more).replace("USER", "[On.]" if "per_step" in more else "[]")
    async with open_env(parse_spec(text, folder=folder)) as env:
        return [await env.run(row, retries=0) for row in env.rows()]


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT)
async def test_reward_finds_the_tool_server_as_the_agent_left_it(tmp_path: Path, name: str) -> None:
    for rollout in await rollouts(tmp_path, *LEFT[name]):
        assert rollout.error is None
        first = 4.0 if "per_step" in LEFT[name][1] else 2.0  # after two calls of the first step
        assert sorted(reward.value for reward in rollout.rewards.values()) == [first, first + 1]
