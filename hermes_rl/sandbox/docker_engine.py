"""HTTP API of a Docker engine on its unix socket, as far as sandboxes need it.

This module owns requests, their errors, builds and retried pulls. Every request has a separate connection, so that
nothing stays open between them. Source of paths and shapes: the Docker Engine API reference; paths contain no version,
so that an engine uses its newest version (the oldest accepted version rises from release to release).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from base64 import b64decode
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import aiohttp

from hermes_rl.errors import SandboxFailure, UserError

DEFAULT_SOCKET = "/var/run/docker.sock"
REQUEST_SECONDS = 120.0
VERSION_SECONDS = 10.0
"""Maximum seconds for an engine to report its version, until it counts as away."""
PULL_SECONDS = 300.0
"""Seconds without progress after which a pull has failed."""
PULL_BYTES = 1 << 20
"""Bytes of a layer that are progress. A registry that sends a few bytes a second would hold a pull for hours."""
BUILD_SILENCE_SECONDS = 3600.0
"""The same for a build, whose steps may work for long before they report progress."""
SAID_OF_ERROR = 600
"""Characters of a refusal that are shown."""
SAID_OF_BUILD = 2000
"""Characters of the output of a failed build that are shown."""
PULL_PAUSES = (2.0, 8.0)
"""Seconds before each retry of a pull."""
LOG_LINES = 20
ACCOUNT_FILES = ("/etc/passwd", "/etc/group")
"""Files of an image that the engine itself reads, as root of this machine, when it starts a container."""
LARGEST_ACCOUNTS = 1 << 20
"""Maximum bytes of each."""
SYMLINK, SPECIAL = 1 << 27, 0x8F280000
"""Bits of a file's mode, as Go writes it: a symlink, and everything that is not a regular file."""
HEADER = 8
"""Bytes in front of each chunk of a multiplexed stream: which stream, three zeros, length (big endian)."""
REMEDY = (
    "start the engine (`systemctl start docker`), let this user reach its socket (`usermod -aG docker $USER`, then log "
    "in again), or name another in DOCKER_HOST (unix:///run/user/1000/docker.sock)"
)


class EngineError(Exception):
    """The engine refused a request: the HTTP status and its message, which may contain parts of an agent's files."""

    def __init__(self, status: int, message: str) -> None:
        half = SAID_OF_ERROR // 2
        message = message if len(message) <= SAID_OF_ERROR else f"{message[:half]} … {message[-half:]}"
        super().__init__(f"the Docker engine says ({status}): {message}")
        self.status = status
        self.message = message


class EngineAway(SandboxFailure):
    """The engine did not respond: it is stopped, or just starting."""


class RegistryAway(SandboxFailure):
    """An image could not be pulled, for a reason that may be temporary: its registry does not respond, or is too
    busy.
    """


class PullStalled(SandboxFailure):
    """Failure of a pull: the registry sends almost no data."""


def engine_socket() -> str:
    """Return the path of the engine's socket; raises `UserError` if DOCKER_HOST names something else."""
    host = os.environ.get("DOCKER_HOST") or f"unix://{DEFAULT_SOCKET}"
    if not host.startswith("unix:///"):
        raise UserError(
            f"DOCKER_HOST is {host!r}; sandboxes need an engine on this machine, with a unix socket (unix:///…): they "
            "share a folder with it"
        )
    return host.removeprefix("unix://")


class Engine:
    """One engine. Requests raise `EngineError` if it refuses, `EngineAway` if it does not respond."""

    def __init__(self, socket: str | None = None) -> None:
        self.socket = socket or engine_socket()
        self.name = f"the Docker engine at {self.socket}"

    async def check(self) -> str:
        """Return the engine's version; raises `UserError` with a fix if there is none."""
        try:
            return await self.version()
        except SandboxFailure as error:
            raise UserError(f"the docker sandbox cannot be used: {error}; {REMEDY}") from error

    async def version(self) -> str:
        """Return the engine's version; raises `SandboxFailure` if none responds."""
        try:
            return str((await self._json("GET", "/version")).get("Version", "unknown"))
        except EngineError as error:
            raise SandboxFailure(str(error)) from error

    async def answers(self) -> bool:
        """Return True if the engine responds now."""
        try:
            async with asyncio.timeout(VERSION_SECONDS):
                await self.version()
        except (SandboxFailure, TimeoutError):
            return False
        return True

    async def image(self, name: str) -> dict[str, Any] | None:
        """Return the engine's data of an image (`Id`, `RepoDigests`, `Config`), or None if it does not have it."""
        return await self._json_or_none(f"/images/{quote(name)}/json")

    async def pull(self, name: str) -> None:
        """Pull an image; retry after a pause if that may help.

        Raises `RegistryAway` if the reason may be temporary; `PullStalled` if almost nothing comes; `SandboxFailure` if
        the registry does not have the image, or denies access.
        """
        for pause in (*PULL_PAUSES, None):
            try:
                await self._pull(name)
            except PullStalled:
                raise
            except (EngineError, SandboxFailure) as error:
                if isinstance(error, EngineError) and _is_refusal(error):
                    raise SandboxFailure(f"the image {name} cannot be pulled: {error}{_pull_advice(error)}") from error
                if pause is None:
                    raise RegistryAway(f"the image {name} cannot be pulled: {error}") from error
                await asyncio.sleep(pause)
            else:
                return

    async def registry_answers(self, name: str) -> bool:
        """Return True if its registry still has an image that was pulled before; Podman cannot be asked."""
        try:
            await self._call("GET", f"/distribution/{quote(name)}/json")
        except (EngineError, SandboxFailure):
            return False
        return True

    async def build(self, name: str, context: bytes) -> None:
        """Build an image from a build context, a tar archive with a Dockerfile; raises `SandboxFailure` if it fails."""
        log: deque[str] = deque(maxlen=LOG_LINES)
        query = {"t": name, "rm": "1", "forcerm": "1"}
        try:
            async with self._request("POST", "/build", query, context, None, BUILD_SILENCE_SECONDS) as answer:
                async for step in _progress_messages(answer):
                    log.append(str(step.get("stream") or ""))
        except EngineError as error:
            last = "".join(log).strip()[-SAID_OF_BUILD:]
            raise SandboxFailure(f"{error.message}\n{last}".strip()) from error

    async def create(self, name: str, container: Mapping[str, Any]) -> list[str]:
        """Create a container under this name, and return the engine's warnings."""
        answer = await self._json("POST", "/containers/create", {"name": name}, container)
        return list(answer.get("Warnings") or ())

    async def lay(self, name: str, archive: bytes) -> None:
        """Unpack a tar archive below the root of a container that is not started yet."""
        async with self._request("PUT", f"/containers/{name}/archive", {"path": "/"}, archive, REQUEST_SECONDS):
            pass

    async def start(self, name: str) -> None:
        """Start a container; raises `SandboxFailure` if the engine would read a pipe or a device of its image."""
        for path in ACCOUNT_FILES:
            status = await self._file_status(name, path)
            if status is not None and (status["mode"] & SPECIAL or status["size"] > LARGEST_ACCOUNTS):
                raise SandboxFailure(
                    f"{path} of the image is not a regular file of at most {LARGEST_ACCOUNTS >> 20} MiB; choose "
                    "another image"
                )
        await self._call("POST", f"/containers/{name}/start")

    async def inspect(self, name: str) -> dict[str, Any] | None:
        return await self._json_or_none(f"/containers/{name}/json")

    async def wait(self, name: str) -> int:
        """Wait until it does not run; return its exit code."""
        async with self._request(
            "POST", f"/containers/{name}/wait", {"condition": "not-running"}, None, None
        ) as answer:
            return int((await answer.json())["StatusCode"])

    async def logs(self, name: str) -> str:
        """Return the last lines of its first process's output."""
        query = {"stdout": "1", "stderr": "1", "tail": str(LOG_LINES)}
        return joined(await self._call("GET", f"/containers/{name}/logs", query)).decode("utf-8", "replace").strip()

    async def remove(self, name: str) -> None:
        """Kill and remove a container; one that is missing or being removed is not an error."""
        try:
            await self._call("DELETE", f"/containers/{name}", {"force": "1", "v": "1"})
        except EngineError as error:
            if error.status not in (404, 409):
                raise

    async def events(self, name: str, *actions: str) -> list[tuple[str, float]]:
        """Return the events of a container with these actions: each with the time, in seconds since 1970.

        An engine remembers its last 256 events, or fewer.
        """
        filters = {"container": [name], "event": actions, "type": ["container"]}
        # Without an end in the past the response continues forever.
        query = {"since": "0", "until": f"{time.time():.9f}", "filters": json.dumps(filters)}
        lines = (await self._call("GET", "/events", query)).splitlines()
        events = [json.loads(line) for line in lines if line.strip()]
        return [(event["Action"], event["timeNano"] / 1e9) for event in events]

    async def is_podman(self) -> bool:
        """Return True if Podman responds instead of Docker."""
        parts = (await self._json("GET", "/version")).get("Components") or ()
        return any(part.get("Name") == "Podman Engine" for part in parts)

    async def network(self, name: str, options: Mapping[str, str]) -> str:
        """Return the id of the network with this name and these options; create it if it does not exist.

        Raises:
            UserError: the engine cannot create it, or the name belongs to another network.
        """
        query = {"filters": json.dumps({"label": [name]})}
        networks: list[dict[str, Any]] = json.loads(await self._call("GET", "/networks", query))
        if not networks:
            shape = {"Name": name, "CheckDuplicate": True, "Driver": "bridge", "Options": options, "Labels": {name: ""}}
            try:
                await self._json("POST", "/networks/create", body=shape)
            except EngineError as error:
                if error.status != 409:  # another process has just made it
                    raise UserError(
                        f"sandbox.network: this engine cannot make a network that keeps containers apart ({error}); "
                        "list the hosts that the agent may reach instead"
                    ) from error
            networks = json.loads(await self._call("GET", "/networks", query))
        fitting = [each for each in networks if (each.get("Options") or {}).items() >= options.items()]
        if not fitting:
            raise UserError(
                f"sandbox.network: the engine has another network of the name {name}: `docker network rm {name}`"
            )
        # Old engines let two processes create two at once: all take the same one.
        return str(min(fitting, key=lambda each: (str(each.get("Created")), str(each["Id"])))["Id"])

    async def containers(self, label: str) -> list[dict[str, Any]]:
        """Return the engine's entry of each container with this label, running or not (`Id`, `State`, `Created`,
        `Labels`).
        """
        query = {"all": "1", "filters": json.dumps({"label": [label]})}
        containers: list[dict[str, Any]] = json.loads(await self._call("GET", "/containers/json", query))
        return containers

    # ------------------------------------------------------------------ requests

    async def _file_status(self, name: str, path: str) -> dict[str, Any] | None:
        """Return the status of a file in a container (`size`, and `mode` as Go writes it), or None if it is missing."""
        status: dict[str, Any] = {"mode": SYMLINK, "linkTarget": path}
        for _ in range(2):  # the engine resolves a link to its last target
            if status["mode"] & SYMLINK:
                query = {"path": str(status["linkTarget"])}
                try:
                    async with self._request(
                        "HEAD", f"/containers/{name}/archive", query, None, REQUEST_SECONDS
                    ) as answer:
                        status = json.loads(b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
                except EngineError as error:
                    if error.status != 404:
                        raise
                    return None
        return status

    async def _pull(self, name: str) -> None:
        # Without a tag the engine would get every tag of the repository.
        query = {"fromImage": name if _has_tag(name) else f"{name}:latest"}
        loop, bytes_by_layer = asyncio.get_running_loop(), dict[tuple[Any, Any], int]()
        try:
            async with (
                asyncio.timeout(PULL_SECONDS) as bound,
                self._request("POST", "/images/create", query, None, None) as answer,
            ):
                async for step in _progress_messages(answer):
                    layer, bytes_so_far = (step.get("id"), step.get("status")), _bytes_of(step)
                    if bytes_so_far is None or bytes_so_far - bytes_by_layer.get(layer, -PULL_BYTES) >= PULL_BYTES:
                        bytes_by_layer[layer] = bytes_so_far or 0
                        bound.reschedule(loop.time() + PULL_SECONDS)
        except TimeoutError:
            minimum_rate = f"{PULL_BYTES >> 20} MiB in {PULL_SECONDS:.0f} s"
            raise PullStalled(
                f"the image {name} cannot be pulled: its registry sends less than {minimum_rate}. Pull it "
                "beforehand (`docker "
                "pull`)"
            ) from None

    async def _json(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await self._call(method, path, query, body))
        return answer

    async def _json_or_none(self, path: str) -> dict[str, Any] | None:
        try:
            return await self._json("GET", path)
        except EngineError as error:
            if error.status == 404:
                return None
            raise

    async def _call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> bytes:
        async with self._request(method, path, query, body, REQUEST_SECONDS) as answer:
            return await answer.read()

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | bytes | None,
        seconds: float | None,
        silence: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        limits = aiohttp.ClientTimeout(total=seconds, sock_read=silence)
        tar = {"Content-Type": "application/x-tar"}
        sent: dict[str, Any] = {"data": body, "headers": tar} if isinstance(body, bytes) else {"json": body}
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(self.socket), timeout=limits) as session,
                session.request(method, f"http://docker{path}", params=query, **sent) as answer,
            ):
                if answer.status >= 400:
                    raise EngineError(answer.status, _error_text(await answer.read()))
                yield answer
        except (aiohttp.ClientError, OSError, ValueError) as error:  # OSError includes timeouts
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise EngineAway(f"{self.name} does not answer: {reason}") from error


async def _progress_messages(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the messages of a pull or a build during its progress; raises `EngineError` if it has failed."""
    pending = b""
    more = True
    while more:
        data = await answer.content.readany()
        more = data != b""
        *lines, pending = [*(pending + data).split(b"\n"), *([] if more else [b""])]  # the last line may have no end
        for line in lines:
            step = json.loads(line) if line.strip() else {}
            # Once it has started, an error is a line of a response whose status was 200.
            if step.get("error"):
                raise EngineError(500, step["error"])
            yield step


def _bytes_of(step: Mapping[str, Any]) -> int | None:
    """Return the bytes of a layer that a message of a pull reports, or None if it reports none."""
    detail = step.get("progressDetail")
    so_far = detail.get("current") if isinstance(detail, Mapping) else None
    return so_far if isinstance(so_far, int) else None


def joined(stream: bytes) -> bytes:
    """Return the output of both streams of a container, in order, without the headers in between."""
    text, offset = bytearray(), 0
    while offset + HEADER <= len(stream):
        size = int.from_bytes(stream[offset + 4 : offset + HEADER], "big")
        text += stream[offset + HEADER : offset + HEADER + size]
        offset += HEADER + size
    return bytes(text)


NOT_HAD = ("manifest unknown", "name unknown", "repository name not known", "not found", "denied")
NOT_GIVEN = ("unauthorized", "no basic auth credentials", "authentication required")


def _is_refusal(error: EngineError) -> bool:
    """Return True if a pull would be refused again. Engines report that by a status, or by a line of a response."""
    message = error.message.lower()
    return error.status in (400, 401, 403, 404) or any(phrase in message for phrase in NOT_HAD + NOT_GIVEN)


def _pull_advice(error: EngineError) -> str:
    if error.status != 401 and not any(phrase in error.message.lower() for phrase in NOT_GIVEN):
        return ""
    return (
        "; the registry asks for a password, which the sandbox does not have: `docker login` and `docker pull` it first"
    )


def registry_of(name: str) -> str:
    """Return the registry of an image name, by Docker's rules."""
    first, slash, _ = name.partition("/")
    return first if slash and ("." in first or ":" in first or first == "localhost") else "docker.io"


def _has_tag(name: str) -> bool:
    return "@" in name or ":" in name.rpartition("/")[2]


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:500].decode("utf-8", "replace")
