"""Processes of user code that reads an agent's text: forks of a template process inside a bubblewrap sandbox.

A template process has no network, and only the runner's variables that specs list. It sees only the system, the Python
environment and the directory of the code, all read-only. It loads the code of one call or rollout; each call, and each
separate process of a rollout, is a fresh fork of it in separate namespaces (see `hermes_rl.sandbox.user_code_child`)
and serves no other caller.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hermes_rl.errors import RewardFailure
from hermes_rl.plugins import Code
from hermes_rl.sandbox.bubblewrap import SYSTEM, find_bwrap, probe, require_bubblewrap
from hermes_rl.sandbox.launcher import Program, launcher, memory_file
from hermes_rl.user_code.environment import listed_variables
from hermes_rl.user_code.pool import OwnProcess, ProcessPool
from hermes_rl.user_code.worker import Warm, Worker

CODE_VARIABLES = {
    **{"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
"""Variables of user code in a sandbox, in addition to the ones that specs list. Threads of a numerical library would
not survive a fork.
"""

PATHS = frozenset({"HOME", "XDG_CACHE_HOME"})
"""Variables by which modules find the directories of `reads` when they are loaded; a fork has a different HOME."""
OTHER_TMP = "/run/user-code"
"""Writable directory of a fork if /tmp holds files that it needs."""


class ConfinedTemplate(Warm):
    """A template process in a sandbox; it has the code for which it was made, and no other."""

    confined = True

    def __init__(self, codes: Sequence[Code]) -> None:
        require_bubblewrap()
        self._codes = codes
        super().__init__()
        for code in codes:
            self.load(code)

    def _start(self, control: int) -> None:
        bwrap = find_bwrap()
        directories = sorted(_shown_directories(self._codes))
        # A directory in memory would hide files below it, such as a virtual environment in /tmp.
        tmp_directory = "/tmp" if not any(_is_below_any(each, ["/tmp"]) for each in directories) else OTHER_TMP
        self._path = [entry for entry in sys.path if _is_below_any(entry, (*directories, *SYSTEM))]
        script = (
            f"import sys; sys.path[:] = {self._path!r}\n"
            f"from hermes_rl.sandbox.user_code_child import main; main({control}, {tmp_directory!r})"
        )
        self._stderr = memory_file(b"", "stderr")
        argv = ["bwrap", *_mount_options(directories, tmp_directory), "--", sys.executable, "-P", "-c", script]
        libraries = {} if bwrap.libraries is None else {"LD_LIBRARY_PATH": bwrap.libraries}
        program = Program(argv, bwrap.path, [control], self._stderr, env=libraries)
        self._sandbox = launcher().launch(program).result()

    def _start_request(self, changed: Mapping[str, str | None]) -> dict[str, Any]:
        return {"path": self._path, "environ": dict(self.variables)}

    @property
    def alive(self) -> bool:
        return self._sandbox.poll() is None

    def close(self) -> None:
        """End it and all of its forks."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):  # it does not end by itself
            self._sandbox.wait(1.0)
        self._sandbox.kill()
        self._sandbox.wait()
        os.close(self._stderr)

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        try:
            return super()._ask(request, descriptors)
        except RewardFailure as failure:
            if self._control.fileno() < 0:  # it is closed, and so is its output
                raise
            message = os.pread(self._stderr, 4096, 0).decode("utf-8", "replace").strip()
            raise RewardFailure(f"{failure}: {message}" if message else str(failure)) from failure


class ConfinedPool(ProcessPool):
    """All processes of user code in sandboxes; each call has a separate one."""

    def __init__(self) -> None:
        super().__init__()
        self._templates: dict[tuple[tuple[Code, ...], frozenset[tuple[str, str]]], ConfinedTemplate] = {}
        """Template processes by the code, and by the visible variables."""
        self._starting = threading.Lock()
        """Held while a template process starts; the event loop never waits for it."""

    async def hold(self, *codes: Code, reused: bool = False) -> OwnProcess:
        """Return a process with this code for one user alone, who closes it; it never had another user."""
        return await super().hold(*codes)

    def load(self, *codes: Code) -> Warm:
        """Return the template process of this code; blocks while it starts.

        Raises `UserError` if the machine has no bubblewrap, or does not let it make namespaces.
        """
        with self._starting:
            key = codes, frozenset(listed_variables().items())
            template = self._templates.get(key)
            if template is None or not template.alive:
                if template is not None:
                    template.close()
                template = self._templates[key] = ConfinedTemplate(codes)
        return template

    def close(self) -> None:
        """End all processes; the next call starts new ones."""
        with self._starting:
            templates, self._templates = list(self._templates.values()), {}
        for template in templates:
            template.close()

    def _leave(self, worker: Worker, *, stays: bool) -> None:
        super()._leave(worker, stays=False)  # a process that has read an agent's text serves no other caller


def problem() -> str | None:
    """Return why user code cannot run in a sandbox on this machine; None if it can."""
    ability = probe()
    return None if ability.ok else ability.detail


def _shown_directories(codes: Sequence[Code]) -> Iterator[str]:
    """Yield the directories that are shown in addition to the system."""
    import hermes_rl

    yield from {sys.prefix, sys.base_prefix}
    yield str(Path(hermes_rl.__file__).parent.parent)
    yield from (entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages")))
    for code in codes:
        origin = code.file
        if origin is None and code.module is not None and (spec := importlib.util.find_spec(code.module)) is not None:
            origin = spec.origin
        if origin is not None:
            yield str(Path(origin).resolve().parent)
        yield from map(str, getattr(code.load(), "reads", ()))


def _is_below_any(entry: str, directories: Sequence[str]) -> bool:
    return bool(entry) and any(Path(entry).is_relative_to(directory) for directory in directories)


def _mount_options(directories: Sequence[str], tmp_directory: str) -> Iterator[str]:
    yield from ("--unshare-user", "--unshare-ipc", "--unshare-uts", "--unshare-net", "--unshare-cgroup-try")
    yield from ("--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox")
    for name, value in CODE_VARIABLES.items():
        yield from ("--setenv", name, value)
    yield from ("--setenv", "TMPDIR", tmp_directory)
    for name in PATHS.intersection(os.environ):
        yield from ("--setenv", name, os.environ[name])
    for system_path in SYSTEM:
        if os.path.islink(system_path):  # noqa: PTH114 - a str
            yield from ("--symlink", os.readlink(system_path), system_path)  # noqa: PTH115
        else:
            yield from ("--ro-bind-try", system_path, system_path)
    yield from ("--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--dev", "/dev")
    yield from ("--dev-bind", "/proc", "/proc", "--tmpfs", "/tmp")
    for directory in directories:
        if not directory.startswith(tuple(f"{system_path}/" for system_path in SYSTEM)) and directory not in SYSTEM:
            yield from ("--ro-bind-try", directory, directory)
    # Modules may write while they are loaded; each fork mounts a separate directory on this one.
    yield from ("--remount-ro", "/tmp", "--tmpfs", tmp_directory, "--remount-ro", "/dev")
    yield from ("--remount-ro", "/", "--chdir", "/")


CONFINED = ConfinedPool()
"""Pool of this process."""
atexit.register(CONFINED.close)
os.register_at_fork(after_in_child=CONFINED.__init__)  # type: ignore[misc]  # the processes are the parent's
