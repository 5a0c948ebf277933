"""What each of hermes-agent's backends takes, can limit, and needs to be there.

Owns turning a configuration into the arguments of its class. Addresses and keys come from the environment, under the
names that hermes-agent and the services use, so that no spec holds them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.sandbox.config import SandboxConfig

NAMES = ("ssh", "modal", "daytona", "singularity")
IMAGE = "python:3.11-slim"
MEBI = 1 << 20
ABLE: Mapping[str, tuple[str, ...]] = {
    "ssh": (),
    "modal": ("memory", "cpu"),
    "daytona": ("memory", "cpu", "disk"),
    "singularity": ("memory", "cpu"),
}
"""Backend → the limits that it has."""


@dataclass(frozen=True)
class Machine:
    """One machine to be made."""

    arguments: Mapping[str, Any]
    limits: tuple[str, ...] = ()
    shared: bool = False
    """True where other rollouts use the same machine, so that each has a folder as its home."""
    piece: int = 0
    """Bytes of a file that one command can take; 0 is without a bound of its own."""


def missing(backend: str, environ: Mapping[str, str] | None = None) -> str | None:
    """What this backend lacks here, and what to do; None where nothing is known to be missing."""
    environ = os.environ if environ is None else environ
    if find_spec("tools") is None or find_spec("model_tools") is None:
        return f"the backend {backend} is hermes-agent's: pip install 'hermes-rl[hermes]'"
    if backend == "ssh":
        absent = [name for name in ("TERMINAL_SSH_HOST", "TERMINAL_SSH_USER") if not environ.get(name)]
        if absent:
            return f"set {' and '.join(absent)} (and TERMINAL_SSH_PORT, TERMINAL_SSH_KEY where they differ)"
        return (
            None if shutil.which("ssh") and shutil.which("scp") else "install the programs ssh and scp (openssh-client)"
        )
    if backend == "modal":
        keys = environ.get("MODAL_TOKEN_ID") and environ.get("MODAL_TOKEN_SECRET")
        if find_spec("modal") is None:
            return "pip install modal"
        return None if keys or Path("~/.modal.toml").expanduser().exists() else "set MODAL_TOKEN_ID, MODAL_TOKEN_SECRET"
    if backend == "daytona":
        if find_spec("daytona") is None:
            return "pip install daytona"
        return None if environ.get("DAYTONA_API_KEY") else "set DAYTONA_API_KEY"
    return None if shutil.which("apptainer") or shutil.which("singularity") else "install apptainer or singularity"


def machine(config: SandboxConfig) -> Machine:
    """The machine for a configuration; raises `UserError` for what it cannot be, and for what is missing here."""
    backend, limits = config.backend, config.limits
    if config.network is not True:
        raise UserError(
            f"the sandbox backend {backend} cannot close its network: set sandbox.network: true, or use another"
        )
    unable = [name for name in limits.requested() if name not in ABLE[backend]]
    if unable and not limits.best_effort:
        raise UserError(
            f"sandbox.limits.{unable[0]} cannot be enforced by the backend {backend}; leave it out, or set "
            "limits.best_effort: true"
        )
    lacking = missing(backend, config.environ)
    if lacking is not None:
        raise UserError(f"the sandbox backend {backend} cannot be used: {lacking}")
    if backend == "ssh":
        return _ssh(config)
    memory = None if limits.memory is None else limits.memory // MEBI
    common: dict[str, Any] = {
        "image": config.image or IMAGE,
        "timeout": int(config.timeout),
        "persistent_filesystem": False,
    }
    if backend == "modal":
        asked = {"cpu": limits.cpu, "memory": memory}
        given = {name: value for name, value in asked.items() if value is not None}
        return Machine({**common, "modal_sandbox_kwargs": given}, ABLE[backend], piece=48_000)
    if memory is not None:
        common["memory"] = memory
    if limits.cpu is not None:
        common["cpu"] = int(limits.cpu) if backend == "daytona" else limits.cpu
    if backend == "daytona" and limits.disk is not None:
        common["disk"] = limits.disk // MEBI
    return Machine(common, ABLE[backend], piece=48_000 if backend == "daytona" else 0)


def _ssh(config: SandboxConfig) -> Machine:
    if config.image is not None:
        raise UserError("sandbox.image: the backend ssh has no images; the machine is the one that it connects to")
    environ = os.environ if config.environ is None else config.environ
    port = environ.get("TERMINAL_SSH_PORT") or "22"
    if not port.isdigit():
        raise UserError(f"TERMINAL_SSH_PORT is {port!r}, which is no port")
    arguments = {
        "host": environ["TERMINAL_SSH_HOST"],
        "user": environ["TERMINAL_SSH_USER"],
        "port": int(port),
        "key_path": environ.get("TERMINAL_SSH_KEY", ""),
        "timeout": int(config.timeout),
    }
    return Machine(arguments, shared=True)
