"""A real Podman for these tests alone, with a Docker-compatible socket (Debian's package podman)."""

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
    """Return the path of the program; fail the test if it does not exist."""
    found = shutil.which("podman")
    if found is None or os.geteuid() != 0:
        raise AssertionError("the tests of a real Podman need podman and root (apt-get install podman)")
    return found


def podman_version() -> str:
    """Return the version of the program."""
    said = subprocess.run([podman(), "--version"], check=True, capture_output=True, text=True).stdout
    return said.split()[-1]


class PodmanService(Daemon):
    """Podman's service, with images, containers and other files in one directory."""

    def start(self) -> None:
        """Start the service, and wait until it responds."""
        (self.folder / "containers.conf").write_text(LIMITS)
        command = [podman(), *self._own(), "system", "service", "--time", "0", self.url]
        self.launch(command, CONTAINERS_CONF=str(self.folder / "containers.conf"))

    def _own(self) -> list[str]:
        places = {name: str(self.folder / name) for name in ("root", "runroot", "tmpdir")}
        words = [word for name, place in places.items() for word in (f"--{name}", place)]
        return [*words, "--cgroup-manager", "cgroupfs", "--events-backend", "file", "--runtime", "runc"]

    def close(self) -> None:
        """End all its processes, and remove its mounts and directories."""
        if self._process is not None:
            self.remove_containers()
        self.kill()
        self.clear()

    def import_as(self, name: str) -> list[tuple[str, str]]:
        """Return the query that imports a short name under the registry in which Docker's requests look; Podman ignores
        a separate tag.
        """
        return [("repo", f"docker.io/library/{name}")]
