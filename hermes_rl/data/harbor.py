"""Task folders in Harbor's format as rows: task.toml, instruction.md, environment/, tests/, solution/.

This module owns what of that format can be played, what is refused by name, with the file and the line that ask for it,
and what is of no effect here, which is said once for all tasks that have it. A Dockerfile is not built here: what it
says is played where plain files, variables and commands are all of it.
Source of names and defaults: Harbor 0.25 (`task.toml`, versions 1.0 to 1.4).
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hermes_rl.errors import Problem, SpecError, UserError
from hermes_rl.spec.model import Spec
from hermes_rl.spec.section import parse_size
from hermes_rl.spec.suggest import did_you_mean

TASK = "task.toml"
VERIFIER_SECONDS = 600.0
PLAIN = re.compile(r"(docker\.io/)?(library/)?(ubuntu|debian|python)(:[\w.-]+)?(@sha256:[0-9a-f]{64})?")
"""Images whose place the default sandbox takes, which has this machine's programs."""
INSTALLS = re.compile(
    r"\b(apt|apt-get|apk|yum|dnf|pip3?|uv|uvx|npm|npx|yarn|conda|cargo|gem|go|curl|wget|git\s+clone|useradd|adduser)\b"
)
"""Commands that need a network, or root."""
BUILD = "build the image, and name it in [environment] docker_image"
NOT_STARTED = "is not run: a sandbox starts no program of its image; build an image that needs none"
UNSTARTED = {"CMD": "is not run, nor is it by Harbor", "EXPOSE": "is of no effect: no port is opened to the outside"}
"""Instructions of a Dockerfile that change nothing here, and why."""

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
UNUSED: Mapping[str, str] = {
    "artifacts": "is not collected; `artifacts` of the spec names what is",
    "multi_step_reward_strategy": "is of effect for tasks of several steps alone",
    "environment.build_timeout_sec": "is of no effect: no image is built here",
    "environment.gpu_types": "is of no effect where no GPU is asked for",
}
"""Keys of task.toml that change nothing here, and why."""
KEYS: Mapping[str, frozenset[str]] = {
    table: frozenset(keys.split())
    for table, keys in {
        "": "version schema_version task metadata source verifier agent environment solution steps artifacts "
        "multi_step_reward_strategy",
        "agent": "timeout_sec user network_mode allowed_hosts",
        "verifier": "timeout_sec env user environment_mode environment collect network_mode allowed_hosts",
        "environment": "build_timeout_sec docker_image os cpus memory_mb memory storage_mb storage gpus gpu_types tpu "
        "mcp_servers env skills_dir healthcheck workdir allow_internet network_mode allowed_hosts",
        "solution": "env",
    }.items()
}
"""The tables of task.toml and their keys; `task` and `metadata` describe the task, in whatever words."""
FILES = frozenset((TASK, "instruction.md", "environment", "tests", "solution", "steps", "README.md"))
"""What lies in a task folder."""
NAMED = 3
"""Tasks that a note names; of more it gives the number."""


@dataclass
class Tasks:
    """What a folder of tasks holds: a row for each that can be played, and what the user is to be told."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def tasks_of(spec: Spec) -> Tasks:
    """Return the tasks that `dataset.harbor` of a spec names; see `read_tasks`."""
    sandbox, rule = spec.sandbox, spec.dataset.eval
    agent = spec.agent_for("evaluate" if rule is not None and rule.only else "process")
    return read_tasks(
        Path(str(spec.dataset.harbor)), sandbox.backend, network=sandbox.network, agent_timeout=agent.timeout
    )


def read_tasks(
    folder: Path, backend: str, *, network: bool | Sequence[str], agent_timeout: float | None = None
) -> Tasks:
    """Read a task folder, or all task folders right in a folder.

    Tasks that cannot be played are left out, and `notes` say which and why; they also say what of the others is of no
    effect. Of a backend that takes images a task has its own; in any other the default sandbox stands in for a plain
    one of Debian, Ubuntu or Python.

    Args:
        folder: the folder.
        backend: the spec's `sandbox.backend`.
        network: the spec's `sandbox.network`: none, all, or names of hosts.
        agent_timeout: seconds that the spec gives the agent; None: any time.

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
    tasks, refused, noted = Tasks(), list[Problem](), dict[str, list[str]]()
    for place in places:
        task = _Task(place, backend, network, agent_timeout)
        row = task.row()
        refused += task.problems
        if row is not None and not task.problems:
            tasks.rows.append(row)
            for note in task.notes:
                noted.setdefault(note, []).append(place.name)
    if not tasks.rows:
        raise SpecError(refused)
    for note, names in noted.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        tasks.notes.append(f"{', '.join(names[:NAMED])}{more}: {note}")
    tasks.notes += [f"WARNING: left out: {problem}" for problem in refused]
    return tasks


class _Line(NamedTuple):
    """One instruction of a Dockerfile; continued lines are joined."""

    number: int
    word: str
    rest: str


class _Task:
    """One task folder."""

    def __init__(self, folder: Path, backend: str, network: bool | Sequence[str], agent_timeout: float | None) -> None:
        self.folder, self.backend, self.network, self.agent_timeout = folder, backend, network, agent_timeout
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
            if self._at(key) not in (None, [], ""):
                self._refuse_key(key, why)
        if self._number("environment.gpus", 0):
            self._refuse_key("environment.gpus", "no sandbox here has a GPU")
        if str(self._at("environment.os") or "linux").lower() != "linux":
            self._refuse_key("environment.os", "sandboxes are Linux")
        if self._at("verifier.environment_mode") not in (None, "shared"):
            self._refuse_key("verifier.environment_mode", 'tests run in the agent\'s sandbox alone, as with "shared"')
        for table in ("environment", "agent", "verifier"):
            self._hold_network(table)
        self._note_unused()
        self._files(file)
        self._links()
        self._environment(file)
        self.env |= self._variables("environment.env")
        seconds = self._number("agent.timeout_sec")
        if seconds is not None and seconds != self.agent_timeout:
            limit = "has no limit" if self.agent_timeout is None else f"is {self.agent_timeout:g}"
            self.notes.append(
                f"`agent.timeout_sec` is {seconds:g}, but `agent.timeout` of the spec {limit}, and that counts: "
                f"--set agent.timeout={seconds:g}"
            )
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
            "memory": self._size("memory"),
            "disk": self._size("storage"),
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
            self._refuse_key(key, f"expected a number, got {value!r}")
            return default
        return value

    def _size(self, kind: str) -> int | None:
        """Return bytes: of `memory_mb`, or of `memory` as versions before wrote it, such as 2G."""
        older = self._at(f"environment.{kind}")
        size = int(self._number(f"environment.{kind}_mb", 0) * 2**20)
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
        """Refuse what the sandbox reaches and a table of the task forbids; note what it allows and is out of reach."""
        mode, hosts = self._at(f"{table}.network_mode"), self._at(f"{table}.allowed_hosts")
        key = f"{table}.network_mode" if mode is not None else f"{table}.allowed_hosts"
        if mode is None and hosts is None:
            key = f"{table}.allow_internet"
            mode = {True: "public", False: "no-network"}.get(self._at(key))
            if mode is None:
                return
        allowed: dict[str, bool | Sequence[str]] = {"no-network": False, "public": True}
        if isinstance(hosts, list) and all(isinstance(host, str) for host in hosts):
            allowed = {"allowlist": hosts}
        if mode not in allowed:
            why = "expected no-network, public, or allowlist with a list of `allowed_hosts`"
            self._refuse_key(key, why)
            return
        reach = allowed[mode]
        words = "any host" if reach is True else ", ".join(reach or ()) or "no host"
        way = f"--set {shlex.quote(f'sandbox.network={json.dumps(reach or False)}')}"
        if _reaches_beyond(self.network, reach):
            self._refuse_key(key, f"the task may reach {words}, and `sandbox.network` gives more: {way}")
        elif _reaches_beyond(reach, self.network):
            self.notes.append(f"`{key}` lets the task reach {words}, and `sandbox.network` does not: {way}")

    def _note_unused(self) -> None:
        for table, keys in KEYS.items():
            given = self._at(table) if table else self._toml
            if given is not None and not isinstance(given, dict):
                self._refuse_key(table, f"expected a table, got {given!r}")
                continue
            for key in sorted((given or {}).keys() - keys):
                name = f"{table}.{key}" if table else key
                self.notes.append(f"`{name}` is no key of the format, and of no effect{did_you_mean(key, keys)}")
        self.notes += [f"`{key}` {why}" for key, why in UNUSED.items() if self._at(key) not in (None, [])]

    def _variables(self, key: str) -> dict[str, str]:
        """Return variables; those that take a value of this machine are refused, as it may be a secret."""
        given, variables = self._at(key) or {}, {}
        if not isinstance(given, dict):
            self._refuse_key(key, f"expected a table, got {given!r}")
            return {}
        for name, value in given.items():
            if "${" in str(value):
                self._refuse_key(f"{key}.{name}", "variables of this machine are not handed over")
            variables[str(name)] = str(value)
        return variables

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

    def _refuse_key(self, key: str, why: str) -> None:
        """Refuse the task for a key of task.toml, at its line."""
        self._refuse(self.folder / TASK, self._line(key), f"`{key}`: {why}")

    def _refuse(self, file: Path, line: int, why: str) -> None:
        self.problems.append(Problem(str(file), line, 1, f"task {self.folder.name} cannot be played: {why}"))

    def _files(self, file: Path) -> None:
        """Take the names in the task folder into account."""
        if not (self.folder / "tests/test.sh").is_file() and "steps" not in self._toml:
            self._refuse(file, 1, "it has no tests/test.sh")
        trajectory = self.folder / "trajectory.json"
        if trajectory.exists():
            self._refuse(trajectory, 1, "a conversation that came before is not given to the agent yet")
        for name in ("tests", "solution"):
            for ignored in sorted((self.folder / name).rglob(".harborignore")):
                self._refuse(ignored, 1, "files are not left out by it; remove it, and the files that it names")
        if (self.folder / "tests/Dockerfile").is_file():
            self.notes.append("tests/Dockerfile is not built: tests run in the agent's sandbox")
        names = {path.name for path in self.folder.iterdir() if not path.name.startswith(".")}
        if others := sorted(names - FILES - {trajectory.name}):
            self.notes.append(f"of no effect, as no part of the format: {', '.join(others)}")
        if "solution" in names and not (self.folder / "solution/solve.sh").is_file():
            self.notes.append("solution/ has no solve.sh, so that the task has no solution of its own")

    def _links(self) -> None:
        """Refuse links that are not followed, behind which files would be missing."""
        copied = () if self._at("environment.docker_image") is not None else ("environment",)
        for top in (self.folder / name for name in ("tests", "solution", *copied)):
            for path in sorted(top.rglob("*")):
                if path.is_symlink() and not (path.is_file() and path.resolve().is_relative_to(top.resolve())):
                    self._refuse(path, 1, f"only links to files in {top.name}/ are followed")

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
        variables = [f"export {name}={shlex.quote(value)}" for name, value in self._variables("solution.env").items()]
        return " && ".join([*commands, *variables, "bash /solution/solve.sh"])

    # ------------------------------------------------------------------ environment/

    def _environment(self, file: Path) -> None:
        folder = self.folder / "environment"
        for name in ("docker-compose.yaml", "docker-compose.yml", "singularity-compose.yaml"):
            if (folder / name).is_file():
                self._refuse(folder / name, 1, "services beside the sandbox are not played yet")
        dockerfile = folder / "Dockerfile"
        instructions = list(_lines(dockerfile.read_text("utf-8", "replace"))) if dockerfile.is_file() else []
        image = self._at("environment.docker_image")
        if image is not None:
            self.base = str(image)
            if not self._takes_images:
                line = self._line("environment.docker_image")
                self._refuse(file, line, f"it needs the image {image}: --set sandbox.backend=docker")
            # The image has been built of the Dockerfile already; what the image starts by itself is left.
            instructions = [line for line in instructions if line.word in (*UNSTARTED, "ENTRYPOINT")]
        elif not dockerfile.is_file() and self._takes_images:
            self._refuse(file, 1, "it has neither a docker_image nor environment/Dockerfile")
        for instruction in instructions:
            try:
                problem = self._instruct(instruction, folder)
            except ValueError as error:  # quotes without an end
                problem = f"`{instruction.word}` cannot be read: {error}"
            if problem is not None:
                self._refuse(dockerfile, instruction.number, problem)

    def _instruct(self, line: _Line, context: Path) -> str | None:
        """Take one instruction of the Dockerfile into account; returns why it cannot be."""
        if line.word in ("LABEL", "MAINTAINER"):
            return None  # they describe the image
        if line.word in UNSTARTED:
            self.notes.append(f"`{line.word}` of environment/Dockerfile {UNSTARTED[line.word]}")
            return None
        if line.word == "RUN":
            return self._run(line)
        if line.word not in ("FROM", "WORKDIR", "ENV", "COPY"):
            return f"`{line.word}` {NOT_STARTED if line.word == 'ENTRYPOINT' else f'is not built here: {BUILD}'}"
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
        self.notes.append(f"the default sandbox stands in for the image {line.rest}")
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
                if (context / ".dockerignore").is_file():
                    return f"`COPY {source}` of a folder with a .dockerignore is not built here: {BUILD}"
                into = [(f"{top.rstrip('/.')}/{inner.relative_to(path)}", inner) for inner in _inside(path, context)]
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


def _reaches_beyond(network: bool | Sequence[str], other: bool | Sequence[str]) -> bool:
    """Whether one network (none, all, or names of hosts, which may begin with `*.`) has hosts that another has not."""
    if network is True or other is True:
        return other is not True
    names = [name.lower() for name in other or ()]
    return not all(
        any(host.lower() == name or (name.startswith("*.") and host.lower().endswith(name[1:])) for name in names)
        for host in network or ()
    )


def _inside(folder: Path, top: Path | None = None) -> list[Path]:
    """Return the files in a folder that lie in it, or in `top` above it, also after symlinks."""
    bound = (top or folder).resolve()
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.resolve().is_relative_to(bound))


def _text(data: bytes) -> str:
    """Return bytes as text; raises ValueError where they are none that a command can hold."""
    text = data.decode("utf-8")
    if "\0" in text:
        raise ValueError("a null character")
    return text


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
