"""Fifty SIGKILLs at random of the runner, of agent programs and of the model server: each group is there once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import uuid
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from hermes_rl.tokens.tokenizer import small_tokenizer_path
from tests.cli.test_run import lines
from tests.runs.faulty_model import number_of
from tests.runs.test_kills import KILLS, Lives, lives, seed_of

GROUPS = 300
LEAST = 5
"""Kills of each that there have to be, at random."""
AGENT = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
while True:
    body = json.dumps({"model": "m", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["BASE"], body, {"Content-Type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        os._exit(0)
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "A"} for call in message["tool_calls"]]
"""
SPEC = """
dataset: {items: [ITEMS]}
prompt: {user: "Do {{ n }}"}
sandbox: {files: [{to: agent.py, from: agent.py}]}
agent:
  program: {command: [python3, -S, agent.py, "{{ prompt }}", MARK], env: {BASE: "{{ endpoint }}/v1/chat/completions"}}
  timeout: 30
rewards: {number: {fn: "code.py:number", range: [-1, 1000]}}
servers: {policy: {type: openai, base_url: URL, model: faulty, tokenizer: TOKENIZER, timeout: 5}}
process: {groups: GROUPS, group_size: 2, concurrency: 6}
"""
CODE = """
def number(result):
    said = result.final_response or ""
    return float(said.rsplit(" ", 1)[1]) if said.startswith("it is") else -1.0
"""


def processes_of(mark: str) -> list[int]:
    """The processes that have a word on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "cmdline").read_text().split("\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it has ended meanwhile
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Killing:
    """A run of programs, what it needs, and how often what of it was killed."""

    def __init__(self, folder: Path, program: Lives) -> None:
        self.random, self.mark, self.port = Random(3), f"mark-{uuid.uuid4().hex}", free_port()
        self.folder, self.program, self.killed = folder, program, Counter[str]()
        items = ", ".join(f"{{n: {number}}}" for number in range(40))
        text = SPEC.replace("URL", f"http://127.0.0.1:{self.port}/v1").replace("ITEMS", items)
        text = text.replace("TOKENIZER", str(small_tokenizer_path())).replace("MARK", self.mark)
        (folder / "spec.yaml").write_text(text.replace("GROUPS", str(GROUPS)))
        (folder / "code.py").write_text(CODE)
        (folder / "agent.py").write_text(AGENT)

    async def start(self) -> None:
        self.engine = await self._engine()
        self.runner = await self._runner()

    async def _engine(self) -> asyncio.subprocess.Process:
        command = (sys.executable, "-m", "tests.runs.faulty_model", str(self.port))
        engine = await asyncio.create_subprocess_exec(*command, cwd=Path(__file__).parents[2])
        while True:  # a run that begins without any server says so, and ends
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.close()
                return engine
            except OSError:
                await asyncio.sleep(0.05)

    async def _runner(self) -> int:
        return await self.program.start("run", "spec.yaml", "process", "--out", "run", "--quiet")

    async def kill_something(self) -> None:
        """Kill one of the three, and start again what does not come back by itself."""
        what = self.random.choice(("runner", "program", "engine"))
        if what == "runner":
            os.kill(self.runner, signal.SIGKILL)
            status = await self.program.end(self.runner)
            # One that has begun while no server was there says so, and has ended by itself.
            assert status == -signal.SIGKILL or (status == 1 and "can be reached" in self.said), self.said
            self.runner = await self._runner()
        elif what == "engine":
            self.engine.kill()
            await self.engine.wait()
            self.engine = await self._engine()
        elif not await self._kill_program():
            return
        self.killed[what] += 1

    async def _kill_program(self) -> bool:
        """Kill a program; a runner that has just begun takes its time to start one."""
        for _ in range(100):
            with contextlib.suppress(IndexError, ProcessLookupError):
                os.kill(self.random.choice(processes_of(self.mark)), signal.SIGKILL)
                return True
            await asyncio.sleep(0.05)
        return False

    @property
    def said(self) -> str:
        return (self.folder / "said.txt").read_text()[-2000:]

    async def end(self) -> None:
        while (status := await self.program.end(self.runner)) != 0:
            assert status == 1 and "can be reached" in self.said, self.said
            self.runner = await self._runner()
        self.engine.kill()
        await self.engine.wait()


@pytest.mark.slow
@pytest.mark.by_turns(2, 0)
@pytest.mark.timeout(600)
async def test_runs_of_programs_write_each_group_once_whatever_is_killed(tmp_path: Path) -> None:
    async with lives(tmp_path) as program:
        run = Killing(tmp_path, program)
        await run.start()
        while run.killed.total() < KILLS:
            await asyncio.sleep(run.random.uniform(0.05, 0.5))
            await run.kill_something()
        await run.end()
    assert min(run.killed[what] for what in ("runner", "program", "engine")) >= LEAST, run.killed
    groups, rollouts = lines(tmp_path / "run" / "groups.jsonl"), lines(tmp_path / "run" / "rollouts.jsonl")
    assert len({group["group"] for group in groups}) == len(groups) == GROUPS
    assert len({line["id"] for line in rollouts}) == len(rollouts)
    scored = {str(line["id"]).partition("r")[0]: line for line in rollouts if line["score"] is not None}
    assert len(scored) == sum(line["score"] is not None for line in rollouts), "each rollout once"
    for line in scored.values():
        # One that was killed behind its call has given up; a server that is gone is no score.
        expected = number_of(seed_of(line, 1)) if line["stop_reason"] == "finished" else -1.0
        assert (line["score"], line["stop_reason"] in ("finished", "program_aborted")) == (expected, True), line
    for group in groups:
        assert group["scores"] == [scores["score"] for scores in (scored[f"{group['group']}-{n}"] for n in range(2))]
    assert processes_of(run.mark) == []
