"""What thousands of rollouts leave behind: nothing.

    python benchmarks/leaks.py [--rollouts N] [--concurrency C] [--backend bubblewrap|none] [--program]

Plays rollouts that start background jobs, leave orphans, are cancelled, or lose their sandbox, and counts processes,
descriptors, temporary files, control groups, threads and memory before and after. Exits with 1 where these differ.
With `--program` an agent program in the sandbox plays them, and leaves connections to its endpoint half open.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

from report import machine, say, table

from hermes_rl.data.load import load_rows
from hermes_rl.rollouts.compiled import CompiledSpec
from hermes_rl.rollouts.rollout import Rollout, RolloutKey
from hermes_rl.rollouts.runner import RolloutRunner
from hermes_rl.sandbox.cgroup import find_layout
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.spec.load import parse_spec
from hermes_rl.spec.model import Spec
from hermes_rl.threads import IDLE
from hermes_rl.tools.base import find_runtime
from hermes_rl.user_code.pool import POOL

MARK = f"{os.getpid()}77"
"""Seconds that nobody else sleeps."""
COMMANDS = {
    "foreground": "echo hello > f; cat f",
    "background": f"sleep {MARK} & echo $!",
    "orphan": f"(setsid nohup sleep {MARK} >/dev/null 2>&1 &) ; echo started",
    "crowd": f"for i in $(seq 20); do (setsid sleep {MARK} &) ; done >/dev/null 2>&1",
    "files": "seq 1 20000 > big; mkdir -p a/b/c; mkfifo a/p; ln -s /nowhere l; chmod 0 a",
}
SPEC = """
dataset: {{items: [{items}]}}
prompt: {{user: go}}
toolsets: [terminal]
sandbox: {{backend: {backend}}}
artifacts: {{f: {{path: f}}}}
rewards: {{file_matches: {{args: {{path: f, content: hello}}}}}}
solution: {{turns: [{{tools: [{{name: terminal, args: {{command: "{{{{ c }}}}"}}}}]}}, {{say: done}}]}}
servers: {{policy: {{type: scripted, error_rate: 0}}}}
"""
AGENT = """
import json, os, socket, subprocess, sys, urllib.request
TOOL = {"type": "function", "function": {"name": "terminal", "parameters": {"type": "object"}}}
messages = [{"role": "user", "content": sys.argv[1]}]
half = socket.create_connection(("127.0.0.1", 8181))
half.sendall(b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 9\\r\\n\\r\\n{")
while True:
    body = json.dumps({"model": "m", "messages": messages, "tools": [TOOL]}).encode()
    request = urllib.request.Request(os.environ["BASE"], body, {"Content-Type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        os._exit(0)
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        with open("/tmp/out", "w+") as out:  # a job in the background would keep a pipe open
            subprocess.run(["sh", "-c", command], stdout=out)
            out.seek(0)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": out.read()})
"""
PLAYED_BY_PROGRAM = {
    "toolsets: [terminal]\n": "",
    "sandbox: {{": "sandbox: {{files: [{{to: agent.py, content: AGENT}}], ",
    "artifacts:": """agent:
  program: {{command: [python3, agent.py, "{{{{ prompt }}}}"], env: {{BASE: "{{{{ endpoint }}}}/v1/chat/completions"}}}}
artifacts:""",
}
"""What a program that plays changes in the spec."""
WARM_UP = 64
SPARE_MEMORY = 16 << 20
"""Bytes by which an allocator's pool may grow; a leak of thousands of sandboxes is more."""


def main() -> None:
    options = arguments()
    before, after, ended, seconds = asyncio.run(measure(options))
    how = f"{options.backend}, {options.concurrency} at a time, {seconds:.0f} s"
    say(f"{options.rollouts} rollouts in {how}: {dict(ended)}")
    say(f"{machine()}.\n")
    say(table(["what", "before", "after"], [[name, str(before[name]), str(after[name])] for name in before]))
    growth = after.pop("memory, MiB") - before.pop("memory, MiB")
    sys.exit(0 if after == before and growth <= SPARE_MEMORY >> 20 else 1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=5000, help="rollouts in all (default: 5000)")
    parser.add_argument("--concurrency", type=int, default=32, help="rollouts at a time (default: 32)")
    parser.add_argument("--backend", default="bubblewrap", help="bubblewrap (default) or none")
    parser.add_argument("--program", action="store_true", help="an agent program plays, and not the loop")
    return parser.parse_args()


async def measure(
    options: argparse.Namespace,
) -> tuple[dict[str, int], dict[str, int], Counter[str], float]:
    items = ", ".join(f"{{c: {_quoted(command)}}}" for command in COMMANDS.values())
    text = SPEC
    for loop, program in PLAYED_BY_PROGRAM.items() if options.program else ():
        text = text.replace(loop, program)
    text = text.format(items=items, backend=options.backend).replace("AGENT", json.dumps(AGENT))
    spec = parse_spec(text)
    await play(spec, WARM_UP, options.concurrency, 0)  # what is made once per process is no leak
    before = await census()
    started_at = time.perf_counter()
    ended = await play(spec, options.rollouts, options.concurrency, 1)
    seconds = time.perf_counter() - started_at
    return before, await census(), ended, seconds


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


async def play(spec: Spec, count: int, concurrency: int, seed: int) -> Counter[str]:
    """Play `count` rollouts; one in ten is cancelled, one in ten loses its sandbox."""
    async with CompiledSpec(spec) as world:
        ended = await _play(world, count, concurrency, seed)
    await asyncio.sleep(IDLE + 0.5)  # threads without work end by themselves
    return ended


async def _play(world: CompiledSpec, count: int, concurrency: int, seed: int) -> Counter[str]:
    random, ended = Random(seed), Counter[str]()
    rows = load_rows(world.spec, "train", notify=lambda _: None)
    player = RolloutRunner(world)
    remaining = iter(range(count))

    async def lane() -> None:
        for index in remaining:
            fate = random.random()
            key = RolloutKey(rows[index % len(rows)], f"{seed}-{index}", 0, 1)
            task = asyncio.create_task(player.member(key))
            if fate < 0.1:
                await asyncio.sleep(random.random() * 0.5)
                task.cancel()
            elif fate < 0.2:
                ended["sandbox killed from outside"] += await _kill(key, task)
            done = (await asyncio.gather(task, return_exceptions=True))[0]
            ended["cancelled" if isinstance(done, BaseException) else str(done.stop_reason)] += 1

    await asyncio.gather(*(lane() for _ in range(concurrency)))
    return ended


async def _kill(key: RolloutKey, task: asyncio.Task[Rollout]) -> bool:
    """What a machine in need of memory does: the sandbox is gone, and not by the agent's doing."""
    while not task.done():
        runtime = find_runtime(key.id)
        sandbox = runtime._sandbox if runtime is not None else None
        if isinstance(sandbox, HelperSandbox) and sandbox.alive:
            os.kill(sandbox.pid, 9)
            return True
        await asyncio.sleep(0.002)
    return False


async def census() -> dict[str, int]:
    """What this process has and holds, once threads without work have ended, and processes that wait for rewards."""
    POOL.close()
    await asyncio.sleep(IDLE + 1)
    return counts()


def counts() -> dict[str, int]:
    gc.collect()
    layout = find_layout()
    groups = [] if layout is None else [top for top in layout.tops() if top.exists()]
    return {
        "processes": len(_processes()),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - not files
        "temporary files": len(list(Path(tempfile.gettempdir()).glob("hermes-rl-*"))),
        "control groups": sum(entry.is_dir() for top in groups for entry in top.iterdir()),
        "threads": sum("asyncio" not in thread.name for thread in threading.enumerate()),
        "memory, MiB": _resident() >> 20,
    }


def _processes() -> list[int]:
    """Processes of sandboxes: children of this one, and whatever sleeps for `MARK` seconds."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                if parent == str(os.getpid()) or MARK in (entry / "cmdline").read_text().split("\0"):
                    pids.append(int(entry.name))
        except OSError:
            continue  # ended meanwhile
    return pids


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
