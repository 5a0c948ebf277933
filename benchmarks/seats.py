"""Processor time per turn of an episode with two seats, beside one agent that hears fixed words as often.

    python benchmarks/seats.py --groups 64 --repetitions 3

All play the scripted policy in this process, 8 turns an episode, groups of 4, with one reward. Ratios are to one agent.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from report import say

from hermes_rl.runs.opening import Launch
from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.spec.load import parse_spec

TURNS = 8
CODE = """
class Order:
    def __init__(self, item):
        self.turns = 0

    def turn(self, said):
        self.turns += 1
        return {("white", "black")[self.turns % 2]: "go on"} if self.turns <= TURNS else None


async def duel(seats):
    heard = "begin"
    for turn in range(TURNS):
        heard = await seats[("white", "black")[turn % 2]].say(heard)


def texts(result):
    return len(result.texts) % 2
""".replace("TURNS", str(TURNS))
PLAYS: dict[str, Any] = {
    "one agent": None,
    "alternate": {"order": "alternate", "rounds": TURNS // 2},
    "a method of the state": {"state": "turn"},
    "a function": {"fn": "code.py:duel"},
}


def spec_of(play: Any, groups: int) -> dict[str, Any]:
    """Return the spec in which 8 turns are played so."""
    seats = ("white", "black")
    turns = [{"say": f"turn {number}", **({"seat": seats[number % 2]} if play else {})} for number in range(TURNS)]
    several = {"agents": {seat: {} for seat in seats}, "play": play}
    alone = {"user": {"says": [f"word {number}" for number in range(TURNS - 1)]}}
    return {
        "name": "seats",
        "dataset": {"items": [{"n": number} for number in range(groups)]},
        "prompt": {"system": "You play.", "user": "Begin."},
        "state": "code.py:Order",
        **(several if play else alone),
        "rewards": {"texts": {"fn": "code.py:texts"}},
        "solution": {"turns": turns},
        "servers": {"policy": {"type": "scripted"}},
        "process": {"groups": groups, "group_size": 4, "concurrency": 64},
    }


def measured(play: Any, groups: int) -> float:
    """Return milliseconds of this process's time for each turn."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "code.py").write_text(CODE)
        spec = parse_spec(yaml.safe_dump(spec_of(play, groups)), folder=Path(folder))
        began = time.process_time()
        asyncio.run(run_process(spec, Launch("process", out=Path(folder) / "run", progress=Progress(quiet=True))))
        return (time.process_time() - began) * 1000 / (groups * 4 * TURNS)


def main() -> None:
    """Measure all in turns, and say the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    for play in PLAYS.values():
        measured(play, 2)  # what is loaded once
    times: dict[str, list[float]] = {name: [] for name in PLAYS}
    for _ in range(given.repetitions):
        for name, play in PLAYS.items():
            times[name].append(measured(play, given.groups))
    say("| who speaks | ms of processor time per turn | × one agent |")
    say("|---|---|---|")
    alone = median(times["one agent"])
    for name, each in times.items():
        say(f"| {name} | {median(each):.3f} | {median(each) / alone:.2f} |")


if __name__ == "__main__":
    main()
