"""What worker processes bring where sandboxes are the bottleneck: a command in a sandbox for each tool turn.

    python benchmarks/workers.py [--workers N …] [--groups N] [--turns N] [--repetitions N]

A scripted policy plays, so that no model is waited for. The ways, in turns: one process; N workers; N independent runs
side by side with an N-th of the groups each, which is the most that N processes can bring; and where Ray is installed N
actors of a Ray cluster, which is started on this machine. Eight rollouts for each core are played at a time, by all
processes of a way together. Times are from the first rollout on record to the last, so that starting is left out, and
all are told as ratios to one process in the same repetition: on a machine that does other things too, only those mean
something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from report import machine, say, spread, table

SIZE = 4
SPEC = """
name: workers
dataset: {items: ITEMS}
prompt: {user: "Do {{ n }}"}
toolsets: [terminal]
rewards: {right: {fn: exact_match, args: {target: "{{ n }}"}}}
solution: {turns: TURNS}
agent: {max_turns: 50}
servers: {policy: {type: scripted, error_rate: 0.25}}
process: {group_size: 4}
"""
AT_A_TIME = 8
"""Rollouts for each core."""


def ways(numbers: list[int]) -> dict[str, tuple[int, list[str]]]:
    """How many runs each way has, and the options of each run."""
    cases = {"one process": (1, ["--workers", "1"])}
    for worker_count in numbers:
        cases[f"{worker_count} workers"] = (1, ["--workers", str(worker_count)])
        cases[f"{worker_count} runs side by side"] = (worker_count, ["--workers", "1"])
        if find_spec("ray") is not None:
            cases[f"{worker_count} actors of a Ray cluster"] = (1, ["--workers", str(worker_count), "--ray"])
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="how many, one or more (default: 2)")
    parser.add_argument("--groups", type=int, default=50, help="groups of four (default: 50)")
    parser.add_argument("--turns", type=int, default=4, help="tool turns of a rollout (default: 4)")
    parser.add_argument("--repetitions", type=int, default=3, help="of everything (default: 3)")
    options = parser.parse_args()
    played = ways(options.workers)
    took: dict[str, list[float]] = {name: [] for name in played}
    for repetition in range(options.repetitions):
        order = list(played)
        for name in order[repetition % len(order) :] + order[: repetition % len(order)]:
            took[name].append(seconds(options.groups, options.turns, *played[name]))
    rollouts = options.groups * SIZE
    say(f"{options.groups} groups of {SIZE}, {options.turns} commands each, {options.repetitions} repetitions.")
    say(f"{machine()}.\n")
    rows = [
        [
            name,
            spread([rollouts / one for one in measured], 1),
            spread([base / one for base, one in zip(took["one process"], measured, strict=True)]),
            spread([base / one for base, one in zip(took[f"{options.workers[0]} workers"], measured, strict=True)]),
        ]
        for name, measured in took.items()
    ]
    say(table(["", "rollouts per second", "times as fast as one process", f"as {options.workers[0]} workers"], rows))


def seconds(groups: int, turns: int, runs: int, options: list[str]) -> float:
    """Seconds from the moment at which all runs play until the last of them has its groups, for all groups."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        items = json.dumps([{"n": n} for n in range(100)])
        call = {"tools": [{"name": "terminal", "args": {"command": "ls / | sort | md5sum"}}]}
        spec = SPEC.replace("ITEMS", items).replace("TURNS", json.dumps([*[call] * turns, {"say": "{{ n }}"}]))
        (folder / "spec.yaml").write_text(spec)
        command = [sys.executable, "-m", "hermes_rl.cli.main", "run", "spec.yaml", "process", "--quiet"]
        at_a_time = max(1, AT_A_TIME * len(os.sched_getaffinity(0)) // runs)
        command += ["--set", f"process.groups={groups // runs}", "--set", f"process.concurrency={at_a_time}", *options]
        playing = [
            subprocess.Popen(
                [*command, "--out", f"run-{index}", "--set", f"seed={index}"], cwd=folder, stdout=subprocess.DEVNULL
            )
            for index in range(runs)
        ]
        files = [folder / f"run-{index}" / "rollouts.jsonl" for index in range(runs)]
        try:
            while not all(file.exists() and file.stat().st_size for file in files):
                time.sleep(0.01)
                if any(run.poll() for run in playing):
                    raise SystemExit("a run has failed")
            started_at, before = time.monotonic(), sum(map(count, files))
            while sum(map(count, files)) < groups // runs * runs * SIZE:
                time.sleep(0.01)
            took = time.monotonic() - started_at
        finally:
            for run in playing:
                run.wait()
        return took * groups * SIZE / (groups // runs * runs * SIZE - before)


def count(file: Path) -> int:
    """Rollouts on record."""
    return file.read_bytes().count(b"\n")


if __name__ == "__main__":
    main()
