"""A started sandbox of each backend that can run here."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hermes_rl.sandbox import Sandbox, SandboxConfig, create_sandbox


@pytest.fixture(scope="session")
def fake_docker() -> Iterator[str]:
    """The socket of an engine that speaks Docker's API, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/docker.sock"
        program = [sys.executable, str(Path(__file__).with_name("fake_docker.py")), path]
        process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield path
        process.stdin.close()
        process.wait(30)
        process.stdout.close()


@pytest.fixture
def docker_host(fake_docker: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same, as the engine that sandboxes use."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{fake_docker}")
    return fake_docker


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
