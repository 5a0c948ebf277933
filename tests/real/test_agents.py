"""Agent programs of others, as their recipes start them: what is trained on is what the policy sampled."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import Ending, Group, Spec, certify, open_env
from hermes_rl.sandbox.packages import npm_folder, package_folder
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.overrides import parse_extra_args
from hermes_rl.spec.recipes import about, shipped_recipes
from tests.api import summing
from tests.api.summing import Sampler, sampled, trained
from tests.real.containers import PATH
from tests.real.docker_daemon import Daemon
from tests.real.environments import ROOT, cache, python_of, wheel_of
from tests.rootfs import make_rootfs

COMPONENT = "agent programs: the recipes"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(900)]
OF_ROOT = Path("/var/cache/hermes-rl-real")
"""Sandboxes of root run as another user, who has to enter it."""
CACHE = OF_ROOT if os.geteuid() == 0 or os.access(OF_ROOT, os.W_OK) else cache() / "agents"
CHANGES = (
    "toolsets=null",  # a program has tools of its own
    "agent.max_trajectory_tokens=null",  # the small tokenizer makes many tokens of the programs' long prompts
    "sandbox.limits.memory=4GiB",
    """prompt.user='- "$HOME"? {{ problem_statement }}'""",
)
"""What is changed in the shipped spec `swe`; a prompt that begins with a dash is none of a program's options."""


def called(name: str, **arguments: Any) -> str:
    """A call in JSON that no program writes so: odd blanks, and escapes."""
    written = " ,  ".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{ {written} }}}}\n</tool_call>'


def typed(command: str, done: bool = False) -> str:
    """What Terminus reads of a text: keys to press."""
    keys = [{"keystrokes": f"{command}\n", "duration": 1.0}] if command else []
    return json.dumps({"analysis": "é", "plan": "I type.", "commands": keys, "task_complete": done}, indent=3)


WRITES: dict[str, Callable[[str], str]] = {
    "claude": lambda command: called("Bash", timeout=60000, description="run é", command=command),
    "codex": lambda command: called("exec_command", yield_time_ms=60000, cmd=command),
    "hermes": lambda command: called("terminal", timeout=60.0, command=command),
    "mini-swe-agent": lambda command: called("bash", command=command),
    "opencode": lambda command: called("bash", timeout=60000, description="run é", command=command),
    "openhands": lambda command: called("terminal", timeout=60.0, command=command),
    "pi": lambda command: called("bash", timeout=60.0, command=command),
    "qwen": lambda command: called("run_shell_command", is_background=False, description="run é", command=command),
    "terminus-2": typed,
}
"""How a policy has each program run a command."""
ENDS = {
    "mini-swe-agent": called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "terminus-2": typed("", done=True),
}
"""What it says at last, where that is no text."""


def policy_of(name: str, patch: str) -> Callable[..., str]:
    """A policy that applies the patch, looks at what has changed, and says so."""
    write, end = WRITES[name], ENDS.get(name, "It is repaired. \n")
    turns = [write(f"git apply - <<'END'\n{patch}END"), f" Now I look at it. é\n{write('git diff --stat')}", end, end]
    return lambda text, right=True: turns[text.count("<|im_start|>assistant") - 1]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node and npm on the path, which the package index has too; what is installed stays for the next session."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    # One that OpenHands needs is there as source alone.
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    monkeypatch.setenv("PIP_FIND_LINKS", " ".join([*folders, str(wheel_of("func-timeout==4.3.5"))]))
    monkeypatch.setenv("PATH", f"{python_of('node').parent}:{os.environ['PATH']}")


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system with the libraries that programs of others find in every image of Debian's."""
    root = make_rootfs(tmp_path_factory.mktemp("image"))
    (system,) = Path("/lib").glob("*-linux-gnu")
    for name in ("libdl.so.2", "librt.so.1", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"):
        shutil.copy(system / name, root / str(system)[1:])
    return root


class Usage:
    """Processor time of the processes that this one has started and that have ended meanwhile, in seconds, and the most
    memory that one sandbox of this machine had at a time, in bytes."""

    def __enter__(self) -> Usage:
        self._before, self.memory, self._over = self._seconds(), 0, threading.Event()
        self._looking = threading.Thread(target=self._look)
        self._looking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._looking.join()
        self.seconds = self._seconds() - self._before

    def _seconds(self) -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def _look(self) -> None:
        while not self._over.wait(0.05):
            parents: dict[int, int] = {}
            pages: dict[int, tuple[Path, int]] = {}
            for entry in Path("/proc").iterdir():
                try:
                    if entry.name.isdigit():
                        parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                        size = int((entry / "statm").read_text().split()[1])
                        pages[int(entry.name)] = ((entry / "ns" / "pid").readlink(), size)
                except OSError:
                    continue  # it has ended, or is somebody else's
            below = {os.getpid()}
            while more := {pid for pid, parent in parents.items() if parent in below} - below:
                below |= more
            sandboxes: Counter[Path] = Counter()
            for place, size in (pages[pid] for pid in below & pages.keys()):
                sandboxes[place] += size
            del sandboxes[Path("/proc/self/ns/pid").readlink()]
            self.memory = max(self.memory, max(sandboxes.values(), default=0) * resource.getpagesize())


def installed(spec: Spec) -> None:
    """Install what the recipe needs, so that it is not counted."""
    if spec.sandbox.python:
        image = spec.sandbox.backend == "docker" or spec.sandbox.image is not None
        package_folder(tuple(spec.sandbox.python), image)
    if spec.sandbox.npm:
        npm_folder(tuple(spec.sandbox.npm))


@pytest.mark.parametrize("name", WRITES)
async def test_it_plays_from_its_package_and_is_trained_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: None, record_property: Callable[..., None], name: str
) -> None:
    record_property("agents.md", await row_of_playing(name, monkeypatch))


@pytest.mark.parametrize("name", ["codex", "hermes", "pi"])
async def test_it_plays_in_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: None, image: Path, name: str
) -> None:
    await row_of_playing(name, monkeypatch, f"sandbox.image={image}")


@pytest.mark.parametrize("name", ["claude", "codex", "hermes", "mini-swe-agent", "opencode", "pi", "qwen"])
async def test_it_plays_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: None, docker_host: Daemon, image: Path, name: str
) -> None:
    docker_host.have("equipped:1", image, {"ENV": PATH})
    await row_of_playing(name, monkeypatch, "sandbox.backend=docker", "sandbox.image=equipped:1")


@pytest.mark.skipif(os.geteuid() != 0, reason="who is no root plays all of these tests as an ordinary user")
def test_an_ordinary_user_plays_them() -> None:
    user = ["unshare", "--user", "--map-user=1234", "--map-group=1234", "--"]
    played = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "from_its_package", __file__]
    env = {name: value for name, value in os.environ.items() if name != "HERMES_RL_TESTED_WITH"}
    done = subprocess.run([*user, *played], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0 and f"| {len(WRITES)} | `pytest" in done.stdout, done.stdout


async def row_of_playing(name: str, monkeypatch: pytest.MonkeyPatch, *sets: str) -> str:
    """Play a row of `swe` by a program, check what is recorded, and return the program's row of the table in docs."""
    spec = load_spec("swe", overrides=parse_extra_args([], [f"agent.program={name}", *CHANGES, *sets]))
    sampler = Sampler()
    installed(spec)
    async with open_env(spec) as env:
        row = env.rows()[0]
        monkeypatch.setattr(summing, "write", policy_of(name, row.columns["patch"]))
        with Usage() as usage:
            rollout = await env.play(row, sampler.policy())
    assert rollout.result is not None
    program = rollout.result.program
    assert program is not None
    turns = 4 if name == "terminus-2" else 3  # it asks once more whether all is done
    assert (rollout.ending, rollout.score, rollout.turns) == (Ending.FINISHED, 1.0, turns), program
    assert (program.exit_code, program.refused, program.left_out) == (0, 0, {}), program
    links = [(call["kind"], call["continues"]) for call in program.calls]
    assert links == [("main", None), *(("main", turn) for turn in range(turns - 1))]
    assert len(rollout.sequences or ()) == 1
    assert trained([rollout]) == sampled(sampler.answers)
    assert certify(Group("g", rollout.key.row, [rollout])).exact
    said, share = about(shipped_recipes()[name]), len(trained([rollout])) / len(sampled(sampler.answers))
    cells = (name, said["version"], said["dialect"], said["licence"], program.requests, len(rollout.sequences or ()))
    used = (f"{share:.0%}", f"{usage.seconds:.1f} s", f"{usage.memory / 1e6:,.0f} MB")
    return f"| {' | '.join(map(str, (*cells, *used)))} |"
