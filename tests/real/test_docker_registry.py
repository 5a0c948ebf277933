"""Images of a real registry: by digest, missing, and while the registry is down."""

from __future__ import annotations

import asyncio
import json
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import SandboxFailure
from hermes_rl.runs.process import run_process
from hermes_rl.runs.setup import RunOptions
from hermes_rl.sandbox import docker, docker_engine
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import SandboxConfig
from hermes_rl.spec.load import load_spec
from tests.real import odd_registry
from tests.real.conftest import hermes
from tests.real.containers import rollouts
from tests.real.docker_daemon import DockerDaemon
from tests.real.docker_registry import ADDRESS, AUTH, PASSWORD, Registry
from tests.rootfs import small_root
from tests.waiting import until

COMPONENT = "Docker's registry"
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(180), pytest.mark.usefixtures("docker_host")]
NOWHERE = "sha256:" + "0" * 64
SPEC = """
version: 1
name: pulled
dataset: {items: ITEMS}
prompt: {user: "Say {{ word }}."}
toolsets: [terminal]
sandbox: {backend: docker, image: "{{ image }}"}
rewards: {file_matches: {args: {path: out, content: "{{ word }}"}}}
solution:
  turns: [{tools: [{name: terminal, args: {command: "echo {{ word }} > out"}}]}, {say: done}]
servers: {policy: {type: scripted}}
process: {group_size: 2, groups: GROUPS, concurrency: 4}
"""


@pytest.fixture
def registry(engine: DockerDaemon, tmp_path: Path) -> Iterator[Registry]:
    folder = tmp_path / "registry"
    folder.mkdir()
    found = Registry(engine, folder)
    found.start()
    yield found
    found.forget()
    found.kill()


@pytest.mark.timeout(900)
async def test_forty_odd_images_of_a_registry_cost_their_own_rows(
    engine: DockerDaemon, docker_host: DockerDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some images arrive one byte at a time, some never, and some are refused or broken off."""
    monkeypatch.setattr(docker_engine, "PULL_SECONDS", 4.0)
    monkeypatch.setattr(docker_engine, "PULL_PAUSES", ())
    root = small_root(tmp_path / "root", ["sh", "cat"])
    with tarfile.open(tmp_path / "layer.tar", "w") as layer:
        layer.add(root, ".")
    port, program = 5001, Path(odd_registry.__file__)
    inside = ["nsenter", f"--net=/proc/{engine.pid}/ns/net", sys.executable, str(program), str(port)]
    registry = await asyncio.create_subprocess_exec(
        *inside, str(tmp_path / "layer.tar"), stderr=asyncio.subprocess.DEVNULL
    )
    odd = {f"{kind}-{number}" for kind in odd_registry.ODD for number in range(3)}
    good = {f"good-{number}" for number in range(6)}
    assert len(odd) >= 40
    try:
        await until(lambda: f":{port:04X} " in Path(f"/proc/{engine.pid}/net/tcp").read_text())
        items = [{"word": name, "image": f"127.0.0.1:{port}/{name}:1"} for name in [*sorted(odd), *sorted(good)]]
        path = write(tmp_path, items, len(items))
        text = path.read_text().replace("items:", "key: word, items:").replace("group_size: 2", "group_size: 1")
        path.write_text(
            text.replace("concurrency: 4", "concurrency: 16, drop_uniform: false") + "budget: {max_failures: 1000}\n"
        )
        _, directory = await run_process(load_spec(path), RunOptions("process", tmp_path / "out"))
    finally:
        registry.kill()
        await registry.wait()
    aside = {row["row_key"]: row["detail"] for row in directory.read_run_info()["quarantined"]}
    graded = {json.loads(line)["row_key"] for line in (directory.path / "groups.jsonl").open()}
    assert good <= graded and graded | aside.keys() == odd | good
    assert len(aside) >= 32
    assert {aside[f"{kind}-0"].rpartition(":")[2] for kind in ("dribbles", "hangs", "silent")} == {
        " its registry sends less than 1 MiB in 4 s. Pull it beforehand (`docker pull`)"
    }


def write(folder: Path, items: list[dict[str, Any]], groups: int) -> Path:
    file = folder / "pulled.yaml"
    file.write_text(SPEC.replace("ITEMS", json.dumps(items)).replace("GROUPS", str(groups)))
    return file


def test_an_image_is_pulled_by_its_digest_and_recorded_by_it(registry: Registry, tmp_path: Path) -> None:
    name = registry.have("small")
    spec = write(tmp_path, [{"word": "one", "image": name}, {"word": "two", "image": name}], 2)
    hermes("run", spec, "process", "--out", "run", folder=tmp_path)
    played = rollouts(tmp_path)
    assert [one["score"] for one in played] == [1.0] * 4
    assert {one["image"] for one in played} == {name}


async def test_a_digest_that_is_not_there_is_one_error_without_a_second_try(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "PULL_PAUSES", (600.0,))  # a second try would come after the test has failed
    registry.have("small")
    with pytest.raises(SandboxFailure, match=rf"{NOWHERE} cannot be pulled: .*(manifest unknown|not found)"):
        await create_sandbox(SandboxConfig(backend="docker", image=f"{ADDRESS}/small@{NOWHERE}")).start()


async def test_a_registry_that_asks_for_a_password_is_named_and_what_to_do(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "PULL_PAUSES", (600.0,))  # a second try would come after the test has failed
    name = registry.have("small")
    registry.kill()
    registry.start(locked=True)
    with pytest.raises(SandboxFailure, match=r"asks for a password.*`docker login` and `docker pull`") as caught:
        await create_sandbox(SandboxConfig(backend="docker", image=name)).start()
    assert PASSWORD not in str(caught.value)


def test_previously_pulled_image_of_a_private_registry_runs(
    registry: Registry, engine: DockerDaemon, tmp_path: Path
) -> None:
    name = registry.have("small")
    registry.kill()
    registry.start(locked=True)
    engine.ask("POST", f"/images/create?fromImage={name}", auth=AUTH, parse=False)
    hermes("run", write(tmp_path, [{"word": "one", "image": name}], 1), "process", "--out", "run", folder=tmp_path)
    assert [(one["score"], one["image"]) for one in rollouts(tmp_path)] == [(1.0, name)] * 2


async def test_registry_is_waited_for_only_if_it_was_reachable_before(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(docker_engine, "PULL_PAUSES", (0.1,))
    monkeypatch.setattr(docker, "REGISTRY_PAUSE", 0.2)
    names = [registry.have("first"), registry.have("second")]
    configs = [SandboxConfig(backend="docker", image=name) for name in names]
    registry.kill()
    with pytest.raises(SandboxFailure, match=r"cannot be pulled: .*connection refused"):
        await create_sandbox(configs[0]).start()
    registry.start()
    async with create_sandbox(configs[0]):
        registry.kill()
        later = [create_sandbox(configs[1]) for _ in range(3)]
        starting = [asyncio.create_task(sandbox.start()) for sandbox in later]
        while "wait for it" not in caplog.text:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in starting)
        await asyncio.to_thread(registry.start)
        await asyncio.gather(*starting)
        for sandbox in later:
            assert (await sandbox.run("echo here")).output == "here\n"
            await sandbox.close()
    assert caplog.text.count("wait for it") == caplog.text.count(f"the registry {ADDRESS} is back after") == 1
