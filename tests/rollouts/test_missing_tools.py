"""What a spec's toolsets need and a machine lacks is reported with its place before anything runs."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from hermes_rl import open_env
from hermes_rl.errors import UserError
from hermes_rl.rollouts.sandboxes import Tooling, named_toolsets, toolset_problems
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.spec.load import parse_spec
from hermes_rl.tools.hermes_toolsets import HermesToolsets
from tests.commands import hermes
from tests.waiting import until

BASE = "version: 1\ndataset: {items: [{q: a}]}\nprompt: {user: a}\nservers: {policy: {type: scripted}}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("toolsets", "expected"),
    [
        ("[file, web]", ["5:18: toolset web cannot work here: set SEARXNG_URL"]),
        ("{enabled: [web, file], disabled: [web]}", []),
        ("{distribution: {file: 1, web: 0.5, tts: 0}}", ["5:41: toolset web cannot work here"]),
        ("{distribution: terminal_only}", []),
        ("{distribution: minimal}", ["5:26: toolset web cannot work here"]),
        ("{distribution: minimal, disabled: [web]}", []),
        ("[memory, clarify]", ["5:12: toolset memory cannot be used", "5:20: toolset clarify cannot be used"]),
    ],
)
def test_what_toolsets_lack(toolsets: str, expected: list[str]) -> None:
    spec = parse_spec(f"{BASE}toolsets: {toolsets}\n", name="s.yaml")
    found = [str(problem) for problem in toolset_problems(spec, HermesToolsets({}))]
    assert len(found) == len(expected)
    assert all(said.startswith(f"s.yaml:{start}") for said, start in zip(found, expected, strict=True))


async def test_a_run_stops_before_it_starts() -> None:
    tooling = Tooling(parse_spec(f"{BASE}toolsets: [memory]\n", name="s.yaml"), {})
    with pytest.raises(UserError, match=r"s\.yaml:5:12: toolset memory cannot be used in a rollout"):
        await tooling.open(SandboxConfig())


def test_a_distribution_names_all_that_it_may_draw() -> None:
    spec = parse_spec(f"{BASE}toolsets: {{distribution: {{file: 1, web: 0.5, tts: 0}}}}\n")
    assert [name for _, name in named_toolsets(spec)] == ["file", "web"]


HOLDING = '''
class Shop:
    def __init__(self, item):
        self.log = item["log"]

    def sell(self, what: str) -> str:
        """Sell something."""
        return what

    def shut(self):
        with open(self.log, "a") as file:
            file.write("shut ")
'''


@pytest.mark.parametrize("isolate", ["none", "process"])
async def test_a_state_that_is_made_to_list_its_tools_is_closed(tmp_path: Path, isolate: str) -> None:
    log = tmp_path / "log"
    (tmp_path / "shop.py").write_text(HOLDING)
    spec = {
        "dataset": {"items": [{"log": str(log)}]},
        "prompt": {"user": "Sell."},
        "state": {"python": "shop.py:Shop", "isolate": isolate, "close": "shut"},
        "tools": [{"state": "sell"}],
        "rewards": {"right": {"fn": "exact_match", "args": {"target": "a"}}},
        "servers": {"policy": {"type": "scripted"}},
    }
    async with open_env(parse_spec(yaml.safe_dump(spec), folder=tmp_path)) as env:
        (tool,) = env.tools(env.rows()[0])
    assert tool["function"]["name"] == "sell"
    assert log.read_text() == "shut "


LEAVES = '''
import subprocess

class World:
    def __init__(self, item):
        started = subprocess.Popen(["sleep", item["seconds"]], start_new_session=True)
        subprocess.run(["sh", "-c", f"setsid sleep {item['seconds']} >/dev/null 2>&1 &"])
        print(started.pid)

    def look(self) -> str:
        """Look."""
        return "there"
'''


def sleeping(seconds: str) -> list[str]:
    """The processes that sleep for so long."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and (process / "cmdline").read_bytes() == f"sleep\0{seconds}\0".encode():
                found.append(process.name)
    return found


@pytest.mark.parametrize("isolate", ["process", pytest.param("reuse", marks=pytest.mark.slow), "sandbox"])
async def test_sessions_that_the_code_of_a_state_starts_end_with_the_run(tmp_path: Path, isolate: str) -> None:
    (tmp_path / "world.py").write_text(LEAVES)
    seconds = f"777.{os.getpid()}"
    spec = {
        "dataset": {"items": [{"seconds": seconds}, {"seconds": seconds + "0"}]},
        "prompt": {"user": "Look."},
        "state": {"python": "world.py:World", "isolate": isolate},
        "tools": [{"state": "look"}],
        "rewards": {"right": {"fn": "exact_match", "args": {"target": "a"}}},
        "solution": {"turns": [{"tools": [{"name": "look"}]}, {"say": "a"}]},
        "servers": {"policy": {"type": "scripted"}},
    }
    if isolate == "reuse":  # what it has started may serve further rollouts, and ends with the program
        (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec | {"process": {"groups": 2, "group_size": 1}}))
        await asyncio.to_thread(hermes, "run", "spec.yaml", "process", cwd=tmp_path)
        scores = [json.loads(line)["score"] for line in next(tmp_path.rglob("rollouts.jsonl")).read_text().splitlines()]
    else:
        async with open_env(parse_spec(yaml.safe_dump(spec), folder=tmp_path)) as env:
            scores = [(await env.run(row)).score for row in env.rows()]
    assert scores == [1.0, 1.0]
    await until(lambda: not sleeping(seconds) + sleeping(seconds + "0"))
