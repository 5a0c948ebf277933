"""The Docker backend on a real Podman: conformance, and many rollouts."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import DEFAULT_IMAGE as IMAGE
from hermes_rl.sandbox.base import ResourceLimits, Sandbox, SandboxConfig
from tests.real.conftest import hermes
from tests.real.containers import NO_SHELL, conformance, give_images, groups, rollouts
from tests.real.podman_service import PodmanService

COMPONENT = "Podman"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(180), pytest.mark.usefixtures("docker_host")]
SPEC = """
version: 1
name: podded
dataset: {items: [{word: one}, {word: two}, {word: three}, {word: four}]}
prompt: {user: "Write {{ word }}."}
toolsets: [terminal]
sandbox: {backend: docker, limits: {memory: 128MiB}}
rewards: {file_matches: {args: {path: out, content: "{{ word }}"}}}
solution:
  turns: [{tools: [{name: terminal, args: {command: "echo {{ word }} > out"}}]}, {say: done}]
servers: {policy: {type: scripted}}
process: {group_size: 4, groups: 12, concurrency: 16}
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodmanService]:
    """Return a real Podman that replaces Docker's engine."""
    service = PodmanService(Path(tempfile.mkdtemp(prefix="podman-")))
    try:
        service.start()
        give_images(service, tmp_path_factory.mktemp("roots"))
        yield service
    finally:
        service.close()


@pytest.fixture
def backend() -> str:
    return "docker"


@pytest.fixture
def config() -> SandboxConfig:
    return SandboxConfig(backend="docker")


@pytest.fixture
async def sandbox(docker_host: PodmanService, config: SandboxConfig) -> AsyncIterator[Sandbox]:
    async with create_sandbox(config) as started:
        yield started


globals().update(conformance())


async def test_image_without_a_shell_fails_at_the_start() -> None:
    with pytest.raises(SandboxFailure, match=r"image no-shell:1 has no /bin/sh"):
        await create_sandbox(SandboxConfig(backend="docker", image=NO_SHELL)).start()


async def test_an_image_of_a_folder_is_built(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("given\n")
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY given /\nRUN echo made > /made\n")
    config = SandboxConfig(backend="docker", image=str(tmp_path))
    for _ in range(2):
        async with create_sandbox(config) as sandbox:
            assert (await sandbox.run("cat /given /made")).output == "given\nmade\n"
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/Dockerfile").write_text(f"FROM {IMAGE}\nRUN echo 42 apples; exit 3\n")
    with pytest.raises(SandboxFailure, match=r"odd cannot be built: (?s:.)*42 apples"):
        await create_sandbox(SandboxConfig(backend="docker", image=str(tmp_path / "odd"))).start()


async def test_limits_are_in_force() -> None:
    limits = ResourceLimits(memory=128 << 20, processes=40, open_files=64)
    async with create_sandbox(SandboxConfig(backend="docker", limits=limits)) as sandbox:
        assert set(sandbox.enforced) == {"memory", "processes", "open_files"}
        assert (await sandbox.run(["python3", "-c", "x = bytearray(1 << 30)"])).exit_code == 137
        assert "fork" in (await sandbox.run("for n in $(seq 100); do sleep 5 & done", timeout=30)).output


@pytest.mark.parametrize("network", [False, True])
async def test_container_files_from_the_engine_are_read_only(network: bool) -> None:
    names = ["hosts", "hostname", *([] if network else ["resolv.conf"])]
    fill = "; ".join(f"(echo x >>/etc/{name}) 2>/dev/null && echo wrote {name}" for name in names)
    async with create_sandbox(SandboxConfig(backend="docker", network=network)) as sandbox:
        assert (await sandbox.run(fill)).output == ""
        assert (await sandbox.run("cat /etc/hostname")).output == "sandbox\n"


def test_rollouts_run_and_leave_no_containers(engine: PodmanService, tmp_path: Path) -> None:
    (tmp_path / "podded.yaml").write_text(SPEC)
    hermes("run", "podded.yaml", "process", "--out", "run", folder=tmp_path)
    assert groups(tmp_path) == 12
    assert {(one["stop_reason"], one["error"], one["score"]) for one in rollouts(tmp_path)} == {("finished", None, 1.0)}
    assert engine.containers() == []
