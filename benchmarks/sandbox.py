"""What a sandboxed rollout costs: start, commands, files, release, alone and beside many others.

    python benchmarks/sandbox.py [--concurrency C] [--rollouts N]

Prints a Markdown table of milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Awaitable

from report import machine, say, table

from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.config import SandboxConfig

FILE = os.urandom(64 * 1024)
COMMANDS = 10
Seconds = dict[str, list[float]]


def main() -> None:
    options = arguments()
    alone = asyncio.run(play_all(options.backend, 1, max(8, options.rollouts // 8)))
    beside = asyncio.run(play_all(options.backend, options.concurrency, options.rollouts))
    say(f"Sandbox {options.backend}, {options.rollouts} rollouts, {COMMANDS} times each step; milliseconds.")
    say(f"{machine()}.\n")
    heads = ["step", "alone: median", "95 %", f"{options.concurrency} at a time: median", "95 %"]
    say(table(heads, [[name, *figures(alone[name]), *figures(beside[name])] for name in alone]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=int, default=32, help="rollouts at a time (default: 32)")
    parser.add_argument("--rollouts", type=int, default=128, help="rollouts in all (default: 128)")
    parser.add_argument("--backend", default="bubblewrap", help="bubblewrap (default) or none")
    return parser.parse_args()


async def play_all(backend: str, concurrency: int, rollouts: int) -> Seconds:
    seconds: Seconds = defaultdict(list)
    await rollout(backend, defaultdict(list))  # what is made once per process is not a rollout's cost
    left = iter(range(rollouts))

    async def lane() -> None:
        for _ in left:
            await rollout(backend, seconds)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(concurrency)))
    seconds["a rollout's share of the time"] = [(time.perf_counter() - began) / rollouts]
    return seconds


async def rollout(backend: str, seconds: Seconds) -> None:
    sandbox = create_sandbox(SandboxConfig(backend=backend))
    try:
        await timed(sandbox.start(), seconds["start"])
        for _ in range(COMMANDS):
            await timed(sandbox.run("true"), seconds["command `true`"])
            await timed(sandbox.run("seq 1000 | sort -r | tail -1"), seconds["pipe of three commands"])
            await timed(sandbox.write_file("data.bin", FILE), seconds["write 64 KiB"])
            await timed(sandbox.read_file("data.bin"), seconds["read 64 KiB"])
    finally:
        await timed(sandbox.close(), seconds["release"])


async def timed(work: Awaitable[object], seconds: list[float]) -> None:
    began = time.perf_counter()
    await work
    seconds.append(time.perf_counter() - began)


def figures(seconds: list[float]) -> list[str]:
    """Median and 95th percentile."""
    ordered = sorted(seconds)
    return [f"{1000 * ordered[int(share * (len(ordered) - 1))]:.1f}" for share in (0.5, 0.95)]


if __name__ == "__main__":
    main()
