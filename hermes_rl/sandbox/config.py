"""What a sandbox is made of: its configuration, already rendered for one rollout.

Owns the frozen types. Reading them from a spec is the spec's work; making a sandbox from them is
`hermes_rl.sandbox.backends`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

BACKENDS = ("bubblewrap", "docker", "modal", "daytona", "ssh", "singularity", "none")
"""Every backend that a spec may name; `create_sandbox` says which of them this version can run."""


@dataclass(frozen=True)
class ResourceLimits:
    """What the agent's processes may use; None leaves the backend's own default in force.

    A limit that is set here and that the backend cannot enforce is an error at start, unless `best_effort`.
    """

    memory: int | None = None
    """Bytes."""
    processes: int | None = None
    """Processes and threads, all of the sandbox together."""
    disk: int | None = None
    """Bytes that all files of the sandbox may take together."""
    cpu: float | None = None
    """Processor cores."""
    open_files: int | None = None
    """Open files per process."""
    best_effort: bool = False
    """Go on where a limit cannot be enforced."""

    def requested(self) -> tuple[str, ...]:
        """Names of the limits that are set."""
        names = (f.name for f in fields(self) if f.name != "best_effort")
        return tuple(name for name in names if getattr(self, name) is not None)


@dataclass(frozen=True)
class SandboxFile:
    """A file laid into the sandbox before `setup`; a relative `to` is below the working directory."""

    to: str
    data: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class SandboxConfig:
    """Everything that a backend needs to start one sandbox."""

    backend: str = "bubblewrap"
    image: str | None = None
    workdir: str | None = None
    """Working directory inside the sandbox; None is the home directory, or the image's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the sandbox's own small environment; nothing is inherited from the host."""
    packages: tuple[str, ...] = ()
    """Python packages that are laid in read-only, as pip names them; bubblewrap without an image alone."""
    files: tuple[SandboxFile, ...] = ()
    setup: tuple[str, ...] = ()
    """Shell commands, run in order in the working directory; non-zero is our failure."""
    network: bool | tuple[str, ...] = False
    limits: ResourceLimits = ResourceLimits()
    timeout: float = 180.0
    """Seconds per command, where the caller names no other."""
    lifetime: float | None = None
    """Seconds after which the sandbox is killed; None is without end."""
    keep_processes: bool = False
    """Leave the agent's processes running while rewards look at the sandbox."""
    environ: Mapping[str, str] | None = field(default=None, repr=False, compare=False)
    """Where backends on other machines find their addresses and keys; None: the process's environment. It may hold
    secrets, so it is never shown, and nothing of it gets into the sandbox."""
