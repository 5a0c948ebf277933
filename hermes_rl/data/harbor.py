"""Task folders in Harbor's format as rows: task.toml, instruction.md, environment/, tests/, solution/.

This module owns what of that format can be played, and what is refused by name, with the file and the line that ask for
it. A Dockerfile is not built here: what it says is played where plain files, variables and commands are all of it.
Source of names and defaults: Harbor 0.25 (`task.toml`, version 1).
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.errors import Problem, SpecError, UserError
from hermes_rl.spec.model import Spec

TASK = "task.toml"
AGENT_SECONDS, VERIFIER_SECONDS = 600.0, 600.0
PLAIN = re.compile(r"(docker\.io/)?(library/)?(ubuntu|debian|python)(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")
"""Images whose place the default sandbox takes, which has this machine's programs."""
INSTALLS = re.compile(
    r"\b(apt|apt-get|apk|yum|dnf|pip3?|uv|uvx|npm|npx|yarn|conda|cargo|gem|go|curl|wget|git\s+clone|useradd|adduser)\b"
)
"""Commands that need a network, or root."""
BUILD = "build the image, and name it in [environment] docker_image"

REFUSED: Mapping[str, str] = {
    "steps": "tasks of several steps are not played yet",
    "environment.mcp_servers": "tool servers of a task are not played yet; name them in `tools:` of a spec of your own",
    "environment.healthcheck": "health checks are not played yet",
    "environment.tpu": "no sandbox here has a TPU",
    "environment.skills_dir": "skills are not handed to the agent",
    "agent.user": "the agent is the image's user, or that of the default sandbox",
    "verifier.user": "tests run as the agent's user",
    "verifier.environment": "tests run in the agent's sandbox alone",
    "verifier.collect": "nothing is collected of services beside the sandbox",
}
"""Keys of task.toml that cannot be played, and why."""


@dataclass
class Tasks:
    """What a folder of tasks holds: a row for each that can be played, and what the user is to be told."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tasks_of(spec: Spec) -> Tasks:
    """Return the tasks that `dataset.harbor` of a spec names; see `read_tasks`."""
    sandbox = spec.sandbox
    return read_tasks(Path(str(spec.dataset.harbor)), sandbox.backend, network=sandbox.network is not False)


def read_tasks(folder: Path, backend: str, *, network: bool) -> Tasks:
    """Read a task folder, or all task folders right in a folder.

    Tasks that cannot be played are left out, and `notes` say which and why. Of a backend that takes images a task has
    its own; in any other the default sandbox stands in for a plain one of Debian, Ubuntu or Python.

    Args:
        folder: the folder.
        backend: the spec's `sandbox.backend`.
        network: whether the spec's sandbox has any.

    Raises:
        SpecError: none of the tasks can be played; with the place of each reason.
        UserError: there is no such folder, or no task in it.
    """
    if not folder.is_dir():
        raise UserError(f"dataset.harbor: {folder} is no folder")
    places = [folder] if (folder / TASK).is_file() else sorted(path.parent for path in folder.glob(f"*/{TASK}"))
    if not places:
        way = (
            "; `hermes-rl run terminal-bench` plays folders with a task.yaml"
            if any(folder.glob("**/task.yaml"))
            else ""
        )
        raise UserError(f"dataset.harbor: {folder} has no {TASK}, and no folder right in it has one{way}")
    tasks, refused = Tasks(), list[Problem]()
    for place in places:
        task = _Task(place, backend, network)
        row = task.row()
        refused += task.problems
        if row is not None and not task.problems:
            tasks.rows.append(row)
            tasks.notes += task.notes
    if not tasks.rows:
        raise SpecError(refused)
    tasks.notes += [f"WARNING: left out: {problem}" for problem in refused]
    return tasks


class _Line(NamedTuple):
    """One instruction of a Dockerfile; continued lines are joined."""

    number: int
    word: str
    rest: str


class _Task:
    """One task folder."""

    def __init__(self, folder: Path, backend: str, network: bool) -> None:
        self.folder, self.backend, self.network = folder, backend, network
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.workdir: str | None = None
        self.base: str | None = None
        self.env: dict[str, str] = {}
        self.files: list[dict[str, Any]] = []
        self.setup: list[str] = []

    @property
    def _takes_images(self) -> bool:
        return self.backend not in ("bubblewrap", "none", "ssh")

    def row(self) -> dict[str, Any] | None:
        """Return the task as a row; None where it cannot be read. `problems` say what of it cannot be played."""
        file = self.folder / TASK
        try:
            self._text = file.read_text("utf-8")
            self._toml = tomllib.loads(self._text)
        except (OSError, ValueError) as error:
            line = re.search(r"line (\d+)", str(error))
            self._refuse(file, int(line[1]) if line else 1, f"it cannot be read: {error}")
            return None
        for key, why in REFUSED.items():
            if self._at(key) not in (None, [], {}, ""):
                self._refuse(file, self._line(key), f"`{key}`: {why}")
        if self._number("environment.gpus", 0):
            self._refuse(file, self._line("environment.gpus"), "`environment.gpus`: no sandbox here has a GPU")
        if str(self._at("environment.os") or "linux").lower() != "linux":
            self._refuse(file, self._line("environment.os"), "`environment.os`: sandboxes are Linux")
        for key, closed in (("environment.allow_internet", False), ("environment.network_mode", "no-network")):
            if self._at(key) == closed and self.network:
                self._refuse(
                    file, self._line(key), f"`{key}`: the task has no network, and `sandbox.network` gives one"
                )
        if not (self.folder / "tests/test.sh").is_file() and "steps" not in self._toml:
            self._refuse(file, 1, "it has no tests/test.sh")
        self._environment(file)
        self.env |= self._variables("environment.env")
        seconds = self._number("agent.timeout_sec", AGENT_SECONDS)
        if seconds != AGENT_SECONDS:
            self.notes.append(
                f"{self.folder.name}: its agent.timeout_sec is {seconds:g}; `agent.timeout` of the spec is what counts"
            )
        memory, disk = self._number("environment.memory_mb"), self._number("environment.storage_mb")
        cpus = self._number("environment.cpus")
        return {
            "name": self.folder.name,
            "instruction": self._instruction(),
            "category": str(self._at("metadata.category") or ""),
            "image": self.base if self._takes_images else None,
            "workdir": str(self._at("environment.workdir") or self.workdir or "/app"),
            "env": self.env,
            "files": self.files,
            "setup": self.setup,
            "memory": None if not memory else int(memory * 2**20),
            "disk": None if not disk else int(disk * 2**20),
            "cpu": cpus or None,
            "tests": [
                {
                    "to": f"/tests/{path.relative_to(self.folder / 'tests')}",
                    "content": path.read_bytes(),
                    "mode": _mode(path),
                }
                for path in _inside(self.folder / "tests")
            ],
            "verifier_env": self._variables("verifier.env"),
            "verifier_timeout": self._number("verifier.timeout_sec", VERIFIER_SECONDS),
            "solution": self._solution(),
        }

    # ------------------------------------------------------------------ task.toml

    def _at(self, key: str) -> Any:
        value: Any = self._toml
        for step in key.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        return value

    def _number(self, key: str, default: float | None = None) -> Any:
        value = self._at(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            self._refuse(self.folder / TASK, self._line(key), f"`{key}`: expected a number, got {value!r}")
            return default
        return value

    def _variables(self, key: str) -> dict[str, str]:
        """Return variables; those that take a value of this machine are refused, as it may be a secret."""
        given, taken = self._at(key) or {}, {}
        for name, value in given.items() if isinstance(given, dict) else ():
            if "${" in str(value):
                line = self._line(f"{key}.{name}")
                self._refuse(self.folder / TASK, line, f"`{key}.{name}`: variables of this machine are not handed over")
            taken[str(name)] = str(value)
        return taken

    def _line(self, key: str) -> int:
        """Return the line of task.toml in which a key, or its table, stands."""
        table, _, name = key.rpartition(".")
        current, nearest = "", 1
        for number, line in enumerate(self._text.splitlines(), 1):
            header = re.match(r"\s*\[+\s*([\w.\"-]+)\s*\]+", line)
            if header:
                current = header[1].replace('"', "")
                if current == key:
                    return number
                nearest = number if current == table else nearest
            elif current == table and re.match(rf"\s*\"?{re.escape(name)}\"?\s*[=.]", line):
                return number
        return nearest if nearest > 1 or not table else self._line(table)

    def _refuse(self, file: Path, line: int, why: str) -> None:
        self.problems.append(Problem(str(file), line, 1, f"task {self.folder.name} cannot be played: {why}"))

    def _instruction(self) -> str:
        try:
            return (self.folder / "instruction.md").read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if "steps" not in self._toml:
                self._refuse(self.folder / "instruction.md", 1, f"it cannot be read: {error}")
            return ""

    def _solution(self) -> str:
        """Return a command that puts the solution in place and runs it."""
        solution = self.folder / "solution"
        if not (solution / "solve.sh").is_file():
            return "true"
        commands = []
        for path in _inside(solution):
            place = f"/solution/{path.relative_to(solution)}"
            target = shlex.quote(place)
            commands.append(f"mkdir -p {shlex.quote(posixpath.dirname(place))}")
            data = path.read_bytes()
            try:  # what the shell itself can write, whatever programs the image has
                commands.append(f"printf %s {shlex.quote(_text(data))} > {target}")
            except ValueError:
                commands.append(f"echo {base64.b64encode(data).decode()} | base64 -d > {target}")
        return " && ".join([*commands, "bash /solution/solve.sh"])

    # ------------------------------------------------------------------ environment/

    def _environment(self, file: Path) -> None:
        folder = self.folder / "environment"
        for name in ("docker-compose.yaml", "docker-compose.yml"):
            if (folder / name).is_file():
                self._refuse(folder / name, 1, "services beside the sandbox are not played yet")
        image = self._at("environment.docker_image")
        if image is not None:
            self.base = str(image)
            if not self._takes_images:
                line = self._line("environment.docker_image")
                self._refuse(file, line, f"it needs the image {image}: --set sandbox.backend=docker")
            return  # the image has been built of the Dockerfile already
        dockerfile = folder / "Dockerfile"
        if not dockerfile.is_file():
            if not self._takes_images:
                return
            self._refuse(file, 1, "it has neither a docker_image nor environment/Dockerfile")
            return
        for instruction in _lines(dockerfile.read_text("utf-8", "replace")):
            try:
                problem = self._instruct(instruction, folder)
            except ValueError as error:  # quotes without an end
                problem = f"`{instruction.word}` cannot be read: {error}"
            if problem is not None:
                self._refuse(dockerfile, instruction.number, problem)

    def _instruct(self, line: _Line, context: Path) -> str | None:
        """Take one instruction of the Dockerfile into account; returns why it cannot be."""
        if line.word in ("LABEL", "MAINTAINER", "CMD", "EXPOSE"):
            return None  # of no effect in a sandbox
        if line.word == "RUN":
            return self._run(line)
        if line.word not in ("FROM", "WORKDIR", "ENV", "COPY"):
            return f"`{line.word}` is not built here: {BUILD}"
        if "$" in line.rest:
            return f"`{line.word}` with variables is not built here: {BUILD}"
        if line.word == "FROM":
            return self._from(line)
        if line.word == "COPY":
            return self._copy(line, context)
        if line.word == "WORKDIR":
            self.workdir = line.rest if line.rest.startswith("/") else f"{self.workdir or ''}/{line.rest}"
            return None
        words = shlex.split(line.rest)
        if not all("=" in word for word in words):
            words = ["=".join(line.rest.split(None, 1))]
        self.env |= dict(word.split("=", 1) for word in words)
        return None

    def _from(self, line: _Line) -> str | None:
        if self.base is not None or len(line.rest.split()) != 1:
            return f"a Dockerfile of several stages is not built here: {BUILD}"
        self.base = line.rest
        if self._takes_images:
            return None
        if PLAIN.fullmatch(line.rest) is None:
            return f"it needs the image {line.rest}: --set sandbox.backend=docker"
        self.notes.append(f"{self.folder.name}: the default sandbox stands in for the image {line.rest}")
        return None

    def _run(self, line: _Line) -> str | None:
        if line.rest.startswith(("--", "[", "<<")) or INSTALLS.search(line.rest):
            return f"`RUN {line.rest[:60]}` installs or needs root, and no image is built here: {BUILD}"
        place = shlex.quote(self.workdir or "/")
        self.setup.append(f"mkdir -p {place} && cd {place} && {{ {line.rest}; }}")
        return None

    def _copy(self, line: _Line, context: Path) -> str | None:
        words = json.loads(line.rest) if line.rest.startswith("[") else shlex.split(line.rest)
        *sources, target = words
        if self.setup:
            return f"`COPY` behind `RUN` is not built here: {BUILD}"
        if not sources or any(word.startswith("--") for word in words):
            return f"`COPY` with options is not built here: {BUILD}"
        top = target if target.startswith("/") else f"{self.workdir or ''}/{target}".replace("/./", "/")
        for source in sources:
            path = (context / source.lstrip("/")).resolve()
            if not path.is_relative_to(context.resolve()) or not path.exists():
                return f"`COPY {source}`: environment/ has no such file"
            if path.is_dir():
                into = [(f"{top.rstrip('/.')}/{inner.relative_to(path)}", inner) for inner in _inside(path)]
            else:
                whole = target.endswith(("/", ".")) or len(sources) > 1
                into = [(f"{top.rstrip('/.')}/{path.name}" if whole else top, path)]
            self.files += [
                {"to": to, "base64": base64.b64encode(inner.read_bytes()).decode(), "mode": f"0o{_mode(inner):03o}"}
                for to, inner in into
            ]
        return None


def _lines(text: str) -> Iterator[_Line]:
    """Yield the instructions of a Dockerfile."""
    pending, began = "", 0
    for number, written in enumerate(text.splitlines(), 1):
        line = written.strip()
        if not line or line.startswith("#"):
            continue
        began = began or number
        pending += line.removesuffix("\\") + (" " if line.endswith("\\") else "")
        if not line.endswith("\\"):
            word, _, rest = pending.partition(" ")
            yield _Line(began, word.upper(), rest.strip())
            pending, began = "", 0


def _inside(folder: Path) -> list[Path]:
    """Return the files in a folder that lie in it, also after symlinks."""
    top = folder.resolve()
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.resolve().is_relative_to(top))


def _text(data: bytes) -> str:
    """Return bytes as text; raises ValueError where they are none that a command can hold."""
    text = data.decode("utf-8")
    if "\0" in text:
        raise ValueError("a null character")
    return text


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
