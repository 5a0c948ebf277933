"""What a rollout costs while it waits for its model: memory, the lag of the event loop, and CPU, from ten to thousands.

    python benchmarks/in_flight.py [--rollouts 10 100 1000 5000] [--latency SECONDS]

Each number of rollouts is played at once, in a process of its own, against a server that answers after ten seconds:
one model call and a reward each, journal included, no sandbox and no tokens. Memory is what the process grew by until
all of them waited, by rollout; a few rollouts come before, so that it holds no first use of anything. CPU is measured
behind that, with a server that answers after 0.2 s, so that looking at the clock two hundred times a second is no part
of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from loop import server
from report import machine, say, table
from runs_contenders import SIZE, Run, Tally, hermes_rl

WARM, ENOUGH = 16, 400
"""Rollouts that are played before anything is measured, and by which CPU is measured at least."""
BEAT, LOOK, FAST = 0.005, 0.25, 0.2
"""Seconds between two looks at the clock, and at the memory; latency of the server by which CPU is measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[10, 100, 1000, 5000])
    parser.add_argument("--latency", type=float, default=10.0, help="of the server, in seconds (default: 10)")
    parser.add_argument("--urls", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    descriptor_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit, descriptor_limit))
    if options.urls:
        say(json.dumps(asyncio.run(measure(options.rollouts[0], *options.urls))))
        return
    rows = []
    with server(1, options.latency) as slow, server(1, FAST) as fast:
        for count in options.rollouts:
            command = [sys.executable, __file__, "--urls", slow, fast, "--rollouts", str(count)]
            figures = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            rows.append([str(count), *(f"{figures[name]:.2f}" for name in ("kB", "lag_p99", "lag_max", "cpu"))])
    say(f"{options.latency:g} s latency.\n{machine()}.\n")
    say(table(["rollouts in flight", "kB each", "lag p99, ms", "longest lag, ms", "CPU ms per rollout"], rows))


async def measure(count: int, slow: str, fast: str) -> dict[str, float]:
    lags: list[float] = []
    peak_memory = 0
    await cost(WARM, WARM, fast)

    async def beat() -> None:
        nonlocal peak_memory
        looked = 0.0
        while True:
            started_at = time.perf_counter()
            await asyncio.sleep(BEAT)
            lags.append(1000 * (time.perf_counter() - started_at - BEAT))
            if started_at - looked > LOOK:
                looked, peak_memory = started_at, max(peak_memory, memory())

    with tempfile.TemporaryDirectory() as folder:
        run = await prepared(count, slow, folder, count)
        before = memory()
        tally = Tally()
        beating = asyncio.create_task(beat())
        await run(tally)
        beating.cancel()
        assert len(tally.ended) == groups(count)
    ordered = sorted(lags)
    return {
        "kB": (peak_memory - before) / 1000 / count,
        "lag_p99": ordered[int(0.99 * (len(ordered) - 1))],
        "lag_max": ordered[-1],
        "cpu": await cost(count, max(count, ENOUGH), fast),
    }


async def cost(count: int, rollouts: int, url: str) -> float:
    """Processor milliseconds of a rollout where `count` are in flight, and nobody looks at the clock."""
    with tempfile.TemporaryDirectory() as folder:
        run = await prepared(rollouts, url, folder, count)
        cpu = time.process_time()
        await run(Tally())
        return 1000 * (time.process_time() - cpu) / rollouts


async def prepared(rollouts: int, url: str, folder: str, concurrency: int) -> Run:
    return await hermes_rl(argparse.Namespace(url=url, groups=groups(rollouts), concurrency=concurrency), Path(folder))


def groups(count: int) -> int:
    return -(-count // SIZE)


def memory() -> int:
    """Bytes of this process that are resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
