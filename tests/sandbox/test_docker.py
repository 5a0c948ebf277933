"""Containers: what is asked of the engine, and what is said where it refuses or fails."""

from __future__ import annotations

import asyncio
import io
import os
import pwd
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.sandbox import channel, docker, docker_engine
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import DEFAULT_IMAGE as IMAGE
from hermes_rl.sandbox.base import ResourceLimits, Sandbox, SandboxConfig, SandboxService
from hermes_rl.sandbox.docker import LABEL, Docker, is_dead, own_mark
from hermes_rl.sandbox.docker_engine import Engine, engine_socket, joined
from hermes_rl.sandbox.docker_ignore import DockerIgnore
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.stop_reasons import StopReason
from tests.sandbox.conftest import fake_engine, remove_leftovers
from tests.sandbox.test_cleanup import marked
from tests.waiting import BOUND, until

CONFIG = SandboxConfig(backend="docker")
Plan = Callable[..., Awaitable[None]]


async def ask(socket: str, method: str, path: str, body: Any = None) -> Any:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session,
        session.request(method, f"http://docker{path}", json=body) as answer,
    ):
        assert answer.status < 400, await answer.text()
        return await answer.json() if answer.content_type == "application/json" else None


@pytest.fixture
async def plan(docker_host: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say what the engine's next answers are; afterwards it is as it was, and has no containers left."""
    monkeypatch.setattr(docker_engine, "PULL_PAUSES", (0.01, 0.02))

    async def say(**answers: Any) -> None:
        await ask(docker_host, "POST", "/fake/plan", answers)

    await say(images={IMAGE: {}})
    yield say
    await say(images={IMAGE: {}})
    await remove_leftovers(Engine())  # of runners that other tests have killed
    assert (await state(docker_host))["containers"] == {}


async def state(socket: str) -> Any:
    return await ask(socket, "GET", "/fake/state")


def isolation_of(sandbox: Sandbox) -> Docker:
    assert isinstance(sandbox, HelperSandbox) and isinstance(sandbox.isolation, Docker)
    return sandbox.isolation


def name_of(sandbox: Sandbox) -> str:
    """The container's."""
    return isolation_of(sandbox).container.name


async def started(socket: str, config: SandboxConfig) -> dict[str, Any]:
    """The body with which the container of such a sandbox is made."""
    async with create_sandbox(config) as sandbox:
        body: dict[str, Any] = (await state(socket))["containers"][name_of(sandbox)]["body"]
        return body


async def test_what_the_container_may(plan: Plan, docker_host: str) -> None:
    limits = ResourceLimits(memory=1 << 30, processes=64, cpu=1.5, open_files=100)
    host = (await started(docker_host, SandboxConfig(backend="docker", limits=limits)))["HostConfig"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (1 << 30, 1 << 30, 65)
    assert host["NanoCpus"] == 1_500_000_000
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert "SYS_ADMIN" not in host["CapAdd"]
    assert "no-new-privileges" in host["SecurityOpt"]
    assert all(mount["ReadOnly"] for mount in host["Mounts"])
    assert not {"Privileged", "PidMode", "IpcMode", "Binds"} & set(host)


async def test_limits_have_defaults_and_files_can_be_many(plan: Plan) -> None:
    async with create_sandbox(CONFIG) as sandbox:
        assert set(sandbox.enforced) == {"memory", "processes", "open_files"}
        assert (await sandbox.run("ulimit -n")).output == "1024\n"


async def test_network(plan: Plan, docker_host: str) -> None:
    whole = await started(docker_host, SandboxConfig(backend="docker", network=True))
    options = (await state(docker_host))["networks"][whole["HostConfig"]["NetworkMode"]]
    assert options == {"com.docker.network.bridge.enable_icc": "false"}
    async with create_sandbox(SandboxConfig(backend="docker", network=("pypi.org",))) as sandbox:
        assert "http://127.0.0.1" in (await sandbox.run("echo $https_proxy")).output
        script = "exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT 10.0.0.1:80 HTTP/1.1\\r\\n\\r\\n' >&3; head -1 <&3"
        port = (await sandbox.run("echo ${https_proxy##*:}")).output.strip().rstrip("/")
        said = await sandbox.run(["bash", "-c", script.replace("3128", port)])
        assert " 403 " in said.output


async def test_engine_without_an_isolating_network_is_refused(plan: Plan, docker_host: str) -> None:
    networked = SandboxConfig(backend="docker", network=True)
    await plan(no_networks=True, networks=[])
    with pytest.raises(
        UserError, match=r"sandbox\.network: this engine cannot make a network that keeps.*address pool"
    ):
        await create_sandbox(networked).start()
    await plan(networks=[{"Name": "hermes-rl", "Id": "1", "Options": {}, "Labels": {}}])
    with pytest.raises(UserError, match=r"another network of the name hermes-rl: `docker network rm hermes-rl`"):
        await create_sandbox(networked).start()
    await plan(networks=[])
    made = [await started(docker_host, networked) for _ in range(2)]
    assert {body["HostConfig"]["NetworkMode"] for body in made} == {"id-of-hermes-rl"}
    assert len((await state(docker_host))["networks"]) == 1


@pytest.mark.parametrize("podman", [False, True])
@pytest.mark.parametrize("network", [False, True])
async def test_files_of_etc_that_the_engine_would_lay_are_read_only(
    plan: Plan, docker_host: str, network: bool, podman: bool
) -> None:
    await plan(podman=podman)
    services = (SandboxService("store", IMAGE, command=("sleep", "600")),)
    config = SandboxConfig(backend="docker", network=network, services=services)
    async with create_sandbox(config) as sandbox:
        containers = (await state(docker_host))["containers"]
        name, sources = name_of(sandbox), []
        for each in (name, f"{name}-store"):
            mounts = containers[each]["body"]["HostConfig"]["Mounts"]
            read_only = {mount["Target"]: mount["Source"] for mount in mounts if mount["ReadOnly"]}
            # Only Podman's own resolver has an address that is not known beforehand.
            assert ("/etc/resolv.conf" in read_only) is not (podman and network)
            sources.append(read_only)
        assert "127.0.0.1 store\n" in Path(sources[0]["/etc/hosts"]).read_text()
        assert Path(sources[0]["/etc/hostname"]).read_text() == "sandbox\n"
        assert sources[0]["/etc/hosts"] != sources[1]["/etc/hosts"], "a service shares no file with other sandboxes"


async def test_the_image_says_where_and_as_whom(plan: Plan) -> None:
    await plan(images={"repo/task:1": {"WorkingDir": "/testbed", "Env": ["PATH=/opt/bin:/usr/bin:/bin", "A=b=c"]}})
    config = SandboxConfig(backend="docker", image="repo/task:1")
    async with create_sandbox(config) as sandbox:
        assert (sandbox.home, sandbox.workdir) == ("/root", "/testbed")
        assert (await sandbox.run("pwd; echo $A $PATH")).output == "/testbed\nb=c /opt/bin:/usr/bin:/bin\n"


async def test_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(UserError, match=r"none\.sock does not answer.*systemctl start docker"):
        await create_sandbox(CONFIG).start()


async def test_a_start_waits_for_an_engine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(docker, "OUTAGE_PAUSE", 0.05)
    path = f"{tmp_path}/d.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with fake_engine(path):
        first = create_sandbox(CONFIG)
        await first.start()
    await first.close()
    waiting = [asyncio.create_task(started_and_closed()) for _ in range(3)]
    await until(lambda: "new sandboxes wait for it" in caplog.text)
    with fake_engine(path):
        assert await asyncio.gather(*waiting) == ["on\n"] * 3
        removed = f"DELETE /containers/{name_of(first)}"

        async def tried() -> bool:
            return removed in (await state(path))["calls"]

        await until(tried)
    assert caplog.text.count("new sandboxes wait for it") == caplog.text.count("is back after") == 1


async def started_and_closed() -> str:
    async with create_sandbox(CONFIG) as sandbox:
        return (await sandbox.run("echo on")).output


async def test_a_start_waits_for_an_engine_with_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "OUTAGE_PAUSE", 0.05)
    monkeypatch.setattr(docker, "OUTAGE_SECONDS", 0.2)
    path = f"{tmp_path}/d.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with fake_engine(path):
        await started_and_closed()
    with pytest.raises(SandboxFailure, match=r"d\.sock does not answer"):
        async with asyncio.timeout(10):
            await create_sandbox(CONFIG).start()


def test_an_engine_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    with pytest.raises(UserError, match="on this machine"):
        create_sandbox(CONFIG)
    monkeypatch.delenv("DOCKER_HOST")
    assert engine_socket() == "/var/run/docker.sock"


async def test_a_pull_is_tried_again(plan: Plan, docker_host: str) -> None:
    later = [{"status": 500, "message": "timeout"}, {"message": "connection reset by peer"}]
    await plan(without=["task"], pulls=later)
    async with create_sandbox(SandboxConfig(backend="docker", image="task")) as sandbox:
        assert (await sandbox.run("echo works")).output == "works\n"
    assert (await state(docker_host))["calls"].count("POST /images/create") == 3


@pytest.mark.parametrize(
    ("failures", "tries"),
    [
        ([{"status": 404, "message": "pull access denied for task"}], 1),
        ([{"message": "manifest for task not found: manifest unknown"}], 1),
        ([{"status": 500, "message": "unexpected EOF"}] * 3, 3),
    ],
)
async def test_unavailable_image_is_a_sandbox_failure(
    plan: Plan, docker_host: str, failures: list[dict[str, Any]], tries: int
) -> None:
    await plan(without=["task"], pulls=failures)
    with pytest.raises(SandboxFailure, match="the image task cannot be pulled") as caught:
        await create_sandbox(SandboxConfig(backend="docker", image="task")).start()
    assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE
    assert (await state(docker_host))["calls"].count("POST /images/create") == tries


async def test_an_image_is_pulled_once_for_many(plan: Plan, docker_host: str) -> None:
    await plan(without=["task"])
    sandboxes = [create_sandbox(SandboxConfig(backend="docker", image="task")) for _ in range(4)]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    assert (await state(docker_host))["calls"].count("POST /images/create") == 1
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


def built_of(folder: Path, dockerfile: str = "FROM debian\n") -> Path:
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile)
    (folder / "link").symlink_to("/etc/hostname")
    return folder


async def test_image_directories_with_equal_content_are_built_once(
    plan: Plan, docker_host: str, tmp_path: Path
) -> None:
    await plan()
    folders = [built_of(tmp_path / name) for name in "ab"]
    os.utime(folders[1] / "Dockerfile", (0, 0))
    sandboxes = [create_sandbox(SandboxConfig(backend="docker", image=str(folder))) for folder in folders * 2]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    said = await state(docker_host)
    assert said["calls"].count("POST /build") == 1
    assert {container["body"]["Image"].partition(":")[0] for container in said["containers"].values()} == {docker.BUILT}
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def test_failed_image_build_is_shared_and_reported_with_its_output(
    plan: Plan, docker_host: str, tmp_path: Path
) -> None:
    await plan()
    folder = built_of(tmp_path / "odd", "RUN false\n")
    sandboxes = [create_sandbox(SandboxConfig(backend="docker", image=str(folder))) for _ in range(3)]
    ended = await asyncio.gather(*(sandbox.start() for sandbox in sandboxes), return_exceptions=True)
    assert {str(error) for error in ended} == {str(ended[0])}
    assert f"the image of {folder} cannot be built: The command 'false' returned a non-zero code: 1" in str(ended[0])
    assert str(ended[0]).endswith("42 apples")
    assert (await state(docker_host))["calls"].count("POST /build") == 1


def test_links_of_a_build_context_stay_links(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(docker.build_context(built_of(tmp_path / "folder")))) as archive:
        assert [(entry.name, entry.issym()) for entry in archive] == [("Dockerfile", False), ("link", True)]
    with pytest.raises(SandboxFailure, match=r"folder .*none cannot be built"):
        docker.build_context(tmp_path / "none")


def test_build_context_that_is_too_large_is_refused(tmp_path: Path) -> None:
    folder = built_of(tmp_path / "folder")
    with (folder / "large").open("wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(SandboxFailure, match="1 GiB in them"):
        docker.build_context(folder)
    (folder / ".dockerignore").write_text("large\n")
    with tarfile.open(fileobj=io.BytesIO(docker.build_context(folder))) as archive:
        assert "large" not in archive.getnames()


@pytest.mark.parametrize(
    ("lines", "there"),
    [
        ("", "a.log d/a.log d/e/b.py link"),
        ("# all\n*\n!d/e", "d/e/b.py"),
        ("*.log\nlink\n", "d/a.log d/e/b.py"),
        ("**/*.log\n", "d/e/b.py link"),
        ("/d/\n", "a.log link"),
        ("d/**\n!**/b.p?\nDockerfile\n", "a.log d/e/b.py link"),
    ],
)
def test_dockerignore_excludes_matching_files(tmp_path: Path, lines: str, there: str) -> None:
    folder = built_of(tmp_path / "folder")
    (folder / "d/e").mkdir(parents=True)
    for name in ("a.log", "d/a.log", "d/e/b.py"):
        (folder / name).touch()
    (folder / ".dockerignore").write_text(lines)
    with tarfile.open(fileobj=io.BytesIO(docker.build_context(folder))) as archive:
        names = [entry.name for entry in archive if not entry.isdir()]
    assert names == [".dockerignore", "Dockerfile", *there.split()]


@pytest.mark.parametrize(
    ("line", "excluded", "kept"),
    [
        ("*a" * 12 + "x", "a" * 200 + "x", "a" * 200),
        ("**/" * 9 + "x/y", "a/" * 40 + "x/y", "a/" * 40 + "x"),
        ("**/a" * 9 + "/x", "a/" * 40 + "x", "a/" * 40 + "y"),
        ("****/**/***" * 20 + "?x", "a/x" * 30 + "ax", "a/y" * 60),
    ],
)
def test_no_line_of_a_dockerignore_takes_long(line: str, excluded: str, kept: str) -> None:
    """A regular expression of such a line takes minutes and more, and holds the interpreter meanwhile."""
    ignored = DockerIgnore(f"other\n{line}\n!not/this")
    assert ignored.leaves_out(excluded)
    assert ignored.leaves_out(f"{excluded}/below")
    assert not ignored.leaves_out(kept)


def test_a_dockerignore_that_is_too_large_is_refused(tmp_path: Path) -> None:
    folder = built_of(tmp_path / "folder")
    (folder / ".dockerignore").write_text("a\n" * 40_000)
    with pytest.raises(SandboxFailure, match=r"\.dockerignore is larger than 65536 bytes"):
        docker.build_context(folder)


async def test_concurrent_starts_share_the_failure_of_a_pull(plan: Plan, docker_host: str) -> None:
    await plan(without=["task"], pulls=[{"status": 500, "message": "no route"}] * 36)
    sandboxes = [create_sandbox(SandboxConfig(backend="docker", image="task")) for _ in range(12)]
    ended = await asyncio.gather(*(sandbox.start() for sandbox in sandboxes), return_exceptions=True)
    assert all(isinstance(one, SandboxFailure) for one in ended)
    assert {str(one) for one in ended} == {str(ended[0])}
    assert (await state(docker_host))["calls"].count("POST /images/create") == 3


async def test_slow_registry_delays_only_its_images(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = [f"registry-{number}.example/task" for number in range(9)]
    await plan(without=["task", *slow], slow=slow)
    waiting = [
        asyncio.create_task(create_sandbox(SandboxConfig(backend="docker", image=each)).start()) for each in slow
    ]

    async def pulled() -> bool:
        calls: list[str] = (await state(docker_host))["calls"]
        return calls.count("POST /images/create") == len(slow)

    await until(pulled)
    async with asyncio.timeout(60), create_sandbox(SandboxConfig(backend="docker", image="task")) as sandbox:
        assert (await sandbox.run("echo on")).output == "on\n"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_an_image_that_takes_too_long_fails_its_rows_once(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "IMAGE_SECONDS", 0.3)
    await plan(without=["task"], slow=["task"])
    for _ in range(2):
        with pytest.raises(SandboxFailure, match=r"the image task is not there after 0 s: pull or build it beforehand"):
            await create_sandbox(SandboxConfig(backend="docker", image="task")).start()
    assert (await state(docker_host))["calls"].count("POST /images/create") == 1


async def test_image_whose_registry_sends_almost_nothing_fails_its_rows_once(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "PULL_SECONDS", 0.5)
    await plan(without=["task"], layers={"task": list(range(0, 100_000, 100))})
    for _ in range(2):
        with pytest.raises(SandboxFailure, match=r"task cannot be pulled: its registry sends less than 1 MiB in 0 s"):
            await create_sandbox(SandboxConfig(backend="docker", image="task")).start()
    assert (await state(docker_host))["calls"].count("POST /images/create") == 1


async def test_pull_with_progress_may_exceed_the_timeout(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "PULL_SECONDS", 2.0)
    await plan(without=["task"], layers={"task": [number << 20 for number in range(60)]})
    async with create_sandbox(SandboxConfig(backend="docker", image="task")) as sandbox:
        assert (await sandbox.run("echo there")).output == "there\n"


async def test_image_that_fails_while_its_registry_answers_is_not_waited_for(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_engine, "PULL_PAUSES", ())
    monkeypatch.setattr(docker, "REGISTRY_PAUSE", 600.0)  # a wait would come after the test has failed
    await plan(without=["first"])
    async with create_sandbox(SandboxConfig(backend="docker", image="first")):
        await plan(without=["second"], pulls=[{"message": "layer verification failed"}] * 4, manifests=["first"])
        with pytest.raises(SandboxFailure, match=r"second cannot be pulled: .*layer verification failed"):
            await create_sandbox(SandboxConfig(backend="docker", image="second")).start()


async def test_a_registry_that_has_given_an_image_before_is_waited_for(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(docker, "REGISTRY_PAUSE", 0.05)
    await plan(without=["first"])
    async with create_sandbox(SandboxConfig(backend="docker", image="first")):
        await plan(without=["second"], pulls=[{"status": 500, "message": "no route"}] * 4)
        async with create_sandbox(SandboxConfig(backend="docker", image="second")) as later:
            assert (await later.run("echo there")).output == "there\n"
    assert "sandboxes of images from docker.io wait for it" in caplog.text
    assert "the registry docker.io is back after" in caplog.text


async def test_a_start_that_is_cancelled_while_its_folder_is_made_leaves_none(
    plan: Plan, docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mkdtemp, made, go_on = tempfile.mkdtemp, asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def slowly(*arguments: Any, **options: Any) -> str:
        folder = mkdtemp(*arguments, **options)
        loop.call_soon_threadsafe(made.set)
        assert go_on.wait(BOUND)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", slowly)
    sandbox = create_sandbox(CONFIG)
    starting = asyncio.create_task(sandbox.start())
    await made.wait()
    assert list(tmp_path.glob("hermes-rl-*"))
    starting.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await sandbox.close()
    await until(lambda: not list(tmp_path.glob("hermes-rl-*")))


async def test_cancelled_container_creation_leaves_no_directory(
    plan: Plan, docker_host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    await plan(create_seconds=0.3, makes_folders=True)
    sandbox = create_sandbox(CONFIG)
    starting = asyncio.create_task(sandbox.start())

    async def creating() -> bool:
        return "POST /containers/create" in (await state(docker_host))["calls"]

    await until(creating)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await sandbox.close()
    assert list(tmp_path.glob("hermes-rl-*")) == []


async def test_starts_together_are_limited(plan: Plan, docker_host: str) -> None:
    await plan(start_seconds=1)
    sandboxes = [create_sandbox(CONFIG) for _ in range(12)]
    await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
    assert (await state(docker_host))["most_starting"] == 8
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))


async def test_a_disk_limit_that_the_engine_has_not(plan: Plan, docker_host: str) -> None:
    with pytest.raises(UserError, match=r"sandbox\.limits\.disk cannot be enforced.*best_effort"):
        await create_sandbox(SandboxConfig(backend="docker", limits=ResourceLimits(disk=1 << 30))).start()
    config = SandboxConfig(backend="docker", limits=ResourceLimits(disk=1 << 30, best_effort=True))
    async with create_sandbox(config) as sandbox:
        assert "disk" not in sandbox.enforced
    await plan(quota=True)
    body = await started(docker_host, SandboxConfig(backend="docker", limits=ResourceLimits(disk=1 << 30)))
    assert body["HostConfig"]["StorageOpt"] == {"size": str(1 << 30)}


async def test_a_limit_that_the_kernel_has_not(plan: Plan) -> None:
    await plan(warnings=["Your kernel does not support memory limit capabilities. Limitation discarded."])
    with pytest.raises(UserError, match=r"sandbox\.limits\.memory cannot be enforced"):
        await create_sandbox(SandboxConfig(backend="docker", limits=ResourceLimits(memory=1 << 30))).start()
    async with create_sandbox(CONFIG) as sandbox:
        assert "memory" not in sandbox.enforced


@pytest.mark.parametrize("group", ["pids/cgroup.procs", "cgroup.procs"])
async def test_limit_without_a_file_in_the_containers_group_is_not_in_force(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, group: str
) -> None:
    """Docker without root on control groups of version 1 leaves containers in the root group, which has no limits."""

    async def control_group(_: HelperSandbox, file: str) -> str:
        if file != group:
            raise FileNotFoundError
        return "1"

    monkeypatch.setattr(HelperSandbox, "control_group", control_group)
    with pytest.raises(UserError, match=r"limits\.processes cannot be enforced by .*pids\.max is missing"):
        await create_sandbox(SandboxConfig(backend="docker", limits=ResourceLimits(processes=64))).start()


async def test_an_engine_that_does_not_see_our_files(plan: Plan) -> None:
    await plan(elsewhere=True)
    with pytest.raises(UserError, match="folders of the same path"):
        await create_sandbox(CONFIG).start()


async def test_a_name_that_is_taken(plan: Plan) -> None:
    sandbox = create_sandbox(CONFIG)
    await plan(containers={name_of(sandbox): {}})
    with pytest.raises(SandboxFailure, match=r"\(409\): Conflict"):
        await sandbox.start()


async def test_a_container_that_ends_at_once(plan: Plan) -> None:
    await plan(entry="echo exec format error >&2; exit 3")
    with pytest.raises(SandboxFailure, match=r"ended at its start \(3\): exec format error"):
        await create_sandbox(CONFIG).start()


FIFO, DEVICE = 0x2000000, 0x4200000
"""Modes as Go writes them."""


@pytest.mark.parametrize(
    "files",
    [
        {"/etc/passwd": {"mode": FIFO, "size": 0}},
        {"/etc/group": {"mode": DEVICE, "size": 0}},
        {"/etc/passwd": {"mode": 0o644, "size": 2 << 20}},
        {"/etc/passwd": {"mode": 0x8000000, "size": 0, "linkTarget": "/x"}, "/x": {"mode": FIFO, "size": 0}},
    ],
    ids=["pipe", "device", "large", "link"],
)
async def test_engine_is_not_asked_to_read_odd_files_of_an_image(
    plan: Plan, docker_host: str, files: dict[str, Any]
) -> None:
    sandbox = create_sandbox(CONFIG)
    await plan(files=files)
    with pytest.raises(SandboxFailure, match="of the image is not a regular file of at most 1 MiB"):
        await sandbox.start()
    assert f"POST /containers/{name_of(sandbox)}/start" not in (await state(docker_host))["calls"]


@pytest.mark.parametrize(
    ("how", "stop_reason"),
    [
        ("oom=0", StopReason.SANDBOX_KILLED),
        ("", StopReason.SANDBOX_FAILURE),
        ("oom=60", StopReason.SANDBOX_FAILURE),
        ("oom=0&kill=0", StopReason.SANDBOX_FAILURE),
    ],
)
async def test_container_exit_is_attributed_by_its_cause(
    plan: Plan, docker_host: str, how: str, stop_reason: StopReason
) -> None:
    await require_blamed(plan, docker_host, how, stop_reason)


@pytest.mark.parametrize("held_up", [False, True])
@pytest.mark.parametrize(
    ("how", "stop_reason"), [("oom=0", StopReason.SANDBOX_KILLED), ("oom=0&kill=0", StopReason.SANDBOX_FAILURE)]
)
async def test_container_out_of_memory_is_caused_by_the_agent_despite_a_late_end(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch, how: str, stop_reason: StopReason, held_up: bool
) -> None:
    monkeypatch.setattr(docker, "CONTAINER_END_SECONDS", 0.2 if held_up else 60)
    monkeypatch.setattr(docker, "OOM_SECONDS", 0)  # any end comes late
    await plan(held_up=held_up)
    await require_blamed(plan, docker_host, how, stop_reason)


@pytest.mark.parametrize(
    ("how", "stop_reason"), [("oom=0", StopReason.SANDBOX_KILLED), ("oom=0&kill=0", StopReason.SANDBOX_FAILURE)]
)
async def test_container_out_of_memory_is_caused_by_the_agent_while_the_engine_clears_it_away(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch, how: str, stop_reason: StopReason
) -> None:
    monkeypatch.setattr(docker, "DIAGNOSIS_SECONDS", 1.0)
    await plan(clearing=True)
    await require_blamed(plan, docker_host, how, stop_reason)


async def test_container_that_does_not_end_proves_no_infrastructure_failure(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "CONTAINER_END_SECONDS", 0.2)
    await plan(held_up=True)
    await require_blamed(plan, docker_host, "", StopReason.SANDBOX_KILLED)


async def require_blamed(plan: Plan, docker_host: str, how: str, stop_reason: StopReason) -> None:
    """Kill a container in a way of the engine's double while a command runs; its loss counts as `ending`."""
    async with create_sandbox(CONFIG) as sandbox:
        running = asyncio.create_task(sandbox.run("sleep 30"))
        await asyncio.sleep(0.05)
        await ask(docker_host, "POST", f"/fake/kill/{name_of(sandbox)}?{how}")
        for asked in (running, sandbox.run("true"), sandbox.spawn("true"), sandbox.read_file("x")):
            with pytest.raises(SandboxFailure) as caught:
                await asked
            assert caught.value.stop_reason is stop_reason
        await plan()


@pytest.mark.parametrize(
    ("paused", "stop_reason"), [(True, StopReason.SANDBOX_FAILURE), (False, StopReason.SANDBOX_KILLED)]
)
async def test_a_container_that_does_not_answer(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, paused: bool, stop_reason: StopReason
) -> None:
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 0.3)
    async with asyncio.timeout(20):
        async with create_sandbox(CONFIG) as sandbox:
            await plan(paused=paused)
            os.kill(isolation_of(sandbox).pid, signal.SIGSTOP)
            with pytest.raises(SandboxFailure, match="did not answer") as caught:
                await sandbox.run("true", timeout=2)
            assert caught.value.stop_reason is stop_reason


async def test_a_removal_that_the_engine_refuses_is_tried_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "REMOVE_PAUSES", (0.01, 0.02))
    async with create_sandbox(CONFIG):
        await plan(unremovable=2)
    # The fixture looks whether a container is left.


async def test_a_container_that_runs_on_after_its_end_is_an_error(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "REMOVE_PAUSES", (0.01, 0.02))
    sandbox = create_sandbox(CONFIG)
    await sandbox.start()
    await plan(unremovable=1000)
    os.kill(isolation_of(sandbox).pid, signal.SIGSTOP)
    with pytest.raises(SandboxFailure, match=r"still runs.*could not kill"):
        await sandbox.close()
    await plan()
    await Engine().remove(name_of(sandbox))


async def test_fake_engine_ends_a_container_that_has_just_started(plan: Plan, docker_host: str) -> None:
    mark = f"sleep {os.getpid()}99"
    host = {"NetworkMode": "none", "Mounts": []}
    body = {"Image": IMAGE, "Hostname": "h", "WorkingDir": "/", "Labels": {}, "HostConfig": host}
    await plan(start_seconds=0, entry=mark)

    async def one(number: int) -> None:
        engine, name = Engine(), f"short-{number}"
        await engine.create(name, body)
        await engine.start(name)
        await asyncio.sleep(number % 8 / 1000)
        await engine.remove(name)

    for begin in range(0, 64, 8):
        await asyncio.gather(*(one(number) for number in range(begin, begin + 8)))
    assert marked(mark) == []


async def test_leftovers_of_a_dead_runner_are_removed(plan: Plan, docker_host: str) -> None:
    code = "from hermes_rl.sandbox.docker import own_mark; print(own_mark())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()  # noqa: ASYNC221
    marks = {
        "dead": f"{dead}:dead", "mine": f"{own_mark()}:mine", "theirs": "b:1:2:3:theirs",
        "users": f"{dead}:dead",  # of an image that was committed of a sandbox
    }  # fmt: skip
    await plan(containers={**{name: {LABEL: mark} for name, mark in marks.items()}, "x": {}})
    async with create_sandbox(CONFIG):

        async def removed() -> bool:
            return "dead" not in (await state(docker_host))["containers"]

        await until(removed)
        assert set((await state(docker_host))["containers"]) >= {"mine", "theirs", "users", "x"}
    for name in ("mine", "theirs", "users", "x"):
        await Engine().remove(name)
    await Engine().remove("x")


async def test_unremovable_leftover_is_reported_once_and_retried(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(docker, "LATER_PAUSES", (0.01,))
    boot, namespace, pid, _ = own_mark().split(":")
    said = "unlinkat /var/lib/docker/" + "d/" * 30_000 + ": too many open files"
    await plan(containers={"stuck": {LABEL: f"{boot}:{namespace}:{pid}:1:stuck"}}, unremovable=3, said=said)
    async with create_sandbox(CONFIG) as sandbox:
        assert (await sandbox.run("echo works")).output == "works\n"

        async def removed() -> bool:
            return "stuck" not in (await state(docker_host))["containers"]

        await until(removed)
    assert caplog.text.count("stuck cannot be removed") == 1
    assert "too many open files" in caplog.text
    assert len(caplog.text) < 2000


async def test_slow_removal_continues_in_the_background(
    plan: Plan, docker_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker, "REMOVE_SECONDS", 0.2)
    async with create_sandbox(CONFIG) as sandbox:
        await plan(held_up=True)
    assert name_of(sandbox) in (await state(docker_host))["containers"]
    await plan()

    async def removed() -> bool:
        return name_of(sandbox) not in (await state(docker_host))["containers"]

    await until(removed)


async def test_containers_of_other_boots_or_hosts_are_removed_only_when_old(plan: Plan, docker_host: str) -> None:
    _, namespace, pid, began = own_mark().split(":")
    marks = {"restarted": f"another:{namespace}:{pid}:{began}", "elsewhere": "b:1:2:3"}
    strangers = {name: {LABEL: f"{mark}:{name}"} for name, mark in marks.items()}
    await plan(containers=strangers)
    await remove_leftovers(Engine())
    assert set((await state(docker_host))["containers"]) == set(strangers)
    await plan(created=time.time() - 2 * 86400)
    await remove_leftovers(Engine())
    assert (await state(docker_host))["containers"] == {}


async def test_folders_of_starts_that_were_killed_are_removed(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, starting = docker.Rendezvous(), docker.Rendezvous()
    old, young = killed.folder.parent, starting.folder.parent
    os.utime(old, (0, 0))
    await remove_leftovers(Engine())
    assert [path for path in (old, young) if path.exists()] == [young]
    for one in (killed, starting):
        one.close()


async def test_home_set_by_the_image_is_used(plan: Plan) -> None:
    await plan(images={IMAGE: {"Env": ["PATH=/usr/bin:/bin", "HOME=/tmp/own"]}})
    async with create_sandbox(CONFIG) as sandbox:
        assert (sandbox.home, sandbox.workdir) == ("/tmp/own", "/tmp/own")
        assert (await sandbox.run("cd && pwd && echo $HOME")).output == "/tmp/own\n/tmp/own\n"


async def test_disk_limit_too_small_for_the_image_is_reported(plan: Plan) -> None:
    await plan(quota=True, full="error creating process: disk quota exceeded")
    with pytest.raises(UserError, match="raise it by the size of the image"):
        await create_sandbox(SandboxConfig(backend="docker", limits=ResourceLimits(disk=1 << 20))).start()


def test_a_runner_that_lives() -> None:
    assert not is_dead(own_mark())
    boot, namespace, pid, _ = own_mark().split(":")
    assert is_dead(f"{boot}:{namespace}:{pid}:1")
    assert not is_dead(f"another:{namespace}:{pid}:1")
    assert not is_dead("nonsense")


async def test_nothing_is_left_where_the_helper_met_the_runner(plan: Plan) -> None:
    async with create_sandbox(CONFIG) as sandbox:
        assert await sandbox.list_dir("/.hermes-rl-rendezvous") == []
        assert (await sandbox.run("touch /.hermes-rl/x /.hermes-rl-rendezvous/x")).exit_code != 0
        assert (await sandbox.run("kill -9 1; kill -9 -1; echo")).exit_code in (0, 137)
        assert (await sandbox.run("echo still there")).output == "still there\n"


def test_streams_without_their_headers() -> None:
    stream = b"\x01\0\0\0\0\0\0\x02ab\x02\0\0\0\0\0\0\x01c"
    assert joined(stream) == b"abc"
    assert joined(stream + b"\x01\0\0") == b"abc"


async def test_home_is_the_home_of_the_image_user(plan: Plan) -> None:
    await plan(images={IMAGE: {"User": "nobody:nogroup"}})
    async with create_sandbox(SandboxConfig(backend="docker", workdir="/work")) as sandbox:
        assert (sandbox.home, sandbox.workdir) == (pwd.getpwnam("nobody").pw_dir, "/work")
