"""What a run costs beside the way it is commonly written: groups, with a no-op tool, a reward and a line per group.

    python benchmarks/runs.py [--groups N] [--concurrency C] [--latency MS] [--shape fixed|lognormal] [--repetitions N]
                              [--only NAME …] [--peer verifiers|inspect PYTHON] …

One server process with a fixed latency (or one that is spread: its 99th percentile is ten times its median); 64 groups
of 4 with four tool turns each by default. Contenders (`runs_contenders.py`), each in a process of its own, in turns:

- raw aiohttp: the conversations, so many at a time, and nothing around them;
- openai client: the same over `AsyncOpenAI`;
- one group at a time: the reference design's process loop, written from its description: it awaits one group after
  the other, the group's rollouts together, each over the openai client with its tool in a pool of threads, and appends
  a line;
- hermes-rl process: `runs.process` of a spec with its journals;
- hermes-rl process, sandboxed: the same with a command in a sandbox for each tool turn, a sandbox for each rollout;
- other frameworks (`peer_contenders.py`), where PYTHON is the interpreter of an environment that has one installed.

The ideal is the time that the models alone would take: the waves of rollouts × the calls of each × the mean latency. No
program reaches it where the machine has to do anything for a turn, and the server takes a part of the same cores; raw
aiohttp says how near one can come. In flight: of the requests that `concurrency` allows, how many the server had in the
mean, from its first one until 98 % of the groups had ended.
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
Measured = dict[str, Any]


def main() -> None:
    options = arguments()
    measured: dict[str, list[Measured]] = {name: [] for name in (*(options.only or CONTENDERS), *dict(options.peer))}
    with ExitStack() as stack:
        serving = {
            tool: stack.enter_context(server(TURNS, options.latency / 1000, options.shape, tool))
            for tool in ("noop", "terminal")
        }
        for repetition in range(options.repetitions):
            names = list(measured)
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                url = serving["terminal" if name == SANDBOXED else "noop"]
                measured[name].append(play(name, url, options))
    shape = "" if options.shape == "fixed" else f" (median, {options.shape})"
    say(f"{options.groups} groups of {SIZE}, {TURNS} model calls each, {options.concurrency} rollouts at a time, ")
    say(f"{options.latency:g} ms latency{shape}, {options.repetitions} repetitions; median (smallest to largest).")
    say(f"{machine()}.\n")
    say(summary(measured, options))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64, help="groups of four (default: 64)")
    parser.add_argument("--concurrency", type=int, default=64, help="rollouts at a time (default: 64)")
    parser.add_argument("--latency", type=float, default=50, help="of the server, in milliseconds (default: 50)")
    parser.add_argument("--shape", choices=["fixed", "lognormal"], default="fixed", help="of the latency")
    parser.add_argument("--repetitions", type=int, default=3, help="of everything (default: 3)")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="these contenders")
    parser.add_argument(
        "--peer", nargs=2, action="append", default=[], help="verifiers or inspect, and its interpreter"
    )
    return parser.parse_args()


def play(name: str, url: str, options: argparse.Namespace) -> Measured:
    peers = dict(options.peer)
    program = "peer_contenders.py" if name in peers else "runs_contenders.py"
    command = [peers.get(name, sys.executable), str(HERE / program), name, url]
    command += [str(options.groups), str(options.concurrency)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    measured: Measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["turns"] == options.groups * SIZE * TURNS, measured
    measured["flight"] = in_flight(url, measured["began"], measured["most"]) / options.concurrency
    return measured


def in_flight(url: str, began: float, until: float) -> float:
    """Requests that the server had in the mean, from the first one behind `began`."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/flight") as answer:
        steps = [(at, count) for at, count in json.load(answer) if began <= at <= until]
    ends = [at for at, _ in steps[1:]] + [until]
    return sum(count * (end - at) for (at, count), end in zip(steps, ends, strict=True)) / (until - steps[0][0])


def summary(measured: dict[str, list[Measured]], options: argparse.Namespace) -> str:
    mean = options.latency / 1000 * (1 if options.shape == "fixed" else math.exp(SPREAD**2 / 2))
    ideal = math.ceil(options.groups * SIZE / options.concurrency) * TURNS * mean
    rows = []
    for name, runs in measured.items():
        cells = [
            spread([1000 * run["cpu"] / run["turns"] for run in runs]),
            ratio(measured, "raw aiohttp", "cpu", runs),
            ratio(measured, "one group at a time", "cpu", runs),
            ratio(measured, "one group at a time", "wall", runs, inverse=True),
            spread([ideal / run["wall"] for run in runs]),
            spread([run["flight"] for run in runs]),
            "" if runs[0]["useful"] is None else spread([1000 * run["cpu"] / run["useful"] for run in runs], 1),
        ]
        rows.append([f"{name} {runs[0].get('version', '')}".rstrip(), *cells])
    heads = ["", "CPU ms per turn", "to raw", "to one group at a time", "times as fast as that", "share of the ideal"]
    return table([*heads, "in flight", "CPU ms per useful group"], rows)


def ratio(
    measured: dict[str, list[Measured]], base: str, what: str, runs: list[Measured], *, inverse: bool = False
) -> str:
    """To another contender, within each repetition; empty where that was not measured."""
    if base not in measured:
        return ""
    pairs = [(run[what], one[what]) for run, one in zip(runs, measured[base], strict=True)]
    return spread([b / a if inverse else a / b for a, b in pairs], 1 if inverse else 2)


if __name__ == "__main__":
    main()
