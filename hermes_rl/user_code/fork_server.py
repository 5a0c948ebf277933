"""Start processes as forks of one process that has imported hermes-rl already.

Importing takes most of the time that a run worker or a process for user code needs to start. The *fork server* imports
once and forks for each request, so that a start takes milliseconds and the imported code is shared memory. It is
started by exec with an empty environment, never forked from its client: threads, locks, CUDA contexts and secrets of
the client do not reach it. It has one thread, and forgets the descriptors of a request after the fork.

Variables, working directory, module paths and limits of the client reach the child in a memory file, which the fork
server passes on unread. When a client ends for any reason, its children end too. Without a fork server (not Linux, or
it cannot be started), `ForkServer.start` starts a fresh interpreter instead.

This module owns both sides: `ForkServer` in the client, and `main` in the fork server. The work of a child belongs to
the function that the client names, in `hermes_rl.runs.worker` and `hermes_rl.user_code.process`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import logging
import os
import random
import resource
import select
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakSet

if TYPE_CHECKING:
    import asyncio
    import subprocess

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Maximum seconds for the fork server to start a child, including its own start and imports."""
CLOSE_SECONDS = 2.0
"""Maximum seconds for which a client waits for the fork server to end, so that its CPU time counts for the client."""
REQUEST_BYTES = 1 << 16
MOST_DESCRIPTORS = 16
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
"""Options of prctl(2)."""
LIMITS = tuple(sorted(name for name in dir(resource) if name.startswith("RLIMIT_")))
_prctl = ctypes.CDLL(None).prctl


class ForkServerError(Exception):
    """The fork server cannot start a process: it has ended, or cannot import the required modules."""


# ------------------------------------------------------------------------------------------------------ The client


class StartedProcess:
    """A process that `ForkServer.start` has started.

    Its id is not reused before `release`. A process whose fork server has ended counts as killed: the kernel kills it
    at that moment.
    """

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self._status = status
        status.setblocking(False)
        self._returncode: int | None = None
        _started.add(self)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        if self._returncode is None:
            try:
                # Peeked, not consumed: several callers may wait for it.
                message = self._status.recv(100, socket.MSG_PEEK)
            except BlockingIOError:
                return None
            except ConnectionError:
                message = b""
            self._returncode = int(message) if message else -signal.SIGKILL
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return its exit status. Raises TimeoutError."""
        ended = select.poll()
        ended.register(self._status, select.POLLIN)
        while (returncode := self.poll()) is None:
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise TimeoutError
        return returncode

    async def ended(self) -> int:
        """Wait on the event loop for the end of the process and return its exit status; for one caller at a time."""
        import asyncio  # the fork server needs neither this nor `subprocess`

        loop = asyncio.get_running_loop()
        while (returncode := self.poll()) is None:
            readable: asyncio.Future[None] = loop.create_future()
            loop.add_reader(self._status, _set_done, readable)
            try:
                await readable
            finally:
                loop.remove_reader(self._status)
        return returncode

    def kill(self) -> None:
        """Kill the process unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def release(self) -> None:
        """Let the fork server forget the process, which is killed if it still runs."""
        if self._returncode is None:
            self._returncode = -signal.SIGKILL
        self._status.close()


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_started: WeakSet[StartedProcess] = WeakSet()


class ForkServer:
    """The connection of this process to its fork server, which starts with the first request.

    A fork of this process connects itself to the same fork server. Methods may be called from any thread.
    """

    def __init__(self, connection: socket.socket | None = None) -> None:
        self._connection = connection
        self._inherited: socket.socket | None = None
        """Connection of the process that this one was forked from: valid for one message, which requests a new
        connection.
        """
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(
        self,
        entry: str,
        *descriptors: int,
        name: str,
        preload: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        linger: float = 0.0,
        may_start: bool = False,
    ) -> StartedProcess:
        """Return a new process that runs a function; its standard input is empty, and it shares the outputs of this
        one.

        Blocks until the process exists, about 5 ms, or a second if the fork server must import first.

        Args:
            entry: `module:function`; the function gets the numbers of its descriptors.
            descriptors: given to the process, at most 12.
            name: name of the process in `ps` and `top`; at most 15 characters.
            preload: further modules imported before the process starts. No module may read variables, start threads or
                open files when it is imported.
            environ: variables of the process; None for the variables of this one.
            linger: seconds that the process may run on after its client has ended, to clean up.
            may_start: give the process a connection to the fork server, so that it can start processes too.

        Raises:
            OSError: neither the fork server nor a fresh interpreter can be started.
        """
        request = {"entry": entry, "name": name, "preload": list(preload), "linger": linger, "client": may_start}
        message = json.dumps(_start_message(os.environ if environ is None else environ)).encode()
        attempts = 2 if sys.platform == "linux" else 0
        for _ in range(attempts):
            connection = None
            try:
                connection = self._connect()
                return _request_process(connection, request, message, descriptors)
            except (ForkServerError, OSError) as error:
                log.info("the fork server cannot start a process: %s", error)
                self._disconnect(connection)
        return _start_interpreter(entry, environ, descriptors)

    def preload(self, *modules: str) -> None:
        """Make the fork server import modules, without waiting for it."""
        with suppress(OSError):
            self._connect().send(json.dumps({"preload": modules}).encode())

    def close(self) -> None:
        """Disconnect; the fork server ends when it has no client and no children."""
        self._disconnect(self._connection)
        process, self._process = self._process, None
        if process is not None:
            import subprocess

            with suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_SECONDS)

    def forget(self) -> None:
        """Leave the parent's resources to the parent process; called in a fork of this process."""
        inherited = self._connection or self._inherited
        self.__init__()  # type: ignore[misc]
        self._inherited = inherited

    def _connect(self) -> socket.socket:
        with self._lock:
            if self._connection is None and self._inherited is not None:
                self._connection = self._connect_anew(self._inherited)
                self._inherited = None
            if self._connection is None:
                self._connection = self._start_server()
            return self._connection

    def _connect_anew(self, inherited: socket.socket) -> socket.socket | None:
        client_end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with inherited, theirs:
            try:
                socket.send_fds(inherited, [b'{"client": true}'], [theirs.fileno()])
            except OSError:
                client_end.close()
                return None
        return client_end

    def _start_server(self) -> socket.socket:
        import subprocess

        client_end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = [os.path.abspath(directory) for directory in sys.path]  # noqa: PTH100 - the server runs in another one
        code = f"import sys; sys.path[:] = {path!r}\nfrom hermes_rl.user_code.fork_server import main; main()"
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, *(["-B"] if sys.dont_write_bytecode else []), "-P", "-c", code],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={},
                    cwd="/",
                    start_new_session=True,  # Ctrl-C goes to the client, which then ends its children
                )
        except BaseException:  # also on Ctrl-C: the caller never gets this end
            client_end.close()
            raise
        return client_end

    def _disconnect(self, connection: socket.socket | None) -> None:
        with self._lock:
            if connection is not None and connection is self._connection:  # otherwise another thread has done it
                self._connection = None
                connection.close()


def _request_process(
    connection: socket.socket, request: Mapping[str, Any], message: bytes, descriptors: Sequence[int]
) -> StartedProcess:
    """Request a process from the fork server. Raises ForkServerError or OSError."""
    parent_end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent_end.settimeout(START_SECONDS)
    try:
        with theirs, _memory_file(message) as start, _output_descriptors() as outputs:
            sent_descriptors = [theirs.fileno(), start, *outputs, *descriptors]
            socket.send_fds(connection, [json.dumps(request).encode()], sent_descriptors)
        answer = json.loads(parent_end.recv(REQUEST_BYTES) or b'{"error": "it has ended"}')
        if "error" in answer:
            raise ForkServerError(answer["error"])
    except BaseException:  # also on Ctrl-C: the caller never gets this end
        parent_end.close()
        raise
    return StartedProcess(answer["pid"], parent_end)


def _start_message(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that a child takes over from this process."""
    try:
        directory = os.getcwd()  # noqa: PTH109 - a str, for JSON
    except FileNotFoundError:
        directory = "/"  # it was removed
    return {
        "environ": dict(environ),
        "directory": directory,
        "path": sys.path,
        "bytecode": not sys.dont_write_bytecode,
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "cores": sorted(os.sched_getaffinity(0)),
        "priority": os.getpriority(os.PRIO_PROCESS, 0),
    }


@contextmanager
def _memory_file(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("hermes-rl-start")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _output_descriptors() -> Iterator[list[int]]:
    """Yield the standard output and error of this process, with /dev/null for a closed one."""
    with ExitStack() as stack:
        outputs = []
        for descriptor in (1, 2):
            try:
                os.fstat(descriptor)
            except OSError:
                descriptor = os.open(os.devnull, os.O_WRONLY)
                stack.callback(os.close, descriptor)
            outputs.append(descriptor)
        yield outputs


def _start_interpreter(entry: str, environ: Mapping[str, str] | None, descriptors: Sequence[int]) -> StartedProcess:
    """Start a process without the fork server; a thread of this process reports its exit status."""
    import subprocess

    module, function = entry.split(":")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        f"from importlib import import_module; import_module({module!r}).{function}(*{list(descriptors)!r})"
    )
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
    )
    parent_end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def tell() -> None:
        with theirs:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            ended = select.poll()
            ended.register(theirs, 0)
            status = _status_of(process.pid)
            with suppress(OSError):
                theirs.send(str(status).encode())
                ended.poll()  # until the id is released
            process.wait()

    threading.Thread(target=tell, name="hermes-rl-wait", daemon=True).start()
    return StartedProcess(process.pid, parent_end)


def _status_of(pid: int) -> int | None:
    """Return the exit status of an ended child that is not reaped yet, or None while it runs."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


# ------------------------------------------------------------------------------------------------- The fork server


@dataclass
class _Child:
    """A child of the fork server, until its client has released it."""

    pid: int
    status: socket.socket
    """The client has the other end."""
    linger: float
    ended: bool = False
    released: bool = False
    deadline: float | None = None
    """Time at which it is killed, in seconds of the monotonic clock."""


def main() -> None:
    """Fork for clients until no client and no child is left; standard input is the connection of the first client."""
    first = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (hard_limit, hard_limit)
    )  # two for each child; children have the limits of clients
    _Server(first).serve()


class _Server:
    def __init__(self, first: socket.socket) -> None:
        self._clients: dict[int, socket.socket] = {}
        self._children: dict[int, _Child] = {}
        """Children by the descriptor of `status`."""
        self._poll = select.poll()
        self._wakeup, wakeup = os.pipe()
        for descriptor in (self._wakeup, wakeup):
            os.set_blocking(descriptor, False)
        self._poll.register(self._wakeup, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        self._server_ends = [self._wakeup, wakeup]
        self._add_client(first)
        self._imported = 0

    def serve(self) -> None:
        while self._clients or self._children:
            for descriptor, _ in self._poll.poll(self._milliseconds()):
                if descriptor == self._wakeup:
                    with suppress(BlockingIOError):
                        os.read(descriptor, 1 << 12)
                elif descriptor in self._clients:
                    self._answer(self._clients[descriptor])
                elif descriptor in self._children:
                    self._released(self._children[descriptor])
            for child in list(self._children.values()):
                self._look_at(child)

    def _milliseconds(self) -> float | None:
        deadlines = [child.deadline for child in self._children.values() if child.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) * 1000 + 1 if deadlines else None

    def _add_client(self, client: socket.socket) -> None:
        self._clients[client.fileno()] = client
        self._poll.register(client, select.POLLIN)

    def _answer(self, client: socket.socket) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(client, REQUEST_BYTES, MOST_DESCRIPTORS)
        except ConnectionError:
            data, descriptors, flags = b"", [], 0
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        request = _read_request(data, descriptors, truncated=bool(flags & socket.MSG_CTRUNC))
        if request is None:
            # It has ended, or code in it wrote into this socket: that must not end the children of other clients.
            for descriptor in descriptors:
                os.close(descriptor)
            self._poll.unregister(client)
            del self._clients[client.fileno()]
            client.close()
        elif flags & socket.MSG_CTRUNC:
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            for descriptor in descriptors[:1]:
                _refuse_client(socket.socket(fileno=descriptor), "too many open files")
        elif "entry" in request:
            self._fork(request, *descriptors)
        elif "preload" in request:
            with suppress(Exception):  # errors are reported to the client that needs the module
                self._import(request["preload"])
        else:
            self._add_client(socket.socket(fileno=descriptors[0]))

    def _import(self, modules: Sequence[str]) -> None:
        for module in modules:
            importlib.import_module(module)
        if len(sys.modules) != self._imported:
            self._imported = len(sys.modules)
            gc.collect()
            gc.freeze()  # a collection in a child would write to, and so copy, each page with an object

    def _fork(self, request: Mapping[str, Any], status: int, *descriptors: int) -> None:
        connection = socket.socket(fileno=status)
        try:
            module, function = request["entry"].split(":")
            self._import([module, *request["preload"]])
            run = getattr(sys.modules[module], function)
            server_end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            parent = os.getpid()
            if (pid := os.fork()) == 0:
                _become_process(
                    partial(self._leave, connection, server_end), parent, request["name"], run, theirs, *descriptors
                )
        except Exception as error:  # noqa: BLE001 - an import may raise anything, and the client is told
            _refuse_client(connection, f"{type(error).__name__}: {error}")
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        theirs.close()
        if request["client"]:
            self._add_client(server_end)
        else:
            server_end.close()
        child = _Child(pid, connection, request["linger"])
        self._children[connection.fileno()] = child
        self._poll.register(connection, 0)  # only the closing of the peer
        with suppress(OSError):  # the client has ended, which `poll` reports
            connection.send(json.dumps({"pid": pid}).encode())

    def _leave(self, *connections: socket.socket) -> None:
        """Close, in a child, the resources of the fork server and of its other children."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in self._server_ends:
            os.close(descriptor)
        for connection in (*connections, *self._clients.values(), *(child.status for child in self._children.values())):
            connection.close()

    def _released(self, child: _Child) -> None:
        """Record that the client has released the child, or has ended."""
        self._poll.unregister(child.status)
        child.released = True
        child.deadline = time.monotonic() + child.linger

    def _look_at(self, child: _Child) -> None:
        if not child.ended and (status := _status_of(child.pid)) is not None:
            child.ended, child.deadline = True, None
            with suppress(OSError):
                child.status.send(str(status).encode())
        if child.ended and child.released:
            del self._children[child.status.fileno()]
            child.status.close()
            os.waitpid(child.pid, 0)
        elif child.deadline is not None and child.deadline <= time.monotonic():
            for kill in (os.killpg, os.kill):  # it may not lead a group yet
                with suppress(ProcessLookupError):
                    kill(child.pid, signal.SIGKILL)
            child.deadline = None


_FORM: Mapping[str, type | tuple[type, ...]] = {
    "entry": str, "name": str, "preload": list, "linger": (int, float), "client": bool
}  # fmt: skip
"""Keys of a request for a process, with their types."""


def _read_request(data: bytes, descriptors: Sequence[int], *, truncated: bool) -> dict[str, Any] | None:
    """Return a client's request, or None if it is not one that clients send with such descriptors."""
    try:
        request = json.loads(data)
        if "entry" in request:
            fits = request.keys() == _FORM.keys() and all(isinstance(request[key], _FORM[key]) for key in _FORM)
            least = 4  # the status, the settings and the two outputs
        else:
            least = int(request.keys() == {"client"})
            fits = bool(least) or request.keys() == {"preload"}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    fits = fits and (truncated or len(descriptors) >= least)
    return request if fits and all(stat.S_ISSOCK(os.fstat(each).st_mode) for each in descriptors[:1]) else None


def _refuse_client(connection: socket.socket, reason: str) -> None:
    with connection, suppress(OSError):
        connection.send(json.dumps({"error": reason[:10_000]}).encode())


# ------------------------------------------------------------------------------------------------------- The child


def _become_process(
    leave: Callable[[], None],
    parent: int,
    name: str,
    run: Callable[..., None],
    connection: socket.socket,
    start: int,
    *descriptors: int,
) -> NoReturn:
    """Run the function in this fork, with the client's settings, and exit."""
    status = 1
    try:
        leave()
        die_with_parent()
        if os.getppid() != parent:
            os._exit(status)  # the fork server ended before the kernel applied the setting
        os.setsid()
        _prctl(PR_SET_NAME, name.encode())
        signal.signal(signal.SIGINT, signal.default_int_handler)
        FORK_SERVER.__init__(connection)  # type: ignore[misc]
        outputs, passed_descriptors = descriptors[:2], descriptors[2:]
        for target_fd, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, target_fd)
            os.close(output)
        sys.stdout, sys.stderr = text_output(1), text_output(2)
        with open(start, "rb") as file:
            file.seek(0)
            _take_over(json.loads(file.read()))
        run(*passed_descriptors)
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001 - the stack of the fork server must not go on in a child
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status & 0xFF)


def die_with_parent() -> None:
    """Make the kernel kill this process when the thread that forked it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent has ended, in any session."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def text_output(descriptor: int) -> io.TextIOWrapper:
    """Return an unbuffered text stream that accepts any text; it does not own the descriptor."""
    return io.TextIOWrapper(io.FileIO(descriptor, "wb", closefd=False), "utf-8", "backslashreplace", write_through=True)


def _take_over(start: Mapping[str, Any]) -> None:
    """Apply the client's settings at the time of its request to this process."""
    os.environ.clear()
    os.environ.update(start["environ"])
    time.tzset()
    if (tempfile := sys.modules.get("tempfile")) is not None:
        vars(tempfile)["tempdir"] = None  # chosen by variables
    sys.path[:] = start["path"]
    sys.dont_write_bytecode = not start["bytecode"]
    try:
        os.chdir(start["directory"])
    except OSError:
        os.chdir("/")  # it was removed meanwhile
    for name, limit in start["limits"].items():
        with suppress(ValueError, OSError):  # a hard limit above the fork server's needs privileges
            resource.setrlimit(getattr(resource, name), tuple(limit))
    os.sched_setaffinity(0, start["cores"])
    with suppress(OSError):  # likewise a lower niceness
        os.setpriority(os.PRIO_PROCESS, 0, start["priority"])
    reseed()


def reseed() -> None:
    """Seed the random generators of this fork separately: all forks of a process have the same state."""
    random.seed()
    # `numpy` loads it lazily, and then it has its own state.
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


FORK_SERVER = ForkServer()
"""Fork server of this process."""
atexit.register(FORK_SERVER.close)


def _forget_server() -> None:
    for process in list(_started):
        process.release()
    FORK_SERVER.forget()


os.register_at_fork(after_in_child=_forget_server)
