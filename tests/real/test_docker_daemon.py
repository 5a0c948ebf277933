"""The Docker backend with a real engine: conformance, many rollouts, and failures of the engine."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hermes_rl.errors import RunError, SandboxFailure, SpecError, UserError
from hermes_rl.sandbox import channel, docker_engine
from hermes_rl.sandbox.backends import create_sandbox
from hermes_rl.sandbox.base import DEFAULT_IMAGE as IMAGE
from hermes_rl.sandbox.base import ResourceLimits, Sandbox, SandboxConfig, SandboxFile, SandboxService
from hermes_rl.sandbox.docker import IN_FORCE, Docker
from hermes_rl.sandbox.helper_sandbox import HelperSandbox
from hermes_rl.stop_reasons import StopReason
from hermes_rl.tools.search import Query, search
from tests.agent.test_program import played
from tests.api.summing import Sampler, sampled, trained
from tests.attacks.test_known_attacks import require_held
from tests.cli.test_harbor import TOML, task
from tests.cli.test_harbor import played as task_played
from tests.real.conftest import hermes
from tests.real.containers import NO_SHELL, OWN_PLACES, SHELL_ONLY, begun, conformance, groups, rollouts, settled
from tests.real.docker_daemon import DockerDaemon
from tests.rootfs import small_root
from tests.sandbox.leases import held

COMPONENT = "Docker"
ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(180), pytest.mark.usefixtures("docker_host")]

CONFIG = SandboxConfig(backend="docker")


def name_of(sandbox: Sandbox) -> str:
    """Return the name of the container."""
    assert isinstance(sandbox, HelperSandbox) and isinstance(sandbox.isolation, Docker)
    return sandbox.isolation.container.name


# -------------------------------------------------------------------------------- what every sandbox does alike


@pytest.fixture
def backend(docker_host: DockerDaemon) -> str:
    return "docker"


@pytest.fixture
def config(docker_host: DockerDaemon) -> SandboxConfig:
    return CONFIG


@pytest.fixture
async def sandbox(config: SandboxConfig) -> AsyncIterator[Sandbox]:
    async with create_sandbox(config) as started:
        yield started


globals().update(conformance())


# -------------------------------------------------------------------------------- agent programs


@pytest.mark.parametrize("mode", ["rewritten", "nasty"])
async def test_an_agent_program_finds_the_model_in_a_container(tmp_path: Path, mode: str) -> None:
    sampler = Sampler()
    rollout = await played(tmp_path, mode, sampler, sandbox="backend: docker, ")
    assert (rollout.stop_reason, rollout.score, rollout.turns) == (StopReason.FINISHED, 1.0, 2)
    assert trained([rollout]) == sampled(sampler.answers)


# -------------------------------------------------------------------------------- images


async def test_an_image_with_nothing_but_a_shell_is_enough() -> None:
    async with create_sandbox(SandboxConfig(backend="docker", image=SHELL_ONLY)) as sandbox:
        assert (await sandbox.run("echo there; echo $PATH")).output.startswith("there\n/")
        assert (await sandbox.run(["sh", "-c", "echo found by name"])).output == "found by name\n"
        await sandbox.write_file("notes.txt", b"hay\nneedle 1\n")
        found = await search(sandbox, Query(r"needle \d"), cwd=None, timeout=30)
        assert [(match["path"], match["line"]) for match in found["matches"]] == [("notes.txt", 2)]
        files = await search(sandbox, Query("*.txt", target="files"), cwd=None, timeout=30)
        assert files["files"] == ["notes.txt"]


async def test_image_without_a_shell_fails_at_the_start() -> None:
    with pytest.raises(SandboxFailure, match=r"image no-shell:1 has no /bin/sh"):
        await create_sandbox(SandboxConfig(backend="docker", image=NO_SHELL)).start()


async def test_image_whose_accounts_are_a_pipe_delays_no_start(engine: DockerDaemon, tmp_path: Path) -> None:
    """Without a check the engine opens the pipe, as root of this machine, and waits in the start for a writer."""
    root = small_root(tmp_path / "root", ["sh"])
    (root / "etc/passwd").unlink()
    os.mkfifo(root / "pipe")
    (root / "etc/passwd").symlink_to("../pipe")
    engine.have("pipe:1", root)
    with pytest.raises(SandboxFailure, match=r"/etc/passwd of the image is not a regular file"):
        await create_sandbox(replace(CONFIG, image="pipe:1")).start()


async def test_volume_of_an_image_claims_no_other_limits(engine: DockerDaemon, tmp_path: Path) -> None:
    root = small_root(tmp_path / "root", ["sh"])
    for name in (file for files in IN_FORCE.values() for file in files):
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text("max\n")
    engine.have("claims:1", root, {"VOLUME": "/sys/fs/cgroup"})
    async with create_sandbox(replace(CONFIG, image="claims:1")) as sandbox:
        assert "memory" in sandbox.enforced


async def test_home_user_and_workdir_of_an_image_are_used() -> None:
    async with create_sandbox(SandboxConfig(backend="docker", image=OWN_PLACES)) as sandbox:
        assert (sandbox.home, sandbox.workdir) == ("/data/home", "/data/place")
        assert (await sandbox.run("id -u; pwd; echo $HOME")).output == "1000\n/data/place\n/data/home\n"


async def test_an_image_that_is_nowhere_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_engine, "PULL_PAUSES", (0.01, 0.02))
    with pytest.raises(SandboxFailure, match=r"the image no-such/image:1 cannot be pulled: the Docker engine says"):
        await create_sandbox(SandboxConfig(backend="docker", image="no-such/image:1")).start()


@pytest.mark.parametrize("named", ["docker_image", "Dockerfile"])
async def test_task_directory_runs_in_its_image(tmp_path: Path, named: str) -> None:
    test = "[ $(id -u) = 0 ] && [ -f answer.txt ] && [ -f /.dockerenv ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    if named == "docker_image":
        folder = task(tmp_path / "task", TOML + f"docker_image = '{IMAGE}'\n", "FROM other\nUSER x\n", test)
    else:
        folder = task(tmp_path / "task", TOML, f"FROM {IMAGE}\nWORKDIR /work\nRUN echo 42 > made\n", test)
    backend = "sandbox.backend=docker"
    right = await task_played(folder, tmp_path / "right", None, backend)
    forged = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
    wrong = await task_played(folder, tmp_path / "wrong", forged, backend)
    assert [(line["score"], line["error"]) for line in (right, wrong)] == [(1.0, None), (0.0, None)]


DOCKERFILE = f"""\
FROM {IMAGE} AS first
ARG WORD=made
RUN echo $WORD > /made
FROM {IMAGE}
COPY --from=first /made /work/
COPY given.txt link /work/
WORKDIR /work
ENV GREETING=hello
"""
BUILT = """\
[ "$(cat made given.txt link answer.txt) $GREETING" = "made
given
given
42 hello" ] && [ "$PWD" = /work ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


async def test_docker_builds_what_a_task_says(engine: DockerDaemon, tmp_path: Path) -> None:
    """Stages, arguments, options and a link are read by the engine; another task may name the built image."""
    folder = task(tmp_path / "task", TOML, DOCKERFILE, BUILT)
    (folder / "environment/link").symlink_to("given.txt")
    right = await task_played(folder, tmp_path / "right", None, "sandbox.backend=docker")
    wrong = await task_played(folder, tmp_path / "wrong", "echo 41 > answer.txt", "sandbox.backend=docker")
    assert [(line["score"], line["error"]) for line in (right, wrong)] == [(1.0, None), (0.0, None)]
    assert right["image"] == wrong["image"] and right["image"].startswith("sha256:")
    (own,) = [image for image in engine.ask("GET", "/images/json") if image["Id"] == right["image"]]
    named = task(tmp_path / "named", f"{TOML}docker_image = '{own['RepoTags'][0]}'\n", None, BUILT)
    line = await task_played(named, tmp_path / "run", None, "sandbox.backend=docker")
    assert (line["score"], line["image"]) == (1.0, right["image"])


async def test_a_build_that_fails_is_nobodys_score(tmp_path: Path) -> None:
    folder = task(tmp_path / "task", TOML, f"FROM {IMAGE}\nRUN echo 42 apples && exit 3\n")
    with pytest.raises(RunError, match=r"cannot be built: The command .* returned a non-zero code: 3(?s:.)*42 apples"):
        await task_played(folder, tmp_path / "run", None, "sandbox.backend=docker")


BEGIN = """\
#!/bin/sh
sleep 1; echo begun > /begun
(n=0; while :; do n=$((n + 1)); echo $n > /beat; sleep 0.1; done) &
exec "$@"
"""
BEATS = """\
a=$(cat /beat); sleep 0.5
if [ "$(cat /beat)" != "$a" ] && grep -q begun seen.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


async def test_processes_of_an_image_are_running_for_agent_and_tests(tmp_path: Path) -> None:
    folder = task(
        tmp_path / "task",
        TOML,
        f'FROM {IMAGE}\nCOPY begin /begin\nWORKDIR /work\nENTRYPOINT ["sh", "/begin"]\n',
        BEATS,
        others={"environment/begin": BEGIN},
    )
    sets = ("sandbox.backend=docker", "sandbox.keep_processes=true")
    assert (await task_played(folder, tmp_path / "run", "cp /begun seen.txt", *sets))["score"] == 1.0
    assert (await task_played(folder, tmp_path / "not", "true", *sets))["score"] == 0.0


# -------------------------------------------------------------------------------- services

STORE = """
import http.server, os
class Store(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.environ['GREETING']} {open('/seed').read()}".encode())
http.server.ThreadingHTTPServer(("", 8080), Store).serve_forever()
"""
FETCH = "python3 -c \"import urllib.request as r; print(r.urlopen('http://store:8080').read().decode())\""
SERVICE = SandboxService(
    "store",
    IMAGE,
    command=("python3", "/srv/store.py"),
    env={"GREETING": "hello"},
    files=(SandboxFile("/srv/store.py", STORE.encode()), SandboxFile("/seed", b"from a file")),
    healthy=FETCH.replace("store:", "localhost:"),
)


@pytest.mark.parametrize("network", [False, True])
async def test_services_are_found_by_name_and_end_with_their_sandbox(engine: DockerDaemon, network: bool) -> None:
    other = replace(SERVICE, name="other", command=("sleep", "600"), healthy=None)
    config = replace(CONFIG, services=(SERVICE, other), network=network)
    before = len(engine.containers())
    async with create_sandbox(config) as sandbox, create_sandbox(config) as second:
        assert len(engine.containers()) == before + 6
        for each in (sandbox, second):
            assert (await each.run(FETCH)).output == "hello from a file\n"
        assert (await sandbox.run("ls /srv/store.py; pgrep -f store.py")).exit_code != 0, "it is another machine"
    assert len(engine.containers()) == before


LEASE = """
import fcntl, os, signal, socket
signal.signal(signal.SIGIO, signal.SIG_IGN)
held = [os.open(f"/etc/{name}", os.O_RDONLY) for name in ("hosts", "hostname", "resolv.conf")]
for fd in held:
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
listening = socket.create_server(("", 8080))
while True:
    listening.accept()[0].sendall(b"leased")
"""


async def test_lease_in_a_service_delays_no_other_sandbox() -> None:
    """An agent may run code in a database, where no filter refuses a lease; whoever opens the file waits 45 s."""
    taken = "python3 -c \"import socket; print(socket.create_connection(('127.0.0.1', 8080)).recv(9).decode())\""
    leasing = replace(
        SERVICE, files=(SandboxFile("/srv/store.py", LEASE.encode()),), healthy=f"{taken} | grep -q leased"
    )
    config = replace(CONFIG, services=(leasing,))
    async with create_sandbox(config) as attacker, create_sandbox(config) as other:
        assert (await attacker.run(taken)).output == "leased\n"
        assert (await other.run("cat /etc/hosts /etc/hostname /etc/resolv.conf", timeout=30)).exit_code == 0


async def test_no_sandbox_of_either_backend_holds_files_that_another_opens(rootfs: Path) -> None:
    image = SandboxConfig(image=str(rootfs))
    for attacker, other in ((CONFIG, CONFIG), (CONFIG, image), (image, CONFIG)):
        output = await held(attacker, other)
        assert re.fullmatch(r"[1-9]\d+ \[\]\n", output), output


async def test_failed_service_is_reported_with_its_output(engine: DockerDaemon) -> None:
    before = len(engine.containers())
    ends = replace(SERVICE, command=("sh", "-c", "echo no disk >&2; exit 3"))
    with pytest.raises(SandboxFailure, match=r"the service store ended \(3\): no disk"):
        await create_sandbox(replace(CONFIG, services=(ends,))).start()
    assert len(engine.containers()) == before


COMPOSE = """
services:
  main:
    depends_on: {store: {condition: service_healthy}}
  store:
    image: IMAGE
    command: [python3, /srv/store.py]
    environment: {GREETING: hello}
    volumes: ["./store.py:/srv/store.py:ro", "./seed:/seed"]
    expose: ["8080"]
    healthcheck: {test: ["CMD-SHELL", "CHECK"], interval: 1s, retries: 30}
"""


async def test_task_with_a_compose_file_runs_with_its_services(tmp_path: Path) -> None:
    folder = task(
        tmp_path / "task",
        TOML + f"docker_image = '{IMAGE}'\n",
        "FROM other\n",
        f"[ \"$({FETCH})\" = 'hello x' ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
    )
    check = str(SERVICE.healthy).replace('"', '\\"')
    (folder / "environment/docker-compose.yaml").write_text(COMPOSE.replace("IMAGE", IMAGE).replace("CHECK", check))
    (folder / "environment/store.py").write_text(STORE)
    (folder / "environment/seed").write_text("x")
    line = await task_played(folder, tmp_path / "run", None, "sandbox.backend=docker")
    assert (line["score"], line["error"]) == (1.0, None)


TOOLS = """
import http.server, json
TOOL = {"name": "count", "description": "Count.", "inputSchema": {"type": "object", "properties": {}}}
class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answers = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}},
                           "serverInfo": {"name": "counter", "version": "1"}},
            "tools/list": {"tools": [TOOL]},
            "tools/call": {"content": [{"type": "text", "text": "forty-two"}]},
            "ping": {},
        }
        known = "id" in asked and asked["method"] in answers
        said = {"jsonrpc": "2.0", "id": asked.get("id")}
        said |= {"result": answers[asked["method"]]} if known else {"error": {"code": -32601, "message": "unknown"}}
        text = json.dumps(said).encode() if "id" in asked else b""
        self.send_response(200 if text else 202)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.send_error(405)
http.server.ThreadingHTTPServer(("", 8000), Server).serve_forever()
"""


async def test_a_service_is_built_and_its_tools_are_the_agents(tmp_path: Path) -> None:
    served = '[[environment.mcp_servers]]\nname = "counter"\ntransport = "streamable-http"\nurl = "http://counter:8000/mcp"\n'
    check = "python3 -c \"import socket; socket.create_connection(('localhost', 8000), 2)\""
    compose = {
        "services": {
            "main": {"depends_on": {"counter": {"condition": "service_healthy"}}},
            "counter": {"build": {"context": "./counter"}, "healthcheck": {"test": check}},
        }
    }
    folder = task(
        tmp_path / "task",
        TOML + served,
        f"FROM {IMAGE}\nWORKDIR /work\n",
        others={
            "environment/docker-compose.yaml": json.dumps(compose),
            "environment/counter/Dockerfile": f"FROM {IMAGE}\nCOPY server.py /srv/\nCMD python3 /srv/server.py\n",
            "environment/counter/server.py": TOOLS,
            "tests/test.sh": "grep -q 42 answer.txt; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
        },
    )
    with pytest.raises(SpecError, match="mcp-proxy") as refused:
        await task_played(folder, tmp_path / "not", None, "sandbox.backend=docker")
    ways = shlex.split(str(refused.value).partition(" --set ")[2])[::2]
    call = [{"tools": [{"name": "count", "args": {}}]}]
    write = [{"tools": [{"name": "terminal", "args": {"command": "echo 42 > answer.txt"}}]}, {"say": "Done."}]
    solution = f"solution={json.dumps({'turns': call + write})}"
    line = await task_played(folder, tmp_path / "run", None, "sandbox.backend=docker", *ways, solution)
    assert (line["score"], line["error"]) == (1.0, None)
    assert "forty-two" in [message["content"] for message in line["messages"]]


# -------------------------------------------------------------------------------- limits


async def test_limits_are_in_force() -> None:
    limits = ResourceLimits(memory=128 << 20, processes=40, cpu=0.5, open_files=64)
    async with create_sandbox(SandboxConfig(backend="docker", limits=limits)) as sandbox:
        assert set(sandbox.enforced) == {"memory", "processes", "cpu", "open_files"}
        assert (await sandbox.run(["python3", "-c", "x = bytearray(1 << 30)"])).exit_code == 137
        assert "fork" in (await sandbox.run("for n in $(seq 100); do sleep 5 & done", timeout=30)).output


BUFFERS = """
import socket
listening, held, sent = socket.create_server(("127.0.0.1", 0)), [], 0
for _ in range(40):
    one = socket.create_connection(listening.getsockname())
    one.setblocking(False)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    held += [one, listening.accept()[0]]
    try:
        while True:
            sent += one.send(bytes(65536))
    except BlockingIOError:
        pass
print(sent >> 20)
"""


async def test_buffers_of_sockets_have_a_limit() -> None:
    """Version 1 of control groups does not count them: one container held half of what the machine has for TCP."""
    async with create_sandbox(replace(CONFIG, limits=ResourceLimits(memory=128 << 20))) as sandbox:
        assert int((await sandbox.run(["python3", "-c", BUFFERS], timeout=60)).output) < 128


@pytest.mark.parametrize(("key", "name"), [("Memory", "memory"), ("PidsLimit", "processes"), ("NanoCpus", "cpu")])
async def test_limit_dropped_by_the_engine_is_an_error_unless_best_effort(
    key: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = docker_engine.Engine.create

    async def without(self: docker_engine.Engine, container_name: str, body: Mapping[str, Any]) -> list[str]:
        host = {option: value for option, value in body["HostConfig"].items() if option not in (key, "MemorySwap")}
        return await create(self, container_name, {**body, "HostConfig": host})

    monkeypatch.setattr(docker_engine.Engine, "create", without)
    asked: dict[str, Any] = {name: {"memory": 128 << 20, "processes": 40, "cpu": 0.5}[name]}
    with pytest.raises(UserError, match=rf"limits\.{name} cannot be enforced"):
        await create_sandbox(SandboxConfig(backend="docker", limits=ResourceLimits(**asked))).start()
    asked["best_effort"] = True
    async with create_sandbox(SandboxConfig(backend="docker", limits=ResourceLimits(**asked))) as sandbox:
        assert name not in sandbox.enforced


# -------------------------------------------------------------------------------- whose doing an end was

HOG = ["python3", "-c", "x = bytearray(1 << 30)"]
SMALL = SandboxConfig(backend="docker", limits=ResourceLimits(memory=128 << 20))


async def test_external_kill_is_an_infrastructure_failure_after_memory_use(engine: DockerDaemon) -> None:
    async with create_sandbox(SMALL) as sandbox:
        assert (await sandbox.run(HOG)).exit_code == 137
        engine.ask("POST", f"/containers/{name_of(sandbox)}/kill")
        with pytest.raises(SandboxFailure) as caught:
            await sandbox.run("true")
        assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE


async def test_sandbox_out_of_memory_is_caused_by_the_agent() -> None:
    limits = ResourceLimits(memory=48 << 20)
    async with create_sandbox(SandboxConfig(backend="docker", limits=limits)) as sandbox:
        # A file in memory belongs to no process, so the kernel takes the largest one, which is the sandbox's own.
        with pytest.raises(SandboxFailure, match="memory was used up") as caught:
            await sandbox.run("while :; do dd if=/dev/zero of=/dev/shm/full bs=64k; done", timeout=30)
        assert caught.value.stop_reason is StopReason.SANDBOX_KILLED


async def test_a_frozen_container_ends_within_its_bounds(engine: DockerDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ANSWER_SECONDS", 2.0)
    async with asyncio.timeout(60):
        async with create_sandbox(CONFIG) as sandbox:
            engine.ask("POST", f"/containers/{name_of(sandbox)}/pause")
            with pytest.raises(SandboxFailure, match="did not answer") as caught:
                await sandbox.run("true", timeout=1)
            assert caught.value.stop_reason is StopReason.SANDBOX_FAILURE


# -------------------------------------------------------------------------------- runs

SPEC = """
version: 1
name: docked
dataset: {items: [{word: one}, {word: two}, {word: three}, {word: four}]}
prompt: {user: "Write {{ word }}."}
toolsets: [terminal]
sandbox: {backend: docker, limits: {memory: 128MiB}}
rewards: {file_matches: {args: {path: out, content: "{{ word }}"}}}
solution:
  turns: [{tools: [{name: terminal, args: {command: "sleep SECONDS; echo {{ word }} > out"}}]}, {say: done}]
servers: {policy: {type: scripted, error_rate: 0.4}}
process: {group_size: 4, groups: 50, concurrency: 32}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Callable[[float], Path]:
    def write(seconds: float) -> Path:
        file = tmp_path / "docked.yaml"
        file.write_text(SPEC.replace("SECONDS", str(seconds)))
        return file

    return write


@pytest.mark.timeout(400)
def test_killed_runner_leaves_no_containers_after_resuming(
    engine: DockerDaemon, spec: Callable[[float], Path], tmp_path: Path
) -> None:
    words = ("run", spec(0), "process", "--set", "process.groups=125", "--out", "run")
    running = hermes(*words, folder=tmp_path, background=True)
    begun(tmp_path, 40, running)
    running.kill()
    running.communicate()
    said = hermes(*words, folder=tmp_path)
    require_all_played(tmp_path, 125, said)
    kept = [one["id"] for one in rollouts(tmp_path)]
    assert len(kept) == len(set(kept)) == 500
    assert engine.containers() == []
    remove_rendezvous(tmp_path)
    # The fixture looks for what else may be left: networks, folders and processes.


def remove_rendezvous(folder: Path) -> None:
    """Remove directories that killed starts left; a later run removes them when they are an hour old."""
    for left in (folder / "temporary").glob("hermes-rl-*"):
        shutil.rmtree(left)


def test_leftovers_of_a_killed_runner_are_removed_by_the_next(
    engine: DockerDaemon, spec: Callable[[float], Path], tmp_path: Path
) -> None:
    file = spec(0.5)
    words = ("run", file, "process", "--set", "process.groups=12", "--out", "run")
    running = hermes(*words, folder=tmp_path, background=True)
    begun(tmp_path, 1, running)
    running.kill()
    running.communicate()
    left = engine.containers()
    assert left
    assert settled(lambda: all(one["State"] == "exited" for one in engine.containers() if one["State"] != "created"))
    hermes(*words, folder=tmp_path)
    assert groups(tmp_path) == 12
    assert engine.containers() == []
    remove_rendezvous(tmp_path)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_an_engine_that_goes_away_and_comes_back_costs_nothing(
    how: str, engine: DockerDaemon, spec: Callable[[float], Path], tmp_path: Path
) -> None:
    words = ("run", spec(0.5), "process", "--set", "process.groups=24", "--out", "run")
    running = hermes(*words, folder=tmp_path, background=True)
    begun(tmp_path, 2, running)
    {"kill": engine.kill, "stop": engine.stop}[how]()
    time.sleep(3)
    engine.start()
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert "new sandboxes wait for it" in said
    assert "is back after" in said
    require_all_played(tmp_path, 24, said)
    assert engine.containers() == []


def test_unresponsive_engine_is_reported_and_waited_for(
    engine: DockerDaemon, spec: Callable[[float], Path], tmp_path: Path
) -> None:
    """The engine accepts requests and sends no response, like an engine whose disk hangs."""
    words = ("run", spec(0.2), "process", "--set", "process.groups=12", "--set", "agent.timeout=15", "--out", "run")
    running = hermes(*words, folder=tmp_path, background=True)
    begun(tmp_path, 1, running)
    os.kill(engine.pid, signal.SIGSTOP)
    try:
        told = ""
        while "does not answer" not in told:
            told = running.stdout.readline()
            assert told
        time.sleep(2)
        assert running.poll() is None
    finally:
        os.kill(engine.pid, signal.SIGCONT)
    assert "new sandboxes wait for it" in told
    said, _ = running.communicate(timeout=120)
    assert running.returncode == 0, said
    assert "is back after" in said
    require_all_played(tmp_path, 12, said)
    assert engine.containers() == []


HAS_NOT = {"one large file", "many files", "temporary files"}
"""What this engine cannot keep from a container: its driver limits no disk."""
CAP_SYS_RESOURCE = 1 << 24
if not int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16) & CAP_SYS_RESOURCE:
    # Without it the engine can put a container into its place in the kernel's order, and cannot hold it there.
    HAS_NOT |= {"kernel file: the order in which processes end"}


def attacked(engine: DockerDaemon, module: str, *words: str) -> dict[str, Any]:
    """Run the attacks of a module of tests/attacks on this engine, and return the output."""
    folder = Path(tempfile.mkdtemp(prefix="world-", dir="/tmp"))
    folder.chmod(0o755)
    places = {"HOME": "home", "TMPDIR": "tmp", "XDG_CACHE_HOME": "cache"}
    env = {name: str(folder / place) for name, place in places.items()}
    env |= {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "API_KEY": "KEY-environment",
        "DOCKER_HOST": engine.url,
    }
    command = [sys.executable, "-m", f"tests.attacks.{module}", str(folder), "docker", *words]
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)  # type: ignore[no-any-return]
    finally:
        shutil.rmtree(folder)


@pytest.mark.timeout(900)
def test_every_attack_is_held(engine: DockerDaemon) -> None:
    found = attacked(engine, "world", "KEY-argument")
    assert {name for name, succeeded in found["succeeded"].items() if succeeded} <= HAS_NOT
    assert (found["errors"], found["hurt"], found["unarmed"]) == ({}, {}, {})
    assert engine.containers() == []


@pytest.mark.timeout(900)
def test_every_known_attack_is_graded_as_it_deserves(engine: DockerDaemon) -> None:
    require_held(attacked(engine, "known"))
    assert engine.containers() == []


def require_all_played(folder: Path, count: int, said: str) -> None:
    """Require the groups of all rows, and no rollout that the engine stopped."""
    assert groups(folder) == count, said
    assert {(one["stop_reason"], one["error"]) for one in rollouts(folder)} == {("finished", None)}, said
    assert " dropped (" not in said
    assert "set aside" not in said


# -------------------------------------------------------------------------------- what rollouts share

SERVE = """
import os, socket, threading
listening = socket.create_server(("", 4711))
way = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
way.connect(("192.0.2.1", 9))
with open("address.tmp", "w") as file:
    file.write(way.getsockname()[0])
os.rename("address.tmp", "address")
while True:
    listening.accept()[0].sendall(b"reached")
"""
REACH = (
    "import socket, sys\ntry:\n    print(socket.create_connection((sys.argv[1], 4711), 3).recv(9).decode())\n"
    "except OSError as error:\n    print('refused', error)\n"
)


async def test_containers_of_rollouts_with_a_network_cannot_reach_each_other() -> None:
    config = replace(CONFIG, network=True)
    async with create_sandbox(config) as first, create_sandbox(config) as second:
        await first.spawn(["python3", "-c", SERVE])
        address = (await first.run("until [ -e address ]; do sleep 0.1; done; cat address", timeout=60)).output
        assert (await first.run(["python3", "-c", REACH, address])).output == "reached\n"
        assert (await second.run(["python3", "-c", REACH, address])).output.startswith("refused")


FILES = ("hosts", "hostname", "resolv.conf")


@pytest.mark.parametrize("network", [False, True])
async def test_container_files_from_the_engine_are_read_only(network: bool) -> None:
    fill = "; ".join(f"(echo x >>/etc/{name}) 2>/dev/null && echo wrote {name}" for name in FILES)
    resolve = "import socket; print(socket.gethostbyname(socket.gethostname()), socket.gethostbyname('localhost'))"
    async with create_sandbox(replace(CONFIG, network=network)) as sandbox:
        assert (await sandbox.run(fill)).output == ""
        assert (await sandbox.run(["python3", "-c", resolve])).output == "127.0.0.1 127.0.0.1\n"
        assert (await sandbox.run("cat /etc/hostname")).output == "sandbox\n"
