"""Implement the processes for user code: one that has loaded the code and forks, and its forks, which run calls.

The first process is a fork of the fork server (`hermes_rl.user_code.fork_server`), started by
`hermes_rl.user_code.worker`. It imports code on request, so that a fork has it immediately (half a millisecond, one
megabyte), and runs none of it. A fork has its own connection to the runner: it receives calls, one after the other, and
may call objects of the runner (a sandbox, a model) while it works. Both end when the runner does, and have the
environment variables of the time when they loaded the code.
"""

from __future__ import annotations

import array
import contextvars
import gc
import importlib
import inspect
import json
import logging
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from hermes_rl.errors import HermesRLError
from hermes_rl.plugins import Code, load_object, place_of
from hermes_rl.user_code.environment import missing_variable
from hermes_rl.user_code.fork_server import adopt_orphans, die_with_parent, reseed, text_output
from hermes_rl.user_code.messages import LONGEST_LOG, LONGEST_NAME, LONGEST_TEXT
from hermes_rl.user_code.wire import Inbox, send, to_json

if TYPE_CHECKING:
    import asyncio

MEMORY = 2 << 30
"""Maximum bytes of data in a process; beyond it Python raises MemoryError."""
PIECE = 1 << 16
CONTROL = 1 << 17
"""Maximum bytes of a message to the process that forks."""
CALL, ANSWERED = b"c", b"a"
"""First byte of a message of the runner: a call, or the result of a question during a call."""
CALL_HEADER = struct.Struct("!QQ16sI")
"""Header of a call: its number, the number of its first object, its secret, and the length of the data before it."""
ANSWER = struct.Struct("!Q?")
"""Number of the question, and True if the following value was returned, False if it must be raised."""
REAP_SECONDS = 5.0
"""Maximum seconds for a killed process to end."""
OOM_EARLY = 500
"""OOM score: if memory is exhausted, the kernel kills such a process before the runner, and after sandboxes."""


# ----------------------------------------------------------------------------------------- The process that forks


def main(descriptor: int, fork: Callable[..., int] | None = None) -> None:
    """Serve until the runner closes its end of the control socket; `fork` creates a worker process."""
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # the runner's own import has already printed the modules' output
        os.dup2(nothing, descriptor)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A worker process adopts the processes started by its calls; after its end, all of them are children of this one.
    adopt_orphans()
    children: set[int] = set()
    while True:
        data, descriptors = _receive_message(control)
        if not data:
            break
        answer = _answer_request(json.loads(data), descriptors, children, control, fork)
        try:
            control.send(json.dumps(answer).encode())
        except OSError:
            break
    for child in children:
        for kill in (os.killpg, os.kill):  # it may have no process group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(child, signal.SIGKILL)
        _reap_child(child)  # so that their CPU time counts for the runner
    _end_orphans(frozenset())


def _answer_request(
    request: Mapping[str, Any],
    descriptors: list[int],
    children: set[int],
    control: socket.socket,
    fork: Callable[..., int] | None,
) -> dict[str, Any]:
    parent_pid = os.getpid()
    match request["do"]:
        case "load":
            before = _with_descendants(_child_ids())  # this process may adopt some of them meanwhile
            problem = _load_code(request)
            _exempt_pids.update(_with_descendants(_child_ids() - before))
            return {"problem": problem}
        case "fork":
            try:
                child = os.fork() if fork is None else fork(*descriptors)
            except OSError as error:
                return {"error": str(error)}
            finally:
                if os.getpid() == parent_pid:
                    for descriptor in descriptors:
                        os.close(descriptor)
            if child == 0:
                control.close()
                become_worker(descriptors[0], descriptors[1])
            children.add(child)
            return {"pid": child}
        case _:  # bury
            children.discard(request["pid"])
            status = _reap_child(request["pid"])
            _end_orphans(children)
            return {"status": signal.SIGKILL if status is None else status}


_exempt_pids: set[int] = set()
"""Processes that modules started on import, and processes that could not be killed."""


def _child_ids(pid: int | None = None) -> set[int]:
    """Return the children of a process, by default of this one."""
    pid = os.getpid() if pid is None else pid
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123 - cheaper than a Path
            return {int(child) for child in file.read().split()}
    except (FileNotFoundError, ProcessLookupError):  # a kernel that does not list them, or the process has ended
        return set()


def _with_descendants(pids: Collection[int]) -> set[int]:
    """Return these processes and their descendants, which this process adopts when their parents end."""
    all_pids, new = set[int](), set(pids)
    while new:
        all_pids |= new
        new = {child for pid in new for child in _child_ids(pid)} - all_pids
    return all_pids


def _reap_child(pid: int) -> int | None:
    """Wait for a child that was killed, and return its status as in waitpid(2).

    Return None if it does not end: the kernel may block it, or it may have the rights of another user. It is ignored
    from then on, because the runner waits for this process.
    """
    deadline, pause = time.monotonic() + REAP_SECONDS, 0.0001
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None
        if ended:
            return status
        if time.monotonic() > deadline:
            _exempt_pids.add(pid)
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _end_orphans(children: Collection[int]) -> None:
    """Kill the processes that calls started in processes that have ended, including those with their own sessions."""
    while orphans := _child_ids() - _exempt_pids - set(children):
        for pid in orphans:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            _reap_child(pid)  # its own children belong to this process from then on


def _receive_message(control: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and the descriptors sent with it; empty if the runner has ended."""
    size = array.array("i").itemsize
    try:
        data, ancillary, _, _ = control.recvmsg(CONTROL, socket.CMSG_SPACE(2 * size))
    except ConnectionError:
        return b"", []
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % size])
    return data, list(descriptors)


def _load_code(request: Mapping[str, Any]) -> str | None:
    """Import the requested code; return the error or None. A call reports the error again, with its location."""
    sys.path[:] = request["path"]
    for name, value in request["environ"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        for name in request["modules"]:
            importlib.import_module(name)
        code = Code(*request["code"]).load()
        awaits = ("asyncio",) if inspect.iscoroutinefunction(code) else ()
        for name in (*awaits, *getattr(code, "imports", ())):
            importlib.import_module(name)  # once, and not in each fork
        if callable(prepare := getattr(code, "prepare", None)):
            prepare()
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
        return f"{type(error).__name__}: {error}"
    finally:
        # Work done here need not be done in each fork: a page that a fork writes to is copied, which takes longer
        # still.
        logging.basicConfig(handlers=[_Log()], level=logging.INFO, force=True)
        gc.collect()
        gc.freeze()  # existing objects are shared by all forks until they are written
    return None


# ------------------------------------------------------------------------------------------ The worker process


def become_worker(
    connection: int, output: int, directory: str | None = None, confine: Callable[[], None] | None = None
) -> NoReturn:
    """Work for the runner, in its working directory or a private one, until it closes the connection.

    `confine` limits the process before it works; by default `limit` does.
    """
    try:
        die_with_parent()
        adopt_orphans()
        # No separate session: the kernel divides the processor between sessions, and a run's code would have as many
        # shares as processes, in addition to the runner's.
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout, sys.stderr = text_output(1), text_output(2)
        (confine or limit)()
        reseed()
        if directory is not None:
            os.environ["HOME"] = directory
        Runner(socket.socket(fileno=connection), directory).work()
    except BaseException:  # noqa: BLE001 - the parent's stack must never go on in a fork
        traceback.print_exc()
    finally:
        os._exit(0)


def limit() -> None:
    """Limit the memory of this process, and lower its priority."""
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        memory_limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit, hard))
    with suppress(OSError):
        adjust = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(adjust, b"%d" % OOM_EARLY)
        os.close(adjust)
    with suppress(OSError):
        os.nice(5)  # the runner's loop has priority


class _Log(logging.Handler):
    """Send log records to the runner."""

    def emit(self, record: logging.LogRecord) -> None:
        if _runner is None:  # during the loading of code
            return
        try:
            _runner.log(record.name[:LONGEST_NAME], record.levelno, record.getMessage()[:LONGEST_LOG])
        except Exception:  # noqa: BLE001 - like all handlers: a record that cannot be logged ends no call
            self.handleError(record)


class Runner:
    """The runner as seen by user code in this process: its objects can be called."""

    def __init__(self, connection: socket.socket, directory: str | None = None) -> None:
        self._connection, self._directory = connection, directory
        self._inbox = Inbox()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._calls: SimpleQueue[bytes] = SimpleQueue()
        self._reader: threading.Thread | None = None
        """Started by the first question of a call: replies to a call without questions are read by the working thread,
        because waking another one costs more than many rewards.
        """
        self._answers: dict[int, Future[Any]] = {}
        self._count = 0
        self._pid = os.getpid()
        self._first: int | None = None
        """Number of the first object of the current call; None between calls."""
        self.objects: dict[str, Any] = {}
        """Objects that this process stores for the runner between calls, such as a rollout's state."""

    def work(self) -> None:
        """Run calls one after the other until the runner ends."""
        while True:
            content = self._next()
            call_id, first, secret, ahead = CALL_HEADER.unpack_from(
                content
            )  # not stored where a call can easily read them
            self._first = first
            kind, value = self._perform(content[CALL_HEADER.size :], ahead)
            sys.stdout.flush()
            sys.stderr.flush()
            if os.getpid() != self._pid:  # the call has forked, and returned here too
                os._exit(0)
            reply = {"call": call_id, "secret": secret.hex()}
            try:
                message = to_json({**reply, kind: value})
            except (TypeError, ValueError, RecursionError) as error:
                message = to_json({**reply, "raised": _describe_exception(error, None)})
            with self._sending:
                self._first = None
                send(self._connection, message)

    def _next(self) -> bytes:
        """Return the next call."""
        with self._sending:  # no reader may start meanwhile, which would take the message received here
            alone = self._reader is None and self._receiving.acquire()
        if alone:
            try:
                while self._reader is None and self._calls.empty():
                    self._receive()
            finally:
                self._receiving.release()
        return self._calls.get()

    def ask(self, object_id: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of an object of the runner and return a future with its result. Any thread may call this."""
        self._require_own()
        with self._sending:
            if self._first is None or object_id < self._first:
                raise RuntimeError("the call that was given this object has ended")
            self._count += 1
            answer: Future[Any] = Future()
            # a caller that stops waiting, as `wait_for` does, must not cancel the result
            answer.set_running_or_notify_cancel()
            self._answers[self._count] = answer
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            request = {"ask": self._count, "of": object_id, "method": method, "args": args, "kwargs": kwargs}
            send(self._connection, to_json(request))
        return answer

    def log(self, name: str, level: int, text: str) -> None:
        """Send a line to the runner's log, without a reply; lines of a fork of this process are dropped."""
        if os.getpid() == self._pid:
            with self._sending:
                send(self._connection, to_json({"log": [name, level, text]}))

    def _require_own(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a fork of the process of user code cannot ask the runner")

    def _read(self) -> None:
        with self._receiving:  # a thread left by a call may ask while the next call is awaited
            while True:
                self._receive()

    def _receive(self) -> None:
        """Receive the next message of the runner; exit if it has ended."""
        data = self._connection.recv(PIECE)
        if not data:
            os._exit(0)
        for message in self._inbox.add(data):
            if message[:1] == CALL:
                self._calls.put(message[1:])
            else:
                question_id, succeeded = ANSWER.unpack_from(message, 1)
                _settle_future(self._answers.pop(question_id), succeeded, message[1 + ANSWER.size :])

    def _perform(self, content: bytes, ahead: int) -> tuple[str, Any]:
        """Run a call; return the kind of the reply and its content."""
        global _runner
        _runner = self
        function: Any = None
        try:
            for module, file in pickle.loads(content[:ahead]):
                Code(module, "", file).load_module()
            call = _unpickle_call(content[ahead:])
            # without reading the current directory, which may have been removed
            os.chdir(self._directory or call.folder)
            function = call.code.load()
            returned = settled(function(**call.arguments))
            return "returned", load_object(call.converter)(returned)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it is told, and ends nothing
            try:
                return "raised", _describe_exception(error, function)
            except BaseException:  # noqa: BLE001 - code of the exception itself
                return "raised", {"text": "an exception whose text cannot be read"}


def _unpickle_call(content: bytes) -> ForeignCall:
    try:
        call: ForeignCall = pickle.loads(content)
    except Exception as error:
        raise ArgumentsError(
            f"its arguments cannot be unpickled in another process ({type(error).__name__}: {error}); make their class "
            "one that pickle can carry, or set `isolate: none`"
        ) from error
    return call


class ArgumentsError(Exception):
    """The arguments of a call cannot be unpickled here."""


def _settle_future(answer: Future[Any], succeeded: bool, content: bytes) -> None:
    try:
        value = pickle.loads(content)
    except BaseException as error:  # noqa: BLE001 - the call waits for an answer, whatever became of it
        succeeded, value = False, RuntimeError(f"an answer of the runner cannot be read here: {error!r}")
    answer.set_result(value) if succeeded else answer.set_exception(value)


class ForeignCall(NamedTuple):
    """One call for a worker process."""

    code: Code
    arguments: Mapping[str, Any]
    converter: str
    """Reference to the function that converts the return value to a plain value for JSON."""
    folder: str
    """Working directory of the runner, so that relative paths have the same meaning."""


def settled(value: Any) -> Any:
    """Return a value; if it is awaitable, the result of awaiting it on an event loop without remains of other calls.

    Creating a loop takes longer than many tools, so it is reused if nothing is left on it.
    """
    global _unused_loop
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def awaited() -> Any:
        return await value

    runner, _unused_loop = _unused_loop or asyncio.Runner(), None
    try:
        return runner.run(awaited(), context=contextvars.copy_context())
    finally:
        if _is_unused(runner.get_loop()):
            _unused_loop = runner
        else:
            runner.close()


_unused_loop: asyncio.Runner | None = None


def _is_unused(loop: Any) -> bool:
    """Return True if an event loop holds no task, timer, descriptor, thread or generator of a call.

    Only private attributes show that.
    """
    import asyncio

    if not isinstance(loop, asyncio.SelectorEventLoop) or asyncio.all_tasks(loop):
        return False
    selector_loop: Any = loop
    handles = [handle for handle in (*selector_loop._ready, *selector_loop._scheduled) if not handle.cancelled()]
    remaining_work = (
        handles or selector_loop._asyncgens or selector_loop._default_executor or selector_loop._signal_handlers
    )
    return (
        not remaining_work and len(selector_loop._selector.get_map()) == 1
    )  # the one with which other threads wake it


def _describe_exception(error: BaseException, function: Callable[..., Any] | None) -> dict[str, Any]:
    """Return an exception as plain values; a hermes-rl exception by its name, with the data to reconstruct it."""
    missing = missing_variable(error)
    more = "" if missing is None else f"; {missing}"
    room = LONGEST_TEXT - len(more)
    if isinstance(error, HermesRLError):
        names = [kind.__name__ for kind in type(error).__mro__]
        return {"ours": names, "text": str(error)[:room] + more, "stop_reason": getattr(error, "stop_reason", None)}
    text = place_of(error, function) if function is not None else f"{type(error).__name__}: {error}"
    return {"text": text[:room] + more}


# ------------------------------------------------------------------- Objects of the runner, as seen from a call

_runner: Runner | None = None


def current_runner() -> Runner:
    """Return the runner whose call is in progress; raise `RuntimeError` outside a process for user code."""
    if _runner is None:
        raise RuntimeError("this is not a process of user code")
    return _runner


def stand_in(reference: str, object_id: int, arguments: Mapping[str, Any]) -> Any:
    """Return the proxy of an object of the runner; pickled calls name this function."""
    return load_object(reference)(object_id, **arguments)
