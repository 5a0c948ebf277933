"""Read task directories in Harbor's format as rows: task.toml, instruction.md, environment/, tests/, solution/.

This module owns the supported subset of that format, the parts that are refused by name, with the file and the line
that request them, and the parts without effect here, which are reported once for all tasks that have them. Docker
builds a task's Dockerfile. For other sandboxes its content is applied if it only consists of plain files, variables and
commands. Source of names and defaults: Harbor 0.25 (`task.toml`, versions 1.0 to 1.4).
"""

from __future__ import annotations

import base64
import json
import os
import posixpath
import re
import shlex
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import file_digest, sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.data.compose import VARIABLES, ComposeFile, defaulted
from hermes_rl.errors import Problem, SpecError, UserError
from hermes_rl.others_files import RefusedFileError, list_below, open_file, read_file, read_regular, read_text
from hermes_rl.plugins import did_you_mean
from hermes_rl.spec.model import Spec
from hermes_rl.spec.rules import no_copies
from hermes_rl.spec.section import parse_size
from hermes_rl.values import is_number

TASK = "task.toml"
LONGEST_TOML = 1 << 20
MANY_NAMES = re.compile(r"""(?<![\w"'-])(?:[\w"'-]+[ \t]*\.[ \t]*){50}""")
"""Keys with at least 50 names, for which the TOML parser would need memory quadratic in their number."""
MOST_STEPS = 100
LARGEST_TASK = 256 << 20
"""Maximum size in bytes of the files of one task that a row contains; a file of several steps counts for each step."""
VERIFIER_SECONDS = 600.0
PLAIN = re.compile(
    r"((docker\.io|public\.ecr\.aws/docker)/)?(library/)?(ubuntu|debian|python)(:[\w.-]+)?(@sha256:[0-9a-f]{64})?"
)
"""Images that the default sandbox, which has the host's programs, can replace."""
INSTALLS = re.compile(
    r"\b(apt|apt-get|apk|yum|dnf|pip3?|uv|uvx|npm|npx|yarn|conda|cargo|gem|go|curl|wget|git\s+clone|useradd|adduser)\b"
)
"""Commands that need a network, or root."""
DOCKER = "--set sandbox.backend=docker"
IN_DEMO = f"{DOCKER} --set servers.policy.type=scripted (instead of --demo)"
"""Options to run a task's solution if only Docker can."""
APT = re.compile(r"(DEBIAN_FRONTEND=\w+ +)?apt(-get)? +(-\S+ +)*(?P<what>update|clean|install)(?P<rest>( +\S+)*) *")
PIP = re.compile(r"(python3? +-m +)?pip3? +install(?P<rest>( +\S+)*) *")
"""Commands that a sandbox with the host's programs need not run if the host already has the packages."""
PACKAGE = re.compile(r"[A-Za-z0-9][\w.+:=~<>,\[\]-]*")
HARMLESS = (
    "--no-cache-dir",
    "--break-system-packages",
    "--upgrade",
    "-U",
    "-q",
    "--quiet",
    "--root-user-action=ignore",
)
"""Options of pip that choose no package."""
MAKES = re.compile(r"mkdir +-p( +[\w./-]+)+ *")
"""Commands that only make directories, which does not affect files written before."""
LISTS = re.compile(r"rm +-rf? +/var/lib/apt/lists/?\*? *")
PACKAGES = Path("/var/lib/dpkg/status")
"""List of installed packages of Debian and Ubuntu."""
KEPT = "--set sandbox.keep_processes=true"
BEGUN = "/tmp/.entrypoint-has-begun"
ENTRYPOINT = (
    "({command} sh -c 'touch {begun}; exec sleep infinity') </dev/null >/dev/null 2>&1 &\n"
    "for _ in $(seq 100); do [ -e {begun} ] && break; sleep 0.1; done; rm -f {begun}"
)
"""Command that starts the entry point of an image; it returns when the entry point starts its command, or after ten
seconds.
"""
READY = "sleep 2"
"""Command that waits for the entry point's background processes, if no health check shows when they are ready."""
UNCHECKED = (
    "without a health check, the agent starts two seconds after `ENTRYPOINT`, whose programs may not be ready yet: "
    "add [environment.healthcheck] to task.toml"
)
UNSTARTED = {"CMD": "is not run, nor is it by Harbor", "EXPOSE": "is of no effect: no port is opened to the outside"}
"""Instructions of a Dockerfile that have no effect here, and why."""

REFUSED: Mapping[str, str] = {
    "environment.tpu": "no sandbox here has a TPU",
    "agent.user": "the agent runs as the image's user, or as the user of the default sandbox",
    "verifier.user": "tests run as the agent's user",
    "verifier.environment": "tests run in the agent's sandbox alone",
    "verifier.collect": "nothing is collected from services other than the sandbox",
}
"""Keys of task.toml that are not supported, and why; keys of `agent` and `verifier` also apply to a step."""
STEPS = 'the loop runs steps, with `user: {turns: "{{ steps }}"}` and a reward with `per_step`, as in the shipped spec'
STRATEGIES = {"mean": "mean", "final": "last"}
"""Value of a reward's `per_step` for each value of `multi_step_reward_strategy`."""
UNUSED: Mapping[str, str] = {
    "artifacts": "is not collected; `artifacts` of the spec names what is",
    "environment.build_timeout_sec": "is of no effect: a build may take an hour",
    "environment.gpu_types": "is of no effect where no GPU is asked for",
}
"""Keys of task.toml that have no effect here, and why."""
KEYS: Mapping[str, frozenset[str]] = {
    table: frozenset(keys.split())
    for table, keys in {
        "": "version schema_version task metadata source verifier agent environment solution steps artifacts "
        "multi_step_reward_strategy",
        "agent": "timeout_sec user network_mode allowed_hosts",
        "verifier": "timeout_sec env user environment_mode environment collect network_mode allowed_hosts",
        "environment": "build_timeout_sec docker_image os cpus memory_mb memory storage_mb storage gpus gpu_types tpu "
        "mcp_servers env skills_dir healthcheck workdir allow_internet network_mode allowed_hosts",
        "environment.healthcheck": "command interval_sec timeout_sec start_period_sec start_interval_sec retries",
        "solution": "env",
        "steps": "name agent verifier min_reward healthcheck artifacts",
    }.items()
}
"""Supported keys of each table of task.toml; `task` and `metadata` describe the task and may have any keys."""
HEALTHY = (
    "end=$(($(date +%s) + {start_period_sec:.0f})); failed=0; until timeout {timeout_sec} bash -c {command}; do "
    "if [ $(date +%s) -lt $end ]; then sleep {start_interval_sec}; continue; fi; failed=$((failed + 1)); "
    "[ $failed -lt {retries:.0f} ] || {{ echo the health check fails >&2; exit 1; }}; sleep {interval_sec}; done"
)
"""Command that runs a health check until it passes, and fails after too many failed checks."""
HEALTH = {"interval_sec": 5, "timeout_sec": 30, "start_period_sec": 0, "start_interval_sec": 5, "retries": 3}
BRIDGED = {"streamable-http": "streamablehttp", "http": "streamablehttp", "sse": "sse"}
"""Name that the bridge program to stdio uses for each transport of a tool server at an address."""
COMPOSE = "docker-compose.yaml"
"""File name by which a Compose file is recognized."""
FILES = frozenset((TASK, "instruction.md", "environment", "tests", "solution", "steps", "README.md"))
STEP_FILES = frozenset(("instruction.md", "workdir", "tests", "solution", "README.md"))
"""Content of a task directory, and of the directory of a step."""
COPIED = ("tests", "solution", "workdir")
"""Directories of a task, or of a step, that are copied into the sandbox."""
NAMED = 3
"""Maximum number of tasks that a note names; for more tasks it contains their number."""


@dataclass
class Tasks:
    """Content of a directory of tasks: one row per supported task, and notes for the user."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tasks_of(spec: Spec) -> Tasks:
    """Return the tasks in `dataset.harbor` of a spec; see `read_tasks`."""
    sandbox, rule = spec.sandbox, spec.dataset.eval
    agent = spec.agent_for("evaluate" if rule is not None and rule.only else "process")
    says = spec.user is not None and spec.user.turns is not None and agent.program is None
    steps = next((each.per_step for each in spec.rewards.values() if each.per_step is not None), None) if says else None
    return read_tasks(
        Path(str(spec.dataset.harbor)),
        sandbox.backend,
        network=sandbox.network,
        agent_timeout=agent.timeout,
        steps=steps,
        servers={
            tool.mcp.name: tuple(tool.mcp.command or (str(tool.mcp.url),))
            for tool in spec.tools
            if tool.mcp is not None
        },
        keeps_processes=sandbox.keep_processes,
        packages=tuple(map(str, sandbox.python)),
        demo=spec.demo,
    )


def read_tasks(
    folder: Path,
    backend: str,
    *,
    network: bool | Sequence[str],
    agent_timeout: float | None = None,
    steps: str | None = None,
    servers: Mapping[str, tuple[str, ...]] | None = None,
    keeps_processes: bool = False,
    packages: Sequence[str] = (),
    demo: bool = False,
) -> Tasks:
    """Read a task directory, or all task directories directly in a directory.

    Unsupported tasks are excluded, and `notes` contain them with the reason, and the parts of the others without
    effect. With a backend that takes images each task has its image; with any other the default sandbox replaces a
    plain image of Debian, Ubuntu or Python.

    Args:
        folder: the directory.
        backend: the spec's `sandbox.backend`.
        network: the spec's `sandbox.network`: none, all, or names of hosts.
        agent_timeout: seconds that the spec gives the agent; None: unlimited.
        steps: how the spec combines the rewards of several steps, `mean` or `last`; None: steps are not supported.
        servers: the commands, or addresses, of the spec's tool servers, by name.
        keeps_processes: the spec's `sandbox.keep_processes`.
        packages: the spec's `sandbox.python`.
        demo: True if the spec is changed so that it needs no container, whatever its backend.

    Raises:
        SpecError: none of the tasks is supported; with the location of each reason.
        UserError: there is no such directory, or no task in it.
    """
    if not folder.is_dir():
        raise UserError(f"dataset.harbor: {folder} is not a directory")
    task_folders = [folder] if (folder / TASK).is_file() else sorted(path.parent for path in folder.glob(f"*/{TASK}"))
    if not task_folders:
        older = any(folder.glob("*/task.yaml"))
        hint = "; `hermes-rl run terminal-bench` runs tasks with a task.yaml" if older else ""
        raise UserError(f"dataset.harbor: {folder} has no {TASK}, and no folder right in it has one{hint}")
    tasks, refused, noted = Tasks(), list[Problem](), dict[str, list[str]]()
    for task_folder in task_folders:
        task = _Task(
            task_folder, folder, backend, network, agent_timeout, steps, servers or {}, keeps_processes, packages, demo
        )
        row = task.row_or_none()
        refused += task.problems
        if row is not None and not task.problems:
            tasks.rows.append(row)
            for note in dict.fromkeys(task.notes):
                noted.setdefault(note, []).append(task_folder.name)
    if not tasks.rows:
        raise SpecError(refused)
    for note, names in noted.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        tasks.notes.append(f"{', '.join(names[:NAMED])}{more}: {note}")
    tasks.notes += [f"WARNING: excluded: {problem}" for problem in refused]
    return tasks


class _Part(NamedTuple):
    """A step of a task, or all of a task without steps."""

    key: str
    """Prefix of its keys in task.toml."""
    folder: Path


class _Line(NamedTuple):
    """One instruction of a Dockerfile; continued lines are joined."""

    start_line: int
    word: str
    rest: str


@dataclass
class _Task:
    """One task directory; see `read_tasks`."""

    folder: Path
    top: Path
    backend: str
    network: bool | Sequence[str]
    agent_timeout: float | None
    plays_steps: str | None
    servers: Mapping[str, tuple[str, ...]]
    keeps_processes: bool
    packages: Sequence[str]
    demo: bool
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    workdir: str | None = None
    base: str | None = None
    ordered: bool = False
    """True if a command of the Dockerfile may see other files when more are copied after it."""
    builds: dict[str, str] = field(default_factory=dict)
    """Directories from which images are built, and a digest of each one's content."""
    env: dict[str, str] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    services: dict[str, Any] = field(default_factory=dict)
    _modes_by_folder: dict[Path, Mapping[Path, int]] = field(default_factory=dict)
    _bytes_left: int = field(default_factory=lambda: LARGEST_TASK)
    """Remaining bytes of the task's files that the row may hold."""

    def __post_init__(self) -> None:
        self.docker = IN_DEMO if self.demo else DOCKER
        self.build = f"{self.docker} builds it; or name an image that you have built in [environment] docker_image"

    @property
    def _takes_images(self) -> bool:
        return self.backend not in ("bubblewrap", "none", "ssh")

    def row_or_none(self) -> dict[str, Any] | None:
        """Return the task as a row, or None if it cannot be read. `problems` contain the unsupported parts."""
        try:
            return self._row()
        except Exception as error:  # noqa: BLE001 - unexpected content excludes only this task
            is_expected = isinstance(error, UserError | OSError | ValueError)
            line = re.search(r"line (\d+)", str(error))
            reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
            self._refuse(self.folder / TASK, int(line[1]) if line else 1, f"it cannot be read: {reason}")
            return None

    def _parse(self) -> None:
        if not self.folder.name.isprintable():  # it is the name of the row
            raise ValueError("the folder's name has a character that cannot be printed")
        self._text = read_text(self.folder / TASK, limit=LONGEST_TOML)
        if MANY_NAMES.search(self._text):
            raise ValueError("it has a key of more than 50 names")
        self._toml = tomllib.loads(self._text)

    def _row(self) -> dict[str, Any] | None:
        file = self.folder / TASK
        self._parse()
        self._hold_refused("", REFUSED)
        if self._read_number("environment.gpus", 0):
            self._refuse_key("environment.gpus", "no sandbox here has a GPU")
        if str(self._lookup("environment.os") or "linux").lower() != "linux":
            self._refuse_key("environment.os", "sandboxes are Linux")
        self._hold_servers()
        parts = self._parts()
        if not parts:
            return None
        keys = dict.fromkeys(("", *(part.key for part in parts)))
        for table in ("environment", *(f"{key}{name}" for key in keys for name in ("agent", "verifier"))):
            self._hold_network(table)
        self._note_unused(parts)
        self._files(file, parts)
        self._links(parts)
        self._environment(file)
        self._hold_copies(parts)
        self.env |= self._variables("environment.env")
        folder = self._lookup("environment.workdir") or self.workdir
        workdir = str(folder) if folder else None if self.backend == "docker" else "/app"  # None: the image's directory
        steps = [self._step(part, workdir) for part in parts]
        self.setup += self._until_healthy("environment.healthcheck")
        if parts[0].key:
            # The sandbox starts with the files of the first step, over files of the image at the same paths.
            step_targets = {posixpath.normpath(each["to"]) for each in steps[0]["files"]}
            environment_files = [each for each in self.files if posixpath.normpath(each["to"]) not in step_targets]
            self.files, self.setup = environment_files + steps[0]["files"], self.setup + steps[0]["setup"]
        self._note_time()
        cpus = self._read_number("environment.cpus")
        return {
            "name": self.folder.name,
            "instruction": steps[0]["say"],
            "skills_dir": str(self._lookup("environment.skills_dir") or ""),
            "category": str(self._lookup("metadata.category") or ""),
            "image": self.base if self._takes_images else None,
            "builds": self.builds,
            "workdir": workdir,
            "env": self.env,
            "files": self.files,
            "setup": self.setup,
            "services": self.services,
            "memory": self._size("memory"),
            "disk": self._size("storage"),
            "cpu": cpus or None,
            "tests": steps[0]["verifier"]["files"],
            "verifier_env": steps[0]["verifier"]["env"],
            "verifier_timeout": steps[0]["verifier"]["timeout"],
            "solution": steps[0]["solution"],
            "verifiers": [step["verifier"] for step in steps],
            "steps": [
                {key: step[key] for key in ("say", "files", "setup")} | before["min_reward"]
                for before, step in pairwise(steps)
            ],
            "turns": [
                turn
                for step in steps
                for turn in (
                    {"tools": [{"name": "terminal", "args": {"command": step["solution"]}}]},
                    {"say": "Done."},
                )
            ],
        }

    def _hold_servers(self) -> None:
        """Refuse tool servers that the spec does not start as the task requires: the spec's tools serve all its
        tasks.
        """
        key = "environment.mcp_servers"
        tables = self._lookup(key) or []
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            self._refuse_key(key, f"expected [[{key}]]")
            return
        needed, packages = [], ""
        for table in tables:
            name, url = str(table.get("name")), table.get("url")
            command = [table.get("command"), *table.get("args", ())]
            spec_server = self.servers.get(name, ())
            if table.get("headers"):
                self._refuse_key(key, f"headers of the tool server {name!r} are not sent")
            elif table.get("transport", "sse") in BRIDGED and isinstance(url, str):
                if url not in spec_server:
                    command = ["mcp-proxy", "--transport", BRIDGED[table.get("transport", "sse")], url]
                    needed.append({"mcp": {"name": name, "command": command}})
                    packages = f" --set {shlex.quote('sandbox.python=[mcp-proxy]')}"
            elif table.get("transport") != "stdio" or not all(isinstance(word, str) for word in command):
                self._refuse_key(key, f"the tool server {name!r} has neither a url nor a command over stdio")
            elif spec_server != tuple(command):
                needed.append({"mcp": {"name": name, "command": command}})
        if needed:
            setting = shlex.quote(f"tools={json.dumps(needed)}") + packages
            self._refuse_key(key, f"the spec starts no such tool server in the sandboxes of its tasks: --set {setting}")

    # ------------------------------------------------------------------ steps

    def _parts(self) -> list[_Part]:
        """Return the steps of the task, or all of it as the only one; an empty list if they cannot be read."""
        tables = self._toml.get("steps")
        if not tables:
            return [_Part("", self.folder)]
        if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
            self._refuse_key("steps", "expected [[steps]]")
            return []
        if len(tables) > MOST_STEPS:
            self._refuse_key("steps", f"it has more than {MOST_STEPS} steps")
            return []
        parts = []
        for index, table in enumerate(tables):
            name, key, top = table.get("name"), f"steps.{index}", (self.folder / "steps").resolve()
            if not isinstance(name, str) or not (top / name).is_dir() or (top / name).resolve().parent != top:
                self._refuse_key(f"{key}.name", "steps/ has no folder of that name")
                return []
            parts.append(_Part(f"{key}.", self.folder / "steps" / name))
            self._hold_step(key)
        self._hold_strategy()
        return parts

    def _hold_copies(self, parts: Sequence[_Part]) -> None:
        """Refuse several steps in a sandbox that cannot be copied for the tests of the steps before the last."""
        problem = no_copies(self.backend, self.keeps_processes, bool(self.services))
        if len(parts) > 1 and problem is not None:
            self._refuse_key("steps.1", problem)

    def _note_time(self) -> None:
        seconds = self._read_number("agent.timeout_sec")
        if seconds is not None and seconds != self.agent_timeout:
            limit = "has no limit" if self.agent_timeout is None else f"is {self.agent_timeout:g}"
            self.notes.append(
                f"`agent.timeout_sec` is {seconds:g}, but `agent.timeout` of the spec {limit}, and that counts: "
                f"--set agent.timeout={seconds:g}"
            )

    def _hold_refused(self, prefix: str, keys: Iterable[str]) -> None:
        """Refuse what is not supported of a task, or of a step, with the prefix of its keys."""
        for key in keys:
            if self._lookup(f"{prefix}{key}") not in (None, [], ""):
                self._refuse_key(f"{prefix}{key}", REFUSED[key])
        mode = f"{prefix}verifier.environment_mode"
        if self._lookup(mode) not in (None, "shared"):
            self._refuse_key(mode, 'tests run in the agent\'s sandbox alone, as with "shared"')

    def _hold_strategy(self) -> None:
        """Refuse steps whose rewards the spec combines in another way than the task."""
        strategy = self._lookup("multi_step_reward_strategy") or "mean"
        required_per_step = STRATEGIES.get(str(strategy))
        if self.plays_steps is None:
            self._refuse_key("steps.0", STEPS)
        elif required_per_step is None:
            self._refuse_key("multi_step_reward_strategy", f"expected mean or final, got {strategy!r}")
        elif self.plays_steps != required_per_step:
            option = f"--set rewards.verified.per_step={required_per_step}"
            self._refuse_key("multi_step_reward_strategy", f"`per_step` of the reward is {self.plays_steps}: {option}")

    def _hold_step(self, key: str) -> None:
        """Refuse unsupported requests of a step; `key` is the key of its table."""
        self._hold_refused(f"{key}.", [each for each in REFUSED if each.startswith(("agent.", "verifier."))])
        if self._lookup(f"{key}.agent.timeout_sec") is not None:
            self.notes.append("`steps.agent.timeout_sec` is of no effect: the agent's time is for all steps together")

    def _step(self, part: _Part, workdir: str | None) -> dict[str, Any]:
        """Return one step: its instruction and files, its verification and its solution."""
        tests = {
            f"/tests/{path.relative_to(top)}": path
            for top in dict.fromkeys((self.folder / "tests", part.folder / "tests"))
            for path in self._inside(top)
        }
        start = part.folder / "workdir" if part.key else None
        timeout = self._read_number("verifier.timeout_sec", VERIFIER_SECONDS)
        env = self._variables("verifier.env")
        if part.key:
            timeout = self._read_number(f"{part.key}verifier.timeout_sec", timeout)
            env |= self._variables(f"{part.key}verifier.env")
        return {
            "say": self._instruction(part),
            "files": [
                self._file(posixpath.join(workdir or "", path.relative_to(part.folder / "workdir")), path)
                for path in (self._inside(start) if start else ())
            ],
            "setup": [
                *(["bash setup.sh"] if start and (start / "setup.sh").is_file() else []),
                *(self._until_healthy(f"{part.key}healthcheck") if part.key else []),
            ],
            "min_reward": self._min_reward(part),
            "verifier": {
                "files": [
                    {"to": to, "content": self._content(path), "mode": _file_mode(path)} for to, path in tests.items()
                ],
                "env": env,
                "timeout": timeout,
            },
            "solution": self._solution(part),
        }

    def _until_healthy(self, key: str) -> list[str]:
        """Return the command that waits for a health check before the agent starts, or an empty list if there is
        none.
        """
        if not self._lookup(key):
            return []
        command = self._lookup(f"{key}.command")
        if not isinstance(command, str):
            self._refuse_key(f"{key}.command", f"expected a command, got {command!r}")
            return []
        numbers = {name: self._read_number(f"{key}.{name}", default) for name, default in HEALTH.items()}
        return [HEALTHY.format(command=shlex.quote(command), **numbers)]

    def _min_reward(self, part: _Part) -> dict[str, Any]:
        """Return the next step's condition on this one; a number refers to the reward called `reward`."""
        key = f"{part.key}min_reward"
        minimum = self._lookup(key) if part.key else None
        if minimum is None:
            return {}
        numbers = minimum if isinstance(minimum, dict) else {"reward": minimum}
        if not all(is_number(value) for value in numbers.values()):
            self._refuse_key(key, f"expected a number, or names with a number each, got {minimum!r}")
        return {"min_reward": numbers["reward"] if set(numbers) == {"reward"} else numbers}

    # ------------------------------------------------------------------ task.toml

    def _lookup(self, key: str) -> Any:
        value: Any = self._toml
        for name in key.split("."):
            if isinstance(value, list) and name.isdigit():
                value = value[int(name)]
            else:
                value = value.get(name) if isinstance(value, dict) else None
        return value

    def _read_number(self, key: str, default: float | None = None) -> Any:
        value = self._lookup(key)
        if value is None:
            return default
        if not is_number(value) or value < 0:
            self._refuse_key(key, f"expected a number, got {value!r}")
            return default
        return value

    def _size(self, kind: str) -> int | None:
        """Return bytes: of `memory_mb`, or of `memory` as in earlier versions, such as 2G."""
        older = self._lookup(f"environment.{kind}")
        size = int(self._read_number(f"environment.{kind}_mb", 0) * 2**20)
        if older is not None:
            key = f"environment.{kind}"
            try:
                written = parse_size(f"{older}i")  # the format's G is 2**30 bytes
            except ValueError:
                self._refuse_key(key, f"expected 512M or 2G, got {older!r}")
                return None
            if size and size != written:
                self._refuse_key(key, f"`{key}_mb` says another size")
            size = written
        return size or None

    def _hold_network(self, table: str) -> None:
        """Refuse hosts that the sandbox reaches and a table of the task forbids; note allowed hosts that are out of
        reach.
        """
        mode, hosts = self._lookup(f"{table}.network_mode"), self._lookup(f"{table}.allowed_hosts")
        key = f"{table}.network_mode" if mode is not None else f"{table}.allowed_hosts"
        if mode is None and hosts is None:
            key = f"{table}.allow_internet"
            mode = {True: "public", False: "no-network"}.get(self._lookup(key))
            if mode is None:
                return
        allowed: dict[str, bool | Sequence[str]] = {"no-network": False, "public": True}
        if isinstance(hosts, list) and all(isinstance(host, str) for host in hosts):
            allowed = {"allowlist": hosts}
        if mode not in allowed:
            self._refuse_key(key, "expected no-network, public, or allowlist with a list of `allowed_hosts`")
            return
        reach = allowed[mode]
        reachable_hosts = "any host" if reach is True else ", ".join(reach or ()) or "no host"
        option = f"--set {shlex.quote(f'sandbox.network={json.dumps(reach or False)}')}"
        if _reaches_beyond(self.network, reach):
            self._refuse_key(key, f"the task may reach {reachable_hosts}, and `sandbox.network` gives more: {option}")
        elif _reaches_beyond(reach, self.network):
            self.notes.append(
                f"`{key}` lets the task reach {reachable_hosts}, and `sandbox.network` does not: {option}"
            )

    def _note_unused(self, parts: Sequence[_Part]) -> None:
        tables = {table: keys for table, keys in KEYS.items() if table != "steps"}
        for part in (part for part in parts if part.key):
            tables |= {part.key.rstrip("."): KEYS["steps"]}
            tables |= {f"{part.key}{name}": KEYS[name] for name in ("agent", "verifier")}
            tables |= {f"{part.key}healthcheck": KEYS["environment.healthcheck"]}
        for table, keys in tables.items():
            section = self._lookup(table) if table else self._toml
            if section is not None and not isinstance(section, dict):
                self._refuse_key(table, f"expected a table, got {section!r}")
                continue
            for key in sorted((section or {}).keys() - keys):
                name = re.sub(r"\.\d+", "", f"{table}.{key}" if table else key)
                self.notes.append(f"`{name}` is not a key of the format and has no effect{did_you_mean(key, keys)}")
        self.notes += [f"`{key}` {reason}" for key, reason in UNUSED.items() if self._lookup(key) not in (None, [])]
        if any(self._lookup(f"{part.key}artifacts") for part in parts if part.key):
            self.notes.append(f"`steps.artifacts` {UNUSED['artifacts']}")
        if not parts[0].key and self._lookup("multi_step_reward_strategy") is not None:
            self.notes.append("`multi_step_reward_strategy` is of effect for tasks of several steps alone")

    def _variables(self, key: str) -> dict[str, str]:
        """Return variables; variables that take a value of this machine are refused, as it may be a secret."""
        section, variables = self._lookup(key) or {}, {}
        if not isinstance(section, dict):
            self._refuse_key(key, f"expected a table, got {section!r}")
            return {}
        for name, value in section.items():
            variables[str(name)] = defaulted(str(value))
            if "${" in variables[str(name)]:
                self._refuse_key(f"{key}.{name}", VARIABLES)
        return variables

    def _line(self, key: str) -> int:
        """Return the line of a key, or of its table, in task.toml."""
        table, _, name = key.rpartition(".")
        current, nearest, step = "", 1, -1
        for line_number, line in enumerate(self._text.splitlines(), 1):
            header = re.match(r"\s*\[+\s*([\w.\"-]+)\s*\]+", line)
            if header:
                current = header[1].replace('"', "")
                step += current == "steps"
                current = re.sub(r"^steps\b", f"steps.{step}", current)
                if current == key:
                    return line_number
                nearest = line_number if current == table else nearest
            elif current == table and re.match(rf"\s*\"?{re.escape(name)}\"?\s*[=.]", line):
                return line_number
        return nearest if nearest > 1 or not table else self._line(table)

    def _refuse_key(self, key: str, reason: str) -> None:
        """Refuse the task for a key of task.toml, at its line."""
        self._refuse(self.folder / TASK, self._line(key), f"`{key}`: {reason}")

    def _refuse(self, file: Path, line: int, reason: str) -> None:
        self.problems.append(Problem(str(file), line, 1, f"task {self.folder.name} cannot run: {reason}"))

    def _files(self, file: Path, parts: Sequence[_Part]) -> None:
        """Check the names in the task directory."""
        for part in parts:
            if not any((folder / "tests/test.sh").is_file() for folder in (self.folder, part.folder)):
                within = f", and neither has steps/{part.folder.name}" if part.key else ""
                self._refuse(
                    file, self._line(part.key.rstrip(".")) if part.key else 1, f"it has no tests/test.sh{within}"
                )
        trajectory = self.folder / "trajectory.json"
        if trajectory.exists():
            self._refuse(trajectory, 1, "a conversation that came before is not given to the agent yet")
        tops = dict.fromkeys(folder / name for folder in (self.folder, *(p.folder for p in parts)) for name in COPIED)
        for ignored in (path for top in tops for path in self._content_below(top) if path.name == ".harborignore"):
            self._refuse(ignored, 1, "it is ignored, so it excludes no files; remove it, and the files that it names")
        if (self.folder / "tests/Dockerfile").is_file():
            self.notes.append("tests/Dockerfile is not built: tests run in the agent's sandbox")
        others = _visible_names(self.folder) - FILES - {trajectory.name}
        for part in (part for part in parts if part.key):
            others |= {f"steps/{part.folder.name}/{name}" for name in _visible_names(part.folder) - STEP_FILES}
        if others:
            self.notes.append(f"of no effect, as no part of the format: {', '.join(sorted(others))}")
        for part in parts:
            if (part.folder / "solution").is_dir() and not (part.folder / "solution/solve.sh").is_file():
                self.notes.append("solution/ has no solve.sh, so that the task has no solution")

    def _links(self, parts: Sequence[_Part]) -> None:
        """Refuse links that are not followed: the files that they lead to would be missing."""
        has_image = self.backend == "docker" or self._lookup("environment.docker_image") is not None
        copied = [] if has_image and not self._is_laid_down() else [self.folder / "environment"]
        for top in dict.fromkeys(
            (*(part.folder / name for part in (_Part("", self.folder), *parts) for name in COPIED), *copied)
        ):
            for path, mode in self._content_below(top).items():
                if not stat.S_ISDIR(mode) and not _lies_in(path, mode, top):
                    restriction = (
                        f"links to files in {top.name}/ are followed" if stat.S_ISLNK(mode) else "files are read"
                    )
                    self._refuse(path, 1, f"only {restriction}")

    def _instruction(self, part: _Part) -> str:
        file = part.folder / "instruction.md"
        try:
            return read_text(file, self.folder)
        except (OSError, RefusedFileError) as error:
            self._refuse(file, 1, f"it cannot be read: {error}")
            return ""

    def _solution(self, part: _Part) -> str:
        """Return a command that puts the solution in place and runs it."""
        solution = part.folder / "solution"
        if not (solution / "solve.sh").is_file():
            return "true"
        commands = []
        for path in self._inside(solution):
            sandbox_path = f"/solution/{path.relative_to(solution)}"
            target = shlex.quote(sandbox_path)
            commands.append(f"mkdir -p {shlex.quote(posixpath.dirname(sandbox_path))}")
            data = self._content(path)
            try:  # only shell built-ins write the files, whatever programs the image has
                commands.append(f"printf %s {shlex.quote(_command_text(data))} > {target}")
            except ValueError:
                commands.append(f"echo {base64.b64encode(data).decode()} | base64 -d > {target}")
        variables = [f"export {name}={shlex.quote(value)}" for name, value in self._variables("solution.env").items()]
        return " && ".join([*commands, *variables, "bash /solution/solve.sh"])

    # ------------------------------------------------------------------ the files of the task

    def _content_below(self, folder: Path) -> Mapping[Path, int]:
        """Return the content below a directory of the task, which may be missing; see `list_below`."""
        if folder not in self._modes_by_folder:
            exists = folder.exists() or folder.is_symlink()
            top = self.folder if folder.is_relative_to(self.folder) else self.folder.resolve()
            self._modes_by_folder[folder] = list_below(folder, top) if exists else {}
        return self._modes_by_folder[folder]

    def _inside(self, folder: Path, top: Path | None = None) -> list[Path]:
        """Return the files in a directory that are inside it, or inside `top` above it, after resolving symlinks
        too.
        """
        return [path for path, mode in self._content_below(folder).items() if _lies_in(path, mode, top or folder)]

    def _content(self, path: Path) -> bytes:
        """Return a file of the task, to which a link within the task may lead."""
        data = read_file(path.resolve(), self.folder.resolve())
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise RefusedFileError(f"its files have more than {LARGEST_TASK >> 20} MiB together")
        return data

    def _file(self, to: str, path: Path) -> dict[str, str]:
        """Return a file in the form for a sandbox."""
        return {"to": to, "base64": base64.b64encode(self._content(path)).decode(), "mode": f"0o{_file_mode(path):03o}"}

    def _laid_whole(self, to: str, path: Path, top: Path) -> list[dict[str, str]]:
        """Return a file, or the files in a directory, in the form for a sandbox; none that is outside `top`."""
        if not path.is_dir():
            return [self._file(to, path)]
        return [self._file(f"{to}/{file_path.relative_to(path)}", file_path) for file_path in self._inside(path, top)]

    # ------------------------------------------------------------------ environment/

    def _environment(self, file: Path) -> None:
        folder = self.folder / "environment"
        if (folder / "singularity-compose.yaml").is_file():
            self._refuse(folder / "singularity-compose.yaml", 1, "it is not supported; docker-compose.yaml is")
        dockerfile = folder / "Dockerfile"
        instructions = self._instructions(dockerfile)
        image = self._lookup("environment.docker_image")
        if image is not None:
            self.base = str(image)
            if not self._takes_images:
                line = self._line("environment.docker_image")
                self._refuse(file, line, f"it needs the image {image}: {self.docker}")
            if self._is_laid_down():
                self.files += [self._file(str(path.relative_to(folder)), path) for path in self._inside(folder)]
        elif self.backend == "docker" and dockerfile.is_file():
            self.base = self._image_name(folder)
        elif not dockerfile.is_file() and self._takes_images:
            self._refuse(file, 1, "it has neither a docker_image nor environment/Dockerfile")
        engine = image is not None or bool(self.builds)  # only the start command of the image remains
        for instruction in instructions:
            try:
                problem = self._start(instruction) if engine else self._instruct(instruction, folder)
            except ValueError as error:  # quotes without an end
                problem = f"`{instruction.word}` cannot be read: {error}"
            if problem is not None:
                self._refuse(dockerfile, instruction.start_line, problem)
        self._compose(folder)

    def _instructions(self, dockerfile: Path) -> list[_Line]:
        """Return the instructions of a Dockerfile, or an empty list if there is none."""
        try:
            return list(_dockerfile_lines(read_file(dockerfile, self.folder).decode("utf-8", "replace")))
        except FileNotFoundError:
            return []
        except (OSError, RefusedFileError) as error:
            self._refuse(dockerfile, 1, f"it cannot be read: {error}")
            return []

    def _is_laid_down(self) -> bool:
        """Return True if the files in environment/ are copied into the working directory, since no image was built from
        them.
        """
        has_image = self._lookup("environment.docker_image") is not None
        return has_image and not any((self.folder / "environment" / name).exists() for name in ("Dockerfile", COMPOSE))

    def _image_name(self, folder: Path) -> str:
        """Return the name of the image that is built from a directory: a relative path, so that tasks can be moved."""
        name = f"./{os.path.relpath(folder.resolve(), self.top.resolve())}"
        digest = sha256()
        for path, mode in self._content_below(folder).items():
            digest.update(f"{path.relative_to(folder)} {mode:o}\0".encode())
            if stat.S_ISLNK(mode):
                digest.update(os.fsencode(path.readlink()))
            elif stat.S_ISREG(mode):
                with open_file(path, self.folder if path.is_relative_to(self.folder) else None) as file:
                    digest.update(file_digest(file, "sha256").digest())
        self.builds[name] = digest.hexdigest()
        return name

    def _compose(self, folder: Path) -> None:
        """Apply the services of a Compose file, which only Docker starts, and its settings for the sandbox."""
        file = folder / COMPOSE
        if not file.is_file():
            return
        compose = ComposeFile(file, lambda to, path: self._laid_whole(to, path, folder), self._image_name)
        if compose.services and self.backend != "docker":
            self._refuse(file, 1, f"services next to the sandbox need Docker: {self.docker}")
        for line, reason in compose.problems:
            self._refuse(file, line, reason)
        self.services, self.env = compose.services, self.env | compose.env
        self.files += compose.files
        self.notes += dict.fromkeys(compose.notes)

    def _instruct(self, line: _Line, context: Path) -> str | None:
        """Apply one instruction of the Dockerfile; return the reason if it is not supported."""
        if line.word in ("LABEL", "MAINTAINER"):
            return None  # they describe the image
        if line.word in UNSTARTED:
            return self._start(line)
        if line.word == "RUN":
            return self._run(line)
        if line.word not in ("FROM", "WORKDIR", "ENV", "COPY"):
            return f"`{line.word}` is not built here: {self.build}"
        if "$" in line.rest:
            return f"`{line.word}` with variables is not built here: {self.build}"
        if line.word == "FROM":
            return self._read_from(line)
        if line.word == "COPY":
            return self._copy(line, context)
        if line.word == "WORKDIR":
            self.workdir = line.rest if line.rest.startswith("/") else f"{self.workdir or ''}/{line.rest}"
            return None
        assignments = shlex.split(line.rest)
        if not all("=" in word for word in assignments):
            assignments = ["=".join(line.rest.split(None, 1))]
        self.env |= dict(word.split("=", 1) for word in assignments)
        return None

    def _start(self, line: _Line) -> str | None:
        """Apply the start command of an image; an engine has applied everything else in its Dockerfile."""
        if line.word in UNSTARTED:
            self.notes.append(f"`{line.word}` of environment/Dockerfile {UNSTARTED[line.word]}")
        elif line.word == "ENTRYPOINT" and not self.keeps_processes:
            return f"`ENTRYPOINT` starts a program that has to be there when the tests run: {KEPT}"
        elif line.word == "ENTRYPOINT":
            argv = json.loads(line.rest) if line.rest.startswith("[") else ["sh", "-c", line.rest]
            self.setup = [ENTRYPOINT.format(command=shlex.join(argv), begun=BEGUN)]
            if not self._lookup("environment.healthcheck"):
                self.setup.append(READY)
                self.notes.append(UNCHECKED)
        return None

    def _read_from(self, line: _Line) -> str | None:
        if self.base is not None or len(line.rest.split()) != 1:
            return f"a Dockerfile of several stages is not built here: {self.build}"
        self.base = line.rest
        if self._takes_images:
            return None
        if PLAIN.fullmatch(line.rest) is None:
            return f"it needs the image {line.rest}: {self.docker}"
        self.notes.append(f"the default sandbox replaces the image {line.rest}")
        return None

    def _run(self, line: _Line) -> str | None:
        packages = None if self._takes_images else _packages_of(line.rest)
        if packages is not None:
            return self._require_installed(line, *packages)
        if line.rest.startswith(("--", "[", "<<")) or INSTALLS.search(line.rest):
            return f"`RUN {line.rest[:60]}` installs or needs root: {self.build}"
        self.ordered |= MAKES.fullmatch(line.rest) is None
        quoted_workdir = shlex.quote(self.workdir or "/")
        self.setup.append(f"mkdir -p {quoted_workdir} && cd {quoted_workdir} && {{ {line.rest}; }}")
        return None

    def _require_installed(self, line: _Line, by_apt: list[str], by_pip: list[str]) -> str | None:
        """Record that the default sandbox has the installed packages; return the reason if it does not."""
        if lacking := [name for name in by_apt if name not in _installed_packages(PACKAGES)]:
            return f"`RUN {line.rest[:60]}`: this machine lacks {', '.join(lacking)}, which apt has: {self.build}"
        if any(name not in self.packages for name in by_pip):
            setting = shlex.quote(
                f"sandbox.python=[{', '.join({**dict.fromkeys(self.packages), **dict.fromkeys(by_pip)})}]"
            )
            return f"`RUN {line.rest[:60]}`: --set {setting} has what pip installs; {self.build}"
        if by_apt:
            self.notes.append(f"this machine has what `RUN` installs: {', '.join(by_apt)}")
        return None

    def _copy(self, line: _Line, context: Path) -> str | None:
        arguments = json.loads(line.rest) if line.rest.startswith("[") else shlex.split(line.rest)
        *sources, target = arguments
        if self.ordered:
            return f"`COPY` after `RUN` is not built here: {self.build}"
        if not sources or any(word.startswith("--") for word in arguments):
            return f"`COPY` with options is not built here: {self.build}"
        top = target if target.startswith("/") else f"{self.workdir or ''}/{target}".replace("/./", "/")
        for source in sources:
            path = (context / source.lstrip("/")).resolve()
            if not path.is_relative_to(context.resolve()) or not path.exists():
                return f"`COPY {source}`: environment/ has no such file"
            if path.is_dir():
                if (context / ".dockerignore").is_file():
                    return f"`COPY {source}` of a folder with a .dockerignore is not built here: {self.build}"
                to = top.rstrip("/.")
            else:
                is_folder_target = target.endswith(("/", ".")) or len(sources) > 1
                to = f"{top.rstrip('/.')}/{path.name}" if is_folder_target else top
            self.files += self._laid_whole(to, path, context)
        return None


def _packages_of(command: str) -> tuple[list[str], list[str]] | None:
    """Return the packages that a command installs by apt and by pip, if it does nothing else."""
    by_apt, by_pip = list[str](), list[str]()
    for part in map(str.strip, command.split("&&")):
        apt, pip = APT.fullmatch(part), PIP.fullmatch(part)
        if apt is not None and apt["what"] == "install":
            by_apt += [word for word in apt["rest"].split() if not word.startswith("-")]
        elif pip is not None:
            by_pip += [word.strip("'\"") for word in pip["rest"].split() if word not in HARMLESS]
        elif apt is None and LISTS.fullmatch(part) is None:
            return None
    return (by_apt, by_pip) if all(map(PACKAGE.fullmatch, [*by_apt, *by_pip])) else None


@cache
def _installed_packages(status: Path) -> frozenset[str]:
    """Return the names of this machine's packages, or an empty set if it is not Debian or similar."""
    try:
        entries = read_regular(status).decode("utf-8", "replace").split("\n\n")
    except OSError:
        return frozenset()
    present = (entry for entry in entries if re.search(r"^Status: \S+ ok installed$", entry, re.MULTILINE))
    return frozenset(entry.removeprefix("Package: ").partition("\n")[0] for entry in present)


def _dockerfile_lines(text: str) -> Iterator[_Line]:
    """Yield the instructions of a Dockerfile's text."""
    pending, start_line = "", 0
    for line_number, written in enumerate(text.splitlines(), 1):
        line = written.strip()
        if not line or line.startswith("#"):
            continue
        start_line = start_line or line_number
        pending += line.removesuffix("\\") + (" " if line.endswith("\\") else "")
        if not line.endswith("\\"):
            word, _, rest = pending.partition(" ")
            yield _Line(start_line, word.upper(), rest.strip())
            pending, start_line = "", 0


def _reaches_beyond(network: bool | Sequence[str], other: bool | Sequence[str]) -> bool:
    """Return True if one network (none, all, or names of hosts, which may start with `*.`) has hosts that another has
    not.
    """
    if network is True or other is True:
        return other is not True
    names = [name.lower() for name in other or ()]
    return not all(
        any(host.lower() == name or (name.startswith("*.") and host.lower().endswith(name[1:])) for name in names)
        for host in network or ()
    )


def _visible_names(folder: Path) -> set[str]:
    """Return the names in a directory that are not hidden."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def _lies_in(path: Path, mode: int, top: Path) -> bool:
    """Return True if a path of this mode is a file in a directory, after resolving links too."""
    return stat.S_ISREG(mode) or (
        stat.S_ISLNK(mode) and path.is_file() and path.resolve().is_relative_to(top.resolve())
    )


def _command_text(data: bytes) -> str:
    """Return bytes as text; raises ValueError if a command cannot contain them."""
    text = data.decode("utf-8")
    if "\0" in text:
        raise ValueError("a null character")
    return text


def _file_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
