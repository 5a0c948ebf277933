"""How near a run that finds its concurrency by itself comes to the best number that one could have told it.

    python benchmarks/adaptive.py [--capacity N] [--seconds S] [--latency MS] [--tries N …]

A server in a process of its own takes `capacity` requests at a time and refuses the others (429); its latencies are
spread (the 99th percentile is ten times the median). `hermes-rl process` with its journals plays against it without a
concurrency, while the server has its capacity, then half of it, then all again. Against a server of each of these
capacities it plays with fixed numbers too, which are told as shares of the capacity.

Throughput is what the server has answered in the phase, from its first moment: what finding costs counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import urllib.request
from pathlib import Path

from loop import server
from report import machine, say, table
from runs import TURNS
from runs_contenders import Tally, hermes_rl

ENDLESS = 1_000_000
"""Groups."""


def main() -> None:
    options = arguments()
    phases = [options.capacity, options.capacity // 2, options.capacity]
    measured_rates = asyncio.run(rates(0, phases, options))
    fixed = {
        capacity: [asyncio.run(rates(round(share * capacity), [capacity], options))[0] for share in options.tries]
        for capacity in dict.fromkeys(phases)
    }
    say(f"{options.seconds:g} s per phase, {options.latency:g} ms latency (median, lognormal), {TURNS} calls each.")
    say(f"{machine()}.\n")
    heads = ["requests that the server takes", "answers/s", *(f"{share:g} × as many" for share in options.tries)]
    rows = [
        [f"{capacity}", f"{rate:.1f}", *(f"{one:.1f}" for one in fixed[capacity]), f"{rate / max(fixed[capacity]):.2f}"]
        for capacity, rate in zip(phases, measured_rates, strict=True)
    ]
    say(table([*heads, "share of the best"], rows))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=64, help="requests that the server takes (default: 64)")
    parser.add_argument("--seconds", type=float, default=25, help="of a phase (default: 25)")
    parser.add_argument("--latency", type=float, default=300, help="median, in milliseconds (default: 300)")
    parser.add_argument(
        "--tries", type=float, nargs="+", default=[1, 1.125], help="fixed numbers of rollouts (default: 1 1.125)"
    )
    return parser.parse_args()


async def rates(concurrency: int, capacities: list[int], options: argparse.Namespace) -> list[float]:
    """Answers per second of a server whose capacity changes, to a run of so many rollouts at a time."""
    with server(TURNS, options.latency / 1000, "lognormal") as url, tempfile.TemporaryDirectory() as folder:
        run_options = argparse.Namespace(url=url, groups=ENDLESS, concurrency=concurrency)
        run = await hermes_rl(run_options, Path(folder))
        playing = asyncio.ensure_future(run(Tally()))
        changes = []
        for capacity in capacities:
            await asyncio.to_thread(ask, url, f"capacity/{capacity}")
            changes.append(time.monotonic())
            await asyncio.wait([playing], timeout=options.seconds)
        flight = await asyncio.to_thread(ask, url, "flight")
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled(), playing.exception()
    answered = [
        timestamp for (timestamp, count), (_, before) in zip(flight[1:], flight, strict=False) if count < before
    ]
    return [
        sum(change <= timestamp < change + options.seconds for timestamp in answered) / options.seconds
        for change in changes
    ]


def ask(url: str, path: str) -> list[tuple[float, int]]:
    """Of the server itself; it always tells what was in flight."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/{path}") as answer:
        flight: list[tuple[float, int]] = json.load(answer)
        return flight


if __name__ == "__main__":
    main()
