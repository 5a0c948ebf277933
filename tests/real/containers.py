"""Helpers for tests of container engines: their images, and observation of a run from outside."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hermes_rl.sandbox.base import DEFAULT_IMAGE as IMAGE
from tests.real.docker_daemon import Daemon
from tests.rootfs import make_rootfs, small_root
from tests.sandbox import (
    test_background,
    test_cleanup,
    test_commands,
    test_conversation,
    test_copy_files,
    test_isolation,
    test_sandbox_files,
    test_waiting_shell,
)

PATH = "PATH=/usr/local/bin:/usr/bin:/bin"
FULL, SHELL_ONLY, NO_SHELL, OWN_PLACES = IMAGE, "shell-only:1", "no-shell:1", "own-places:1"


def give_images(daemon: Daemon, roots: Path) -> None:
    """Give an engine the four images, whose files are laid out in `roots`."""
    daemon.have(FULL, make_rootfs(roots / "full"), {"ENV": PATH})
    daemon.have(SHELL_ONLY, small_root(roots / "shell", ["sh"]))
    daemon.have(NO_SHELL, small_root(roots / "none", ["true"]), {"ENV": PATH})
    (roots / "own").mkdir()
    small_root(roots / "own", ["sh", "id", "pwd"])
    (roots / "own/data/home").mkdir(parents=True)
    for folder in ("data", "data/home"):
        os.chown(roots / "own" / folder, 1000, 1000)
    daemon.have(OWN_PLACES, roots / "own", {"ENV": "HOME=/data/home", "WORKDIR": "/data/place", "USER": "agent"})


def settled(done: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Return True if the condition holds within these seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/rollouts.jsonl").read_text("utf-8").splitlines()]


def groups(folder: Path) -> int:
    file = folder / "run/groups.jsonl"
    return len(file.read_text("utf-8").splitlines()) if file.exists() else 0


def begun(folder: Path, count: int, running: subprocess.Popen[str]) -> None:
    """Wait until a run has written this many groups."""
    assert settled(lambda: groups(folder) >= count or running.poll() is not None, 90)
    assert running.poll() is None, running.communicate()[0]


def conformance() -> dict[str, Any]:
    """Return the tests that every sandbox must pass, by name; they use `sandbox`, `config` or `backend`."""
    found = {}
    for module in (
        *(test_background, test_commands, test_conversation, test_copy_files, test_isolation, test_cleanup),
        *(test_sandbox_files, test_waiting_shell),
    ):
        for name, test in inspect.getmembers(module, inspect.isfunction):
            asked = set(inspect.signature(test).parameters) & {"sandbox", "config", "backend"}
            if name.startswith("test_") and test.__module__ == module.__name__ and asked:
                found[f"{name}__{module.__name__.rpartition('.')[2]}"] = test
    return found
