"""Inside of the outer namespaces: random hostile sequences in many sandboxes, beside innocent rollouts.

    python -m tests.attacks.fuzz FOLDER SANDBOXES SEED

Prints a JSON object: what was played, what took longer than its bound, whose score has changed, and what is left.
The seed of a sandbox is SEED plus its number, so that one that does harm can be played alone.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hermes_rl.data.load import load_rows
from hermes_rl.errors import SandboxFailure
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import RolloutKey
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import ResourceLimits, SandboxConfig
from hermes_rl.sandbox.cgroup import find_layout
from hermes_rl.spec.load import parse_spec
from hermes_rl.stop_reasons import StopReason
from hermes_rl.threads import IDLE
from hermes_rl.tools.artifacts import ArtifactRequest, collect

LANES = 8
"""Hostile sandboxes at a time."""
COMMAND_SECONDS = 1.5
PAUSE = 0.2
"""Seconds between two innocent rollouts: the machine is the hostile ones'."""
BOUND = 120.0
"""Seconds after which a sandbox counts as hanging; on two quiet cores, all of one takes at most 17."""
LIMITS = ResourceLimits(memory=128 << 20, processes=48, disk=16 << 20, open_files=256)
INNOCENT = """
dataset: {items: [{n: 1}, {n: 2}, {n: 3}]}
prompt: {user: go}
toolsets: [terminal, file]
artifacts: {f: {path: f}}
rewards:
  file_matches: {args: {path: f, content: "{{ n }}00\\n"}}
  tests_pass:
    sandbox: fresh
    args: {command: "python3 check.py", files: [{to: check.py, content: "assert open('f').read() == '{{ n }}00\\\\n'"}]}
solution:
  turns:
  - tools: [{name: terminal, args: {command: "seq 100000 > big; tail -n 1 big; expr {{ n }} '*' 100 > f"}}]
  - tools: [{name: read_file, args: {path: big, limit: 5}}]
  - say: done
servers: {policy: {type: scripted, error_rate: 0}}
"""
RIGHT = 2.0


@dataclass
class Found:
    """What was seen."""

    played: int = 0
    stop_reasons: Counter[str] = field(default_factory=Counter)
    slow: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)
    """Ends of sandboxes by the agent that were put down to us: each would be a rollout that is not scored."""
    innocent: int = 0
    changed: list[str] = field(default_factory=list)
    longest: float = 0.0


async def hostile(seed: int, found: Found) -> None:
    """One sandbox: what an agent may do in it, and what a rollout does with it afterwards."""
    began = time.monotonic()
    config = SandboxConfig(limits=LIMITS, timeout=10)
    try:
        async with asyncio.timeout(BOUND), create_sandbox(config) as sandbox:
            try:
                await sandbox.write_file("/tmp/hostile.py", Path(__file__).with_name("hostile.py").read_bytes())
                program = "python3 /tmp/hostile.py"
                await sandbox.run(f"{program} {2 * seed}", timeout=COMMAND_SECONDS)
                await sandbox.run_reporting(f"{program} {2 * seed + 1}", "", timeout=COMMAND_SECONDS)
                await collect(sandbox, [ArtifactRequest("artifact", path="artifact")], 3)
                await sandbox.kill_all()
                with suppress(OSError):
                    await sandbox.read_file("artifact")
                answer = await sandbox.run("echo lives", timeout=3)
                found.stop_reasons["lives" if answer.output == "lives\n" else "broken by itself"] += 1
            except OSError:
                found.stop_reasons["an error of its files"] += 1
            except SandboxFailure as failure:
                found.stop_reasons[str(failure.stop_reason)] += 1
                if failure.stop_reason is not StopReason.SANDBOX_KILLED:
                    found.ours.append(f"{seed}: {failure}")
    except TimeoutError:
        found.slow.append(f"{seed}: no end within {BOUND:g} s")
    except SandboxFailure as failure:
        found.ours.append(f"{seed}, at its end: {failure}")
    found.played += 1
    found.longest = max(found.longest, time.monotonic() - began)


async def innocent(found: Found, done: asyncio.Event) -> None:
    """Rollouts whose score is known, one after the other, for as long as the others are hostile."""
    async with CompiledSpec(parse_spec(INNOCENT)) as world:
        rows = load_rows(world.spec, "train", notify=lambda _: None)
        player = RolloutRunner(world)
        while not done.is_set() or found.innocent == 0:
            row = rows[found.innocent % len(rows)]
            rollout = await asyncio.wait_for(player.member(RolloutKey(row, f"i-{found.innocent}", 0, 1)), 3 * BOUND)
            found.innocent += 1
            await asyncio.sleep(PAUSE)
            if rollout.score != RIGHT:
                values = {name: (value.value, value.reason) for name, value in rollout.rewards.items()}
                found.changed.append(f"{rollout.score}: {rollout.stop_reason}, {rollout.error}, {values}")


async def play(count: int, first: int) -> Found:
    found, done, left = Found(), asyncio.Event(), iter(range(count))

    async def lane() -> None:
        for number in left:
            await hostile(first + number, found)

    beside = asyncio.create_task(innocent(found, done))
    await asyncio.gather(*(lane() for _ in range(LANES)))
    done.set()
    await beside
    return found


# ------------------------------------------------------------------ what is left


async def census(folder: Path) -> dict[str, Any]:
    """What this world has, once threads without work and what was killed are gone."""
    await asyncio.sleep(IDLE + 1.5)
    gc.collect()
    layout = find_layout()
    groups = [] if layout is None else [top for top in layout.tops() if top.exists()]
    return {
        "processes": sorted(_processes()),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "temporary files": sorted(path.name for path in (folder / "tmp").iterdir()),
        "control groups": sum(entry.is_dir() for top in groups for entry in top.iterdir()),
        "files": _digest(folder / "precious"),
    }


def _processes() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                yield f"{entry.name} {(entry / 'comm').read_text().strip()}"


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.stat()
        digest.update(f"{path} {status.st_mode} {status.st_mtime_ns} {status.st_nlink}".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


async def measure(folder: Path, count: int, seed: int) -> dict[str, Any]:
    await play(4, seed)  # what is made once per process is not left by anybody
    before = await census(folder)
    began = time.monotonic()
    found = await play(count, seed)
    seconds = time.monotonic() - began
    after = await census(folder)
    left = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    return {**vars(found), "seconds": round(seconds, 1), "left": left}


def main() -> None:
    folder = Path(sys.argv[1])
    for name in ("home", "tmp", "precious"):
        (folder / name).mkdir()
    for number in range(20):
        (folder / "precious" / str(number)).write_text(f"mine {number}")
    os.chdir(folder)
    found = asyncio.run(measure(folder, int(sys.argv[2]), int(sys.argv[3])))
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
