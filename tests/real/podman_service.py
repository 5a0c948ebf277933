"""A real Podman that belongs to the tests alone, whose socket speaks as Docker's does (Debian's package podman)."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.real.docker_daemon import Daemon

LIMITS = """
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""
"""Podman would raise them to a million, for which root lacks the right in some virtual machines."""


def podman() -> str:
    """Return the path of the program; fails the test where there is none."""
    found = shutil.which("podman")
    if found is None or os.geteuid() != 0:
        raise AssertionError("the tests of a real Podman need podman and root (apt-get install podman)")
    return found


def podman_version() -> str:
    """Return the version of that program."""
    said = subprocess.run([podman(), "--version"], check=True, capture_output=True, text=True).stdout
    return said.split()[-1]


class PodmanService(Daemon):
    """Podman's service, with images, containers and the like below one folder."""

    def start(self) -> None:
        """Start it, and wait until it answers."""
        (self.folder / "containers.conf").write_text(LIMITS)
        command = [podman(), *self._own(), "system", "service", "--time", "0", self.url]
        self.launch(command, CONTAINERS_CONF=str(self.folder / "containers.conf"))

    def _own(self) -> list[str]:
        places = {name: str(self.folder / name) for name in ("root", "runroot", "tmpdir")}
        words = [word for name, place in places.items() for word in (f"--{name}", place)]
        return [*words, "--cgroup-manager", "cgroupfs", "--events-backend", "file", "--runtime", "runc"]

    def close(self) -> None:
        """End it with all that it has started, and remove its mounts and folders."""
        if self._process is not None:
            self.remove_containers()
        self.kill()
        self.clear()

    def import_as(self, name: str) -> list[tuple[str, str]]:
        """A short name gets the place before it that requests like Docker's look in; a tag of its own is ignored."""
        return [("repo", f"docker.io/library/{name}")]
