"""What a run costs beside the way it is commonly written: groups, with a no-op tool, a reward and a line per group.

    python benchmarks/runs.py [--groups N] [--concurrency C] [--latency MS] [--repetitions N]

One server process with a fixed latency; 64 groups of 4 with four tool turns each by default. Contenders, each in a
process of its own, in turns:

- raw aiohttp: the conversations, so many at a time, and nothing around them;
- openai client: the same over `AsyncOpenAI`;
- one group at a time: the reference design's process loop, written from its description: it awaits one group after
  the other, the group's rollouts together, each over the openai client with its tool in a pool of threads, and appends
  a line;
- hermes-rl process: `runs.process` of a spec with its journals, everything but a tokenizer, which the others lack too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from loop import server
from loop_contenders import PROMPT, RESULT, TOOL, openai_client, raw_aiohttp
from report import machine, say, spread, table

TURNS, SIZE = 5, 4
Measured = dict[str, float]


def main() -> None:
    options = arguments()
    if options.contender:
        say(json.dumps(asyncio.run(measure(options))))
        return
    with server(TURNS, options.latency / 1000) as url:
        measured: dict[str, list[Measured]] = {name: [] for name in CONTENDERS}
        for repetition in range(options.repetitions):
            names = list(CONTENDERS)
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                measured[name].append(play(name, url, options))
    say(f"{options.groups} groups of {SIZE}, {TURNS} model calls each, {options.concurrency} rollouts at a time, ")
    say(f"{options.latency:g} ms latency, {options.repetitions} repetitions; median (smallest to largest).")
    say(f"{machine()}.\n")
    say(summary(measured, options))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help="groups of four (default: 64)")
    parser.add_argument("--concurrency", type=int, default=64, help="rollouts at a time (default: 64)")
    parser.add_argument("--latency", type=float, default=50, help="of the server, in milliseconds (default: 50)")
    parser.add_argument("--repetitions", type=int, default=3, help="of everything (default: 3)")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args()


def play(name: str, url: str, options: argparse.Namespace) -> Measured:
    command = [sys.executable, __file__, "--contender", name, "--url", url, "--groups", str(options.groups)]
    done = subprocess.run(
        [*command, "--concurrency", str(options.concurrency)], stdout=subprocess.PIPE, text=True, check=True
    )
    measured: Measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["turns"] == options.groups * SIZE * TURNS, measured
    return measured


async def measure(options: argparse.Namespace) -> Measured:
    """CPU and wall seconds without imports."""
    with tempfile.TemporaryDirectory() as folder:
        run = await CONTENDERS[options.contender](options, Path(folder))
        cpu, wall = time.process_time(), time.perf_counter()
        turns = await run()
        return {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "turns": turns}


Run = Callable[[], Awaitable[int]]


def lanes(client: Callable[..., object]) -> Callable[[argparse.Namespace, Path], Awaitable[Run]]:
    """All conversations, so many at a time."""

    async def prepare(options: argparse.Namespace, folder: Path) -> Run:
        async def run() -> int:
            left = iter(range(options.groups * SIZE))
            async with client(options.url) as play:  # type: ignore[attr-defined]

                async def lane() -> int:
                    return sum([await play() for _ in left])

                return sum(await asyncio.gather(*(lane() for _ in range(options.concurrency))))

        return run

    return prepare


async def one_group_at_a_time(options: argparse.Namespace, folder: Path) -> Run:
    from openai import AsyncOpenAI

    pool, client = ThreadPoolExecutor(128), AsyncOpenAI(base_url=options.url, api_key="none", max_retries=0)

    async def rollout() -> dict[str, object]:
        messages, turns = list(PROMPT), 0
        while True:
            completion = await client.chat.completions.create(
                model="bench",
                messages=messages,
                tools=[TOOL],
                temperature=1.0,  # type: ignore[arg-type, list-item]
            )
            message = completion.choices[0].message
            turns += 1
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return {"messages": messages, "turns": turns}
            for call in message.tool_calls:
                content = await asyncio.get_running_loop().run_in_executor(pool, lambda: RESULT)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    async def run() -> int:
        turns = 0
        with (folder / "groups.jsonl").open("a") as file:
            for _ in range(options.groups):
                group = await asyncio.gather(*(rollout() for _ in range(SIZE)))
                scores = [1.0 for _ in group]
                file.write(json.dumps({"messages": [one["messages"] for one in group], "scores": scores}) + "\n")
                turns += sum(int(str(one["turns"])) for one in group)
        return turns

    return run


SPEC = """
dataset: {{items: {items}}}
prompt: {{messages: {messages}}}
tools: [{{python: "code.py:noop"}}]
rewards: {{done: {{fn: "code.py:done"}}}}
agent: {{max_turns: 50, temperature: 1.0}}
servers: {{policy: {{type: openai, base_url: "{url}", model: bench}}}}
process: {{groups: {groups}, group_size: 4, concurrency: {concurrency}}}
"""
CODE = '''
async def noop(note: str) -> str:
    """Do nothing."""
    return RESULT

def done(result):
    return float(result.turns_used)

RESULT = {result!r}
'''


async def hermes_rl(options: argparse.Namespace, folder: Path) -> Run:
    from hermes_rl.data.load import load_rows
    from hermes_rl.rollouts.compiled import CompiledSpec
    from hermes_rl.rollouts.encode import Encoder
    from hermes_rl.runs.budget import Budget
    from hermes_rl.runs.directory import RunDirectory
    from hermes_rl.runs.process import ProcessPlan, process
    from hermes_rl.runs.progress import Progress
    from hermes_rl.spec.load import parse_spec

    (folder / "code.py").write_text(CODE.format(result=RESULT))
    text = SPEC.format(
        items=json.dumps([{"n": n} for n in range(options.groups)]),
        messages=json.dumps(PROMPT), url=options.url, groups=options.groups, concurrency=options.concurrency,
    )  # fmt: skip
    spec = parse_spec(text, folder=folder)
    compiled, rows = CompiledSpec(spec), load_rows(spec, "train", notify=say)
    plan = ProcessPlan(SIZE, options.groups, concurrency=options.concurrency)

    async def run() -> int:
        with RunDirectory(folder / "run") as directory:
            encoder, progress = Encoder(None, "none of the contenders has one"), Progress(quiet=True)
            async with compiled:
                await process(compiled, rows, plan, directory, encoder=encoder, budget=Budget(), progress=progress)
            with closing(directory.journal("rollouts.jsonl")) as journal:
                return sum(line["turns"] for line in journal.read())

    return run


CONTENDERS = {
    "raw aiohttp": lanes(raw_aiohttp),
    "openai client": lanes(openai_client),
    "one group at a time": one_group_at_a_time,
    "hermes-rl process": hermes_rl,
}


def summary(measured: dict[str, list[Measured]], options: argparse.Namespace) -> str:
    raw, reference = measured["raw aiohttp"], measured["one group at a time"]
    ideal = math.ceil(options.groups * SIZE / options.concurrency) * TURNS * options.latency / 1000
    rows = []
    for name, runs in measured.items():
        cpu = [1000 * run["cpu"] / run["turns"] for run in runs]
        to_raw = [run["cpu"] / one["cpu"] for run, one in zip(runs, raw, strict=True)]
        to_reference = [run["cpu"] / one["cpu"] for run, one in zip(runs, reference, strict=True)]
        faster = [one["wall"] / run["wall"] for run, one in zip(runs, reference, strict=True)]
        share = [ideal / run["wall"] for run in runs]
        rows.append([name, spread(cpu), spread(to_raw), spread(to_reference), spread(faster, 1), spread(share)])
    heads = ["", "CPU ms per turn", "to raw", "to one group at a time", "times as fast as that", "share of the ideal"]
    return table(heads, rows)


if __name__ == "__main__":
    main()
