"""A started sandbox of each backend that can run here."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import Sandbox, SandboxConfig
from hermes_rl.sandbox.docker import leftovers
from hermes_rl.sandbox.docker_engine import Engine
from tests.ports import free_port

ALIKE = (
    "test_background",
    "test_commands",
    "test_conversation",
    "test_copy_files",
    "test_sandbox_files",
    "test_waiting_shell",
)
"""Modules about what a sandbox of an image does as the default sandbox does, of which it differs by its root alone."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave to the slow part what an image repeats."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("config") == "image" and item.path.stem in ALIKE:
            item.add_marker("slow")


@contextmanager
def fake_engine(path: str) -> Iterator[str]:
    """An engine that speaks Docker's API at this socket, which is there when the block begins."""
    program = [sys.executable, str(Path(__file__).with_name("fake_docker.py")), path]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield path
    process.stdin.close()
    process.wait(30)
    process.stdout.close()


async def remove_leftovers(engine: Engine) -> None:
    """Remove what runners have left that are dead, as the next run does in the background."""
    for name in await leftovers(engine):
        await engine.remove(name)


@pytest.fixture(scope="session")
def fake_docker() -> Iterator[str]:
    """The socket of an engine that speaks Docker's API, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder, fake_engine(f"{folder}/docker.sock") as path:
        yield path


@pytest.fixture
def docker_host(fake_docker: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, as the engine that sandboxes use."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{fake_docker}")
    return fake_docker


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real sshd on loopback, with keys of its own; what names it to sandboxes.

    `known_hosts` is a file with its key, `asked` one to which it writes every command that it runs, and `rc` one that
    its shell reads before each.
    """
    program = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if program is None:
        pytest.skip("there is no sshd (apt-get install openssh-server)")
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = str(free_port())
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\n"
        f"StrictModes no\nUsePAM no\nPermitRootLogin yes\nPidFile none\nMaxSessions 100\nMaxStartups 100\n"
        f'ForceCommand . {folder}/rc; echo "$SSH_ORIGINAL_COMMAND" >>{folder}/asked; '
        'exec bash -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "rc").touch()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([program, "-D", "-e", "-f", folder / "config"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "listening" in process.stderr.readline()
    user = pwd.getpwuid(os.getuid()).pw_name
    where = {"HOST": "127.0.0.1", "PORT": port, "USER": user, "KEY": str(folder / "user")}
    files = {name: str(folder / name) for name in ("known_hosts", "asked", "rc")}
    yield {f"TERMINAL_SSH_{name}": value for name, value in where.items()} | files
    process.terminate()
    process.wait(10)
    process.stderr.close()


@pytest.fixture
def ssh(sshd: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> SandboxConfig:
    """A sandbox on that machine."""
    pytest.importorskip("tools.environments.ssh", reason="the extra hermes is not installed")
    for name, value in sshd.items():
        monkeypatch.setenv(name, value)
    return SandboxConfig(backend="ssh", network=True, known_hosts=sshd["known_hosts"])


@pytest.fixture(params=["bubblewrap", "docker", "none"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "docker":
        request.getfixturevalue("docker_host")
    return str(request.param)


@pytest.fixture(params=["bubblewrap", "image", "docker", "none"])
def config(request: pytest.FixtureRequest) -> SandboxConfig:
    """What every sandbox has to do alike is asked of each of these."""
    if request.param == "image":
        return SandboxConfig(image=str(request.getfixturevalue("rootfs")))
    if request.param == "docker":
        request.getfixturevalue("docker_host")
    return SandboxConfig(backend=request.param)


@pytest.fixture
async def sandbox(config: SandboxConfig) -> AsyncIterator[Sandbox]:
    async with create_sandbox(config) as started:
        yield started


@pytest.fixture
async def fenced() -> AsyncIterator[Sandbox]:
    """The default sandbox, for what only a fence can promise."""
    async with create_sandbox(SandboxConfig()) as started:
        yield started
