"""Declare `sandbox` and `artifacts`: where the agent's commands run, and the files saved from there."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, StringConstraints, Tag

from hermes_rl.spec.section import EMPTY, EnvText, MayTemplate, PathText, Section, Seq, Size, SystemText, freeze, wrong
from hermes_rl.spec.sections.common import File

BACKENDS = ("bubblewrap", "docker", "modal", "daytona", "ssh", "singularity", "none")
"""Backends by name; a package may publish more."""


Network = Annotated[
    Annotated[bool, Tag("switch")] | Annotated[Seq[str], Tag("hosts")],
    Discriminator(lambda value: "hosts" if isinstance(value, list | tuple) else "switch"),
]


def _require_package(form: str, expected: str) -> BeforeValidator:
    """Return a validator that rejects a text that an installer would parse as an option, a file or an address."""

    def checked(value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch(form, value):
            raise wrong(f"expected {expected}, got {value!r}")
        return value

    return BeforeValidator(checked)


_VERSION = r"[<>=!~]=?=?\s*[\w.*+!-]+"
_PYTHON = rf"[A-Za-z0-9][\w.-]*(\[[\w.,\s-]+\])?\s*({_VERSION}(\s*,\s*{_VERSION})*)?"
_NPM = r"(@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@\d+\.\d+\.\d+([.+-][\w.+-]*)?"  # it is the same tomorrow
Package = Annotated[str, _require_package(_PYTHON, "a package such as pytest, numpy==2.1.0 or requests[socks]>=2")]
NpmPackage = Annotated[
    str, _require_package(_NPM, "a package of npm with its version, such as prettier@3.1.0 or @scope/name@1.2.3")
]


class Limits(Section):
    """Resource limits of the agent's commands; an absent limit is the backend's default."""

    memory: Annotated[Size, Field(gt=0), MayTemplate()] | None = Field(
        None, description="Bytes of memory, such as 2GiB; default: 4GiB (bubblewrap, docker)."
    )
    processes: Annotated[int, Field(ge=1), MayTemplate()] | None = Field(
        None, description="Processes at a time; default: 256 (bubblewrap, docker)."
    )
    disk: Annotated[Size, Field(gt=0), MayTemplate()] | None = Field(
        None, description="Bytes on disk, such as 4GiB; default: 1GiB (bubblewrap)."
    )
    cpu: Annotated[float, Field(gt=0), MayTemplate()] | None = Field(None, description="Processor cores.")
    open_files: Annotated[int, Field(ge=1), MayTemplate()] | None = Field(
        None, description="Open files per process, such as 256; default: 1024 (bubblewrap, docker)."
    )
    best_effort: Annotated[bool, MayTemplate()] = Field(
        False, description="Ignore a limit that the backend cannot enforce instead of raising an error."
    )


class ServiceSection(Section):
    """A program in its own image, next to the sandbox, such as a database. Supported by docker."""

    image: SystemText = Field(description="Container image, such as `postgres:17`, or ./folder with a Dockerfile.")
    command: Seq[SystemText] = Field((), description="What it runs, a list of words; default: what the image starts.")
    env: Annotated[Mapping[SystemText, EnvText], AfterValidator(freeze), MayTemplate()] = Field(
        EMPTY, description="Environment variables of it."
    )
    files: Seq[File] = Field((), description="Files in place before it starts, by absolute paths.")
    healthy: SystemText | None = Field(
        None,
        description="Shell command in it, such as `pg_isready -U postgres`, repeated until it passes, before which the "
        "sandbox is not used; default: the image's own check.",
    )


ServiceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$")]


class SshSection(Section):
    """Host keys that the backend ssh trusts; by default, the keys that this host already trusts."""

    known_hosts: SystemText | None = Field(
        None, description="File of known hosts, the only trusted keys; default: the known hosts of ssh on this host."
    )
    accept_unknown_host: bool = Field(
        False, description="Trust and remember the key of a host that is not known; a changed key is always refused."
    )


class SandboxSection(Section):
    """The sandbox in which commands run; started only when something uses it."""

    backend: str = Field(
        "bubblewrap",
        description="bubblewrap, docker, modal, daytona, singularity, none (no isolation from the host), or ssh, which "
        "does not separate rollouts: for `evaluate` and `play` only.",
    )
    image: SystemText | None = Field(
        None,
        description="Container image, or for docker a ./folder with a Dockerfile; for bubblewrap a folder or archive "
        "with a root file system.",
    )
    workdir: PathText | None = Field(None, description="Working directory in the sandbox; default: its home.")
    env: Annotated[Mapping[SystemText, EnvText], AfterValidator(freeze), MayTemplate()] = Field(
        EMPTY, description="Environment variables of every command."
    )
    python: Seq[Package] = Field(
        (),
        description="Python packages for bubblewrap and docker, such as `pytest==8.4.1`, and `python>=3.12` if they "
        "need it. Installed once, by the host's pip, and mounted read-only.",
    )
    npm: Seq[NpmPackage] = Field(
        (),
        description="npm packages for bubblewrap and docker, with their versions, such as `prettier@3.1.0`. "
        "Installed once, by the host's npm without running their scripts, and mounted read-only.",
    )
    files: Annotated[Seq[File], MayTemplate()] = Field((), description="Files in place before setup.")
    setup: Annotated[Seq[SystemText], MayTemplate()] = Field(
        (), description="Commands before the agent starts; one that fails is our failure, not the agent's."
    )
    scrub_git: bool = Field(
        False,
        description="After setup, remove from the git repositories of the working directory all that HEAD does not "
        "reach: branches, tags, the stash, logs and objects. Set-up fails if something is left.",
    )
    services: Annotated[Mapping[ServiceName, ServiceSection], AfterValidator(freeze), MayTemplate()] = Field(
        EMPTY,
        description="Programs on the sandbox's network, by host name; docker only. Each starts when the one before it "
        "is ready.",
    )
    ssh: SshSection = Field(SshSection.model_construct(), description="Which host keys the backend ssh trusts.")
    network: Network = Field(False, description="false: none; true: all; or a list of host names.")
    limits: Limits = Field(
        Limits.model_construct(), description="Limits on memory, processes, disk, cpu and open files."
    )
    timeout: float = Field(120.0, gt=0, description="Seconds per command.")
    lifetime: float | None = Field(
        None, gt=0, description="Seconds that a sandbox may live, such as 3600; default: no bound."
    )
    keep_processes: bool = Field(
        False, description="Leave the agent's processes running while rewards look; false kills them first."
    )


class Artifact(Section):
    """Something taken from the sandbox when the agent has ended: exactly one of path, command."""

    path: PathText | None = Field(None, description="File or folder in the sandbox.")
    command: SystemText | None = Field(None, description="Command whose standard output is saved.")
    restore: bool = Field(True, description="false: it is only kept; fresh sandboxes of rewards do not get it.")
