"""No isolation: run the agent's commands on this machine, as this user. It is an explicit choice, and warns.

This module owns a temporary directory that is home and working directory, an environment without the runner's
variables, and the end of every process that the agent started, daemons too. The agent has all the user's access to
files and networks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import posixpath
import shutil
import signal
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from hermes_rl.errors import UserError
from hermes_rl.sandbox.base import MARK, RLIMITS, SandboxConfig
from hermes_rl.sandbox.helper_sandbox import COMMAND_VARIABLES, NO_CORE, HelperSandbox, LocalIsolation
from hermes_rl.sandbox.launcher import (
    Descriptors,
    LocalProcess,
    Program,
    boot_argv,
    helper_bundle,
    isolated,
    own_python,
)
from hermes_rl.spec.row_files import require_in_home
from hermes_rl.threads import done_in_thread

log = logging.getLogger(__name__)

WARNING = (
    "sandbox.backend is none: the model's commands run on this machine with your rights. They can read your "
    "files and keys, reach your network and harm other rollouts."
)
ENFORCED = {"memory": "RLIMIT_DATA", **RLIMITS}
"""Limits per process: name of a limit → the kernel's name."""


class NoIsolation(LocalIsolation):
    """Run commands on this machine as the current user; see the warning above."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        if isinstance(config.network, tuple):
            raise UserError("sandbox.network with a list of hosts needs isolation, which the backend none has not")
        require_in_home(config.workdir, [file.to for file in config.files])
        self.home = self.workdir = "/"
        self._folder: Path | None = None
        self.process = LocalProcess()

    @property
    def enforced(self) -> Mapping[str, str]:
        return {name: "per process" for name in self.config.limits.requested() if name in ENFORCED}

    def environment(self) -> dict[str, str]:
        path = os.environ.get("PATH", os.defpath)
        return {**COMMAND_VARIABLES, "PATH": path, "HOME": self.home, "TMPDIR": f"{self._folder}/tmp", MARK: self.id}

    async def start(self, sandbox: HelperSandbox) -> None:
        _warn_once()
        rlimits = {ENFORCED[name]: getattr(self.config.limits, name) for name in self.enforced}
        rlimits["RLIMIT_CORE"] = NO_CORE
        await asyncio.to_thread(helper_bundle, own_python())
        # The helper makes the directory, since it also removes it if this process is killed, at any moment.
        self._folder = Path(tempfile.gettempdir(), f"hermes-rl-{self.id}")
        self.top = str(self._folder)
        self.home = str(self._folder / "home")
        self.workdir = posixpath.normpath(posixpath.join(self.home, self.config.workdir or ""))
        async with self.in_time(), self.process.started(own_python(), self._program) as control:
            await sandbox.connect(control, rlimits, folder=str(self._folder))
            for folder in (self.workdir, str(self._folder / "tmp")):
                await sandbox.make_dir(folder)

    async def close(self) -> None:
        try:
            await self.process.wait()
        finally:
            if self._folder is not None:
                folder = self._folder
                await done_in_thread(lambda: _clean_up(self.id, folder))

    def _program(self, descriptors: Descriptors) -> Program:
        python = own_python()
        argv = boot_argv(isolated(python), descriptors.control, descriptors.code)
        return Program(argv, python, descriptors.all, descriptors.stderr)


warned = threading.Event()
"""Set when the user was warned, here or before a run."""


def _warn_once() -> None:
    if not warned.is_set():
        warned.set()
        log.warning(WARNING)


def _clean_up(marker: str, folder: Path) -> None:
    """End the processes and remove the directory, which the helper did already unless the agent killed it."""
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"{MARK}={marker}\0".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue  # ended meanwhile, or a process of another user
    shutil.rmtree(folder, ignore_errors=True)
