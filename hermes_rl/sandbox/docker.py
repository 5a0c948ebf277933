"""A container of a Docker engine, with the helper as its first process.

This module owns the limits of a container (`Container`), the connection of its helper to the runner (`Rendezvous`), the
removal of containers whose runner was killed, and `Docker`, which starts and ends one. Requests to the engine belong to
`docker_engine`.

The helper is the same as in bubblewrap, under a separate Python that the container sees read-only, so an image needs
only `/bin/sh`. It connects through a socket in a shared directory, which carries descriptors: a command costs the same
as in bubblewrap, not an `exec` of the engine, and files are copied byte by byte. When a runner dies, the helper ends,
and its container stops with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import io
import itertools
import logging
import math
import os
import posixpath
import shutil
import socket
import stat
import struct
import tarfile
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from hermes_rl.errors import SandboxFailure, UserError
from hermes_rl.others_files import RefusedFileError, list_below, open_file
from hermes_rl.sandbox.base import (
    DEFAULT_IMAGE,
    DEFAULT_LIMITS,
    KILLED_EXIT_CODE,
    RLIMITS,
    SandboxConfig,
    SandboxFile,
    SandboxService,
)
from hermes_rl.sandbox.cgroup import limit_sockets
from hermes_rl.sandbox.channel import ConnectionLoss, Diagnosis
from hermes_rl.sandbox.docker_engine import (
    VERSION_SECONDS,
    Engine,
    EngineAway,
    EngineError,
    PullStalled,
    RegistryAway,
    registry_of,
)
from hermes_rl.sandbox.docker_ignore import DockerIgnore
from hermes_rl.sandbox.etc import HOSTS, RESOLVER
from hermes_rl.sandbox.helper_sandbox import COMMANDS, NO_CORE, HelperSandbox, Isolation
from hermes_rl.sandbox.helper_system import process_status
from hermes_rl.sandbox.images import cached
from hermes_rl.sandbox.launcher import BOOT, helper_bundle, memory_file, own_python, system_python
from hermes_rl.sandbox.packages import RUNTIME_FOLDER, Layers, runtime_folder, runtime_python
from hermes_rl.sandbox.seccomp import filter_program
from hermes_rl.threads import acquire_in_thread, end_tasks

# -------------------------------------------------------------------------------- the container's limits and rights
# A limit that the engine cannot enforce is an error, unless `best_effort`.

CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
"""Capabilities of root in a container: enough to install packages."""
OF_SERVICES = (*CAPABILITIES, "NET_BIND_SERVICE", "SETPCAP", "SYS_CHROOT")
"""The same for a service, with the capabilities that servers need when they start."""
HEALTH_SECONDS = 1
"""Seconds between two health checks of a service."""
WORDS = {"memory": "memory", "processes": "pids", "cpu": "cpu"}
"""Limit → a word of the engine's warning that it cannot enforce it."""
IN_FORCE = {
    "memory": ("memory.max", "memory/memory.limit_in_bytes"),
    "processes": ("pids.max", "pids/pids.max"),
    "cpu": ("cpu.max", "cpu/cpu.cfs_quota_us", "cpu,cpuacct/cpu.cfs_quota_us"),
}
"""Limit → the files that contain it, with control groups of version 2 and of version 1."""
GROUP = "cgroup.procs"
"""File that each control group has, of both versions."""
CPU_PERIOD = 100_000
"""Microseconds; the kernel's and every engine's default."""


class Container:
    """One container, from its name on."""

    def __init__(self, engine: Engine, name: str, image: str, config: SandboxConfig) -> None:
        self.engine = engine
        self.name = name
        self.image = image
        self.config = config
        self.built: Mapping[str, str] = {}
        """Directories from which images were built, and the engine's name of each."""
        self.network = "none"
        """The engine's name of its network."""
        self.etc: Sequence[dict[str, Any]] = ()
        """Files that replace the ones that the engine would write into it."""
        self.limits = {limit: getattr(config.limits, limit) or default for limit, default in DEFAULT_LIMITS.items()}
        self.image_variables: list[str] = []
        """Names of the image's variables; the helper starts without their values, and commands get them."""
        self._unenforced: set[str] = set()

    def enforced(self) -> dict[str, str]:
        """Return the limits in force, each with how."""
        bounds = {"memory": "per container", "processes": "per container", **dict.fromkeys(RLIMITS, "per process")}
        requested = self.config.limits.requested()
        bounds |= {name: "per container" for name in ("cpu", "disk") if name in requested}
        return {name: how for name, how in bounds.items() if name not in self._unenforced}

    async def start(self, command: list[str], *folders: dict[str, Any]) -> None:
        """Create and start it; raises `EngineError`, or `UserError` for a request that this engine can never fulfil."""
        body = self._container_body(command, folders)
        try:
            warnings = await self.engine.create(self.name, body)
        except EngineError as error:
            warnings = await self._create_otherwise(error, body)
        self._refuse_warnings(warnings)
        try:
            await self.engine.start(self.name)
        except EngineError as error:
            if "StorageOpt" not in body["HostConfig"] or "quota" not in error.message.lower():
                raise
            raise UserError(
                f"sandbox.limits.disk is too small for the image {self.image}, whose own files some storage drivers of "
                f"Docker count too ({error.message}): raise it by the size of the image, or leave it out"
            ) from error

    async def _create_otherwise(self, error: EngineError, body: dict[str, Any]) -> list[str]:
        """Create it without a disk limit if the engine has refused that limit; else raise an error with a fix."""
        if "mount" in error.message.lower() and "path" in error.message.lower():
            raise UserError(
                f"the Docker engine does not see this machine's files ({error.message}): where the runner is itself in "
                "a container, mount its TMPDIR and XDG_CACHE_HOME into it from folders of the same path on the "
                "engine's machine"
            ) from error
        if "StorageOpt" not in body["HostConfig"] or "storage" not in error.message.lower():
            raise error
        self._note_unenforced("disk", error.message)
        del body["HostConfig"]["StorageOpt"]
        return await self.engine.create(self.name, body)

    def _refuse_warnings(self, warnings: list[str]) -> None:
        """Refuse limits that the kernel cannot enforce, of which the engine only warns."""
        for warning in warnings:
            for name, word in WORDS.items():
                if "discarded" in warning.lower() and word in warning.lower():
                    self._note_unenforced(name, warning)

    async def look_at_limits(self, sandbox: HelperSandbox) -> None:
        """Read from the container's control groups which limits are in force: some engines drop them silently.

        A container in a group without the file has no limit, as in the root group, where rootless engines leave it. If
        groups cannot be read, the engine's report is trusted.
        """
        cpu = self.config.limits.cpu
        expected_limits = {"memory": self.limits["memory"], "processes": self.limits["processes"] + 1}
        expected_limits |= {} if cpu is None else {"cpu": max(1, int(cpu * CPU_PERIOD))}
        for name, limit in expected_limits.items():
            for file in IN_FORCE[name]:
                text = await _content(sandbox, file)
                if text is None and await _content(sandbox, posixpath.join(posixpath.dirname(file), GROUP)) is None:
                    continue
                first = (text or "").partition(" ")[0]
                if not first.isdigit() or int(first) > limit:
                    evidence = "missing" if text is None else repr(text)
                    self._note_unenforced(name, f"the container's {file} is {evidence}")
                break

    def _note_unenforced(self, name: str, evidence: str) -> None:
        self._unenforced.add(name)
        enforceable = {*self.config.limits.requested()} - {name}
        self.config.limits.require_at_most(enforceable, f"by this Docker engine ({evidence})")

    def names(self) -> list[str]:
        """Return the names of its containers, its services first."""
        return [*map(self._name_of, self.config.services), self.name]

    def _name_of(self, service: SandboxService) -> str:
        return f"{self.name}-{service.name}"

    async def start_service(self, service: SandboxService) -> None:
        """Create and start a service of this container, which runs; raises `EngineError`."""
        name = self._name_of(service)
        image = self.built.get(service.image, service.image)
        service_config: dict[str, Any] = {
            "Image": image,
            "Env": [f"{key}={value}" for key, value in service.env.items()],
        }
        if service.command:
            service_config["Cmd"] = list(service.command)
        if service.healthy is not None:
            seconds = HEALTH_SECONDS * 1_000_000_000
            service_config["Healthcheck"] = {
                "Test": ["CMD-SHELL", service.healthy],
                "Interval": seconds,
                "Retries": 1_000_000,
            }
        # In the network of the sandbox, and so without a separate bridge and addresses, of which an engine has few.
        host = self._host_config(f"container:{self.name}", OF_SERVICES)
        # Copies: its programs could take a lease on shared files, and so delay everybody who opens them.
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            host["Mounts"] = [
                shared_folder(Path(shutil.copy(each["Source"], folder)), each["Target"]) for each in self.etc
            ]
            labels = {LABEL: f"{own_mark()}:{name}"}
            await self.engine.create(name, {**service_config, "Labels": labels, "HostConfig": host})
            if service.files:
                await self.engine.lay(name, _tar_archive(service.files))
            await self.engine.start(name)

    async def until_healthy(self, service: SandboxService) -> None:
        """Wait until a service can be used; raises `SandboxFailure` if it ends instead."""
        name = self._name_of(service)
        while True:
            state = ((await self.engine.inspect(name)) or {}).get("State") or {}
            health = str((state.get("Health") or {}).get("Status") or "none")
            if not state.get("Running") or health == "unhealthy":
                how = f"ended ({state.get('ExitCode')})" if not state.get("Running") else "is not healthy"
                logs = await self.engine.logs(name)
                raise SandboxFailure(f"the service {service.name} {how}: {logs or 'no message'}")
            if health in ("none", "healthy"):
                return
            await asyncio.sleep(HEALTH_SECONDS / 5)

    def _host_config(self, network: str, capabilities: Sequence[str]) -> dict[str, Any]:
        """Return the host configuration for a container of the sandbox."""
        limits, requested = self.limits, self.config.limits
        host: dict[str, Any] = {
            "NetworkMode": network,
            "Memory": limits["memory"],
            "MemorySwap": limits["memory"],
            "OomScoreAdj": 1000,  # when memory runs out, containers are killed before the runner
            "PidsLimit": limits["processes"] + 1,  # the helper is a process too
            "CapDrop": ["ALL"],
            "CapAdd": list(capabilities),
            # SELinux would keep the container from the rendezvous; elsewhere the second option means nothing.
            "SecurityOpt": [
                "no-new-privileges",
                *(["label=disable"] if Path("/sys/fs/selinux/enforce").exists() else []),
            ],
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
        }
        if requested.cpu is not None:
            host["NanoCpus"] = int(requested.cpu * 1_000_000_000)
        return host

    def _container_body(self, command: list[str], folders: Sequence[dict[str, Any]]) -> dict[str, Any]:
        host = self._host_config(self.network, CAPABILITIES)
        host["Mounts"] = [*folders, *self.etc]
        if self.config.limits.disk is not None:
            host["StorageOpt"] = {"size": str(self.config.limits.disk)}
        return {
            "Image": self.built.get(self.image, self.image),
            "Entrypoint": command,
            "Cmd": [],
            "WorkingDir": "/",
            "Hostname": "sandbox",
            # The helper loads nothing that the image names: neither libraries nor the data and modules of a locale.
            "Env": [*(f"{name}=" for name in self.image_variables if name != "LC_ALL"), "LC_ALL=C"],
            "Labels": {LABEL: f"{own_mark()}:{self.name}"},
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": host,
        }


async def _content(sandbox: HelperSandbox, file: str) -> str | None:
    """Return the content of a file of the container's control groups, or None if it cannot be read."""
    try:
        return await sandbox.control_group(file)
    except OSError:
        return None


def _tar_archive(files: Sequence[SandboxFile]) -> bytes:
    """Return files as a tar archive of paths below the root."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for file in files:
            entry = tarfile.TarInfo(file.to.lstrip("/"))
            entry.size, entry.mode = len(file.data), file.mode
            archive.addfile(entry, io.BytesIO(file.data))
    return data.getvalue()


def build_context(folder: Path) -> bytes:
    """Return a directory with a Dockerfile as a tar archive, which does not depend on where and when its files were
    made.

    Links stay links, so that they only lead to files of the image. Raises `SandboxFailure` if it cannot be read.
    """

    def strip_metadata(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = MADE
        return entry

    data = io.BytesIO()
    try:
        with tarfile.open(fileobj=data, mode="w") as archive:
            (folder / "Dockerfile").stat()
            lines = folder / IGNORE_FILE
            if lines.is_file() and lines.stat().st_size > LARGEST_IGNORED:
                raise SandboxFailure(f"{lines} is larger than {LARGEST_IGNORED} bytes: exclude whole directories")
            ignored = DockerIgnore(lines.read_text("utf-8", "replace") if lines.is_file() else "")

            def is_excluded(path: Path) -> bool:
                name = str(path.relative_to(folder))
                return name not in ("Dockerfile", IGNORE_FILE) and ignored.leaves_out(name)

            for path, mode in list_below(folder, folder, is_excluded).items():
                name = str(path.relative_to(folder))
                if stat.S_ISREG(mode):
                    with open_file(path, folder) as file:
                        archive.addfile(strip_metadata(archive.gettarinfo(arcname=name, fileobj=file)), file)
                else:
                    archive.add(path, name, recursive=False, filter=strip_metadata)
    except (OSError, RefusedFileError) as error:
        raise SandboxFailure(f"the folder {folder} cannot be built: {error}") from error
    return data.getvalue()


def etc_files(names: Sequence[str], resolver: str | None) -> list[dict[str, Any]]:
    """Return the files in a container's /etc about names of machines, read-only; blocks.

    Files that an engine provides are on its disk, where no limit of the container counts data that is written to them.

    Args:
        names: names of services, which are found on the container's loopback.
        resolver: content of resolv.conf; None: it is left to the engine.
    """
    hosts = HOSTS["hosts"] + "".join(f"127.0.0.1 {name}\n" for name in names)
    texts = {**HOSTS, "hosts": hosts} | ({} if resolver is None else {RESOLVER: resolver})

    def make(folder: Path) -> None:
        for name, text in texts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o644)
        folder.chmod(0o755)

    folder = cached(f"container-etc/{hashlib.sha256(repr(texts).encode()).hexdigest()[:32]}", make)
    return [shared_folder(folder / name, f"/etc/{name}") for name in texts]


def shared_folder(folder: Path, target: str) -> dict[str, Any]:
    """Return the mount of a directory of this machine that the container sees, read-only."""
    return {"Type": "bind", "Source": str(folder), "Target": target, "ReadOnly": True}


# -------------------------------------------------------------------------------- rendezvous
# The helper connects to the runner at a socket in a directory that both see. Once it has connected, directory and
# socket are removed: no other process in the container can connect, and nothing is left over.

RENDEZVOUS_FOLDER = "/.hermes-rl-rendezvous"
"""Path of the directory in the container."""
SOCKET_NAME = "socket"
PREFIX = "hermes-rl-rendezvous-"

CONNECT = f"""
import _socket, os, sys
control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
control.connect("{RENDEZVOUS_FOLDER}/{SOCKET_NAME}")
rest = control.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)[1]
sys.argv[1:] = [str(control.detach()), str(int.from_bytes(rest[0][2][:4], sys.byteorder))]
"""
"""Connects, gets the helper's code, and leaves both descriptors where `BOOT` expects them."""


class Rendezvous:
    """Created before the container; `close` may be called twice."""

    def __init__(self) -> None:
        # No other user of this machine may enter the outer directory; the container sees the inner one.
        self._outer = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.folder = self._outer / "in"
        self.folder.mkdir()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listen()
        except BaseException:  # the caller has nothing to close, and the directory exists
            self.close()
            raise

    def _listen(self) -> None:
        entered = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        try:  # by descriptor: a path of a socket has 107 bytes at most
            self._listener.bind(f"/proc/self/fd/{entered}/{SOCKET_NAME}")
        finally:
            os.close(entered)
        self._listener.listen(1)
        self.folder.chmod(0o755)
        (self.folder / SOCKET_NAME).chmod(0o666)  # for any user id of the container on this machine

    async def accept(self, code: int) -> tuple[socket.socket, int]:
        """Wait for the helper and send it its code, a descriptor; return its socket and its process id on this
        machine.
        """
        control, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        try:
            socket.send_fds(control, [b"x"], [code])
            peer = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except BaseException:  # only this method knows the connection
            control.close()
            raise
        return control, int(struct.unpack("3i", peer)[0])

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self._outer, ignore_errors=True)


# -------------------------------------------------------------------------------- leftovers of killed runners
# A label contains the runner of a container, and its name: an image that a user commits from a sandbox passes the label
# on to the user's containers. A dead runner can be detected only if it had this machine's boot and PID namespace, so a
# container of any other runner is removed once it does not run and is too old to be starting. The directory of a
# rendezvous is only needed during a start.

LABEL = "hermes-rl.runner"
RUNNING = ("running", "paused", "restarting")
"""States in which a container has processes."""
CONTAINER_SECONDS, FOLDER_SECONDS = 86400.0, 3600.0
"""Ages in seconds from which a stopped container, and the directory of a rendezvous, count as abandoned."""

log = logging.getLogger(__name__)


@functools.cache
def _format_marker(pid: int) -> str:
    return f"{_boot_id()}:{_pid_namespace()}:{pid}:{_read_start_time(pid)}"


def own_mark() -> str:
    """Return a name for this process that no other process of this machine has, had or will have."""
    return _format_marker(os.getpid())


def is_dead(marker: str) -> bool:
    """Return True if `marker` belongs to a dead runner of this machine, boot and PID namespace."""
    fields = marker.split(":")
    if len(fields) != 4 or fields[:2] != [_boot_id(), _pid_namespace()]:
        return False
    return fields[2].isdigit() and _read_start_time(int(fields[2])) != fields[3]


async def leftovers(engine: Engine) -> list[str]:
    """Return the containers that dead runners have left; remove the directories for their helpers."""
    await asyncio.to_thread(_remove_folders)
    leftover_names = []
    for container in await engine.containers(LABEL):
        marker, _, name = container["Labels"][LABEL].rpartition(":")
        if f"/{name}" not in container["Names"]:
            continue
        aside = container["State"] not in RUNNING and time.time() - container["Created"] > CONTAINER_SECONDS
        if aside or is_dead(marker):
            leftover_names.append(name)
    return leftover_names


def _remove_folders() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):
            info = folder.lstat()
            if info.st_uid == os.geteuid() and time.time() - info.st_mtime > FOLDER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").stat().st_ino)


def _read_start_time(pid: int) -> str:
    """Return the start time of a process, in ticks since the machine's start; empty if there is no such process."""
    try:
        return process_status(pid)[19].decode()
    except OSError:
        return ""


# -------------------------------------------------------------------------------- one sandbox

NETWORK = "hermes-rl"
"""Network of all containers with `network: true`, which persists: an engine has addresses for few networks."""
APART = {"com.docker.network.bridge.enable_icc": "false"}
"""Options by which containers in it cannot reach each other."""
RESOLVES = "nameserver 127.0.0.11\noptions ndots:0\n"
"""The engine's own resolver, as containers in such a network see it."""
BUILT = "hermes-rl-built"
"""Name of images that were built from a directory; the tag is a digest of its content."""
IGNORE_FILE = ".dockerignore"
LARGEST_IGNORED = 1 << 16
"""Maximum bytes of that file."""
MADE = 946684800
"""Modification time of all files in a build context: the first day of 2000."""
STARTS_AT_ONCE = 8
"""Containers of one event loop that are started together; with more requests an engine gets slower, not faster."""
PULLS_AT_ONCE = 4
"""Images of one registry that are pulled together, and images that are built together."""
IMAGE_SECONDS = 3600.0
"""Maximum seconds for pulling an image, with all tries, or building one."""
DIAGNOSIS_SECONDS = 10.0
"""Maximum seconds for the engine to report how a container has ended."""
CONTAINER_END_SECONDS = 10.0
"""Maximum seconds to wait for the end of a container."""
REMOVE_PAUSES = (0.2, 1.0, 3.0)
"""Seconds before each retry of a removal; an engine may still be busy with the container's end."""
REMOVE_SECONDS = 15.0
"""Seconds that a sandbox waits for the removal of its container, which then continues in the background."""
LATER_PAUSES = (1.0, 5.0, 20.0, 60.0)
"""Seconds before each retry in the background; the last value repeats."""
OUTAGE_SECONDS = 1800.0
"""Maximum seconds that a start waits for an engine that is away, as a call waits for model servers that are down."""
OUTAGE_PAUSE = 1.0
"""Seconds between two checks if it is back."""
REGISTRY_PAUSE = 5.0
"""Seconds before a pull is retried from a registry that is away."""
OOM_SECONDS = 5.0
"""Seconds for which a helper may still respond after the memory shortage that kills it: events come late."""

_starts: WeakKeyDictionary[asyncio.AbstractEventLoop, _StartupState] = WeakKeyDictionary()


async def remove_now() -> None:
    """Try once more to remove the containers of this event loop that could not be removed.

    An engine that was away has left some, and the loop may end before the next attempt in the background. The next
    runner on this host removes what is left.
    """
    if (starts := _starts.get(asyncio.get_running_loop())) is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REMOVE_SECONDS):
                await starts.remove_all()


class _StartupState:
    """Shared data of the sandboxes of one event loop while they start."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(STARTS_AT_ONCE)
        self.first = asyncio.Lock()
        self.images: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Held while an image is pulled or built, by its name."""
        self.sources: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(PULLS_AT_ONCE))
        """Limits on images that are pulled together, by their registry, and on images that are built together."""
        self.checked: set[str] = set()
        """Sockets of engines that have responded, and whose leftovers are removed."""
        self.built: dict[str, str] = {}
        """Directories from which images are built, in their state at first use, and the engine's name of each."""
        self.unpulled: dict[str, tuple[float, SandboxFailure]] = {}
        """Images that could not be pulled or built: when, on the loop's clock, and why."""
        self.registries: dict[str, str] = {}
        """The latest image that each registry has provided."""
        self.unremoved: dict[str, Engine] = {}
        """Containers that could not be removed yet, each with its engine."""
        self._reported_containers: set[str] = set()
        """Containers for which a removal failure was reported to the user."""
        self._removing: asyncio.Task[None] | None = None
        self.away: dict[str, float] = {}
        """The engine and registries that are away: since when, on the loop's clock."""

    def remove_later(self, engine: Engine, *names: str) -> None:
        """Remove containers in the background, again and again while the event loop runs."""
        self.unremoved |= dict.fromkeys(names, engine)
        if self._removing is None or self._removing.done():
            self._removing = asyncio.create_task(self._remove())

    async def _remove(self) -> None:
        for pause in itertools.chain(LATER_PAUSES, itertools.repeat(LATER_PAUSES[-1])):
            await self.remove_all()
            if not self.unremoved:
                return
            await asyncio.sleep(pause)

    async def remove_all(self) -> None:
        """Try to remove each container that could not be removed yet."""
        await asyncio.gather(*(self._remove_one(*each) for each in self.unremoved.items()))

    async def _remove_one(self, name: str, engine: Engine) -> None:
        try:
            await engine.remove(name)
        except EngineAway as error:
            log.info("the container %s is not removed yet: %s", name, error)
        except EngineError as error:
            if name not in self._reported_containers:
                log.warning(
                    "the container %s cannot be removed, which is tried again in the background: %s", name, error
                )
            self._reported_containers.add(name)
        else:
            self.unremoved.pop(name, None)

    def say_away(self, component: str, reason: str, waiting: str) -> None:
        """Warn that the engine or a registry is away, once for all starts that wait for it."""
        if component not in self.away:
            self.away[component] = asyncio.get_running_loop().time()
            log.warning("%s; %s wait for it for up to %.0f minutes", reason, waiting, OUTAGE_SECONDS / 60)

    def say_back(self, component: str) -> None:
        if component in self.away:
            seconds = asyncio.get_running_loop().time() - self.away.pop(component)
            log.warning("%s is back after %.0f s; the run continues", component, seconds)


class Docker(Isolation):
    """See `Isolation`; `network: true` is a network of the engine, with its address translation."""

    start_seconds = 120.0

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.engine = Engine()
        self.image = config.image or DEFAULT_IMAGE
        self.home = "/root"
        self.workdir = config.workdir or "/"
        self.container = Container(self.engine, f"hermes-rl-{self.id}", self.image, config)
        self._image_config: Mapping[str, Any] = {}
        """User, working directory and variables of the image."""
        self._packages = Layers(config.packages, config.npm, image=True)
        self._starts = _StartupState()
        self._creating: asyncio.Task[None] | None = None
        self._removing: asyncio.Task[None] | None = None
        self._package_mounts: list[dict[str, Any]] = []
        """Directories of its packages, in the form for the engine."""
        self._heard_at: Callable[[], float] = lambda: 0.0
        """Returns the time of the helper's last message, in seconds since 1970."""
        self._pid = 0
        self._started_at = 0.0
        """Time since when this start waits for its turn, on the loop's clock."""

    @property
    def enforced(self) -> Mapping[str, str]:
        return self.container.enforced()

    @property
    def pid(self) -> int:
        if not self._pid:
            raise SandboxFailure("the sandbox is not started")
        return self._pid

    def environment(self) -> dict[str, str]:
        variables = {"LANG": "C.UTF-8", **self._image_variables(), "HOME": self.home, "TERM": "dumb"}
        return (
            {**variables, "PATH": self._packages.path(variables.get("PATH", COMMANDS))}
            if self._packages.mount_paths
            else variables
        )

    def _image_variables(self) -> dict[str, str]:
        return dict(entry.partition("=")[::2] for entry in self._image_config.get("Env") or ())

    # ------------------------------------------------------------------ starting

    async def start(self, sandbox: HelperSandbox) -> None:
        loop = asyncio.get_running_loop()
        self._starts = _starts.setdefault(loop, _StartupState())
        self._heard_at = lambda: sandbox.connection.heard_at
        python = system_python() or own_python()
        code = await asyncio.to_thread(helper_bundle, python)
        runtime = await asyncio.to_thread(runtime_folder, python)
        registry = registry_of(self.image)
        self._package_mounts = [
            shared_folder(folder, target)
            for target, folder in (await asyncio.to_thread(self._packages.ensure_folders)).items()
        ]
        until: float | None = None
        while True:
            self._started_at = loop.time()
            try:
                await self._try_and_watch(sandbox, code, runtime)
                return
            except EngineError as error:
                raise SandboxFailure(f"the sandbox did not start: {error}") from error
            except SandboxFailure as error:
                if self._pid:
                    raise
                # An engine that has responded before is only away for a while: to fail now would fail every rollout.
                away = isinstance(error, EngineAway) or not await self.engine.answers()
                passing = isinstance(error, RegistryAway) and await self._is_away(registry)
                until = until or loop.time() + OUTAGE_SECONDS
                if not (away or passing) or loop.time() > until:
                    raise
                if away:
                    self._starts.say_away(self.engine.name, error.detail, "new sandboxes")
                    while loop.time() <= until:
                        await asyncio.sleep(OUTAGE_PAUSE)
                        if await self.engine.answers():
                            break
                else:
                    self._starts.say_away(
                        f"the registry {registry}", error.detail, f"sandboxes of images from {registry}"
                    )
                    await asyncio.sleep(REGISTRY_PAUSE)
                await self._give_up_container()

    async def _is_away(self, registry: str) -> bool:
        """Return True if a registry that has given an image does not answer now: else the failed image is to blame."""
        known_image = self._starts.registries.get(registry)
        return known_image is not None and not await self.engine.registry_answers(known_image)

    async def _try_and_watch(self, sandbox: HelperSandbox, code: bytes, runtime: Path) -> None:
        """Start, and report if the engine does not respond meanwhile: a frozen engine breaks no connection."""
        trying = asyncio.create_task(self._try_to_start(sandbox, code, runtime))
        try:
            while not (await asyncio.wait([trying], timeout=VERSION_SECONDS))[0]:
                if await self.engine.answers():
                    self._starts.say_back(self.engine.name)
                elif not trying.done():
                    self._starts.say_away(self.engine.name, f"{self.engine.name} does not answer", "new sandboxes")
            await trying
            self._starts.say_back(self.engine.name)
        finally:
            await end_tasks([trying])

    async def _give_up_container(self) -> None:
        """Schedule the removal of a container of an earlier try, and use another name."""
        if self._creating is not None:
            await asyncio.gather(self._creating, return_exceptions=True)
            self._starts.remove_later(self.engine, *self.container.names())
            self.container = Container(self.engine, f"hermes-rl-{uuid.uuid4().hex[:12]}", self.image, self.config)
            self._creating = None

    async def _try_to_start(self, sandbox: HelperSandbox, code: bytes, runtime: Path) -> None:
        await self._prepare_images()
        async with self._starts.slots, self.in_time():
            control = await self._start_container(code, runtime)
            # This filter is added to the engine's filter, which lets the agent's processes change process 1's use of
            # the processor.
            rlimits = {rlimit: self.container.limits[name] for name, rlimit in RLIMITS.items()}
            rlimits["RLIMIT_CORE"] = NO_CORE
            await sandbox.connect(control, rlimits, system_calls=filter_program() or b"")
            if not sandbox.has_shell:
                raise sandbox.unusable_image(f"has no {sandbox.shell}")
            await self._make_folders(sandbox)
            await self.container.look_at_limits(sandbox)
            limit_sockets(self._pid, self.container.limits["memory"])
            for service in self.config.services:
                self._creating = asyncio.create_task(self.container.start_service(service))
                await asyncio.shield(self._creating)
                await self.container.until_healthy(service)

    async def _prepare_images(self) -> None:
        """Ensure that the engine responds and has the image."""
        starts = self._starts
        async with starts.first:
            if self.engine.socket not in starts.checked:
                await self.engine.check()
                starts.remove_later(self.engine, *await leftovers(self.engine))
                starts.checked.add(self.engine.socket)
        image = await self._inspect_image(self.image)
        starts.say_back(self.engine.name)
        for service in self.config.services:
            if await self._inspect_image(service.image) is None:
                await self._pull(service.image)
        if image is None:
            image = await self._pull(self.image)
        if image is None:
            raise SandboxFailure(f"the engine has no image {self.image}, although it was pulled")
        self._image_config = image.get("Config") or {}
        await self._find_network()
        self.container.image_variables = list(self._image_variables())
        # An image that was built here has an id and no digest of a registry.
        self.image_digest = next(iter(image.get("RepoDigests") or ()), image.get("Id"))

    async def _find_network(self) -> None:
        """Give the container the network that its sandbox requests, in which it finds no other container."""
        resolver: str | None = ""
        if self.config.network is True and await self.engine.is_podman():
            self.container.network, resolver = "bridge", None
        elif self.config.network is True:
            self.container.network, resolver = await self.engine.network(NETWORK, APART), RESOLVES
        names = [service.name for service in self.config.services]
        self.container.etc = await asyncio.to_thread(etc_files, names, resolver)

    async def _inspect_image(self, name: str) -> dict[str, Any] | None:
        """Return the engine's data of an image, or None if it must be pulled, or built from a directory."""
        built = self.container.built = self._starts.built
        if name.startswith("/") and name not in built:
            await self._read_context(name)
        return await self.engine.image(built.get(name, name))

    async def _pull(self, name: str) -> dict[str, Any] | None:
        """Pull or build an image, once for all waiting callers: they share its failure too."""
        starts = self._starts
        source = BUILT if name in starts.built else registry_of(name)
        lock = starts.images.setdefault(starts.built.get(name, name), asyncio.Lock())
        async with lock, starts.sources[source]:
            image = await self._inspect_image(name)
            if image is not None:
                return image
            when, failure = starts.unpulled.get(name, (self._started_at, None))
            if failure is not None and when > self._started_at:
                raise type(failure)(failure.detail)
            try:
                async with asyncio.timeout(IMAGE_SECONDS):
                    await (self._build(name) if source == BUILT else self.engine.pull(name))
            except TimeoutError:
                # For the rest of the run: each rollout of this image would wait as long again.
                error = SandboxFailure(
                    f"the image {name} is not there after {IMAGE_SECONDS:.0f} s: pull or build it beforehand (`docker "
                    "pull`, `docker build`)"
                )
                starts.unpulled[name] = math.inf, error
                raise error from None
            except SandboxFailure as error:
                # One that stalls would do so for each rollout of it.
                until = math.inf if isinstance(error, PullStalled) else asyncio.get_running_loop().time()
                starts.unpulled[name] = until, error
                raise
            if source != BUILT:
                starts.say_back(f"the registry {source}")
                starts.registries[source] = name
            return await self._inspect_image(name)

    async def _build(self, folder: str) -> None:
        log.warning("an image is built of %s, which may take minutes", folder)
        context = await self._read_context(folder)
        try:
            await self.engine.build(self._starts.built[folder], context)
        except EngineAway:
            raise
        except SandboxFailure as error:
            raise SandboxFailure(f"the image of {folder} cannot be built: {error.detail}") from error

    async def _read_context(self, folder: str) -> bytes:
        """Return a build context; the image that is built from it is named after its content."""
        context = await asyncio.to_thread(build_context, Path(folder))
        self._starts.built[folder] = f"{BUILT}:{hashlib.sha256(context).hexdigest()}"
        return context

    async def _start_container(self, code: bytes, runtime: Path) -> socket.socket:
        """Start the container, wait for its helper, and return the helper's socket."""
        rendezvous = await acquire_in_thread(Rendezvous, Rendezvous.close)
        mounts = (
            shared_folder(runtime, RUNTIME_FOLDER),
            shared_folder(rendezvous.folder, RENDEZVOUS_FOLDER),
        )
        try:
            self.python = runtime_python(runtime)  # an image may have none
            command = [*self.python, "-c", CONNECT + BOOT]
            self._creating = asyncio.create_task(self.container.start(command, *mounts, *self._package_mounts))
            await asyncio.shield(self._creating)
            return await self._meet_helper(rendezvous, code)
        finally:
            if self._creating is None or self._creating.done():
                rendezvous.close()
            else:  # On cancellation the request continues: Podman would create the directory again
                self._creating.add_done_callback(lambda _: rendezvous.close())

    async def _meet_helper(self, rendezvous: Rendezvous, code: bytes) -> socket.socket:
        """Wait for the helper at the rendezvous, or for the end of its container."""
        passed = memory_file(code, "helper")
        accepting = asyncio.create_task(rendezvous.accept(passed))
        exited = asyncio.create_task(self.engine.wait(self.container.name))
        try:
            await asyncio.wait([accepting, exited], return_when=asyncio.FIRST_COMPLETED)
            if not accepting.done():
                logs = await self.engine.logs(self.container.name)
                raise SandboxFailure(f"the container ended at its start ({exited.result()}): {logs or 'no message'}")
            control, self._pid = accepting.result()
            return control
        finally:
            os.close(passed)
            for task in (accepting, exited):
                task.cancel()
            await asyncio.gather(accepting, exited, return_exceptions=True)

    async def _make_folders(self, sandbox: HelperSandbox) -> None:
        """Make home and working directory of the image if they do not exist."""
        self.home = await self._own_home(sandbox)
        image_workdir = self._image_config.get("WorkingDir") or "/"
        start = self.home if image_workdir == "/" else image_workdir
        self.workdir = posixpath.normpath(posixpath.join(start, self.config.workdir or ""))
        for folder in (self.home, self.workdir):
            try:
                await sandbox.make_dir(folder)
            except OSError as error:
                raise SandboxFailure(f"{folder} cannot be made as the image's user: {error.strerror}") from error

    async def _own_home(self, sandbox: HelperSandbox) -> str:
        home = self._image_variables().get("HOME", "")
        if home.startswith("/"):
            return home
        user = str(self._image_config.get("User") or "root").partition(":")[0]
        with contextlib.suppress(OSError):
            lines = (await sandbox.read_file("/etc/passwd")).decode("utf-8", "replace").splitlines()
            for fields in (line.split(":") for line in lines):
                if len(fields) > 5 and user in (fields[0], fields[2]) and fields[5].startswith("/"):
                    return fields[5]
        return "/root" if user in ("root", "0") else "/tmp"

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        if self._removing is None and self._creating is not None:
            self._removing = asyncio.create_task(self._remove(self._creating))
        if self._removing is not None:
            # Continues if the waiting caller is cancelled.
            await asyncio.shield(self._removing)

    async def diagnose(self, loss: ConnectionLoss) -> Diagnosis:
        """Report an infrastructure failure if the engine is lost, or a container was paused or killed with memory
        left.
        """
        state: Mapping[str, Any] = {}
        times: Mapping[str, float] = {}
        with contextlib.suppress(SandboxFailure, EngineError, TimeoutError):
            if loss is not ConnectionLoss.SILENT:
                await self._wait_for_end()  # the engine learns of it later than this process
            async with asyncio.timeout(DIAGNOSIS_SECONDS):
                times = await self._events()
                # Last: an engine does not respond while it clears a container away, which an agent could make slow.
                state = ((await self.engine.inspect(self.container.name)) or {}).get("State") or {}
        # The time that a container takes to end proves nothing: an agent that wants no grade could delay it. A helper
        # that still responded after a memory shortage was not killed by it. The engine forgets events after a while.
        recent = times["oom"] >= self._heard_at() - OOM_SECONDS if "oom" in times else bool(state.get("OOMKilled"))
        if recent and "kill" not in times:
            return Diagnosis(detail="the container's memory was used up")
        if not state or loss is ConnectionLoss.SILENT:
            return Diagnosis(is_infrastructure_failure=not state or bool(state.get("Paused")))
        detail = f"the container was lost (exit code {state.get('ExitCode')}; {state.get('Error') or '-'})"
        killed = "kill" in times or state.get("ExitCode") == KILLED_EXIT_CODE
        return Diagnosis(is_infrastructure_failure=killed, detail=detail)

    async def _wait_for_end(self) -> None:
        """Wait for the end of the container, for a limited time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONTAINER_END_SECONDS):
                await self.engine.wait(self.container.name)

    async def _events(self) -> dict[str, float]:
        """Return the times when its memory was last used up, and when the engine was asked to kill it, if they are
        known.
        """
        try:
            return dict(await self.engine.events(self.container.name, "oom", "kill"))
        except EngineError:
            return {}

    async def _remove(self, creating: asyncio.Task[None]) -> None:
        await asyncio.gather(creating, return_exceptions=True)
        removing = [self._remove_container(name) for name in self.container.names()]
        for error in await asyncio.gather(*removing, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error

    async def _remove_container(self, name: str) -> None:
        """Remove a container, or leave that to the background if it takes long.

        Raises `SandboxFailure` if the engine refuses it and the container still runs.
        """
        refused: EngineError | None = None
        try:
            async with asyncio.timeout(REMOVE_SECONDS):
                for pause in (*REMOVE_PAUSES, None):
                    try:
                        await self.engine.remove(name)
                    except EngineError as error:
                        refused = error
                        if pause is not None:
                            await asyncio.sleep(pause)
                    else:
                        return
        except (EngineAway, TimeoutError) as error:
            # Without its engine the container still stops, as its first process does.
            log.info("the container %s is not removed yet: %s", name, error)
        self._starts.remove_later(self.engine, name)
        if refused is not None and await self._is_running(name):
            raise SandboxFailure(f"the container {name} is closed and still runs: {refused}")

    async def _is_running(self, name: str) -> bool:
        try:
            return bool((((await self.engine.inspect(name)) or {}).get("State") or {}).get("Running"))
        except EngineError:
            return True
