"""Read a Compose file of a task directory: its service `main` becomes sandbox settings, the others `sandbox.services`.

This module owns the supported subset of the format, and reports the line of each unsupported part. It never uses
variables of the host. Source of the keys: the Compose specification.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from hermes_rl.others_files import read_file
from hermes_rl.spec.nodes import MappingNode, Node, SourceText, find, to_builtins
from hermes_rl.spec.reader import read_bytes

MAIN = "main"
NOT_USED = (
    "expose ports restart networks container_name hostname init stop_grace_period stop_signal pull_policy platform "
    "labels logging deploy mem_limit cpus stdin_open tty"
)
"""Keys of a service that have no effect here: a service has the limits and the network of the sandbox."""
TOP = ("services", "version", "name", "volumes", "networks")
IDLE = re.compile(r"(sleep (infinity|\d+)|tail -f /dev/null)\W*$")
"""Commands with which a container only waits, as every sandbox does."""
DEFAULTED = re.compile(r"(?<!\$)((?:\$\$)*)\$\{\w+:?-([^${}]*)\}")
VARIABLES = "takes variables of this machine, which are not handed over: write the value there, or ${NAME:-VALUE}"
VARIABLE = re.compile(r"(?<!\$)(\$\$)*\$(?!\$)")


Value = tuple[str, Any]
"""A key of `sandbox.services`, and its value."""


class ComposeFile:
    """One Compose file.

    Args:
        path: the file.
        files_of: returns the sandbox's files for a path in the sandbox and a file or directory on the host.
        built: returns the name of the image that is built from a directory.
    """

    def __init__(
        self, path: Path, files_of: Callable[[str, Path], list[dict[str, str]]], built: Callable[[Path], str]
    ) -> None:
        self.env: dict[str, str] = {}
        """Variables of the sandbox; `files` are its files."""
        self.files: list[dict[str, str]] = []
        self.services: dict[str, dict[str, Any]] = {}
        """Services in the form of `sandbox.services`, each after the services that it depends on."""
        self.problems: list[tuple[int, str]] = []
        """Unsupported parts: the line, and the reason."""
        self.notes: list[str] = []
        self._folder, self._files_of, self._built = path.parent, files_of, built
        self._volumes: dict[str, str] = {}
        """Service that mounts each named volume, by volume."""
        root, problems = read_bytes(read_file(path), SourceText(str(path), path.resolve().parent))
        self.problems += [(problem.line or 1, problem.message) for problem in problems]
        if isinstance(root, MappingNode) and not problems:
            self._read(root)
        elif not problems:
            self.problems.append((1, "it has no services"))

    def _read(self, root: MappingNode) -> None:
        for key, entry in root.entries.items():
            if key not in TOP and not key.startswith("x-"):
                self.problems.append((entry.key.line, f"`{key}` is not supported"))
        services = root.get("services")
        if not isinstance(services, MappingNode):
            self.problems.append((1, "it has no services"))
            return
        for name, entry in services.entries.items():
            values = dict(self._values(name, entry.value)) if isinstance(entry.value, MappingNode) else {}
            if name == MAIN:
                self.env, self.files = values.get("env", {}), values.get("files", [])
            else:
                self.services[name] = values
                has = isinstance(entry.value, MappingNode) and {"image", "build"} & entry.value.entries.keys()
                if not has:  # an unsupported `image` or `build` is reported already
                    self.problems.append((entry.key.line, f"`{name}` has no `image` and no `build`"))
        self._put_in_order(services)

    def _put_in_order(self, services: MappingNode) -> None:
        needed: dict[str, list[str]] = {}
        for name in services.entries:
            node = find(services, (name, "depends_on"))
            value = [] if node is None else to_builtins(node)
            needed[name] = list(value) if isinstance(value, list | dict) else [str(value)]
            unknown = [other for other in needed[name] if other not in services.entries]
            if node is not None and unknown:
                self.problems.append((node.position.line, f"`{name}` depends on {unknown[0]}, which is not a service"))
        try:
            order = TopologicalSorter(needed).static_order()
            self.services = {name: self.services[name] for name in order if name in self.services}
        except CycleError:
            self.problems.append((1, "its services depend on each other in a circle"))

    def _values(self, name: str, service: MappingNode) -> Iterator[tuple[str, Any]]:
        """Yield the supported values of a service; add the other keys to `problems` or `notes`."""
        for key, (position, node) in service.entries.items():
            try:
                if key in NOT_USED.split():
                    self.notes.append(f"`{key}` of services in environment/docker-compose.yaml is of no effect")
                elif (
                    key == "depends_on"
                    or (name != MAIN and key == "image" and "build" in service.entries)
                    or (name == MAIN and self._is_the_sandbox(key, node))
                ):
                    pass
                elif key in READ:
                    yield READ[key](self, name, node)
                else:
                    raise ValueError("is not supported")
            except ValueError as error:
                self.problems.append((position.line, f"`{key}` of the service `{name}` {error}"))
            except (TypeError, AttributeError):
                self.problems.append((position.line, f"`{key}` of the service `{name}` cannot be read"))

    def _is_the_sandbox(self, key: str, node: Node) -> bool:
        """Return True if a key of `main` only repeats a property that the sandbox always has."""
        if key == "image":
            return "$" in str(to_builtins(node))  # the image of the task
        if key == "build":
            return _to_text(node) in (".", "${CONTEXT_DIR}") or to_builtins(node) in (
                {"context": "."},
                {"context": "${CONTEXT_DIR}"},
            )
        return key == "command" and IDLE.search(_to_text(node)) is not None

    def _image(self, name: str, node: Node) -> Value:
        if name == MAIN:
            raise ValueError("is named in [environment] docker_image")
        return "image", _literal_text(to_builtins(node))

    def _build(self, name: str, node: Node) -> Value:
        value = to_builtins(node)
        build = dict(value) if isinstance(value, Mapping) else {"context": value}
        if name == MAIN or build.keys() != {"context"}:
            raise ValueError(
                "is supported only as `build: FOLDER` of services other than `main`, without other files, arguments or "
                "stages"
            )
        folder = (self._folder / _literal_text(build["context"])).resolve()
        if not folder.is_relative_to(self._folder.resolve()) or not (folder / "Dockerfile").is_file():
            raise ValueError(f"names {build['context']}, which is not a directory with a Dockerfile in environment/")
        return "image", self._built(folder)

    def _command(self, name: str, node: Node) -> Value:
        if name == MAIN:
            raise ValueError("starts a program in the sandbox: start it in [environment.healthcheck], or in a service")
        value = to_builtins(node)
        return "command", [_literal_text(word) for word in (shlex.split(value) if isinstance(value, str) else value)]

    def _environment(self, name: str, node: Node) -> Value:
        value = to_builtins(node)
        pairs: Mapping[str, Any] = (
            value
            if isinstance(value, Mapping)
            else {name: text if sign else None for name, sign, text in (str(each).partition("=") for each in value)}
        )
        if any(each is None for each in pairs.values()):
            raise ValueError(VARIABLES)
        return "env", {str(key): _literal_text(each) for key, each in pairs.items()}

    def _healthcheck(self, name: str, node: Node) -> Value:
        test: Any = to_builtins(node).get("test") if isinstance(node, MappingNode) else None
        kind, *arguments = test if isinstance(test, list) and test else ("CMD-SHELL", test)
        if name == MAIN:
            raise ValueError("of the main service is not supported: use [environment.healthcheck] in task.toml")
        if kind == "NONE":
            return "healthy", None
        if kind not in ("CMD", "CMD-SHELL") or not arguments or not all(isinstance(word, str) for word in arguments):
            raise ValueError("has no `test` that can be run")
        command = shlex.join(arguments) if kind == "CMD" else " ".join(arguments)
        return "healthy", _literal_text(command)

    def _volumes_of(self, name: str, node: Node) -> Value:
        files = []
        for volume in to_builtins(node):
            is_mapping = isinstance(volume, Mapping)
            parts = (volume.get("source", ""), volume.get("target")) if is_mapping else str(volume).split(":")[:2]
            source, target = parts if len(parts) == 2 else ("", parts[0])
            if name == MAIN and "$" in str(source):
                continue  # a directory of Harbor's runner, for collected files
            source, target = _literal_text(source), _literal_text(target)
            if not source.startswith((".", "/")):
                if source and self._volumes.setdefault(source, name) != name:
                    raise ValueError(f"shares {source} with {self._volumes[source]}, but services cannot share files")
                continue
            path = (self._folder / source).resolve()
            if not path.is_relative_to(self._folder.resolve()) or not path.exists():
                raise ValueError(f"names {source}, which is not in environment/")
            files += self._files_of(target, path)
        return "files", files


READ: Mapping[str, Callable[[ComposeFile, str, Node], Value]] = {
    "image": ComposeFile._image,
    "build": ComposeFile._build,
    "command": ComposeFile._command,
    "environment": ComposeFile._environment,
    "healthcheck": ComposeFile._healthcheck,
    "volumes": ComposeFile._volumes_of,
}
"""Method that reads each key of a service, by key."""


def _to_text(node: Node) -> str:
    value = to_builtins(node)
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def defaulted(text: str) -> str:
    """Return a text in which variables are replaced by their defaults, independent of the host."""
    return DEFAULTED.sub(r"\1\2", text)


def _literal_text(value: Any) -> str:
    """Return a value of the file as text; raise ValueError if it uses a variable of the host."""
    text = defaulted(str(value).lower() if isinstance(value, bool) else str(value))
    if VARIABLE.search(text):
        raise ValueError(VARIABLES)
    return text.replace("$$", "$")
