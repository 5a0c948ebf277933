"""Processor time per turn of an episode with two seats, beside one agent with as long a conversation as theirs.

    python benchmarks/seats.py --groups 32 --repetitions 5

All play the scripted policy in this process, 8 turns a seat, groups of 4, with one reward. Who plays alone hears fixed
words, or a method of the state as its user. Ratios are to the one of the same kind, taken in each round.
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

from hermes_rl.runs.process import run_process
from hermes_rl.runs.progress import Progress
from hermes_rl.runs.setup import RunOptions
from hermes_rl.spec.load import parse_spec

TURNS = 8
"""Of each seat."""
SEATS = ("white", "black")
CODE = """
class Order:
    def __init__(self, item):
        self.turns = 0

    def answer(self, said):
        self.turns += 1
        return "go on" if self.turns < TURNS else None

    def turn(self, said):
        self.turns += 1
        return {("white", "black")[self.turns % 2]: "go on"} if self.turns <= 2 * TURNS else None


async def duel(seats):
    heard = "begin"
    for turn in range(2 * TURNS):
        heard = await seats[("white", "black")[turn % 2]].say(heard)


def texts(result):
    return len(result.texts) % 2
""".replace("TURNS", str(TURNS))
ALONE: dict[str, dict[str, Any]] = {
    "fixed words": {"user": {"turns": [f"word {number}" for number in range(TURNS - 1)]}},
    "a method as user": {"user": {"state": "answer"}},
}
SEVERAL: dict[str, tuple[dict[str, Any], str]] = {
    "alternate": ({"order": "alternate", "rounds": TURNS}, "fixed words"),
    "a method of the state": ({"state": "turn"}, "a method as user"),
    "a function": ({"fn": "code.py:duel"}, "a method as user"),
}
"""Who says who speaks → the section `schedule`, and the one agent that it is compared with."""


def spec_of(sections: dict[str, Any], seats: int, groups: int) -> dict[str, Any]:
    """Return the spec in which each seat has its turns."""
    turns = [
        {"say": f"turn {turn}", **({"seat": SEATS[turn % 2]} if seats > 1 else {})} for turn in range(seats * TURNS)
    ]
    return {
        "name": "seats",
        "dataset": {"items": [{"n": index} for index in range(groups)]},
        "prompt": {"system": "You play.", "user": "Begin."},
        "state": "code.py:Order",
        **sections,
        "rewards": {"texts": {"fn": "code.py:texts"}},
        "solution": {"turns": turns},
        "servers": {"policy": {"type": "scripted"}},
        "process": {"groups": groups, "group_size": 4, "concurrency": 64},
    }


def measured(sections: dict[str, Any], seats: int, groups: int) -> float:
    """Return milliseconds of this process's time for each turn."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "code.py").write_text(CODE)
        spec = parse_spec(yaml.safe_dump(spec_of(sections, seats, groups)), folder=Path(folder))
        started_at = time.process_time()
        asyncio.run(run_process(spec, RunOptions("process", out=Path(folder) / "run", progress=Progress(quiet=True))))
        return (time.process_time() - started_at) * 1000 / (groups * 4 * seats * TURNS)


def main() -> None:
    """Measure all in turns, and say the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    games = {name: (sections, 1) for name, sections in ALONE.items()}
    games |= {
        name: ({"agents": {seat: {} for seat in SEATS}, "schedule": play}, 2) for name, (play, _) in SEVERAL.items()
    }
    for sections, seats in games.values():
        measured(sections, seats, 2)  # what is loaded once
    times: dict[str, list[float]] = {name: [] for name in games}
    for _ in range(options.repetitions):
        for name, (sections, seats) in games.items():
            times[name].append(measured(sections, seats, options.groups))
    say("| who speaks | ms of processor time per turn | × one agent |")
    say("|---|---|---|")
    for name, each in times.items():
        alone = SEVERAL[name][1] if name in SEVERAL else name
        ratio = median(two / one for two, one in zip(each, times[alone], strict=True))
        comparison = f"{ratio:.2f} × {alone}" if name in SEVERAL else "1"
        say(f"| {name} | {median(each):.3f} | {comparison} |")


if __name__ == "__main__":
    main()
