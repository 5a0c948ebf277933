"""A real Docker engine for these tests alone, and images that are built here.

Nothing of it is shared with another engine of the machine: it has a network, a bridge, a data folder, a socket and a
containerd of its own, and no images but those that the tests give it. It takes root, and Debian's package docker.io.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection
from pathlib import Path
from socket import AF_UNIX, SOCK_STREAM, socket
from typing import Any

START_SECONDS = 60.0
END_SECONDS = 20.0
PACKAGE = "the tests of a real Docker engine need dockerd and root (apt-get install docker.io)"


def dockerd() -> str:
    """Return the path of the engine's program; fail the test if it does not exist."""
    found = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None or os.geteuid() != 0:
        raise AssertionError(PACKAGE)
    return found


def docker_version() -> str:
    """Return the version of the engine."""
    said = subprocess.run([dockerd(), "--version"], check=True, capture_output=True, text=True).stdout
    return said.split("version", 1)[1].split(",")[0].strip()


class Daemon:
    """An engine with its socket in its directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "docker.sock"
        self.url = f"unix://{self.socket}"
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self.crashed = False
        """True once it was killed: the engine then forgets the shims of containers that ended meanwhile."""

    @property
    def pid(self) -> int:
        """Process id of the running engine."""
        assert self._process is not None
        return self._process.pid

    def launch(self, command: Sequence[str], **environ: str) -> None:
        """Start the engine's program, and wait until it responds."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,  # Podman notes there that memory was used up
                env={**os.environ, **environ},
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{command[0]} did not start:\n{self.log.read_text('utf-8', 'replace')[-3000:]}")
            time.sleep(0.1)

    def answers(self) -> bool:
        """Return True if it responds."""
        with contextlib.suppress(OSError):
            return self.ask("GET", "/_ping", parse=False) == b"OK"
        return False

    def kill(self) -> None:
        """Kill the engine, as a crash would; its containers continue."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def clear(self) -> None:
        """Remove the processes, mounts and directory that remain of an ended engine."""
        deadline = time.monotonic() + END_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for mount in self.mounts():
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert left == []
        assert not self.folder.exists()

    def processes(self) -> list[int]:
        """Return the ids of its processes, and of processes that name its directory, such as the containers' shims."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                named = entry.name.isdigit() and str(self.folder).encode() in (entry / "cmdline").read_bytes()
                if named and program_of(int(entry.name)) in PROGRAMS:
                    found.append(int(entry.name))
        return found

    def watchers(self) -> list[int]:
        """Return the ids of the processes that watch containers: one each."""
        return [pid for pid in self.processes() if program_of(pid) in ("containerd-shim", "conmon")]

    def mounts(self) -> list[str]:
        """Return its mounts, innermost first."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return sorted((path for line in lines if (path := line.split()[1]).startswith(f"{self.folder}/")), reverse=True)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        file: Path | None = None,
        parse: bool = True,
        auth: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a request and return the JSON of the response."""
        connection = _UnixConnection(str(self.socket))
        try:
            kind = {"Content-Type": "application/x-tar" if file else "application/json"}
            if auth is not None:
                kind["X-Registry-Auth"] = base64.urlsafe_b64encode(json.dumps(auth).encode()).decode()
            data = file.read_bytes() if file else json.dumps(body).encode() if body is not None else None
            connection.request(method, path, data, kind)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status < 400, f"{method} {path}: {answer.status} {text.decode('utf-8', 'replace')}"
        return json.loads(text) if parse and text and file is None else text

    def containers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/containers/json?all=1")
        return found

    def networks(self) -> set[str]:
        return {network["Name"] for network in self.ask("GET", "/networks")}

    def remove_containers(self) -> None:
        """Remove its containers, as far as it still responds."""
        with contextlib.suppress(OSError, AssertionError):
            for container in self.containers():
                self.ask("DELETE", f"/containers/{container['Id']}?force=1")

    def import_as(self, name: str) -> list[tuple[str, str]]:
        """Return the query that gives an imported image its name."""
        repository, _, tag = name.partition(":")
        return [("repo", repository), ("tag", tag)]

    def have(self, name: str, root: Path, config: Mapping[str, Any] | None = None) -> None:
        """Import an image of the files in `root`; `config` has one Dockerfile instruction each."""
        archive = self.folder / "image.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(root, ".")
        changes = [("changes", f"{key} {value}") for key, value in (config or {}).items()]
        asked = urllib.parse.urlencode([("fromSrc", "-"), *self.import_as(name), *changes])
        self.ask("POST", f"/images/create?{asked}", file=archive)
        archive.unlink()
        self.ask("GET", f"/images/{name}/json")


class DockerDaemon(Daemon):
    """An engine with its files in one directory. Its first process unshares the network, so that its packet filter is
    separate.
    """

    def start(self) -> None:
        """Start the engine, and wait until it responds."""
        program = dockerd()
        # In the new network, loopback is down; the engine's own proxies and embedded resolver need it.
        command = [
            *("unshare", "--net", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$0" "$@"', program),
            *("--data-root", str(self.folder / "data"), "--exec-root", str(self.folder / "exec")),
            *(
                "--pidfile",
                str(self.folder / "pid"),
                "--host",
                self.url,
                "--config-file",
                str(self.folder / "none.json"),
            ),
            *("--log-level", "warn"),
        ]
        (self.folder / "none.json").write_text("{}")
        self.launch(command)

    def stop(self) -> None:
        """Stop the engine regularly: it stops its containers first."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self.kill()

    def kill(self) -> None:
        """Kill the engine, as a crash would; its containers continue."""
        if self._process is not None:
            super().kill()
            self.crashed = True
            deadline = time.monotonic() + END_SECONDS
            while any(program_of(pid) == "containerd" for pid in self.processes()) and time.monotonic() < deadline:
                time.sleep(0.05)
            # What a machine does where init reaps at once: to the next engine, an unreaped process seems alive.
            (self.folder / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def close(self) -> None:
        """End all its processes, and remove its mounts and directories."""
        if self._process is not None:
            self.remove_containers()
            self.stop()
        self.clear()


PROGRAMS = ("dockerd", "containerd", "containerd-shim", "docker-proxy", "runc", "unshare", "conmon")


def program_of(pid: int) -> str:
    """Return a process's name, which the kernel cuts to 15 characters; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket(AF_UNIX, SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
