"""What a rollout costs while it waits for its model: memory, the lag of the event loop, and CPU, from ten to thousands.

    python benchmarks/in_flight.py [--rollouts 10 100 1000 5000] [--latency SECONDS]

Each number of rollouts is played at once, in a process of its own, against a server that answers after ten seconds:
one model call and a reward each, journal included, no sandbox and no tokens. Memory is what the process grew by until
all of them waited, by rollout.
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
from runs_contenders import SIZE, Tally, hermes_rl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=[10, 100, 1000, 5000])
    parser.add_argument("--latency", type=float, default=10.0, help="of the server, in seconds (default: 10)")
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if options.url:
        say(json.dumps(asyncio.run(measure(options.rollouts[0], options.url))))
        return
    rows = []
    with server(1, options.latency) as url:
        for count in options.rollouts:
            command = [sys.executable, __file__, "--url", url, "--rollouts", str(count)]
            found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
            rows.append([str(count), *(f"{found[name]:.2f}" for name in ("kB", "lag_p99", "lag_max", "cpu"))])
    say(f"{options.latency:g} s latency.\n{machine()}.\n")
    say(table(["rollouts in flight", "kB each", "lag p99, ms", "longest lag, ms", "CPU ms per rollout"], rows))


async def measure(count: int, url: str) -> dict[str, float]:
    lags: list[float] = []

    async def beat() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            lags.append(1000 * (time.perf_counter() - began - 0.005))

    with tempfile.TemporaryDirectory() as folder:
        given = argparse.Namespace(url=url, groups=-(-count // SIZE), concurrency=count)
        run = await hermes_rl(given, Path(folder))
        before, cpu = memory(), time.process_time()
        tally = Tally()
        beating, playing = asyncio.create_task(beat()), asyncio.ensure_future(run(tally))
        most = before
        while not playing.done():
            await asyncio.sleep(0.25)
            most = max(most, memory())
        beating.cancel()
        used = time.process_time() - cpu
        await playing
        assert len(tally.ended) == given.groups
    ordered = sorted(lags)
    return {
        "kB": (most - before) / 1000 / count,
        "lag_p99": ordered[int(0.99 * (len(ordered) - 1))],
        "lag_max": ordered[-1],
        "cpu": 1000 * used / count,
    }


def memory() -> int:
    """Bytes of this process that are resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
