"""A real image registry (Debian's package docker-registry) on the loopback device of the tests' own Docker engine."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import uuid
from pathlib import Path

from tests.real.docker_daemon import DockerDaemon
from tests.rootfs import small_root

PORT = 5000
ADDRESS = f"127.0.0.1:{PORT}"
"""In the engine's own network: nothing else of the machine sees it."""
USER, PASSWORD = "ali", "open sesame"
HTPASSWD = f"{USER}:$2b$04$TsTr01oRiegMcSiwVgdcT.HtFXyHYTrRQu671oA0USyqRJ4HXSK2q\n"
AUTH = {"username": USER, "password": PASSWORD, "serveraddress": ADDRESS}
START_SECONDS = 20.0
LISTENS = "0A"
"""How the kernel's table of sockets says it."""


def registry_program() -> str:
    """Return the path of the registry's program; fail the test if it does not exist."""
    found = shutil.which("docker-registry")
    if found is None:
        raise AssertionError("the tests of a real registry need docker-registry (apt-get install docker-registry)")
    return found


def registry_version() -> str:
    """Return the version of the registry's program."""
    said = subprocess.run([registry_program(), "--version"], check=True, capture_output=True, text=True).stdout
    return said.split()[-1]


class Registry:
    """A registry whose images are stored in a directory; it can be stopped and restarted."""

    def __init__(self, engine: DockerDaemon, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self._process: subprocess.Popen[bytes] | None = None
        self._made: list[str] = []

    def start(self, *, locked: bool = False) -> None:
        """Start the registry, and wait until the engine reaches it; with `locked` it requires the password."""
        (self.folder / "htpasswd").write_text(HTPASSWD)
        config = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(self.folder / "data")}},
            "http": {"addr": ADDRESS, "secret": "none"},
            "auth": {"htpasswd": {"realm": "here", "path": str(self.folder / "htpasswd")}} if locked else {},
        }
        (self.folder / "config.yaml").write_text(json.dumps(config))
        inside = ["nsenter", f"--net=/proc/{self.engine.pid}/ns/net"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*inside, registry_program(), "serve", str(self.folder / "config.yaml")], stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_SECONDS
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the registry did not start:\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.05)

    def _listens(self) -> bool:
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/net/tcp").read_text().splitlines()
        return any(line.split()[1].endswith(f":{PORT:04X}") and line.split()[3] == LISTENS for line in lines[1:])

    def kill(self) -> None:
        """End the registry immediately."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def have(self, name: str) -> str:
        """Build a new image, let the engine push and forget it, and return its name in this registry.

        An engine keeps what it knows of a digest, and asks the registry for less another time.
        """
        root = small_root(self.folder / name, ["sh"])
        (root / "unique").write_text(uuid.uuid4().hex)
        self.engine.have(f"{name}:1", root)
        place = f"{ADDRESS}/{name}"
        self.engine.ask("POST", f"/images/{name}:1/tag?" + urllib.parse.urlencode({"repo": place, "tag": "1"}))
        said = self.engine.ask("POST", f"/images/{place}/push?tag=1", auth=AUTH, parse=False)
        lines = [json.loads(line) for line in said.splitlines()]
        assert not [line for line in lines if "error" in line], said
        digest = next(str(line["aux"]["Digest"]) for line in lines if "aux" in line)
        self._made += [f"{name}:1", f"{place}:1", f"{place}@{digest}"]
        self.forget()
        return f"{place}@{digest}"

    def forget(self) -> None:
        """Let the engine forget all images of this registry."""
        for name in self._made:
            with contextlib.suppress(AssertionError):  # it does not have it
                self.engine.ask("DELETE", f"/images/{name}?force=1")
