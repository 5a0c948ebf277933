"""Inside of the outer namespaces: a runner with things worth stealing plays every case, and says what got through.

    python world.py FOLDER system|none|docker|IMAGE

Prints a JSON object: from the name of each case to the harm that it did, errors, and cases that did not do what their
name says.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.bubblewrap import _has_users
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.model import Spec
from hermes_rl.tools.base import ToolRuntime
from tests.attacks.cases import CASES, LIMITS, SUCCEEDED, Case
from tests.attacks.relatives import ALL, ALONE, WORK, innocent

SECRET = "KEY-"
ATTACKS = CASES if sys.argv[2:3] == ["none"] else (*CASES, *ALL)
IS_USER = sys.argv[2:3] == ["system"] and (_has_users() if os.geteuid() == 0 else "LENT" in os.environ)
"""Whether each sandbox is a user of its own outside."""
EVERYDAY = WORK + (ALONE if IS_USER else "")
INNOCENT = tuple(innocent(number, EVERYDAY) for number in range(len(ATTACKS) // 5))
VICTIMS = ("kill", "stop", "trace", "nice", "limit", "memory")
HELD = """
import json

def own(ctx):
    told = json.loads(ctx.call_tool("terminal", {"command": "echo honest"}))["output"]
    return told == ctx.terminal("echo honest")["output"].rstrip() == "honest"
"""
SPEC: dict[str, Any] = {
    "name": "attacks",
    "dataset": {"path": "json", "data_files": "cases.jsonl", "split": "train", "key": "name"},
    "prompt": {"user": "{{ name }}"},
    "toolsets": ["terminal", "file"],
    "agent": {"max_turns": 8, "tool_timeout": 30},
    "artifacts": {"answer": {"path": "answer"}, "out": {"path": "out"}},
    "rewards": {
        "own": {"fn": "held.py:own", "weight": 0},
        "tests_pass": {
            "sandbox": "fresh",
            "args": {
                "command": "python3 tests/check.py",
                "files": [{"to": "tests/check.py", "content": "assert open('answer').read().strip() == '42'\n"}],
            },
        },
    },
    "solution": {"turns": "{{ turns }}"},
    "servers": {"policy": {"type": "scripted", "error_rate": 0}},
    "process": {"group_size": 1, "groups": len(ATTACKS) + len(INNOCENT), "concurrency": 4},
}


class World:
    """The runner's folder, its services, and other processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("home/.aws", "home/ssh", "other", "spec", "run", "tmp"):
            (folder / name).mkdir(parents=True)
        self.before = {
            "home/.netrc": f"machine x password {SECRET}netrc",
            "home/.aws/credentials": f"{SECRET}aws",
            "home/ssh/id_secret": f"{SECRET}ssh",
            "home/.bash_profile": "",
            "other/answer": "theirs",
            "other/patch-me": "safe",
            "other/remove-me": "here",
            "other/solution": "42",
            "spec/held.py": HELD,
        }
        for name, text in self.before.items():
            (folder / name).write_text(text)
        self.victims = {f"victim-{name}": _victim(name) for name in VICTIMS}
        self.other_runs = True
        """Whether the process of another rollout has outlived all."""
        self.opened = (folder / "opened").open("w+")
        self.opened.write(f"{SECRET}opened")
        self.opened.flush()
        (folder / "opened").unlink()
        _services(folder)

    def harm(self, case: Case, line: dict[str, Any], run: Path) -> str:
        """What became of the rollout of an attack that has got through; empty where it has not."""
        if not self._succeeded(case, line, run):
            return ""
        own, seconds = line["rewards"]["own"], line["timings"]["total"]
        return f"{case.sign}, {line['stop_reason']} after {seconds:.1f} s, own {own}: {answers(line)[:2000]}"

    def _succeeded(self, case: Case, line: dict[str, Any], run: Path) -> bool:
        """Whether an attack has got through, from what its tools answered and from what has become of this world."""
        said = answers(line)
        kind, _, what = case.sign.partition(":")
        if SUCCEEDED in said or SECRET in said:
            return True
        if kind == "path":
            return any(word in said for word in (str(self.folder), "hermes_rl/", "Traceback"))
        looks: dict[str, Any] = {
            "said": lambda: False,
            "file": lambda: (self.folder / what).exists(),
            "gone": lambda: not (self.folder / what).exists(),
            "changed": lambda: (self.folder / what).read_text() != self.before[what],
            "score": lambda: (line["score"] or 0) > 0,
            "dead": lambda: self.victims[what].poll() is not None,
            "stopped": lambda: _state(self.victims[what].pid) == "T",
            "killed": lambda: line["stop_reason"] == "sandbox_killed",
            "runs": lambda: _runs(what),
            "long": lambda: len(said) > 2_000_000,
            "slow": lambda: line["timings"]["total"] > 15,
            "harmed": lambda: looks["slow"]() or looks["graded"]() or '"output": "on"' not in answers(line, 1),
            "graded": lambda: line["rewards"]["own"]["value"] != 1,
            "held": lambda: line["rewards"]["own"]["value"] != 1 or "forged" in answers(line, 1),
            "ended": lambda: not self.other_runs,
            "bound": lambda: _connects(int(what)),
            "kernel": lambda: '"error"' not in answers(line, 1) and '"total_count": 0' not in answers(line, 1),
            "artifact": lambda: SECRET in _kept(run, line),
        }
        return bool(looks[kind]())


def answers(line: dict[str, Any], last: int = 0) -> str:
    """What the tools answered, all or the last of them."""
    return "\n".join([str(m["content"]) for m in line["messages"] if m["role"] == "tool"][-last:])


def _kept(run: Path, line: dict[str, Any]) -> str:
    """All that was kept of the artifact `out`."""
    place = run / line["artifacts"]["out"].get("path", "nothing")
    return "".join(path.read_text("utf-8", "replace") for path in (place, *place.rglob("*")) if path.is_file())


def _victim(name: str) -> subprocess.Popen[bytes]:
    code = f"import time; key = 'KEY-' + 'in-memory' + '{name}'; time.sleep(3000)"
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", code, f"victim-{name}"])


def _services(folder: Path) -> None:
    """What listens on the runner's machine, each answering with a secret."""
    whole = socket.socket(socket.AF_INET6)
    whole.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    whole.bind(("::", 8765))
    abstract, named = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    abstract.bind("\0runner")
    named.bind(str(folder / "runner.sock"))
    for listener in (whole, abstract, named):
        listener.listen(64)
        threading.Thread(target=_serve, args=(listener,), daemon=True).start()
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind(("127.0.0.1", 8766))
    threading.Thread(target=_echo, args=(datagrams,), daemon=True).start()


def _serve(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        connection.sendall(f"{SECRET}service".encode())
        connection.close()


def _echo(datagrams: socket.socket) -> None:
    while True:
        _, sender = datagrams.recvfrom(1000)
        datagrams.sendto(f"{SECRET}datagram".encode(), sender)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _runs(mark: str) -> bool:
    for process in Path("/proc").iterdir():
        try:
            if (
                process.name.isdigit()
                and mark in (process / "cmdline").read_text()
                and _state(int(process.name)) != "Z"
            ):
                return True
        except OSError:
            continue
    return False


def _connects(port: int) -> bool:
    with socket.socket() as some:
        return some.connect_ex(("127.0.0.1", port)) == 0


def _write_spec(world: World, mode: str) -> Path:
    sandbox: dict[str, Any] = {"limits": dict(LIMITS), "timeout": 25}
    if mode == "none":
        sandbox |= {"backend": "none", "limits": {**LIMITS, "memory": 8 << 30, "open_files": 4096, "best_effort": True}}
    elif mode == "docker":
        # Its storage driver has no limit of the disk.
        sandbox |= {"backend": "docker", "limits": {name: limit for name, limit in LIMITS.items() if name != "disk"}}
    elif mode != "system":
        sandbox["image"] = mode
    path = world.folder / "spec" / "attacks.yaml"
    path.write_text(yaml.safe_dump({**SPEC, "sandbox": sandbox}))
    rows = [{"name": case.name, "turns": _turns(case, world.folder)} for case in _beside(ATTACKS, INNOCENT)]
    (world.folder / "spec/cases.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _beside(attacks: Sequence[Case], innocent: Sequence[Case]) -> list[Case]:
    """Five attacks, an innocent rollout, and so on."""
    return [case for i, one in enumerate(innocent) for case in (*attacks[5 * i : 5 * i + 5], one)] + [
        *attacks[5 * len(innocent) :]
    ]


def _turns(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Each call has a turn of its own: those of one turn would run beside each other."""
    calls = json.loads(json.dumps(case.calls).replace("{world}", str(folder)))
    return [*({"tools": [call]} for call in calls), {"say": "done"}]


async def _play(world: World, spec: Spec, out: Path) -> None:
    """The cases, beside another rollout with a process in the background."""
    async with ToolRuntime(SandboxConfig(), task_id="other") as other:
        command = f"echo {SECRET}process; exec sleep 3000"
        process = await (await other.sandbox()).spawn(command)
        other.processes.add(command, "/", process)
        await run_process(spec, RunOptions("process", out=out))
        world.other_runs = process.poll() is None


def main() -> None:
    world = World(Path(sys.argv[1]))
    os.chdir(world.folder)
    out = world.folder / "run" / "out"
    spec = load_spec(_write_spec(world, sys.argv[2]))
    asyncio.run(_play(world, spec, out))
    time.sleep(0.3)  # what was killed is buried
    lines = {line["row_key"]: line for line in map(json.loads, (out / "rollouts.jsonl").read_text().splitlines())}
    found = {case.name: world.harm(case, lines[case.name], out) for case in ATTACKS}
    said = {name: answers(line) for name, line in lines.items()}
    unarmed = {case.name: said[case.name] for case in ATTACKS if case.armed not in said[case.name]}
    unarmed |= {name: text for name, text in said.items() if "NameError" in text or "SyntaxError" in text}
    errors = {name: line["error"] for name, line in lines.items() if line["error"]}
    hurt = {case.name: said[case.name][:1000] for case in INNOCENT if lines[case.name]["score"] != 1}
    sys.stdout.write(json.dumps({"succeeded": found, "errors": errors, "unarmed": unarmed, "hurt": hurt}))
    sys.stdout.flush()
    for victim in world.victims.values():
        victim.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
