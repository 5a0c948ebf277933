"""What a turn of the agent loop costs, beside the openai client and bare HTTP.

    python benchmarks/loop.py [--turns N] [--concurrency C]

One server process with a fixed latency, the same conversations for each contender, each in a process of its own,
in turns and several times. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from loop_contenders import CONTENDERS
from report import machine, say, spread, table

HERE = Path(__file__).parent
BASELINE = "raw aiohttp"
Measured = dict[str, list[dict[str, float]]]


def main() -> None:
    options = arguments()
    with server(options.turns, options.latency / 1000) as url:
        measured = play_all(url, options)
    say(f"{options.conversations} conversations of {options.turns} turns, {options.concurrency} at a time, ")
    say(f"{options.latency:g} ms latency, {options.repetitions} repetitions; median (smallest to largest).")
    say(f"{machine()}.\n")
    say(summary(measured))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10, help="model calls per conversation (default: 10)")
    parser.add_argument("--concurrency", type=int, default=64, help="conversations at a time (default: 64)")
    parser.add_argument("--conversations", type=int, default=256, help="conversations in all (default: 256)")
    parser.add_argument("--latency", type=float, default=20, help="of the server, in milliseconds (default: 20)")
    parser.add_argument("--repetitions", type=int, default=5, help="of everything (default: 5)")
    return parser.parse_args()


def server(turns: int, latency: float, shape: str = "fixed", tool: str = "noop") -> AbstractContextManager[str]:
    """Start the model of the benchmarks; the context is its address."""
    options = ["--turns", str(turns), "--latency", str(latency), "--shape", shape, "--tool", tool]
    return serving(str(HERE / "loop_server.py"), *options)


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """Start a program that prints its address, which is the context; end it behind that."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def play_all(url: str, options: argparse.Namespace) -> Measured:
    measured: Measured = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for repetition in range(options.repetitions):
        # Nobody is always the first or always behind the same one.
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            measured[name].append(play(name, url, options))
    return measured


def play(name: str, url: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, str(HERE / "loop_contenders.py"), name, url]
    command += [str(options.conversations), str(options.concurrency)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout)
    assert measured["turns"] == options.conversations * options.turns, measured
    return measured


def summary(measured: Measured) -> str:
    baseline = measured[BASELINE]
    rows = []
    for name, runs in measured.items():
        cpu = [1000 * run["cpu"] / run["turns"] for run in runs]
        rate = [run["turns"] / run["wall"] for run in runs]
        more = [run["cpu"] / base["cpu"] for run, base in zip(runs, baseline, strict=True)]
        faster = [base["wall"] / run["wall"] for run, base in zip(runs, baseline, strict=True)]
        rows.append([name, spread(cpu), spread(more), spread(rate, 0), spread(faster)])
    return table(["loop", "CPU ms per turn", "ratio to raw", "turns per second", "ratio to raw"], rows)


if __name__ == "__main__":
    main()
