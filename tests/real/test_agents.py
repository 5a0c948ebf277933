"""Third-party agent programs, started as in their recipes: only sampled tokens are trained."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import Group, Rollout, Spec, StopReason, attach_provenance, open_env
from hermes_rl.agent.conversations import Conversations
from hermes_rl.agent.result import Message
from hermes_rl.sandbox.packages import npm_folder, package_folder
from hermes_rl.servers.base import ContextLengthExceeded
from hermes_rl.spec.load import load_spec
from hermes_rl.spec.overrides import parse_extra_args
from hermes_rl.spec.recipes import about, shipped_recipes
from hermes_rl.tokens.load import load_renderer
from hermes_rl.tokens.rendering import Renderer, RendererSettings
from tests.api import summing
from tests.api.summing import TOKENIZER, Sampler, sampled, trained
from tests.real.containers import PATH
from tests.real.docker_daemon import Daemon
from tests.real.environments import ROOT, cache, python_of, wheel_of
from tests.real.rival_rules import RecordedCall, by_openenv, by_verifiers, lengths
from tests.rootfs import make_rootfs

COMPONENT = "agent programs: the recipes"
PLAYED = "../benchmarks/played.md"
"""From docs/, the page with the tables of sequences."""
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
    """Return a call in unusual JSON: odd blanks, and escapes."""
    written = " ,  ".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in arguments.items())
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{ {written} }}}}\n</tool_call>'


def typed(command: str, done: bool = False) -> str:
    """Return a text that Terminus reads as keys to press."""
    keys = [{"keystrokes": f"{command}\n", "duration": 1.0}] if command else []
    return json.dumps({"analysis": "é", "plan": "I type.", "commands": keys, "task_complete": done}, indent=3)


WRITES: dict[str, Callable[[str], str]] = {
    "claude": lambda command: called("Bash", timeout=60000, description="run é", command=command),
    "codex": lambda command: called("exec_command", yield_time_ms=60000, cmd=command),
    "gemini": lambda command: called("run_shell_command", is_background=False, description="run é", command=command),
    "hermes": lambda command: called("terminal", timeout=60.0, command=command),
    "mini-swe-agent": lambda command: called("bash", command=command),
    "opencode": lambda command: called("bash", timeout=60000, description="run é", command=command),
    "openhands": lambda command: called("terminal", timeout=60.0, command=command),
    "pi": lambda command: called("bash", timeout=60.0, command=command),
    "qwen": lambda command: called("run_shell_command", is_background=False, description="run é", command=command),
    "terminus-2": typed,
}
"""How a policy has each program run a command."""
TYPING = ("terminus-2",)
"""Programs that read calls from a text, one list of them in each."""
ENDS = {
    "mini-swe-agent": called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    "terminus-2": typed("", done=True),
}
"""What it says at last, where that is no text."""


def policy_of(name: str, patch: str) -> Callable[..., str]:
    """Return a policy that applies the patch, inspects the changes, and ends with a message."""
    write, end = WRITES[name], ENDS.get(name, "It is repaired. \n")
    turns = [write(f"git apply - <<'END'\n{patch}END"), f" Now I look at it. é\n{write('git diff --stat')}", end, end]
    return lambda text, right=True: turns[text.count("<|im_start|>assistant") - 1]


def thinking(answer: str) -> str:
    return f"<think>\nLet me see…\n  First this.\n</think>\n\n{answer}"


def plain(answer: str) -> str:
    """Return the same reply as templates would write it: plain JSON with integers in calls, no blanks around texts."""

    def call(said: re.Match[str]) -> str:
        value = json.loads(said[1], parse_float=lambda number: int(float(number)))
        return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"

    written = re.sub(r"<tool_call>\n(.*?)\n</tool_call>", call, answer, flags=re.DOTALL)
    return re.sub(r"</think>\n\n\s+", "</think>\n\n", written).strip()


def healthy_answers(name: str, patch: str) -> list[str]:
    """Return replies that apply the patch, inspect it in several turns (in one with two parallel calls), and end."""
    write, end = WRITES[name], ENDS.get(name, "It is repaired. \n")
    looks = [write(f"git diff --stat | head -{count}") for count in range(1, 6)]
    if name not in TYPING:
        looks[1:3] = [f" Now I look at it. é\n{looks[1]}\n{looks[2]}"]
    return [thinking(said) for said in (write(f"git apply - <<'END'\n{patch}END"), *looks, end, end)]


TOO_LONG = "the conversation does not fit"
"""Said by a policy whose context the request exceeds."""


def faulty_answers(name: str) -> dict[str, list[str]]:
    """Return, by mistake, replies with that mistake between two calls."""
    write, end = WRITES[name], ENDS.get(name, "It is repaired. \n")
    look, further = write("git status"), [write("git diff --stat"), "So far I have looked at it, all is well.", end]
    called = re.search(r'"name": "(\w+)"', look)
    tool = called[1] if called else "bash"
    mistakes = {
        "cut JSON": f'<tool_call>\n{{"name": "{tool}", "arguments": {{"command": "echo hi}}\n</tool_call>',
        "a tool that is not there": look.replace(f'"name": "{tool}"', '"name": "no_such_tool"'),
        "nothing": "",
        "more than it may": "and so on " * 3_000,
        "not anything, as it does not fit": TOO_LONG,
    }
    return {mistake: [look, said, *further, end, end] for mistake, said in mistakes.items()}


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return Node and npm of the package index on the path; installed packages remain for the next session."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    # One that OpenHands needs is there as source alone.
    folders = os.environ.get("PIP_FIND_LINKS", "").split()
    monkeypatch.setenv("PIP_FIND_LINKS", " ".join([*folders, str(wheel_of("func-timeout==4.3.5"))]))
    monkeypatch.setenv("PATH", f"{python_of('node').parent}:{os.environ['PATH']}")


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root file system with the libraries that programs expect in every Debian image."""
    root = make_rootfs(tmp_path_factory.mktemp("image"))
    (system,) = Path("/lib").glob("*-linux-gnu")
    for name in ("libdl.so.2", "librt.so.1", "libpthread.so.0", "libstdc++.so.6", "libgcc_s.so.1", "libm.so.6"):
        shutil.copy(system / name, root / str(system)[1:])
    return root


class Usage:
    """Processor seconds of ended child processes, and the maximum memory of a sandbox of this machine in bytes."""

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
    """Install the packages of the recipe beforehand, so that their installation is not measured."""
    if spec.sandbox.python:
        image = spec.sandbox.backend == "docker" or spec.sandbox.image is not None
        package_folder(tuple(spec.sandbox.python), image)
    if spec.sandbox.npm:
        npm_folder(tuple(spec.sandbox.npm))


@pytest.mark.parametrize("name", WRITES)
async def test_packaged_agent_runs_and_trains_on_exact_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: None, record_property: Callable[..., None], name: str
) -> None:
    record_property("agents.md", await row_of_playing(name, monkeypatch))


@pytest.mark.parametrize("name", WRITES)
async def test_its_conversations_break_less_often_than_by_the_rules_of_others(
    monkeypatch: pytest.MonkeyPatch, node: None, record_property: Callable[..., None], name: str
) -> None:
    spec = load_spec("swe", overrides=parse_extra_args([], [f"agent.program={name}", *CHANGES, "agent.timeout=150"]))
    installed(spec)
    recording = recorded(monkeypatch)
    renderer = load_renderer(None, RendererSettings())
    async with open_env(spec) as env:
        row = env.rows()[0]
        healthy = healthy_answers(name, row.columns["patch"])
        played = {"odd JSON": healthy, "plain JSON": [plain(said) for said in healthy], **faulty_answers(name)}
        figures: dict[str, Figures] = {}
        for what, answers in played.items():
            recording.clear()
            monkeypatch.setattr(summing, "write", said_in_turn(answers))
            sampler = Sampler()
            rollout = await env.run(row, sampler.policy(), group=what.replace(" ", "-"))
            figures[what] = figures_of(rollout, sampler, recording, renderer)
    odd, neat, *faulty = figures.values()
    assert odd.ours == neat.ours == 1
    faults = Figures.of_all(faulty)
    every = Figures.of_all(figures.values())
    accounted = (every.trained + sum(every.excluded.values())) / every.sampled
    assert accounted >= 0.99
    excluded = ", ".join(f"{kind} {count:,}" for kind, count in sorted(every.excluded.items())) or "–"
    record_property("figure", f"healthy rollouts {Figures.of_all((odd, neat)).told(2)}; with mistakes {faults.told(5)}")
    cells = [name, odd.rules, neat.rules, odd.thousands, f"{len(faulty)}, {faults.requests}", faults.rules]
    record_property(PLAYED, f"| {' | '.join((*cells, f'{accounted:.0%} of {every.sampled:,}', excluded))} |")


DELEGATES = {
    "opencode": called("task", description="look é", prompt="SUBTASK: is the tree clean?", subagent_type="general"),
    "qwen": called("agent", description="look é", prompt="SUBTASK: is it clean?", subagent_type="general-purpose"),
}
"""How a policy has a program ask a sub-agent of its own, by the recipe as it is."""


def delegating(name: str, patch: str) -> Callable[..., str]:
    """Return a policy that repairs, lets a sub-agent run two commands to inspect the repair, and ends."""
    write, end = WRITES[name], thinking("It is repaired. \n")
    main = [thinking(write(f"git apply - <<'END'\n{patch}END")), thinking(DELEGATES[name]), end]
    beside = [thinking(write("git status")), write("git diff --stat"), thinking("The sub-agent has looked. \n")]

    def say(text: str, right: bool = True) -> str:
        turns = main if "MAINTASK" in text else beside
        return turns[min(text.count("<|im_start|>assistant") - 1, len(turns) - 1)]

    return say


async def recorded_of(
    name: str, monkeypatch: pytest.MonkeyPatch, policy_of_patch: Callable[[str], Callable[..., str]], **given: Any
) -> tuple[Rollout, Figures]:
    """Run a row of `swe` with a program and a policy; return the rollout and its recorded calls."""
    changes = [*CHANGES[:-1], "prompt.user='MAINTASK: {{ problem_statement }}'", "agent.timeout=150"]
    spec = load_spec("swe", overrides=parse_extra_args([], [f"agent.program={name}", *changes]))
    installed(spec)
    recording, sampler = recorded(monkeypatch), Sampler()
    async with open_env(spec) as env:
        row = env.rows()[0]
        monkeypatch.setattr(summing, "write", policy_of_patch(row.columns["patch"]))
        rollout = await env.run(row, sampler.policy(**given))
    return rollout, figures_of(rollout, sampler, recording, load_renderer(None, RendererSettings()))


@pytest.mark.parametrize("name", DELEGATES)
async def test_sub_agent_of_an_agent_is_trained_in_its_context(
    monkeypatch: pytest.MonkeyPatch, node: None, record_property: Callable[..., None], name: str
) -> None:
    rollout, figures = await recorded_of(name, monkeypatch, partial(delegating, name))
    assert (rollout.stop_reason, rollout.score, figures.trained) == (StopReason.FINISHED, 1.0, figures.sampled)
    (main, kinds), (asked, inner) = both = conversations_of(rollout)
    assert (set(kinds), inner) == ({"main"}, ["subagents"] * 3), both
    assert ("MAINTASK" in main, "MAINTASK" in asked, "SUBTASK" in asked) == (True, False, True)
    record_property(PLAYED, figures.row(f"{name}, a sub-agent"))
    record_property("figure", figures.told(1))


LONG = {"codex": 16_000, "opencode": 24_000}
"""Programs that sum up what was said in an answer without tools, and the tokens of a context in which they do."""


def lasting(name: str, patch: str) -> Callable[..., str]:
    """Return a policy that inspects a lot before it repairs, and summarizes without tools when asked to."""
    write, looks = WRITES[name], [f"seq {count}000 {count}400" for count in range(1, 7)]
    left = [thinking(write(command)) for command in (*looks, f"git apply - <<'END'\n{patch}END")]
    left.append(thinking("It is repaired. \n"))

    def say(text: str, right: bool = True) -> str:
        if "<tools>" not in text:
            return thinking("Much was looked at, and it is to be repaired now. é")
        return left.pop(0) if len(left) > 1 else left[0]

    return say


@pytest.mark.parametrize("name", LONG)
async def test_long_run_continues_from_its_summaries(
    monkeypatch: pytest.MonkeyPatch, node: None, record_property: Callable[..., None], name: str
) -> None:
    rollout, figures = await recorded_of(name, monkeypatch, partial(lasting, name), context=LONG[name])
    assert (rollout.stop_reason, rollout.score, set(figures.excluded)) == (StopReason.FINISHED, 1.0, {"summaries"})
    assert figures.trained + figures.excluded["summaries"] == figures.sampled
    conversations = conversations_of(rollout)
    assert [set(kinds) for _, kinds in conversations] == [{"main"}] * figures.ours, conversations
    assert figures.ours >= 2
    record_property(PLAYED, figures.row(f"{name}, a long run"))
    record_property("figure", figures.told(1))


def conversations_of(rollout: Rollout) -> list[tuple[str, list[str]]]:
    """Return the text of each sequence, and the kinds of the calls whose replies are trained in it."""
    assert rollout.result is not None and rollout.result.program is not None
    calls = rollout.result.program.calls
    return [
        (TOKENIZER.decode(line.tokens), [str(calls[span.turn]["kind"]) for span in line.spans])
        for line in rollout.sequences or ()
    ]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Message]]:
    """Return a list that receives the messages, tools and reply of each call that a program makes."""
    recording, add = list[tuple[Any, Any, Message]](), Conversations.add

    def noted(
        self: Conversations,
        messages: Any,
        tools: Any,
        answer: Message,
        before: int | None = None,
        came: int | None = None,
    ) -> Any:
        recording.append((messages, tools, answer))
        return add(self, messages, tools, answer, before, came)

    monkeypatch.setattr(Conversations, "add", noted)
    return recording


def said_in_turn(answers: Sequence[str]) -> Callable[..., str]:
    """Return a policy with these replies, which then repeats its last one."""
    left = list(answers)

    def write(text: str, right: bool = True) -> str:
        said = left.pop(0) if len(left) > 1 else left[0]
        if said == TOO_LONG:
            raise ContextLengthExceeded(said, 9_000, 8_192)
        return said

    return write


@dataclass(frozen=True)
class Figures:
    """Recorded figures of rollouts: answered requests, tokens, and sequences by three rules."""

    requests: int
    sampled: int
    trained: int
    excluded: Counter[str]
    ours: int
    verifiers: int
    openenv: int
    computed: tuple[int, int, int]
    """Tokens of all sequences by the three rules."""

    @classmethod
    def of_all(cls, parts: Iterable[Figures]) -> Figures:
        first, *others = parts
        for each in others:
            computed = tuple(map(sum, zip(first.computed, each.computed, strict=True)))
            counts = {f.name: getattr(first, f.name) + getattr(each, f.name) for f in fields(cls)}
            first = cls(**{**counts, "computed": computed})
        return first

    def row(self, name: str) -> str:
        """Return a row of the table in docs for one rollout."""
        accounted = (self.trained + sum(self.excluded.values())) / self.sampled
        assert accounted >= 0.99
        excluded = ", ".join(f"{kind} {count:,}" for kind, count in sorted(self.excluded.items())) or "–"
        cells = (name, self.requests, self.rules, self.thousands, f"{accounted:.0%} of {self.sampled:,}", excluded)
        return f"| {' | '.join(map(str, cells))} |"

    def told(self, rollouts: int) -> str:
        """Return the number of sequences of a rollout, and the share of tokens in each state."""
        three = " / ".join(f"{count / rollouts:.1f}" for count in (self.ours, self.verifiers, self.openenv))
        kinds = "".join(f", {kind} {count:,}" for kind, count in sorted(self.excluded.items()))
        share = f"{self.trained / self.sampled:.2%} of {self.sampled:,} sampled tokens trained{kinds}"
        return f"{three} sequences each (ours / verifiers / OpenEnv), {share}"

    @property
    def rules(self) -> str:
        return f"{self.ours} / {self.verifiers} / {self.openenv}"

    @property
    def thousands(self) -> str:
        return " / ".join(f"{count / 1e3:,.0f}" for count in self.computed)


def figures_of(rollout: Rollout, sampler: Sampler, recording: Sequence[Any], renderer: Renderer) -> Figures:
    """Check the record of a rollout, and return its figures."""
    assert rollout.score is not None, rollout.error
    assert rollout.result is not None and rollout.result.transcript is not None
    proof = attach_provenance(Group("g", rollout.key.row, [rollout]))
    assert proof.exact, proof.problems
    assert Counter(trained([rollout])) <= Counter(sampled(sampler.answers))
    transcript, excluded = rollout.result.transcript, Counter(rollout.excluded)
    assert sum(excluded.values()) == proof.excluded
    tokens = [transcript.branches[turn.sequence].tokens[turn.start : turn.stop].tolist() for turn in transcript.turns]
    calls = [RecordedCall(*said, ids) for said, ids in zip(recording, tokens, strict=True)]
    ours = [len(sequence) for sequence in rollout.sequences or ()]
    verifiers, openenv = (lengths(place(calls, renderer)) for place in (by_verifiers, by_openenv))
    counted = (len(calls), len(sampled(sampler.answers)), proof.trained, excluded)
    computed = (sum(ours), sum(verifiers), sum(openenv))
    return Figures(*counted, len(ours), len(verifiers), len(openenv), computed)


@pytest.mark.parametrize("name", ["codex", "hermes", "pi"])
async def test_agent_runs_in_an_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: None, image: Path, name: str
) -> None:
    await row_of_playing(name, monkeypatch, f"sandbox.image={image}")


@pytest.mark.parametrize("name", ["claude", "codex", "gemini", "hermes", "mini-swe-agent", "opencode", "pi", "qwen"])
async def test_agent_runs_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: None, docker_host: Daemon, image: Path, name: str
) -> None:
    docker_host.have("equipped:1", image, {"ENV": PATH})
    await row_of_playing(name, monkeypatch, "sandbox.backend=docker", "sandbox.image=equipped:1")


@pytest.mark.skipif(os.geteuid() != 0, reason="who is no root plays all of these tests as an ordinary user")
def test_agents_run_as_an_ordinary_user() -> None:
    user = ["unshare", "--user", "--map-user=1234", "--map-group=1234", "--"]
    chosen = ["-k", "test_packaged_agent_runs", __file__]
    played = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    env = {name: value for name, value in os.environ.items() if name != "HERMES_RL_TESTED_WITH"}
    done = subprocess.run([*user, *played], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0 and f"| {len(WRITES)} | `pytest" in done.stdout, done.stdout


async def row_of_playing(name: str, monkeypatch: pytest.MonkeyPatch, *sets: str) -> str:
    """Run a row of `swe` with a program, check its record, and return its row of the table in docs."""
    spec = load_spec("swe", overrides=parse_extra_args([], [f"agent.program={name}", *CHANGES, *sets]))
    sampler = Sampler()
    installed(spec)
    async with open_env(spec) as env:
        row = env.rows()[0]
        monkeypatch.setattr(summing, "write", policy_of(name, row.columns["patch"]))
        with Usage() as usage:
            rollout = await env.run(row, sampler.policy())
    assert rollout.result is not None
    program = rollout.result.program
    assert program is not None
    turns = 4 if name == "terminus-2" else 3  # it asks once more whether all is done
    assert (rollout.stop_reason, rollout.score, rollout.turns) == (StopReason.FINISHED, 1.0, turns), program
    assert (program.exit_code, program.refused, program.excluded) == (0, 0, {}), program
    links = [(call["kind"], call["continues"]) for call in program.calls]
    assert links == [("main", None), *(("main", turn) for turn in range(turns - 1))]
    assert len(rollout.sequences or ()) == 1
    assert trained([rollout]) == sampled(sampler.answers)
    assert attach_provenance(Group("g", rollout.key.row, [rollout])).exact
    said, share = about(shipped_recipes()[name]), len(trained([rollout])) / len(sampled(sampler.answers))
    cells = (name, said["version"], said["dialect"], said["licence"], program.requests, len(rollout.sequences or ()))
    used = (f"{share:.0%}", f"{usage.seconds:.1f} s", f"{usage.memory / 1e6:,.0f} MB")
    return f"| {' | '.join(map(str, (*cells, *used)))} |"
