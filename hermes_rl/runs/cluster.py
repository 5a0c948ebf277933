"""Workers as actors of a Ray cluster. This is the only module that imports Ray, and only if a run asks for it.

Ray places actors, starts them on nodes that join, reports their death, and carries requests and responses. This module
owns how an actor is requested, which setup it receives, and how it holds a `Player`. Keys travel as arguments of calls,
in pieces small enough that Ray keeps them in memory; they never appear in a runtime environment, a log, or a dashboard.
Any process that may join a cluster receives them and runs code in the run, so Ray must ask every process for a token.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from pathlib import Path
from types import ModuleType
from typing import Any

from hermes_rl import __version__
from hermes_rl.errors import RunError, UserError, install_command
from hermes_rl.others_files import read_regular
from hermes_rl.rollouts.admission import POLL_INTERVAL, raise_descriptor_limit
from hermes_rl.rollouts.variables import key_names
from hermes_rl.runs import handles
from hermes_rl.runs.handles import DiedError, Heard, WorkerAnswer, WorkerHandle, wait_for
from hermes_rl.runs.packaging import pack, stage, unpack
from hermes_rl.runs.rollout_worker import RolloutWorker, WorkerSetup
from hermes_rl.runs.run_log import secrets_of
from hermes_rl.spec.model import Spec
from hermes_rl.threads import reduce_gc_pauses
from hermes_rl.tools.artifacts import TakenArtifact

log = logging.getLogger(__name__)

LOCAL = "local"
"""Address value for a cluster that is started on this machine and ends with the run."""
CALLS = 10_000
"""Concurrent requests per actor."""
PIECE = 1 << 16
"""Bytes of an argument that Ray keeps in memory; a larger argument goes through its object store, which may be on
disk.
"""
STORE = 512 << 20
"""Bytes of the object store of a cluster that is started on this machine."""
CONNECT = 10.0
"""Timeout in seconds for connecting to the head of a cluster."""
LEAST = "2.52"
"""First Ray version that can ask for a token."""
MODE, TOKEN, TOKEN_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Variables by which Ray decides to require a token, and which one."""
OPEN, REFUSED = 3, 4
"""Exit statuses of `KNOCK`: the cluster accepts a process without a token, or rejects the token of this process."""
KNOCK = f"""
import os, sys
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient
from ray.exceptions import AuthenticationError

def admitted(mode):
    os.environ[{MODE!r}] = mode
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        GcsClient(address=sys.argv[1]).get_all_node_info(timeout={CONNECT})
    except AuthenticationError:
        return False
    return True

sys.exit({OPEN} if admitted("disabled") else 0 if admitted("token") else {REFUSED})
"""
"""Program that asks the head of a cluster for its nodes, without a token and with this process's token. Ray has no
other way to check this.
"""
KNOCK_SECONDS = 60.0
"""Timeout of that program in seconds; most of the time is spent importing Ray."""
MAX_WORKERS = 256
"""Maximum number of workers if the run does not set a number."""
NODE = "ray.io/node-id"
"""The label that Ray gives to each node."""
ON_THE_NODE = frozenset({"bubblewrap", "docker", "singularity", "none"})
"""Backends whose sandboxes take cores and memory of the node."""


@dataclass(frozen=True)
class Needs:
    """Resources that a worker requests from Ray: a core for itself, or as much as one sandbox of the spec may use."""

    cpus: float
    memory: int

    @staticmethod
    def from_specs(specs: Iterable[Spec]) -> Needs:
        """Return the needs that are enough for a worker of any of the specs, so that each slot in a cluster fits them
        all.
        """
        cpus, memory = 1.0, 0
        for sandbox in [spec.sandbox for spec in specs if spec.sandbox.backend in ON_THE_NODE]:
            if isinstance(sandbox.limits.cpu, int | float):
                cpus = max(cpus, sandbox.limits.cpu)
            if isinstance(sandbox.limits.memory, int):
                memory = max(memory, sandbox.limits.memory)
        return Needs(cpus, memory)

    def room(self, node: Mapping[str, Any]) -> int:
        """Return how many workers a node has room for, if nothing else runs on it."""
        has = node["Resources"]
        rooms = [int(has.get("CPU", 0) / self.cpus)]
        rooms += [int(has.get("memory", 0) / self.memory)] if self.memory else []
        return min(rooms)

    def __str__(self) -> str:
        memory = f" and {self.memory / 2**30:.1f} GiB of memory" if self.memory else ""
        return f"{self.cpus:g} CPU{memory}"


@asynccontextmanager
async def connected(
    openings: Sequence[WorkerSetup], address: str, note: Callable[[str], None]
) -> AsyncIterator[RayConnection]:
    """Connect to a cluster, or start one on this machine; disconnect from it, or end it, afterwards.

    `openings` are the setups of the workers of each environment that shares the connection. `address` is the address of
    the head of the cluster as HOST:PORT, or `auto` or `local`. Raises `UserError` if Ray is not installed, cannot be
    reached, or is not suitable.
    """
    try:
        import ray
        import ray.exceptions  # a directory called ray has none
    except ImportError:
        raise UserError(f"--ray needs Ray, which is not installed: {install_command('ray')}") from None
    if ray.is_initialized():
        raise UserError(
            "--ray: this process is connected to a Ray cluster already; let it disconnect first. Environments that "
            "run at the same time share a connection: hermes_rl.connect_ray"
        )
    for key in (opening.spec.policy_api_key for opening in openings):
        if key is not None and any(key.get_secret_value() in word for word in sys.orig_argv):
            raise UserError(
                "--openai.api_key: Ray shows the command line in its dashboard. Put the key into a variable, and name "
                "that: --set servers.policy.api_key_env=NAME"
            )
    # The kernel ends the processes that Ray starts here together with their parent thread, so that thread must stay.
    thread = ThreadPoolExecutor(1, thread_name_prefix="hermes-rl-ray")
    in_it = partial(asyncio.get_running_loop().run_in_executor, thread)
    with _token_required(ray, address):
        try:
            with tempfile.TemporaryDirectory(prefix="hermes-rl-spec-") as folder:
                folders: tuple[Path, ...] = ()
                head = address
                if address != LOCAL:
                    head = await in_it(_closed_head, ray, address)
                    of_all = frozenset[Path]().union(*(opening.spec.folders for opening in openings))
                    keys = set[bytes]().union(*map(_secret_keys, openings))
                    folders = await asyncio.to_thread(stage, of_all, Path(folder), keys, note)
                await in_it(_connect_ray, ray, head, folder if folders else None)  # the head has the files then
            _restore_sigterm_handler()
            yield RayConnection(ray, [opening.spec for opening in openings], address, folders, note)
        finally:
            stop_reason = in_it(ray.shutdown)
            while not stop_reason.done():  # Ray removes all handlers of SIGTERM seconds before its processes have ended
                await asyncio.wait([stop_reason], timeout=0.01)
                _restore_sigterm_handler()
            await stop_reason
            thread.shutdown(wait=False)


@asynccontextmanager
async def open_cluster(
    opening: WorkerSetup, ray: str | RayConnection, worker_count: int | None, note: Callable[[str], None]
) -> AsyncIterator[Cluster]:
    """Yield a cluster as the source of workers of one environment.

    `ray` is the address of a cluster (see `connected`), or the connection that the environment shares with others. If
    `worker_count` is None, the cluster runs as many workers as it has room for. Raises `UserError` if the cluster is
    not available or has no room.
    """
    async with AsyncExitStack() as stack:
        if isinstance(ray, str):
            ray = await stack.enter_async_context(connected([opening], ray, note))
        cluster = Cluster(ray, opening, worker_count, note)
        stack.enter_context(ray.shared_by(cluster))
        await cluster.start()
        yield cluster


def _secret_keys(opening: WorkerSetup) -> set[bytes]:
    """Return the keys among the variables that workers get."""
    keys = {value for name in key_names(opening.spec) if (value := opening.variables.get(name))}
    return {key.encode() for key in keys.union(secrets_of(opening.variables))}


@contextmanager
def _token_required(ray: ModuleType, address: str) -> Iterator[None]:
    """Make Ray ask for a token, and send one, while this process is connected.

    A cluster of this machine gets a new token, which is only in the memory of its processes. Raises `UserError` if this
    Ray version does not support tokens, or there is none for the address.
    """
    raylet = ray._raylet
    if not hasattr(raylet, "AuthenticationTokenLoader"):
        raise UserError(
            f"--ray needs Ray {LEAST} or later, and {ray.__version__} is installed: it requires no token, so any "
            f"machine that reaches its ports could run code in this run. pip install -U 'ray>={LEAST}'"
        )
    before = {name: os.environ.get(name) for name in (MODE, TOKEN)}
    os.environ[MODE] = "token"
    try:
        if address == LOCAL:
            os.environ[TOKEN] = secrets.token_hex(32)
        elif not _has_token():
            raise UserError(
                f"--ray {address}: there is no token, without which any machine that reaches the cluster could run "
                f"code in this run. Start the head and all nodes with {MODE}=token and one {TOKEN} (or {TOKEN_FILE}, "
                "the path of a file with it), and this program with the same: docs/scale.md has recipes"
            )
        _reread_token(raylet)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _reread_token(raylet)


def _reread_token(raylet: Any) -> None:
    """Make Ray, which may have been imported long ago, read its variables again."""
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def _has_token() -> bool:
    """Return True if Ray finds a token in its search locations; an unreadable file ends the process."""
    if os.environ.get(TOKEN):
        return True
    file = Path(os.environ.get(TOKEN_FILE) or "~/.ray/auth_token").expanduser()
    try:
        return bool(read_regular(file).decode().strip())
    except (OSError, UnicodeDecodeError):
        return False


def _closed_head(ray: ModuleType, address: str) -> str:
    """Return the address of the head, as HOST:PORT; blocks.

    Raises `UserError` if the head cannot be reached, accepts processes without a token, or rejects this process's
    token.
    """
    _require_reachable(address)
    try:
        head: str = ray._private.services.canonicalize_bootstrap_address_or_die(address)
    except ConnectionError as error:
        raise _cannot_connect(ray, address, error) from error
    command = [sys.executable, "-P", "-c", KNOCK, head]
    try:
        knock = subprocess.run(command, capture_output=True, timeout=KNOCK_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise _cannot_connect(ray, address, "its head does not answer") from error
    if knock.returncode == OPEN:
        raise UserError(
            f"--ray {address}: the cluster requires no token, so any machine that reaches it could run code in "
            f"this run. Start the head and all nodes with {MODE}=token and one {TOKEN}: docs/scale.md has recipes"
        )
    if knock.returncode == REFUSED:
        raise UserError(
            f"--ray {address}: the cluster has another token: {TOKEN} (or {TOKEN_FILE}) has to be what its head and "
            "its nodes were started with"
        )
    if knock.returncode != 0:
        last_line = knock.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise _cannot_connect(ray, address, last_line)
    return head


def _restore_sigterm_handler() -> None:
    """Set this process's handler of SIGTERM again: Ray's own prints a stack and ends the process at once."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _cannot_connect(ray: ModuleType, address: str, error: object) -> UserError:
    return UserError(
        f"--ray {address}: Ray {ray.__version__} cannot connect: {str(error).strip()}\nThis program has to run on "
        "a node of the cluster, with the Ray and the Python that the cluster has"
    )


def _require_reachable(address: str) -> None:
    """Raise UserError if nothing listens at the address; Ray itself would retry for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        raise UserError(
            f"--ray {address}: expected HOST:PORT of the head of the cluster, such as 10.0.0.1:6379; `auto` finds the "
            "cluster of this machine, and --ray alone starts one"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT).close()
    except (OSError, ValueError) as error:  # the latter for a name or port that cannot be one
        raise UserError(
            f"--ray {address}: nothing answers there ({error}). `ray status` on a node of the cluster tells its "
            "address; --ray alone starts a cluster on this machine"
        ) from None


def _connect_ray(ray: ModuleType, address: str, folder: str | None) -> None:
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    # Ray has no switch for its messages to stdout when a node dies; stdout is for the results of the command line.
    vars(ray)["_private"].worker.print_to_stdstream = _log_ray_text
    more: dict[str, Any] = {"runtime_env": {"working_dir": folder}} if folder is not None else {}
    if address == LOCAL:
        more |= {"include_dashboard": False, "object_store_memory": STORE}
    try:
        ray.init(address, log_to_driver=False, configure_logging=False, logging_level=logging.CRITICAL, **more)
    except (OSError, RuntimeError, ValueError) as error:
        raise _cannot_connect(ray, address, error) from error


def _log_ray_text(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Log the text that Ray would print."""
    log.info("Ray: %s", "\n".join(data["lines"]))


class RayConnection:
    """Connection of this process to a Ray cluster, and the environments that share the room there.

    It serves the environments of `specs`, whose `folders` were copied to the nodes.
    """

    def __init__(
        self, ray: ModuleType, specs: Sequence[Spec], address: str, folders: Sequence[Path], note: Callable[[str], None]
    ) -> None:
        self.ray, self.address, self.folders = ray, address, folders
        self.needs = Needs.from_specs(specs)
        self.alone = len(specs) == 1
        """True if it serves one environment, which reports the cluster to the user itself."""
        self.nodes: list[Mapping[str, Any]] = []
        """Nodes that are alive."""
        self._specs, self._awaited, self._note = specs, list(specs), note
        self.sharing: list[Cluster] = []

    async def look(self) -> None:
        """Update the list of nodes, and tell the user if it has changed."""
        nodes = await asyncio.to_thread(self.ray.nodes)
        before, self.nodes = self.cluster_resources, [node for node in nodes if node["Alive"]]
        if not self.alone and self.cluster_resources != before:
            self._note(f"{self}, for {len(self._specs)} environments")

    @contextmanager
    def shared_by(self, cluster: Cluster) -> Iterator[None]:
        """Give an environment its share of the room while it is open. Raises UserError."""
        if not any(cluster.spec is spec for spec in self._specs):
            raise UserError(
                f"ray: the connection was opened for other specs than {cluster.spec.name}: load each spec once, and "
                "give hermes_rl.connect_ray and open_env the same objects"
            )
        self._awaited = [spec for spec in self._awaited if spec is not cluster.spec]
        self.sharing.append(cluster)
        try:
            yield
        finally:
            self.sharing.remove(cluster)

    def share(self, cluster: Cluster) -> int:
        """Return how many workers of an environment there is room for, in addition to the workers of the others."""
        room = sum(map(self.needs.room, self.nodes))
        requested_counts = [sharing.max_workers for sharing in self.sharing] + [MAX_WORKERS] * len(self._awaited)
        share = share_evenly(room, requested_counts)[self.sharing.index(cluster)]
        return min(share, sum(map(self.needs.room, cluster.nodes)))

    def __str__(self) -> str:
        location = "on this machine" if self.address == LOCAL else f"at {self.address}"
        return f"Ray cluster {location}: {self.cluster_resources}"

    @property
    def cluster_resources(self) -> str:
        nodes = len(self.nodes)
        cpus = sum(node["Resources"].get("CPU", 0) for node in self.nodes)
        memory = max((node["Resources"].get("memory", 0) for node in self.nodes), default=0)
        memory_text = f", at most {memory / 2**30:.1f} GiB of memory each" if self.needs.memory else ""
        return f"{nodes} node{'' if nodes == 1 else 's'} with {cpus:g} CPU{memory_text}"

    def explain(self) -> str:
        others = "" if self.alone else f" for {len(self.sharing) + len(self._awaited)} environments"
        return f"a worker asks for {self.needs}, and the Ray cluster has {self.cluster_resources}{others}"


def share_evenly(room: int, requested_counts: Sequence[int]) -> list[int]:
    """Return how many slots each environment gets if slots are dealt out in turns, up to its requested number."""
    shares = [0] * len(requested_counts)
    while room > 0 and (wanting := [index for index, limit in enumerate(requested_counts) if shares[index] < limit]):
        for index in wanting[:room]:
            shares[index] += 1
        room -= len(wanting)
    return shares


class Cluster:
    """A Ray cluster, as where the workers of one environment come from; `number` None: as many as there is room for."""

    def __init__(
        self, connection: RayConnection, opening: WorkerSetup, worker_count: int | None, note: Callable[[str], None]
    ) -> None:
        self.worker_count = worker_count or 1
        self.connection, self.spec = connection, opening.spec
        self.has_artifacts = bool(opening.spec.artifacts)
        self.placed = 0
        """Workers that are on a node, when it was last looked."""
        self._excluded: set[str] = set()
        """Nodes on which no worker of this environment can run rollouts."""
        self._follows, self._note = worker_count is None, note
        calls = [server.max_concurrency for servers in opening.spec.servers.values() for server in servers]
        self.max_workers = min([MAX_WORKERS, *calls]) if worker_count is None else worker_count
        packed = pack(opening, connection.folders)
        self.setup_chunks = [packed[start : start + PIECE] for start in range(0, len(packed), PIECE)]
        needs = connection.needs
        more = {"memory": needs.memory} if needs.memory else {}
        self._actor = connection.ray.remote(_Actor)
        self._options = {
            "num_cpus": needs.cpus,
            "max_concurrency": CALLS,
            "scheduling_strategy": "SPREAD",
            "enable_task_events": False,  # Ray's record of calls would grow with the run
            **more,
        }

    @property
    def nodes(self) -> list[Mapping[str, Any]]:
        """The nodes on which its workers may run."""
        return [node for node in self.connection.nodes if node["NodeID"] not in self._excluded]

    async def start(self) -> None:
        """Set the number of workers, and tell the user. Raises UserError if no worker can ever run."""
        await self.connection.look()
        share = self.connection.share(self)
        if self._follows:
            self.worker_count = max(1, share)
        if share == 0 and self.connection.address == LOCAL:
            raise UserError(f"--ray: {self.explain()}")
        about = f"{self.connection}; " if self.connection.alone else ""
        self._note(f"{about}workers: {self.worker_count}, each with {self.connection.needs}")
        if share < self.worker_count:
            self._note(f"there is room for {share} of them; the others wait for nodes that join")

    async def look(self) -> None:
        """Follow nodes and environments that join and leave."""
        await self.connection.look()
        target_count = max(1, self.connection.share(self))
        if self._follows and target_count != self.worker_count:
            about = f"the Ray cluster has {self.connection.cluster_resources} now; " if self.connection.alone else ""
            self._note(f"{about}workers: {target_count}, not {self.worker_count}")
            self.worker_count = target_count

    def surplus(self, handles: Sequence[WorkerHandle]) -> list[WorkerHandle]:
        nodes = {node["NodeID"] for node in self.connection.nodes}
        on_nodes = [handle for handle in handles if handle.machine in nodes and not handle.closed]
        self.placed = len(on_nodes)
        surplus = [handle for handle in handles if not handle.placed][: max(0, len(handles) - self.worker_count)]
        others = (other for other in self.connection.sharing if other is not self)
        if any(other.placed < self.connection.share(other) for other in others):
            on_nodes.sort(key=lambda handle: len(handle.pending_requests))
            surplus += on_nodes[: max(0, self.placed - max(1, self.connection.share(self)))]
        return surplus

    def exclude(self, handle: WorkerHandle) -> bool:
        if not handle.machine:
            return False
        self._excluded.add(handle.machine)
        return bool(self.nodes)

    def start_actor(self) -> Any:
        """Return a new actor, which Ray places on a node that is not excluded."""
        excluded = {NODE: f"!in({','.join(sorted(self._excluded))})"} if self._excluded else {}
        return self._actor.options(**self._options, label_selector=excluded).remote()

    def handle(self, worker_index: int, on_message: Heard) -> WorkerHandle:
        return ActorHandle(self, f"worker {worker_index + 1}", on_message)

    def explain(self) -> str:
        return self.connection.explain()


class ActorHandle(WorkerHandle):
    """A worker that is an actor of a Ray cluster."""

    def __init__(self, cluster: Cluster, name: str, on_message: Heard) -> None:
        super().__init__(name, on_message)
        self.placed = False
        self._cluster = cluster
        self._errors = cluster.connection.ray.exceptions
        self._actor: Any = None
        self._closing = asyncio.Event()
        self._waits: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        try:
            self._actor = self._cluster.start_actor()
            if await self._open():
                await self._listen()
                for message in await wait_for(handles.CLOSING, self._actor.close.remote()):
                    self._take_news(message)
        except TimeoutError:
            self.ended = "it said nothing any more"
        except self._errors.RayError as error:
            self.ended = _describe_loss(error)
            if not self.ready and not self.closed:
                self.error = _actor_error(error)
                await self._find_node()
        finally:
            self.kill()
            for wait in self._waits:
                wait.cancel()
            self.fail(DiedError())

    async def _open(self) -> bool:
        """Wait for a slot and set up the worker there; return False if something is wrong."""
        host_info = await self._actor.describe_host.remote()
        self.placed, self.machine = True, host_info["node"]
        self.name, self.location = f"{self.name} (on {host_info['host']})", f"the node {host_info['host']}"
        if host_info["version"] != __version__:
            self.error = UserError(
                f"{host_info['host']} has hermes-rl {host_info['version']}, and this machine {__version__}: "
                "install the same "
                "on all"
            )
            return False
        nodes = self._cluster.connection.nodes
        cores = [node["Resources"].get("CPU", 1) for node in nodes if node["NodeID"] == self.machine]
        self.cores = max(1, int(cores[0] if cores else 1))
        for chunk in self._cluster.setup_chunks:
            await wait_for(handles.START, self._actor.take.remote(chunk))
        wrong = await wait_for(handles.START, self._actor.open.remote())
        self._take_news({"raised": wrong} if wrong is not None else {"ready": True})
        return wrong is None

    async def _find_node(self) -> None:
        """Ask Ray on which node an actor was that ended before it could report this itself."""
        if self.machine or self._actor is None:
            return
        state = self._cluster.connection.ray._private.state
        actor_info = await asyncio.to_thread(state.actors, self._actor._actor_id.hex())
        address = actor_info.get("Address", {})
        nodes = {node["NodeID"]: node["NodeManagerHostname"] for node in self._cluster.connection.nodes}
        if (node := address.get("NodeID")) in nodes:
            self.machine, self.location = node, f"the node {nodes[node]}"

    async def _listen(self) -> None:
        """Receive messages of the actor until it must end."""
        seconds = POLL_INTERVAL * max(1.0, self._cluster.worker_count / 8)
        closing = asyncio.create_task(self._closing.wait())
        try:
            while not closing.done():
                message_task = asyncio.ensure_future(wait_for(handles.SILENT, self._actor.condition.remote(seconds)))
                await asyncio.wait((message_task, closing), return_when=asyncio.FIRST_COMPLETED)
                if not message_task.done():
                    message_task.cancel()
                    return
                for message in message_task.result():
                    self._take_news(message)
        finally:
            closing.cancel()

    def send(self, request_id: int, kind: str, *args: Any) -> None:
        if self.closed or self._actor is None:
            return
        if request_id == 0:
            self._actor.hear.remote(kind, *args)
            return
        answer, artifacts = self._actor.answer.options(num_returns=2).remote(request_id, kind, *args)
        wait = asyncio.create_task(self._wait_for_answer(request_id, answer, artifacts))
        self._waits.add(wait)
        wait.add_done_callback(self._waits.discard)

    async def _wait_for_answer(self, request_id: int, answer: Any, artifacts: Any) -> None:
        try:
            message = await answer
        except self._errors.RayError as error:
            self.ended = self.ended or _describe_loss(error)
            self.kill()  # its remaining results are not available; callers get the error when `live` ends
            return
        get = partial(self._get_artifacts, artifacts) if self._cluster.has_artifacts else None
        self._answered(request_id, WorkerAnswer(message, get))

    def _get_artifacts(self, artifacts: Any) -> Mapping[str, TakenArtifact]:
        """Get artifacts from the node; blocks. Raises `DiedError` if the node is gone."""
        try:
            return dict(self._cluster.connection.ray.get(artifacts) or {})
        except self._errors.RayError as error:
            raise DiedError from error

    def close(self) -> None:
        self.closed = True
        if self.ready:
            self._closing.set()
        else:
            self.kill()

    def kill(self) -> None:
        if self._actor is not None:
            self._cluster.connection.ray.kill(self._actor)


def _describe_loss(error: Exception) -> str:
    """Return a short form of the reason that Ray gives for the loss of an actor."""
    if type(error).__name__ == "ActorUnavailableError":
        return "its process or its node is gone"
    if (cause := getattr(error, "cause", None)) is not None:  # raised by a method of the actor
        return f"{type(cause).__name__}: {cause}"[:300]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = next((line for line in lines if "because" in line), lines[0] if lines else type(error).__name__)
    return telling.rpartition("because ")[2].partition(". ")[0].rstrip(".")[:300]


def _actor_error(error: Exception) -> UserError | RunError | None:
    """Return the error that keeps every actor from starting, or None if another actor may succeed."""
    text = str(error)
    if "No module named" in text:
        missing = next(line for line in text.splitlines() if "No module named" in line).strip()
        return UserError(
            f"a node of the Ray cluster lacks a requirement of workers ({missing}): install hermes-rl on all nodes"
        )
    if type(error).__name__ == "RuntimeEnvSetupError":
        return RunError(f"the spec's folder did not arrive on a node of the Ray cluster: {text.strip()}")
    return None


# ------------------------------------------------------------------------------------- what runs on the nodes


@dataclass(repr=False)  # Ray shows it in the messages of errors, and the pieces hold keys
class _Actor:
    """Holds a `Player` on a separate event loop: Ray's loop is of another kind, which cannot start processes in a
    thread.

    The run calls its methods through Ray.
    """

    setup_chunks: list[bytes] = field(default_factory=list)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    artifacts: dict[str, Mapping[str, TakenArtifact]] = field(default_factory=dict)
    """Artifacts of rollouts, by their ids, that are on their way to the run."""

    def __post_init__(self) -> None:
        asyncio.set_event_loop_policy(None)
        os.environ.pop(TOKEN, None)  # Ray has read it; no program that is started here gets it
        raise_descriptor_limit()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, name="hermes-rl-player", daemon=True).start()

    def _run_loop(self) -> None:
        with reduce_gc_pauses():
            self._loop.run_forever()

    async def _run_on_loop(self, work: Callable[[], Any]) -> Any:
        """Call a function of the player on its loop and return the result; an awaitable is awaited."""

        async def called() -> Any:
            result = work()
            return await result if isawaitable(result) else result

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self._loop))

    async def describe_host(self) -> dict[str, str]:
        """Return the location of the actor and its resources."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return {"host": socket.gethostname(), "node": node, "version": __version__}

    async def take(self, chunk: bytes) -> None:
        """Add a piece of the pickled setup."""
        self.setup_chunks.append(chunk)

    async def open(self) -> list[str] | None:
        """Set up the worker; return an error as `raised_of` describes it, or None."""
        opening = unpack(b"".join(self.setup_chunks), Path.cwd())
        self.setup_chunks.clear()

        def keep(rollout: str, artifacts: Mapping[str, TakenArtifact]) -> dict[str, Any]:
            self.artifacts[rollout] = artifacts
            return {}

        self._player = RolloutWorker(opening, self.messages.append, keep)
        wrong: list[str] | None = await self._run_on_loop(self._player.open)
        return wrong

    async def answer(self, request_id: int, kind: Any, *args: Any) -> tuple[bytes, Mapping[str, TakenArtifact] | None]:
        """Return the answer to a request, and the artifacts of the rollout."""
        answer = await self._run_on_loop(lambda: self._player.answer(request_id, kind, *args))
        return answer, self.artifacts.pop(args[0].id, None) if kind == "play" else None

    async def hear(self, method: Any, *arguments: int) -> None:
        """Handle a message that needs no response."""
        await self._run_on_loop(lambda: self._player.hear(method, *arguments))

    async def condition(self, seconds: float) -> list[Mapping[str, Any]]:
        """Wait for that many seconds; return the condition of this worker and its pending messages."""
        await asyncio.sleep(seconds)
        messages, self.messages[:] = list(self.messages), []
        return [*messages, await self._run_on_loop(self._player.condition)]

    async def close(self) -> list[Mapping[str, Any]]:
        """Release everything; return the last messages."""
        await self._run_on_loop(self._player.close)
        return self.messages
