"""Whether a run lives and scores as it should while many sandboxes together want far more memory than there is.

    python benchmarks/crowd.py [--sandboxes N] [--seconds S] [--memory BYTES]

The run is a process of its own in a control group of 2 GiB, which it shares with its sandboxes. Each hostile rollout
stays below every limit of its own sandbox and holds as much memory as it can: in many small processes, in one large, in
files, in buffers of UDP, TCP, unix sockets and netlink, in pipes, or in the runner, by what it prints to no reader.
Beside every eight of them is an innocent rollout, which deserves 1; all begin at once. It takes a user who may make
control groups, and about `--seconds`. The program fails where the run does not end well or an innocent does not have 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from report import machine, say

from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.sandbox.cgroup import find_layout
from hermes_rl.spec.load import load_spec

HOLD = 4
"""Seconds for which a hostile rollout holds what it has."""
EVERY = 8
"""Hostile rollouts beside an innocent one."""
LIMITS = {"memory": 160 << 20, "processes": 64, "disk": 32 << 20, "open_files": 1024}
START = "import os, socket, time\nheld = []\ntry:\n"
END = "except (OSError, MemoryError): pass\ntime.sleep({hold})\n"
WAYS = {
    "small processes": """
 for _ in range(14):
  if os.fork() == 0: x = b'x' * (9 << 20); time.sleep({hold}); os._exit(0)
""",
    "one large process": " for _ in range(130): held.append(b'x' * (1 << 20))",
    "files": """
 for n in range(30): open(f'f{{n}}', 'wb').write(b'x' * (1 << 20))
 for _ in range(80): held.append(b'x' * (1 << 20))
""",
    "UDP": """
 for _ in range(400):
  s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.setsockopt(1, 8, 8 << 20); s.bind(('127.0.0.1', 0))
  c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); c.connect(s.getsockname()); c.setblocking(False); held += [s, c]
  for _ in range(200): c.send(b'x' * 60000)
""",
    "TCP": """
 for _ in range(300):
  l = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(l.getsockname())
  held += [l, c, l.accept()[0]]; c.setblocking(False)
  try:
   while True: c.send(b'x' * 65536)
  except BlockingIOError: pass
""",
    "unix sockets": """
 for _ in range(400):
  a, b = socket.socketpair(); a.setblocking(False); held += [a, b]
  try:
   while True: a.send(b'x' * 65536)
  except BlockingIOError: pass
""",
    "netlink": """
 for _ in range(300):
  s = socket.socket(16, socket.SOCK_DGRAM, 2); s.bind((0, 0)); held.append(s)
  for _ in range(50): s.sendto(b'x' * 32768, (s.getsockname()[0], 0))
""",
    "pipes": """
 for _ in range(400):
  r, w = os.pipe(); os.set_blocking(w, False); held += [r, w]
  try:
   while True: os.write(w, b'x' * 65536)
  except BlockingIOError: pass
""",
}  # fmt: skip
INNOCENT = "x = b'x' * (40 << 20); open('answer', 'w').write(str(len(x) and 6 * 7))"
SPEC: dict[str, Any] = {
    "name": "crowd",
    "dataset": {"path": "json", "data_files": "rows.jsonl", "split": "train", "key": "name"},
    "prompt": {"user": "{{ name }}"},
    "toolsets": ["terminal", "file"],
    "agent": {"max_turns": 8, "tool_timeout": 60},
    "artifacts": {"answer": {"path": "answer"}},
    "rewards": {
        "tests_pass": {
            "sandbox": "fresh",
            "args": {
                "command": "python3 check.py",
                "files": [{"to": "check.py", "content": "assert open('answer').read() == '42'\n"}],
            },
        }
    },
    "solution": {"turns": "{{ turns }}"},
    "servers": {"policy": {"type": "scripted", "error_rate": 0}},
    "sandbox": {"limits": LIMITS, "timeout": 50},
}


def rows(hostile: int) -> Iterator[dict[str, Any]]:
    ways = [*WAYS, "background"]
    for index in range(hostile):
        attack = ways[index % len(ways)]
        yield {"name": f"{attack} {index}", "turns": [{"tools": calls(attack)}, {"say": "done"}]}
        if index % EVERY == 0:
            work = terminal(f'python3 -c "{INNOCENT}"')
            yield {"name": f"innocent {index}", "turns": [{"tools": [work]}, {"say": "done"}]}


def calls(attack: str) -> list[dict[str, Any]]:
    if attack == "background":
        # Each prints more than is held of it, and ends.
        flood = [terminal("head -c 3000000 /dev/zero | tr '\\0' x", background=True) for _ in range(60)]
        return [*flood, terminal(f"sleep {HOLD}")]
    code = (START + WAYS[attack] + "\n" + END).format(hold=HOLD)
    return [terminal(f"python3 - <<'END'\n{code}END")]


def terminal(command: str, **more: Any) -> dict[str, Any]:
    return {"name": "terminal", "args": {"command": command, **more}}


def play(folder: Path, sandboxes: int, seconds: float) -> dict[str, Any]:
    """Play the run in this process; what became of it."""
    # Once it was short of memory, the run plays about one rollout a second: as many as are sure to fit.
    table = list(rows(max(sandboxes, int(seconds))))
    spec = {**SPEC, "process": {"group_size": 1, "groups": len(table), "concurrency": sandboxes + sandboxes // EVERY}}
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    started_at = time.monotonic()
    asyncio.run(run_process(load_spec(folder / "spec.yaml"), RunOptions("process", out=folder / "out")))
    lines = [json.loads(line) for line in (folder / "out" / "rollouts.jsonl").read_text().splitlines()]
    last = {line["row_key"]: line for line in lines}
    innocent = [line for name, line in last.items() if name.startswith("innocent")]
    return {
        "seconds": round(time.monotonic() - started_at, 1),
        "hostile": len(last) - len(innocent),
        "innocent": len(innocent),
        "innocent and 1": sum(line["score"] == 1 for line in innocent),
        "hurt": {line["row_key"]: [line["stop_reason"], line["error"]] for line in innocent if line["score"] != 1},
        "played anew": sum(line["attempt"] for line in last.values()),
        "stop_reasons": Counter(line["stop_reason"] for line in last.values()),
        "runner's peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


@contextlib.contextmanager
def bounded(memory: int) -> Iterator[Path]:
    """A control group with so much memory; the one below it that the run is to join."""
    layout = find_layout()
    if layout is None or "memory" not in layout.parents:
        raise SystemExit("this user may make no control groups for memory here")
    around = layout.parents["memory"] / f"crowd-{os.getpid()}"
    run = around / "run" if layout.version == 2 else around
    around.mkdir()
    try:
        if layout.version == 2:
            (around / "cgroup.subtree_control").write_text("+memory +pids")
            run.mkdir()
        name = "memory.max" if layout.version == 2 else "memory.limit_in_bytes"
        (around / name).write_text(str(memory))
        yield run
    finally:
        for folder in dict.fromkeys((run, around)):
            for _ in range(200):
                with contextlib.suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sandboxes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--memory", type=int, default=2 << 30)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        (Path(options.inside) / "cgroup.procs").write_text(str(os.getpid()))
        with tempfile.TemporaryDirectory() as folder:
            outcome = play(Path(folder), options.sandboxes, options.seconds)
        Path(os.environ["OUTCOME"]).write_text(json.dumps(outcome))
        return
    with bounded(options.memory) as group, tempfile.NamedTemporaryFile("r") as outcome:
        arguments = ["--inside", str(group), "--sandboxes", str(options.sandboxes), "--seconds", str(options.seconds)]
        done = subprocess.run(
            [sys.executable, __file__, *arguments],
            env={**os.environ, "OUTCOME": outcome.name},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        text = outcome.read()
    result = {"status": done.returncode, **(json.loads(text) if text else {})}
    say(machine())
    for name, value in result.items():
        say(f"{name:>16}  {value}")
    if result["status"] != 0 or result["innocent and 1"] != result["innocent"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
