"""``sandbox`` and ``artifacts``: where the agent's commands run, and what is kept of it."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, PlainSerializer, Tag

from hermes_rl.spec.model.base import EMPTY, EnvText, Map, MayTemplate, Section, Seq, Size, wrong

BACKENDS = ("bubblewrap", "docker", "modal", "daytona", "ssh", "singularity", "none")
"""Backends by name; a package may publish more."""


def _mode(value: Any) -> Any:
    """Permission bits from digits that are octal however they are written: ``0755`` is the YAML number 755."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        return value
    if not re.fullmatch(r"(0o)?[0-7]{1,5}", str(value)):
        raise wrong("expected octal permissions such as 0755")
    return int(str(value).removeprefix("0o"), 8)


def _mode_written(value: int) -> str:
    """With the sign that says octal, so that a section that is written out and read again keeps its bits."""
    return f"0o{value:03o}"


def _network_shape(value: Any) -> str:
    return "hosts" if isinstance(value, list | tuple) else "switch"


Network = Annotated[Annotated[bool, Tag("switch")] | Annotated[Seq[str], Tag("hosts")], Discriminator(_network_shape)]


def _package(value: Any) -> Any:
    """What pip would take for an option, a file or an address is not taken: the list is names and versions alone."""
    if isinstance(value, str) and not _PACKAGE.fullmatch(value):
        raise wrong(f"expected a package such as pytest, numpy==2.1.0 or requests[socks]>=2, got {value!r}")
    return value


_PACKAGE = re.compile(
    r"[A-Za-z0-9][\w.-]*(\[[\w.,\s-]+\])?\s*([<>=!~]=?=?\s*[\w.*+!-]+(\s*,\s*[<>=!~]=?=?\s*[\w.*+!-]+)*)?"
)
Package = Annotated[str, BeforeValidator(_package)]


class File(Section):
    """A file put into the sandbox: exactly one of content, from, base64."""

    to: str = Field(description="Path in the sandbox, relative to its working directory.")
    content: str | None = Field(None, description="Text of the file.")
    from_: str | None = Field(
        None, alias="from", description="File or folder to copy, below the folder of the spec after symlinks."
    )
    base64: str | None = Field(None, description="Bytes of the file in base64.")
    mode: Annotated[int, BeforeValidator(_mode), PlainSerializer(_mode_written), MayTemplate()] | None = Field(
        None, description="Permissions in octal digits, such as 0755; default: those of the source, else 0644."
    )


class Limits(Section):
    """What the agent's commands may use; absent means the backend's default."""

    memory: Annotated[Size, Field(gt=0), MayTemplate()] | None = Field(None, description="Bytes of memory, or 2GiB.")
    processes: Annotated[int, Field(ge=1), MayTemplate()] | None = Field(None, description="Processes at a time.")
    disk: Annotated[Size, Field(gt=0), MayTemplate()] | None = Field(None, description="Bytes on disk, or 4GiB.")
    cpu: Annotated[float, Field(gt=0), MayTemplate()] | None = Field(None, description="Processor cores.")
    open_files: Annotated[int, Field(ge=1), MayTemplate()] | None = Field(None, description="Open files per process.")
    best_effort: Annotated[bool, MayTemplate()] = Field(
        False, description="A limit that the backend cannot enforce is left out instead of being an error."
    )


class Sandbox(Section):
    """Where commands run; started only when something uses it."""

    backend: str = Field(
        "bubblewrap",
        description="bubblewrap, docker, modal, daytona, ssh, singularity or none (the bare machine).",
    )
    image: str | None = Field(
        None, description="Container image; for bubblewrap a folder or archive with a root file system."
    )
    workdir: str | None = Field(None, description="Working directory in the sandbox; default: its home.")
    env: Map[EnvText] = Field(EMPTY, description="Environment variables of every command.")
    python: Seq[Package] = Field(
        (),
        description="Python packages for the default sandbox, as pip names them; installed once, by the machine's pip, "
        "and laid in read-only.",
    )
    files: Annotated[Seq[File], MayTemplate()] = Field((), description="Files in place before setup.")
    setup: Annotated[Seq[str], MayTemplate()] = Field(
        (), description="Commands before the agent starts; one that fails is our failure, not the agent's."
    )
    network: Network = Field(False, description="false: none; true: all; or a list of host names.")
    limits: Limits = Field(
        Limits.model_construct(), description="Limits on memory, processes, disk, cpu and open files."
    )
    timeout: float = Field(120.0, gt=0, description="Seconds per command.")
    lifetime: float | None = Field(None, gt=0, description="Seconds that a sandbox may live; default: no bound.")
    keep_processes: bool = Field(
        False, description="Leave the agent's processes running while rewards look; false kills them first."
    )


class Artifact(Section):
    """Something taken from the sandbox when the agent has ended: exactly one of path, command."""

    path: str | None = Field(None, description="File or folder in the sandbox.")
    command: str | None = Field(None, description="Command whose standard output is kept.")
    lay: bool = Field(True, description="false: it is only kept; fresh sandboxes of rewards do not get it.")
