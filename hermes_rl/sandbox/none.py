"""No sandbox: the agent's commands run on this machine, as this user. An explicit choice, said loudly.

Owns a temporary folder that is home and working directory, an environment without the runner's variables,
and ending every process that the agent started, daemons too, as long as it does not kill our helper. What
the user can read and reach, the agent can read and reach.
"""

from __future__ import annotations

import asyncio
import logging
import os
import posixpath
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.sandbox.helper_sandbox import NO_CORE, Descriptors, HelperSandbox, boot_argv, own_python
from hermes_rl.sandbox.launcher import Program, ours

log = logging.getLogger(__name__)

WARNING = (
    "sandbox.backend is none: the model's commands run on this machine with your rights. They can read your "
    "files and keys, reach your network and harm other rollouts."
)
ENFORCED = {"memory": "per process", "open_files": "per process"}
MARK = "HERMES_RL_SANDBOX"

_warned = False


class NoSandbox(HelperSandbox):
    """See `Sandbox`, and the warning above."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.python = own_python()
        self._check()
        self._folder: Path | None = None

    @property
    def enforced(self) -> Mapping[str, str]:
        return {name: ENFORCED[name] for name in self.config.limits.requested() if name in ENFORCED}

    async def start(self) -> None:
        _warn()
        with ours("the sandbox did not start"):
            self._make_folders()
        await super().start()

    def _make_folders(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hermes-rl-"))
        self.home = str(self._folder / "home")
        self.workdir = posixpath.normpath(posixpath.join(self.home, self.config.workdir or ""))
        for folder in (self.workdir, str(self._folder / "tmp")):
            Path(folder).mkdir(parents=True)

    def program(self, descriptors: Descriptors) -> Program:
        argv = boot_argv(self.python, descriptors.control, descriptors.code)
        return Program(argv, self.python, descriptors.all(), descriptors.stderr)

    def environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": self.home,
            "TMPDIR": str(self._folder / "tmp") if self._folder else "/tmp",
            "USER": "user",
            "LOGNAME": "user",
            "SHELL": self.shell,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            MARK: self.id,
        }

    def rlimits(self) -> dict[str, int]:
        limits = self.config.limits
        asked = {"RLIMIT_DATA": limits.memory, "RLIMIT_NOFILE": limits.open_files}
        return {"RLIMIT_CORE": NO_CORE} | {name: value for name, value in asked.items() if value is not None}

    def folder(self) -> str:
        return str(self._folder)

    async def released(self) -> None:
        if self._folder is not None:
            await asyncio.to_thread(_clear, self.id, self._folder)

    def _check(self) -> None:
        if isinstance(self.config.network, tuple):
            raise UserError("sandbox.network with a list of hosts needs a fence; the backend none has no such thing")
        limits = self.config.limits
        missing = [name for name in limits.requested() if name not in ENFORCED]
        if missing and not limits.best_effort:
            raise UserError(
                f"sandbox.limits.{missing[0]} cannot be enforced without a sandbox (backend none); "
                "leave it out, or set limits.best_effort: true"
            )
        paths = [self.config.workdir or "", *(file.to for file in self.config.files)]
        for path in paths:
            if path.startswith("/") or ".." in path.split("/"):
                raise UserError(
                    f"sandbox path {path!r} is outside of the home directory; without a sandbox "
                    "(backend none) it would be a path of this machine"
                )


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(WARNING)


def _clear(mark: str, folder: Path) -> None:
    """What the helper does at its end, for where the agent killed it: end its processes, remove the folder."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"{MARK}={mark}\0".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # ended meanwhile, or somebody else's
    shutil.rmtree(folder, ignore_errors=True)
