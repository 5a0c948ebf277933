"""The ways to play groups that `runs.py` compares; each is measured in a process of its own.

A contender prepares (imports, loading) and returns what is measured. All of them draw the score of a rollout as a
policy would that solves the task half of the time, so that an eighth of the groups teaches nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loop_contenders import PROMPT, RESULT, TOOL, openai_client, raw_aiohttp
from report import say

SIZE = 4
MOST = 0.98
"""Share of the groups; the last ones cannot keep a server busy, as nothing begins behind them."""
MOST_ROWS = 1000
"""Then the rows come again."""
FLIPS = 0.5
"""How often a rollout is right."""


@dataclass
class Tally:
    """What a contender did: its model calls, when each group ended, and how many groups have scores that differ."""

    ended: list[float] = field(default_factory=list)
    turns: int = 0
    useful: int | None = None
    """None for those that know no groups."""


Run = Callable[[Tally], Awaitable[None]]
Contender = Callable[[argparse.Namespace, Path], Awaitable[Run]]


async def measure(contender: Contender, options: argparse.Namespace) -> dict[str, Any]:
    """CPU seconds of this process and of the whole machine, and wall seconds, without imports.

    `began` and `most` (until most groups had ended) are monotonic times.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, tally = await contender(options, Path(folder)), Tally()
        started_at, cpu, wall, busy = time.monotonic(), time.process_time(), time.perf_counter(), machine_busy()
        await run(tally)
        measured = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "began": started_at}
        measured["machine"] = machine_busy() - busy
        count_groups(tally, Path(folder))
    most_ended_at = sorted(tally.ended)[int(MOST * len(tally.ended)) - 1]
    return {**measured, "turns": tally.turns, "useful": tally.useful, "most": most_ended_at}


def machine_busy() -> float:
    """Seconds for which all cores together were busy since the machine's start, with the kernel's own work.

    See proc_stat(5): of the first line's fields the fourth and the fifth are time in which nothing ran.
    """
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def count_groups(tally: Tally, folder: Path) -> None:
    """Look into the file of groups, where there is one; nobody's time is measured here."""
    groups = next(folder.rglob("groups.jsonl"), None)
    if groups is not None:
        scores = [json.loads(line)["scores"] for line in groups.read_text().splitlines()]
        tally.useful = sum(len(set(group)) > 1 for group in scores)
    rollouts = next(folder.rglob("rollouts.jsonl"), None)
    if rollouts is not None:
        tally.turns = sum(json.loads(line)["turns"] for line in rollouts.read_text().splitlines())


def lanes(client: Callable[..., Any]) -> Contender:
    """All conversations, so many at a time."""

    async def prepare(options: argparse.Namespace, folder: Path) -> Run:
        async with client(options.url):
            pass  # the imports

        async def run(tally: Tally) -> None:
            remaining = iter(range(options.groups * SIZE))
            async with client(options.url) as play:

                async def lane() -> None:
                    for _ in remaining:
                        turns = await play()
                        tally.turns += turns
                        tally.ended.append(time.monotonic())

                await asyncio.gather(*(lane() for _ in range(options.concurrency)))

        return run

    return prepare


async def one_group_at_a_time(options: argparse.Namespace, folder: Path) -> Run:
    """The reference design's process loop, written from its description."""
    from openai import AsyncOpenAI

    pool, client = ThreadPoolExecutor(128), AsyncOpenAI(base_url=options.url, api_key="none", max_retries=0)

    async def rollout() -> dict[str, Any]:
        messages, turns = list(PROMPT), 0
        while True:
            completion = await client.chat.completions.create(
                model="bench",
                messages=messages,  # type: ignore[arg-type]
                tools=[TOOL],  # type: ignore[list-item]
                temperature=1.0,
            )
            message = completion.choices[0].message
            turns += 1
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return {"messages": messages, "turns": turns}
            for call in message.tool_calls:
                content = await asyncio.get_running_loop().run_in_executor(pool, lambda: RESULT)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def run(tally: Tally) -> None:
        drawn = random.Random(0)
        with (folder / "groups.jsonl").open("a") as file:
            for _ in range(options.groups):
                group = await asyncio.gather(*(rollout() for _ in range(SIZE)))
                scores = [float(drawn.random() < FLIPS) for _ in group]
                file.write(json.dumps({"messages": [one["messages"] for one in group], "scores": scores}) + "\n")
                tally.turns += sum(one["turns"] for one in group)
                tally.ended.append(time.monotonic())

    return run


SPEC = """
dataset: {{items: {items}}}
prompt: {{messages: {messages}}}
{tools}
rewards: {{done: {{fn: "code.py:done", isolate: {isolate}}}}}
agent: {{max_turns: 50, temperature: 1.0}}
servers: {{policy: {{type: openai, base_url: "{url}", model: bench, max_concurrency: 8192}}}}
process: {{groups: {groups}, group_size: 4}}
"""
CODE = '''
import random

async def noop(note: str) -> str:
    """Do nothing."""
    return RESULT

def done(result):
    assert not result.tool_errors
    return float(DRAWN.random() < {flips})

DRAWN = random.Random(0)
RESULT = {result!r}
'''
NOOP = 'tools: [{{python: "code.py:noop", isolate: {isolate}}}]'
TERMINAL = "toolsets: {{enabled: [terminal]}}"


async def hermes_rl(options: argparse.Namespace, folder: Path, tools: str = NOOP, isolate: str = "none") -> Run:
    """`runs.process` of a spec with its journals, everything but a tokenizer, which the others lack too.

    The tool and the reward run in the runner, as those of the others do. With a concurrency of 0 as many rollouts at a
    time as it finds to be carried.
    """
    import aiohttp  # noqa: F401  # a run imports it with its first client
    from playing import play

    from hermes_rl.data.load import load_rows
    from hermes_rl.rollouts.compiled import CompiledSpec
    from hermes_rl.rollouts.rollout import Encoder, Group
    from hermes_rl.runs.progress import Progress
    from hermes_rl.spec.load import parse_spec
    from hermes_rl.threads import reduce_gc_pauses

    class Noted(Progress):
        """When each group ended."""

        def __init__(self, tally: Tally) -> None:
            super().__init__(quiet=True)
            self.tally = tally

        def step(self, done: int, group: Group) -> None:
            self.tally.ended.append(time.monotonic())

    (folder / "code.py").write_text(CODE.format(result=RESULT, flips=FLIPS))
    text = SPEC.format(
        items=json.dumps([{"n": n} for n in range(min(options.groups, MOST_ROWS))]),
        tools=tools.format(isolate=isolate), isolate=isolate,
        messages=json.dumps(PROMPT), url=options.url, groups=options.groups,
    )  # fmt: skip
    spec = parse_spec(text, folder=folder)
    compiled, rows = CompiledSpec(spec), load_rows(spec, "train", notify=say)

    async def run(tally: Tally) -> None:
        with reduce_gc_pauses():  # as the command line does it
            await play(
                compiled, rows, folder / "run", Noted(tally), Encoder(None, "none of the contenders has one"),
                size=SIZE, groups=options.groups, concurrency=options.concurrency or None,
            )  # fmt: skip

    return run


async def hermes_rl_isolated(options: argparse.Namespace, folder: Path) -> Run:
    """The same with the tool and the reward in worker processes, as they are by default."""
    return await hermes_rl(options, folder, isolate="reuse")


async def hermes_rl_sandboxed(options: argparse.Namespace, folder: Path) -> Run:
    """The same with the terminal: a sandbox for each rollout, and a command in it for each tool turn."""
    return await hermes_rl(options, folder, TERMINAL)


CONTENDERS: dict[str, Contender] = {
    "raw aiohttp": lanes(raw_aiohttp),
    "openai client": lanes(openai_client),
    "one group at a time": one_group_at_a_time,
    "hermes-rl process": hermes_rl,
    "hermes-rl process, isolated": hermes_rl_isolated,
    "hermes-rl process, sandboxed": hermes_rl_sandboxed,
}
SANDBOXED = "hermes-rl process, sandboxed"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("url")
    parser.add_argument("groups", type=int)
    parser.add_argument("concurrency", type=int)
    given = parser.parse_args()
    say(json.dumps(asyncio.run(measure(CONTENDERS[given.contender], given))))
