"""Rules on the sandbox, the files put into it, and artifacts."""

from __future__ import annotations

import binascii
import posixpath
from base64 import b64decode
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hermes_rl.plugins import SANDBOXES
from hermes_rl.spec.fault import Fault, entries, exactly_one, section
from hermes_rl.spec.model.base import is_template
from hermes_rl.spec.model.sandbox import BACKENDS
from hermes_rl.spec.nodes import NodePath
from hermes_rl.spec.rules_data import tool_entries
from hermes_rl.spec.suggest import choices


def _backend(data: dict[str, Any]) -> Iterator[Fault]:
    name = section(data, "sandbox").get("backend")
    if not isinstance(name, str) or name in BACKENDS:
        return
    known = [*BACKENDS, *(point.name for point in entry_points(group=SANDBOXES))]
    if name not in known:
        yield Fault(("sandbox", "backend"), f"there is no backend `{name}`{choices(name, known)}")


def _bare_machine(data: dict[str, Any]) -> Iterator[Fault]:
    sandbox = section(data, "sandbox")
    if sandbox.get("backend") != "none":
        return
    if "image" in sandbox:
        yield Fault(("sandbox", "image"), "the backend `none` has no images", at="key")
    limits = section(sandbox, "limits")
    if limits.get("best_effort") is True:
        return
    for key in limits:
        if key != "best_effort":
            message = f"the backend `none` cannot enforce `{key}`; set best_effort: true to go without"
            yield Fault(("sandbox", "limits", key), message, at="key")


def _packages(data: dict[str, Any]) -> Iterator[Fault]:
    """Where there is an image, packages belong into it; the bare machine has those that it has."""
    sandbox = section(data, "sandbox")
    backend = sandbox.get("backend", "bubblewrap")
    if "python" not in sandbox or (backend == "bubblewrap" and "image" not in sandbox):
        return
    if backend == "none":
        way = "the backend `none` is this machine itself: install them here"
    else:
        what = "an image" if backend == "bubblewrap" else f"the backend `{backend}`"
        way = f"{what} has a Python of its own: install them in the image, or in `setup`"
    yield Fault(("sandbox", "python"), f"`python` is for the default sandbox; {way}", at="key")


def file_lists(data: dict[str, Any]) -> Iterator[NodePath]:
    """The paths of all lists of files."""
    yield ("sandbox", "files")
    for path, tool in tool_entries(data):
        if isinstance(section(tool, "mcp").get("files"), list):
            yield (*path, "mcp", "files")


def _at(data: Any, path: NodePath) -> list[Any]:
    for step in path:
        if isinstance(data, dict):
            data = data.get(str(step))
        elif isinstance(data, list) and isinstance(step, int):
            data = data[step]
        else:
            return []
    return data if isinstance(data, list) else []


def _files(data: dict[str, Any]) -> Iterator[Fault]:
    for path in file_lists(data):
        targets: dict[str, int] = {}
        for index, file in enumerate(_at(data, path)):
            here = (*path, index)
            yield from exactly_one(file, here, ("content", "from", "base64"), "a file")
            yield from _base64(here, section(file).get("base64"))
            target = section(file).get("to")
            if not isinstance(target, str) or is_template(target):
                continue
            first = targets.setdefault(posixpath.normpath(target), index)
            if first != index:
                yield Fault((*here, "to"), f"file number {first + 1} is put at `{target}` already")


def _base64(path: NodePath, value: Any) -> Iterator[Fault]:
    if not isinstance(value, str) or is_template(value):
        return
    try:
        b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError):
        yield Fault((*path, "base64"), "this is not base64")


def sources_below(data: dict[str, Any], folder_of: Callable[[NodePath], Path]) -> Iterator[Fault]:
    """A file's source stays below the folder of the file that names it, after symlinks."""
    for path in file_lists(data):
        for index, file in enumerate(_at(data, path)):
            source = section(file).get("from")
            here = (*path, index, "from")
            if isinstance(source, str) and not is_template(source) and not is_below(source, folder_of(here)):
                yield Fault(here, "`from` must stay below the folder of the spec, symlinks included")


def is_below(source: str, folder: Path) -> bool:
    """True where a path, relative ones from `folder`, leads below `folder` after symlinks."""
    top = folder.resolve()
    return (top / source).resolve().is_relative_to(top)


def _artifacts(data: dict[str, Any]) -> Iterator[Fault]:
    for path, artifact in entries(data, "artifacts"):
        yield from exactly_one(artifact, path, ("path", "command"), "an artifact")


SANDBOX_RULES = (_backend, _bare_machine, _packages, _files, _artifacts)
