"""Whether a long run stays what it was: memory, descriptors, processes and speed over thousands of sandboxed rollouts.

    python benchmarks/soak.py [--rollouts N] [--concurrency C] [--every N] [--workers N]

One run of process mode: a sandbox for each rollout, one command in it, a reward, the journals; a scripted policy, so
that all the time is ours. The first lines bring everything that is made once; from then on each line should look like
the one before. Exits with 1 where descriptors, processes or threads have grown since then, or memory has by more than a
rollout's place in the index of the run is worth.

With `--workers` the command line plays rollouts without a sandbox, which are many more in the same time, in so many
worker processes; what is looked at is the process that decides and writes, and what it leaves behind.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from leaks import counts
from playing import play
from report import machine, say, table

from hermes_rl.data.load import load_rows
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Encoder, Group
from hermes_rl.runs.progress import Progress
from hermes_rl.sandbox.cgroup import find_layout
from hermes_rl.sandbox.helper_system import descendants
from hermes_rl.spec.load import parse_spec
from hermes_rl.threads import reduce_gc_pauses

SIZE = 4
SPEC = """
dataset: {items: [{word: one}, {word: two}, {word: three}]}
prompt: {user: "write {{ word }}"}
toolsets: [terminal]
artifacts: {f: {path: f}}
rewards: {file_matches: {args: {path: f, content: "{{ word }}"}}}
solution: {turns: [{tools: [{name: terminal, args: {command: "printf {{ word }} > f"}}]}, {say: done}]}
servers: {policy: {type: scripted, error_rate: 0}}
"""
WATCHED = ("processes", "descriptors", "control groups", "threads")
INDEX = 1_500
"""Bytes that a run remembers of a rollout: where its line begins, its score, its place in its group."""
SPARE = 16
"""MiB by which an allocator's pool may grow."""

ANSWERS = """
dataset: {items: [{word: one}, {word: two}, {word: three}]}
prompt: {user: "say {{ word }}"}
rewards: {exact_match: {args: {target: "{{ word }}"}}}
solution: {turns: [{say: "{{ word }}"}]}
servers: {policy: {type: scripted, error_rate: 0}}
"""
"""What is played without a sandbox."""

Sample = dict[str, float]


class Watch(Progress):
    """A look at the process whenever so many rollouts have ended."""

    def __init__(self, every: int) -> None:
        super().__init__(quiet=True)
        self.every = every
        self.samples: list[Sample] = []
        self._since, self._rollouts = time.perf_counter(), 0

    def step(self, done: int, group: Group) -> None:
        if any(rollout.score != 1.0 for rollout in group.rollouts):
            raise AssertionError(f"{group.id} was not played as written: {group.scores} {group.detail}")
        if done * SIZE - self._rollouts < self.every:
            return
        speed = (done * SIZE - self._rollouts) / (time.perf_counter() - self._since)
        self.samples.append({"rollouts": done * SIZE, "rollouts/s": speed, **counts()})
        self._since, self._rollouts = time.perf_counter(), done * SIZE


def main() -> None:
    options = arguments()
    samples = asyncio.run(soak(options)) if options.workers is None else soak_workers(options)
    say(f"{options.concurrency} at a time.\n{machine()}.\n")
    say(table(list(samples[0]), [[f"{value:.0f}" for value in sample.values()] for sample in samples]))
    grown = growth(samples, options.concurrency)
    say("\n" + ("\n".join(grown) or "Nothing has grown since the first line."))
    sys.exit(1 if grown else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=20_000, help="rollouts in all (default: 20000)")
    parser.add_argument("--concurrency", type=int, default=16, help="rollouts at a time (default: 16)")
    parser.add_argument("--every", type=int, default=1000, help="rollouts between two lines (default: 1000)")
    parser.add_argument("--workers", type=int, help="worker processes that play (default: none, and sandboxes)")
    return parser.parse_args()


async def soak(options: argparse.Namespace) -> list[Sample]:
    spec, watch = parse_spec(SPEC), Watch(options.every)
    with tempfile.TemporaryDirectory() as folder, reduce_gc_pauses():
        rows = load_rows(spec, "train", notify=say)
        await play(
            CompiledSpec(spec), rows, Path(folder), watch, Encoder.load(None),
            size=SIZE, groups=options.rollouts // SIZE, concurrency=options.concurrency,
        )  # fmt: skip
    return watch.samples


def soak_workers(options: argparse.Namespace) -> list[Sample]:
    """Watch the command line from outside; ends with what failed, or was left behind."""
    with tempfile.TemporaryDirectory() as directory:
        folder, samples = Path(directory), []
        (folder / "soak.yaml").write_text(ANSWERS)
        (folder / "temporary").mkdir()
        command = [sys.executable, "-m", "hermes_rl.cli.main", "run", "soak.yaml", "process", "--out", "run"]
        command += ["--quiet", "--workers", str(options.workers), "--set", f"process.groups={options.rollouts // SIZE}"]
        command += ["--set", f"process.group_size={SIZE}", "--set", f"process.concurrency={options.concurrency}"]
        environment = {**os.environ, "TMPDIR": str(folder / "temporary")}
        run = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        file, offset, rollouts, last_count, since = folder / "run" / "rollouts.jsonl", 0, 0, 0, time.perf_counter()
        players: set[int] = set()
        while run.poll() is None:
            time.sleep(0.1)
            if file.exists():
                with file.open("rb") as lines:
                    lines.seek(offset)
                    new = lines.read()
                offset, rollouts = offset + len(new), rollouts + new.count(b"\n")
            if rollouts - last_count >= options.every:
                now = time.perf_counter()
                players.update(members(run.pid))
                samples.append(
                    {"rollouts": rollouts, "rollouts/s": (rollouts - last_count) / (now - since), **seen(run.pid)}
                )
                last_count, since = rollouts, now
        if run.returncode or rollouts < options.rollouts:
            raise SystemExit(f"the run ended with status {run.returncode} and {rollouts} rollouts")
        leftovers = [*filter(resident, players), *control_groups(players), *(folder / "temporary").iterdir()]
        if leftovers:
            raise SystemExit(f"left behind: {leftovers}")
    return samples


def seen(driver: int) -> Sample:
    """What the process that decides has, and the memory of those that play."""
    playing = members(driver)
    return {
        "processes": len(playing),
        "descriptors": len(list(Path(f"/proc/{driver}/fd").iterdir())),
        "control groups": len(control_groups(playing)),
        "threads": len(list(Path(f"/proc/{driver}/task").iterdir())),
        "memory, MiB": resident(driver) / (1 << 20),
        "of the workers, MiB": sum(resident(pid) for pid in playing if pid != driver) / (1 << 20),
    }


def members(driver: int) -> set[int]:
    """A process and all that come from it."""
    return {driver, *descendants(driver)}


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def control_groups(owners: set[int]) -> list[Path]:
    """The control groups that these processes have made."""
    layout = find_layout()
    tops = set(layout.parents.values()) if layout is not None else set()
    return [one for top in tops for owner in owners for one in top.glob(f"hermes-rl-{owner}-*")]


def growth(samples: list[Sample], concurrency: int) -> list[str]:
    """What has grown from the first line to the last one; what is there at a moment varies with what is in flight."""
    first, last = samples[0], samples[-1]
    increases = [
        f"{name}: {first[name]:.0f}, then {last[name]:.0f}"
        for name in WATCHED
        if last[name] > max(sample[name] for sample in samples[:2]) + 4 * concurrency
    ]
    allowed = SPARE + (last["rollouts"] - first["rollouts"]) * INDEX / (1 << 20)
    more = last["memory, MiB"] - first["memory, MiB"]
    return [*increases, f"memory: {more:.0f} MiB more, {allowed:.0f} expected"] if more > allowed else increases


if __name__ == "__main__":
    main()
