"""A Docker engine as far as sandboxes see it: its HTTP API on a unix socket, containers that are bubblewrap's.

    python fake_docker.py SOCKET

Paths, status codes, JSON shapes and the framing of streams are those of the Engine API reference. A container has the
programs of this machine, its own processes and (without a network) its own network, and really runs its entry point.
Limits are recorded and not enforced. What tests need beyond the API lies below /fake: `POST /fake/plan` says what is
answered next, `POST /fake/kill/{name}?oom=0` kills a container's processes as the kernel would (`oom`,
`kill`: so many seconds after such an event), `GET /fake/state` tells all.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from hermes_rl.sandbox.bubblewrap import find_bwrap
from hermes_rl.sandbox.helper_system import PR_SET_CHILD_SUBREAPER, children, prctl

ENV = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "OF_THE_IMAGE=yes"]
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
START_SECONDS = 0.05


@dataclass
class Container:
    name: str
    body: dict[str, Any]
    status: str = "created"
    process: asyncio.subprocess.Process | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    output: Path | None = None
    exit_code: int = 0
    oom: bool = False
    events: list[tuple[str, float]] = field(default_factory=list)


class Engine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """For what containers print; it is whoever's to remove that has made it."""
        self.images: dict[str, dict[str, Any]] = {}
        self.have("python:3.11-slim")
        self.containers: dict[str, Container] = {}
        self.networks: list[dict[str, Any]] = []
        self.plan: dict[str, Any] = {}
        self.calls: list[str] = []
        self.starting = self.most_starting = 0

    def have(self, name: str, **config: Any) -> None:
        digest = f"sha256:{'ab' * 32}"
        shape = {"Env": ENV, "User": "", "WorkingDir": "", **config}
        self.images[name] = {"Id": digest, "RepoDigests": [f"{name.partition(':')[0]}@{digest}"], "Config": shape}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/version", self.version),
            web.get("/images/{name:.+}/json", self.image),
            web.post("/images/create", self.pull),
            web.get("/distribution/{name:.+}/json", self.distribution),
            web.post("/build", self.build),
            web.post("/containers/create", self.create),
            web.get("/networks", self.list_networks),
            web.post("/networks/create", self.create_network),
            web.get("/containers/json", self.list),
            web.get("/events", self.events),
            web.get("/containers/{name}/json", self.inspect),
            web.head("/containers/{name}/archive", self.file_status),
            web.post("/containers/{name}/start", self.start),
            web.post("/containers/{name}/wait", self.wait),
            web.get("/containers/{name}/logs", self.logs),
            web.delete("/containers/{name}", self.remove),
            web.post("/fake/plan", self.set_plan),
            web.post("/fake/kill/{name}", self.kill),
            web.get("/fake/state", self.state),
        ]

    @web.middleware
    async def note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(f"{request.method} {request.path}")
        answer: web.StreamResponse = await handler(request)
        return answer

    # ------------------------------------------------------------------ images

    async def version(self, _: web.Request) -> web.Response:
        parts = [{"Name": "Podman Engine" if self.plan.get("podman") else "Engine"}]
        versions = {"Version": "28.0.0-fake", "ApiVersion": "1.48", "MinAPIVersion": "1.24", "Components": parts}
        return web.json_response(versions)

    async def image(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.images:
            return refusal(404, f"No such image: {name}")
        return web.json_response(self.images[name])

    async def pull(self, request: web.Request) -> web.StreamResponse:
        name = request.query["fromImage"]
        if name.removesuffix(":latest") in self.plan.get("nowhere", []):
            return refusal(404, f"pull access denied for {name}, repository does not exist")
        failures = self.plan.get("pulls", [])
        failure = failures.pop(0) if failures else None
        if failure is not None and "status" in failure:
            return refusal(failure["status"], failure["message"])
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        await answer.write(json.dumps({"status": f"Pulling from {name}"}).encode() + b"\r\n")
        while name.removesuffix(":latest") in self.plan.get("slow", []):
            await answer.write(b'{"status": "Downloading"}\r\n')
            await asyncio.sleep(0.05)
        for size in self.plan.get("layers", {}).get(name.removesuffix(":latest"), []):
            step = {"id": "a", "status": "Downloading", "progressDetail": {"current": size, "total": 10**9}}
            await answer.write(json.dumps(step).encode() + b"\r\n")
            await asyncio.sleep(0.05)
        if failure is not None:
            said = {"errorDetail": {"message": failure["message"]}, "error": failure["message"]}
            await answer.write(json.dumps(said).encode() + b"\r\n")
        else:
            self.have(name.removesuffix(":latest"))
            await answer.write(json.dumps({"status": f"Downloaded newer image for {name}"}).encode() + b"\r\n")
        await answer.write_eof()
        return answer

    async def distribution(self, request: web.Request) -> web.Response:
        if request.match_info["name"] in self.plan.get("manifests", []):
            return web.json_response({"Descriptor": {}})
        return refusal(500, "no route")

    async def build(self, request: web.Request) -> web.Response:
        with tarfile.open(fileobj=io.BytesIO(await request.read())) as archive:
            (dockerfile,) = (archive.extractfile(entry) for entry in archive if entry.name == "Dockerfile")
            assert dockerfile is not None
            text = dockerfile.read().decode()
        steps: list[dict[str, Any]] = [
            {"stream": f"Step 1/1 : {text}" + "x" * 300_000 + "\n"},
            {"stream": "42 apples\n"},
        ]
        if "false" in text:
            steps.append({"errorDetail": {"code": 1}, "error": "The command 'false' returned a non-zero code: 1"})
        else:
            self.have(request.query["t"])
        return web.Response(text="\r\n".join(map(json.dumps, steps)))

    # ------------------------------------------------------------------ containers

    async def create(self, request: web.Request) -> web.Response:
        name, body = request.query["name"], await request.json()
        if body["Image"] not in self.images:
            return refusal(404, f"No such image: {body['Image']}")
        if name in self.containers:
            return refusal(409, f'Conflict. The container name "/{name}" is already in use')
        await asyncio.sleep(self.plan.get("create_seconds", 0))
        for mount in body["HostConfig"].get("Mounts", ()):
            if self.plan.get("makes_folders"):  # as Podman does
                Path(mount["Source"]).mkdir(parents=True, exist_ok=True)
            if not Path(mount["Source"]).exists() or self.plan.get("elsewhere"):
                text = f"bind source path does not exist: {mount['Source']}"
                return refusal(400, f'invalid mount config for type "bind": {text}')
        if "StorageOpt" in body["HostConfig"] and not self.plan.get("quota"):
            return refusal(500, "--storage-opt is supported only for overlay over xfs with 'pquota' mount option")
        self.containers[name] = Container(name, body)
        warnings = self.plan.get("warnings", [])
        return web.json_response({"Id": name, "Warnings": warnings}, status=201)

    async def list_networks(self, request: web.Request) -> web.Response:
        labels = json.loads(request.query["filters"])["label"]
        found = [each for each in self.networks if all(label in each["Labels"] for label in labels)]
        return web.json_response(found)

    async def create_network(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["CheckDuplicate"] and any(each["Name"] == body["Name"] for each in self.networks):
            return refusal(409, f"network with name {body['Name']} already exists")
        if "no_networks" in self.plan:
            return refusal(500, "could not find an available, non-overlapping IPv4 address pool")
        self.networks.append({**body, "Id": f"id-of-{body['Name']}", "Created": f"{time.time()}"})
        return web.json_response({"Id": self.networks[-1]["Id"]}, status=201)

    async def list(self, request: web.Request) -> web.Response:
        labels = json.loads(request.query["filters"])["label"]
        assert request.query["all"] == "1"
        found = [
            {
                "Id": each.name,
                "Names": [f"/{each.name}"],
                "State": each.status,
                "Created": int(self.plan.get("created", time.time())),
                "Labels": each.body["Labels"],
            }
            for each in self.containers.values()
            if all(label in each.body["Labels"] for label in labels)
        ]
        return web.json_response(found)

    async def events(self, request: web.Request) -> web.Response:
        filters = json.loads(request.query["filters"])
        assert float(request.query["until"]) <= time.time()
        found = [
            {"Type": "container", "Action": action, "time": int(when), "timeNano": int(when * 1e9)}
            for action, when in self.containers[filters["container"][0]].events
            if action in filters["event"]
        ]
        return web.Response(text="".join(json.dumps(event) + "\n" for event in found))

    async def inspect(self, request: web.Request) -> web.Response:
        container = self.containers.get(request.match_info["name"])
        if container is None:
            return missing(request)
        while self.plan.get("clearing"):
            await asyncio.sleep(0.05)
        pid = container.process.pid if container.process is not None and container.status == "running" else 0
        state = {
            "Status": container.status,
            "Running": container.status == "running",
            "Paused": bool(self.plan.get("paused")),
            "OOMKilled": container.oom,
            "Pid": pid,
            "ExitCode": container.exit_code,
            "Error": "",
        }
        return web.json_response({"Id": container.name, "State": state, "Config": container.body})

    async def file_status(self, request: web.Request) -> web.Response:
        status = self.plan.get("files", {}).get(request.query["path"])
        if status is None:
            return web.Response(status=404)
        header = base64.b64encode(json.dumps({"linkTarget": "", **status}).encode()).decode()
        return web.Response(headers={"X-Docker-Container-Path-Stat": header})

    async def start(self, request: web.Request) -> web.Response:
        container = self.containers.get(request.match_info["name"])
        if container is None:
            return missing(request)
        if "full" in self.plan:
            return refusal(500, self.plan["full"])
        self.starting += 1
        self.most_starting = max(self.most_starting, self.starting)
        try:
            await asyncio.sleep(self.plan.get("start_seconds", START_SECONDS))
            await self.launch(container)
        finally:
            self.starting -= 1
        return web.Response(status=204)

    async def launch(self, container: Container) -> None:
        bwrap = find_bwrap()
        handle, path = tempfile.mkstemp(prefix="output-", dir=self.folder)
        container.output = Path(path)
        env = {} if bwrap.libraries is None else {"LD_LIBRARY_PATH": bwrap.libraries}
        body = container.body
        argv = ["/bin/sh", "-c", self.plan["entry"]] if "entry" in self.plan else body.get("Entrypoint") or body["Cmd"]
        argv = [bwrap.path, *arguments(container.body), "--", *argv]
        container.process = await asyncio.create_subprocess_exec(
            *argv, stdout=handle, stderr=handle, env=env, start_new_session=True
        )
        os.close(handle)
        container.status = "running"
        self.follower = asyncio.create_task(self.follow(container, container.process))

    async def follow(self, container: Container, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        await asyncio.to_thread(end_session, process.pid)
        await asyncio.sleep(0.05)  # an engine hears of it a little later
        while self.plan.get("held_up"):
            await asyncio.sleep(0.02)
        container.status, container.exit_code = "exited", code if code >= 0 else 128 - code
        container.events.append(("die", time.time()))
        container.ended.set()

    async def wait(self, request: web.Request) -> web.StreamResponse:
        container = self.containers.get(request.match_info["name"])
        if container is None:
            return missing(request)
        # As the engine does: the header at once, the result when it comes.
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        with contextlib.suppress(ConnectionError):  # nobody waits any more
            await answer.prepare(request)
            if container.status != "created":
                await container.ended.wait()
            await answer.write(json.dumps({"StatusCode": container.exit_code}).encode())
            await answer.write_eof()
        return answer

    async def logs(self, request: web.Request) -> web.Response:
        container = self.containers.get(request.match_info["name"])
        if container is None:
            return missing(request)
        data = container.output.read_bytes() if container.output is not None else b""
        framed = b"".join(frame(2, line) for line in data.splitlines(keepends=True))
        return web.Response(body=framed, content_type="application/vnd.docker.multiplexed-stream")

    async def remove(self, request: web.Request) -> web.Response:
        container = self.containers.get(request.match_info["name"])
        if container is None:
            return missing(request)
        if self.plan.get("unremovable", 0) > 0:
            self.plan["unremovable"] -= 1
            said = "could not kill container: tried to kill container, but did not receive an exit event"
            return refusal(500, self.plan.get("said", said))
        if container.status == "running" and request.query.get("force") != "1":
            return refusal(409, f"cannot remove container {container.name}: container is running")
        await self.end(container)
        self.containers.pop(container.name, None)
        if container.output is not None:
            container.output.unlink(missing_ok=True)
        return web.Response(status=204)

    async def end(self, container: Container) -> None:
        if container.process is not None:
            if container.process.returncode is None:
                container.process.kill()
            await container.ended.wait()

    # ------------------------------------------------------------------ for tests

    async def set_plan(self, request: web.Request) -> web.Response:
        self.plan = await request.json()
        self.networks = self.plan.get("networks", self.networks)
        for name, config in self.plan.get("images", {}).items():
            self.have(name, **config)
        for name, labels in self.plan.get("containers", {}).items():
            self.containers[name] = Container(name, {"Labels": labels}, status="exited")
        for name in self.plan.get("without", []):
            self.images.pop(name, None)
        self.calls.clear()
        self.most_starting = 0
        return web.Response(status=204)

    async def kill(self, request: web.Request) -> web.Response:
        container = self.containers[request.match_info["name"]]
        container.oom = "oom" in request.query
        ago = {action: float(seconds) for action, seconds in request.query.items() if action in ("oom", "kill")}
        container.events += [(action, time.time() - seconds) for action, seconds in ago.items()]
        assert container.process is not None
        container.process.kill()
        return web.Response(status=204)

    async def state(self, _: web.Request) -> web.Response:
        networks = {each["Id"]: each["Options"] for each in self.networks}
        containers = {each.name: {"body": each.body, "status": each.status} for each in self.containers.values()}
        told = {"calls": self.calls, "most_starting": self.most_starting}
        return web.json_response({"containers": containers, "networks": networks, **told})


def end_session(leader: int) -> None:
    """End what a bubblewrap has started that was itself killed before it had tied that to its own life."""
    for pid in children(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            if pid != leader and os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def arguments(body: dict[str, Any]) -> list[str]:
    """bubblewrap's, for a container of this shape."""
    host = body["HostConfig"]
    argv = [
        "--unshare-user",
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--hostname",
        body.get("Hostname", "it"),
    ]
    argv += ["--uid", "0", "--gid", "0", "--as-pid-1", "--die-with-parent", "--clearenv", "--tmpfs", "/"]
    argv += ["--unshare-net"] if host["NetworkMode"] == "none" else []
    for path in SYSTEM:
        if Path(path).exists():
            argv += ["--ro-bind", str(Path(path).resolve()), path]
    argv += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--dir", "/tmp", "--dir", "/root"]
    argv += ["--ro-bind", "/etc/passwd", "/etc/passwd"]
    for mount in host.get("Mounts", ()):
        assert mount["Type"] == "bind"
        argv += ["--ro-bind" if mount["ReadOnly"] else "--bind", mount["Source"], mount["Target"]]
    for entry in ENV:
        name, _, value = entry.partition("=")
        argv += ["--setenv", name, value]
    return [*argv, "--chdir", body.get("WorkingDir") or "/"]


def frame(stream: int, data: bytes) -> bytes:
    return bytes([stream, 0, 0, 0]) + len(data).to_bytes(4, "big") + data


def refusal(status: int, message: str) -> web.Response:
    return web.json_response({"message": message}, status=status)


def missing(request: web.Request) -> web.Response:
    return refusal(404, f"No such container: {request.match_info['name']}")


async def main(socket: str) -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a container become ours, see `end_session`
    engine = Engine(Path(socket).parent)
    app = web.Application(middlewares=[engine.note])
    app.add_routes(engine.routes())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, socket).start()
    os.write(1, b"ready\n")
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it is gone
    await runner.cleanup()  # first: a request could start one more
    for container in engine.containers.values():
        await engine.end(container)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
