"""How long the event loop is held up while every sandbox does the worst that the tools allow.

    python benchmarks/lag.py [--sandboxes N] [--seconds S]

Each sandbox does one of these again and again: it reads a large file of short lines, asks for a name that is missing
beside 20,000, hands in an artifact of 200,000 names, patches a file at every place, and prints without end. Others have
written what parsers and rewards find hard to read. A timer of 5 ms beside them says how late it was.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from report import machine, say, table

from hermes_rl.agent.result import AgentResult
from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig
from hermes_rl.scoring.reward_function import find_reward
from hermes_rl.threads import reduce_gc_pauses
from hermes_rl.tokens.load import load_renderer
from hermes_rl.tokens.rendering import RendererSettings
from hermes_rl.tools.artifacts import ArtifactRequest, collect
from hermes_rl.tools.base import Tool, ToolRuntime
from hermes_rl.tools.toolsets._patch import Patch
from hermes_rl.tools.toolsets.file import ReadFile
from hermes_rl.tools.toolsets.terminal import Terminal
from hermes_rl.user_code.pool import POOL

TICK = 0.005
Work = Callable[[ToolRuntime], Awaitable[Any]]


def calling(tool: type[Tool], **args: Any) -> Work:
    return lambda runtime: tool().call(args, runtime)


async def artifact(runtime: ToolRuntime) -> None:
    await collect(await runtime.sandbox(), [ArtifactRequest("names", path="names")], 60)


RENDERER = load_renderer(None, RendererSettings())
HARD = [
    piece * (64_000 // len(piece))
    for piece in (" ", "[", '{"a": ', "<tool_call>", "<tool_call>\n{", "\\", "1", "\ud800 ", "a b\n", "</think>", "1e")
]
TURNS = [RENDERER.tokenizer.encode(text.encode("utf-8", "replace").decode()) for text in HARD]
FUZZY = find_reward("fuzzy_match", None)


async def read_turns(_: ToolRuntime) -> None:
    for turn in TURNS:
        await RENDERER.parse(turn, [], [])


async def grade(_: ToolRuntime) -> None:
    for text in HARD:
        result = AgentResult(messages=[{"role": "assistant", "content": text}])
        arguments = {"result": result, "target": "the answer is 1"}
        await POOL.call(FUZZY.code, arguments, "hermes_rl.plugins:identity", 10.0)


WORST: dict[str, tuple[str, Work]] = {
    "turns that are hard to parse": ("true", read_turns),
    "turns that are hard to grade": ("true", grade),
    "66 MB of short lines": (
        "yes '' | head -c 66000000 > lines",
        calling(ReadFile, path="lines", offset=65_000_000),
    ),
    "a missing name beside 20,000": (
        "mkdir many; cd many; seq -f '%.0f-abcdefghijklmnopqrstuvwxyz' 1 20000 | xargs touch",
        calling(ReadFile, path="many/abcdefghijklmnopqrstuvwxyz"),
    ),
    "an artifact of 200,000 names": ("mkdir names; cd names; seq 1 200000 | xargs touch", artifact),
    "a patch at every place": (
        "true",
        lambda runtime: _patched(runtime, "head -c 1000000 /dev/zero | tr '\\0' a > big", "a", "b"),
    ),
    "a patch of every line": (
        "true",
        lambda runtime: _patched(runtime, "yes abc | head -c 8000000 > big", "c\n", "d\n"),
    ),
    "a lenient patch": (
        "yes 'a  b' | head -c 2000000 > big",
        calling(Patch, path="big", old_string="a b\n" * 1000 + "c", new_string="x"),
    ),
    "output without end": ("true", calling(Terminal, command="yes | head -c 300000000", timeout=20)),
    "one long line": ("head -c 66000000 /dev/zero | tr '\\0' a > line", calling(ReadFile, path="line")),
}  # fmt: skip


async def _patched(runtime: ToolRuntime, make: str, old: str, new: str) -> None:
    await (await runtime.sandbox()).run(make)
    await Patch().call({"path": "big", "old_string": old, "new_string": new, "replace_all": True}, runtime)


async def measure(sandboxes: int, seconds: float) -> tuple[list[float], Counter[str], float]:
    """Return by how much each tick was late, how often each work was done, and the cores that this process used."""
    done, late = Counter[str](), list[float]()
    ready, stop = asyncio.Barrier(sandboxes + 1), asyncio.Event()

    async def lane(lane_index: int) -> None:
        name, (prepare, work) = list(WORST.items())[lane_index % len(WORST)]
        limits = ResourceLimits(disk=1 << 28, memory=1 << 30)
        async with ToolRuntime(SandboxConfig(limits=limits), task_id=f"lag-{lane_index}") as runtime:
            await (await runtime.sandbox()).run(prepare, timeout=300)
            await ready.wait()
            while not stop.is_set():
                await work(runtime)
                done[name] += 1

    async def tick() -> None:
        while not stop.is_set():
            tick_start = time.perf_counter()
            await asyncio.sleep(TICK)
            late.append(time.perf_counter() - tick_start - TICK)

    lanes = [asyncio.create_task(lane(number)) for number in range(sandboxes)]
    await ready.wait()
    started_at, used = time.perf_counter(), time.process_time()
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(seconds)
    stop.set()
    await ticking
    share = (time.process_time() - used) / (time.perf_counter() - started_at)
    await asyncio.gather(*lanes)
    return late, done, share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sandboxes", type=int, default=32, help="sandboxes at a time (default: 32)")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: 60)")
    options = parser.parse_args()
    with reduce_gc_pauses():  # as in a run
        late, done, share = asyncio.run(measure(options.sandboxes, options.seconds))
    late.sort()
    say(f"{options.sandboxes} sandboxes for {options.seconds:g} s, {len(late)} ticks, {share:.2f} cores of our own.")
    say(f"{machine()}.\n")
    shares = {"median": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "longest": 1.0}
    rows = [[name, f"{late[min(int(len(late) * part), len(late) - 1)] * 1000:.1f}"] for name, part in shares.items()]
    say(table(["late by", "ms"], rows))
    say("")
    say(table(["work", "times done"], [[name, str(done[name])] for name in WORST]))


if __name__ == "__main__":
    main()
