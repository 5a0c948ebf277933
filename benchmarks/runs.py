"""What a run costs beside the way it is commonly written: groups, with a no-op tool, a reward and a line per group.

    python benchmarks/runs.py [--groups N] [--concurrency C …] [--latency MS] [--shape fixed|lognormal]
                              [--repetitions N] [--only NAME …] [--peer verifiers|inspect PYTHON] …

One server process with a fixed latency (or one that is spread: its 99th percentile is ten times its median); 64 groups
of 4 with four tool turns each by default. Contenders (`runs_contenders.py`), each in a process of its own, in turns:

- raw aiohttp: the conversations, so many at a time, and nothing around them;
- openai client: the same over `AsyncOpenAI`;
- one group at a time: the reference design's process loop, written from its description: it awaits one group after
  the other, the group's rollouts together, each over the openai client with its tool in a pool of threads, and appends
  a line;
- hermes-rl process: `runs.process` of a spec with its journals, with the tool and the reward in the runner;
- hermes-rl process, isolated: the same with both in worker processes, which is the default;
- hermes-rl process, sandboxed: the same with a command in a sandbox for each tool turn, a sandbox for each rollout;
- other frameworks (`peer_contenders.py`), where PYTHON is the interpreter of an environment that has one installed.

CPU ms per turn are the process's own; beside them stands what all cores together were busy with meanwhile: the server,
the processes in sandboxes, and the kernel, which starts and buries them.

The ideal is the time that the models alone would take: the waves of rollouts × the calls of each × the mean latency. No
program reaches it where the machine has to do anything for a turn, and the server takes a part of the same cores; raw
aiohttp says how near one can come. The last wave counts in full, as it takes as long for a few rollouts as for many;
but a concurrency that leaves it nearly empty flatters, so the waves are told with it. In flight: of the requests that
`concurrency` allows, how many the server had in the mean, from its first one until 98 % of the groups had ended.

With several concurrencies every contender plays with each of them, but for the reference's way, which has its own: it
plays once, and all are compared with that.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from loop import server
from loop_server import SPREAD
from report import machine, say, spread, table
from runs_contenders import CONTENDERS, SANDBOXED, SIZE

HERE = Path(__file__).parent
TURNS = 5
RAW, REFERENCE = "raw aiohttp", "one group at a time"
Measured = dict[str, Any]
Runs = dict[tuple[str, int], list[Measured]]
"""What was measured of each contender with each concurrency, a run per repetition."""


def main() -> None:
    options = arguments()
    names = (*(options.only or CONTENDERS), *dict(options.peer))
    runs: Runs = {
        (name, concurrency): []
        for index, concurrency in enumerate(options.concurrency)
        for name in names
        if name != REFERENCE or index == 0
    }
    with ExitStack() as stack:
        serving = {
            tool: stack.enter_context(server(TURNS, options.latency / 1000, options.shape, tool))
            for tool in ("noop", "terminal")
        }
        for repetition in range(options.repetitions):
            order = list(runs)
            for name, concurrency in order[repetition % len(order) :] + order[: repetition % len(order)]:
                url = serving["terminal" if name == SANDBOXED else "noop"]
                runs[name, concurrency].append(play(name, url, concurrency, options))
    shape = "" if options.shape == "fixed" else f" (median, {options.shape})"
    say(f"{options.groups} groups of {SIZE}, {TURNS} model calls each, {options.latency:g} ms latency{shape}, ")
    say(f"{options.repetitions} repetitions; median (smallest to largest).")
    say(f"{machine()}.\n")
    say(summary(runs, options))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help="groups of four (default: 64)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64], help="rollouts at a time (default: 64)")
    parser.add_argument("--latency", type=float, default=50, help="of the server, in milliseconds (default: 50)")
    parser.add_argument("--shape", choices=["fixed", "lognormal"], default="fixed", help="of the latency")
    parser.add_argument("--repetitions", type=int, default=3, help="of everything (default: 3)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="these contenders")
    parser.add_argument(
        "--peer", nargs=2, action="append", default=[], help="verifiers or inspect, and its interpreter"
    )
    return parser.parse_args()


def play(name: str, url: str, concurrency: int, options: argparse.Namespace) -> Measured:
    peers = dict(options.peer)
    program = "peer_contenders.py" if name in peers else "runs_contenders.py"
    command = [peers.get(name, sys.executable), str(HERE / program), name, url]
    command += [str(options.groups), str(concurrency)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: Measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["turns"] == options.groups * SIZE * TURNS, measured
    measured["flight"] = in_flight(url, measured["began"], measured["most"]) / concurrency
    return measured


def in_flight(url: str, start: float, until: float) -> float:
    """Requests that the server had in the mean, from the first one behind `start`."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/flight") as answer:
        steps = [(timestamp, count) for timestamp, count in json.load(answer) if start <= timestamp <= until]
    ends = [timestamp for timestamp, _ in steps[1:]] + [until]
    return sum(count * (end - timestamp) for (timestamp, count), end in zip(steps, ends, strict=True)) / (
        until - steps[0][0]
    )


def summary(runs: Runs, options: argparse.Namespace) -> str:
    mean = options.latency / 1000 * (1 if options.shape == "fixed" else math.exp(SPREAD**2 / 2))
    reference = runs.get((REFERENCE, options.concurrency[0]))
    rows = []
    for (name, concurrency), measured in runs.items():
        waves = options.groups * SIZE / concurrency
        ideal = math.ceil(waves) * TURNS * mean
        cells = [
            f"{concurrency} ({waves:.3g})",
            spread([1000 * run["cpu"] / run["turns"] for run in measured]),
            spread([1000 * run["machine"] / run["turns"] for run in measured]),
            ratio(measured, runs.get((RAW, concurrency)), "cpu"),
            ratio(measured, reference, "cpu"),
            ratio(measured, reference, "wall", inverse=True),
            spread([ideal / run["wall"] for run in measured]),
            spread([run["flight"] for run in measured]),
            "" if measured[0]["useful"] is None else spread([1000 * run["cpu"] / run["useful"] for run in measured], 1),
        ]
        rows.append([f"{name} {measured[0].get('version', '')}".rstrip(), *cells])
    heads = ["", "at a time (waves)", "CPU ms per turn", "of the machine", "to raw", f"to {REFERENCE}"]
    return table([*heads, "times as fast as that", "share of the ideal", "in flight", "CPU ms per useful group"], rows)


def ratio(measured: list[Measured], base: list[Measured] | None, quantity: str, *, inverse: bool = False) -> str:
    """To another contender, within each repetition; empty where that was not measured."""
    if base is None:
        return ""
    pairs = [(run[quantity], one[quantity]) for run, one in zip(measured, base, strict=True)]
    return spread([b / a if inverse else a / b for a, b in pairs], 1 if inverse else 2)


if __name__ == "__main__":
    main()
