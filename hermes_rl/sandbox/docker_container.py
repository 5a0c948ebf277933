"""What a sandbox's container is: its limits, its rights, and what the engine says to them.

Owns the body of the request that makes it. A limit that the engine cannot enforce is an error, unless `best_effort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hermes_rl.errors import UserError
from hermes_rl.sandbox.config import SandboxConfig
from hermes_rl.sandbox.docker_engine import Engine, EngineError
from hermes_rl.sandbox.docker_leftovers import LABEL, own_mark

GIB = 1 << 30
DEFAULTS = {"memory": 4 * GIB, "processes": 256, "open_files": 1024}
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""What root keeps in a container: enough to install packages."""
WORDS = {"memory": "memory", "processes": "pids", "cpu": "cpu"}
"""Limit → a word of the engine's warning that it cannot enforce it."""


class Container:
    """One container, from its name on."""

    def __init__(self, engine: Engine, name: str, image: str, config: SandboxConfig) -> None:
        self.engine = engine
        self.name = name
        self.image = image
        self.config = config
        self.limits = {limit: getattr(config.limits, limit) or default for limit, default in DEFAULTS.items()}
        self._unenforced: set[str] = set()

    def enforced(self) -> dict[str, str]:
        """The limits in force, each with how."""
        found = {"memory": "per container", "processes": "per container", "open_files": "per process"}
        asked = self.config.limits.requested()
        found |= {name: "per container" for name in ("cpu", "disk") if name in asked}
        return {name: how for name, how in found.items() if name not in self._unenforced}

    async def start(self, command: list[str], *folders: dict[str, Any]) -> None:
        """Make and start it; raises `EngineError`, or `UserError` for what this engine can never do."""
        body = self._body(command, folders)
        try:
            warnings = await self.engine.create(self.name, body)
        except EngineError as error:
            warnings = await self._create_otherwise(error, body)
        self._heed(warnings)
        await self.engine.start(self.name)

    async def _create_otherwise(self, error: EngineError, body: dict[str, Any]) -> list[str]:
        """Again without a limit on the disk, where that was refused and may be; else say what to do."""
        if "mount" in error.message.lower() and "path" in error.message.lower():
            raise UserError(
                f"the Docker engine does not see this machine's files ({error.message}): where the runner is itself in "
                "a container, mount its TMPDIR and XDG_CACHE_HOME into it from folders of the same path on the "
                "engine's machine"
            ) from error
        if "StorageOpt" not in body["HostConfig"] or "storage" not in error.message.lower():
            raise error
        if not self.config.limits.best_effort:
            raise UserError(
                f"sandbox.limits.disk cannot be enforced by this Docker engine ({error.message}); leave it out, or set "
                "limits.best_effort: true"
            ) from error
        self._unenforced.add("disk")
        del body["HostConfig"]["StorageOpt"]
        return await self.engine.create(self.name, body)

    def _heed(self, warnings: list[str]) -> None:
        """The engine only warns where the kernel cannot enforce a limit; here that is an error."""
        limits = self.config.limits
        for warning in warnings:
            for name, word in WORDS.items():
                if "discarded" in warning.lower() and word in warning.lower():
                    self._unenforced.add(name)
                    if name in limits.requested() and not limits.best_effort:
                        raise UserError(
                            f"sandbox.limits.{name} cannot be enforced by this Docker engine ({warning}); leave it "
                            "out, or set limits.best_effort: true"
                        )

    def _body(self, command: list[str], folders: Sequence[dict[str, Any]]) -> dict[str, Any]:
        limits, asked = self.limits, self.config.limits
        host: dict[str, Any] = {
            "NetworkMode": "bridge" if self.config.network is True else "none",
            "Mounts": list(folders),
            "Memory": limits["memory"],
            "MemorySwap": limits["memory"],
            "PidsLimit": limits["processes"] + 1,  # the helper is a process too
            "CapDrop": ["ALL"],
            "CapAdd": list(CAPABILITIES),
            # SELinux would keep the container from the door; elsewhere the second option says nothing.
            "SecurityOpt": ["no-new-privileges", *(["label=disable"] if _selinux() else [])],
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
        }
        if asked.cpu is not None:
            host["NanoCpus"] = int(asked.cpu * 1_000_000_000)
        if asked.disk is not None:
            host["StorageOpt"] = {"size": str(asked.disk)}
        return {
            "Image": self.image,
            "Entrypoint": command,
            "Cmd": [],
            "WorkingDir": "/",
            "Hostname": "sandbox",
            "Labels": {LABEL: own_mark()},
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": host,
        }


def shared_folder(folder: Path, place: str) -> dict[str, Any]:
    """A folder of this machine that the container sees, read-only."""
    return {"Type": "bind", "Source": str(folder), "Target": place, "ReadOnly": True}


def _selinux() -> bool:
    return Path("/sys/fs/selinux/enforce").exists()
