"""What runs where foreign code is: a process that has loaded the code and forks, and its forks, which call it.

The first process is a fork of the fork server (`hermes_rl.fork_server`), which `hermes_rl.foreign.worker` asks for. It
imports what it is told, so that a fork has it at once (half a millisecond, one megabyte), and runs none of it. A fork
has a connection of its own to the runner: it gets calls, one after the other, and may ask the runner for what lives
there (a sandbox, a model) while it works. Both end when the runner does, and see the variables that it had when it
loaded the code.
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
from typing import TYPE_CHECKING, Any, NamedTuple

from hermes_rl.errors import HermesRLError
from hermes_rl.foreign.environment import missing_variable
from hermes_rl.foreign.messages import LONGEST_LOG, LONGEST_NAME, LONGEST_TEXT
from hermes_rl.foreign.wire import Inbox, send, to_json
from hermes_rl.fork_server import adopt_orphans, die_with_parent, reseed, text_output
from hermes_rl.plugins import Code, load_object, place_of

if TYPE_CHECKING:
    import asyncio

MEMORY = 2 << 30
"""Bytes of data that a process may hold; beyond it Python raises MemoryError."""
PIECE = 1 << 16
CONTROL = 1 << 17
"""Bytes of a message to the process that forks."""
CALL, ANSWERED = b"c", b"a"
"""First byte of a message of the runner: a call, or what was asked for while it works."""
HEADER = struct.Struct("!QQ16sI")
"""Of a call: its number, the number of its first object, its secret, and the length of what comes before the call."""
ANSWER = struct.Struct("!Q?")
"""Number of the question, and whether the value behind it was returned or is to be raised."""
REAP_SECONDS = 5.0
"""How long a killed process may take to end."""
OOM_EARLY = 500
"""When memory ends, the kernel ends such a process before the runner, and after what is in sandboxes."""


# ----------------------------------------------------------------------------------------- The process that forks


def main(descriptor: int, fork: Callable[..., int] | None = None) -> None:
    """Serve until the runner closes its end of the control socket; `fork`: how a process that works is made."""
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # what modules print when they are loaded, the runner's own import has printed
        os.dup2(nothing, descriptor)
    os.close(nothing)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A process that works adopts what its calls have started; once it has ended, all of that is a child of this one.
    adopt_orphans()
    children: set[int] = set()
    while True:
        data, descriptors = _receive(control)
        if not data:
            break
        answer = _answer(json.loads(data), descriptors, children, control, fork)
        try:
            control.send(json.dumps(answer).encode())
        except OSError:
            break
    for child in children:
        for kill in (os.killpg, os.kill):  # it may have no group of its own yet
            with suppress(ProcessLookupError, PermissionError):
                kill(child, signal.SIGKILL)
        _reap(child)  # so that the runner's own processor time has theirs
    _end_orphans(frozenset())


def _answer(
    request: Mapping[str, Any],
    descriptors: list[int],
    children: set[int],
    control: socket.socket,
    fork: Callable[..., int] | None,
) -> dict[str, Any]:
    own = os.getpid()
    match request["do"]:
        case "load":
            before = _child_ids()
            problem = _load(request)
            _kept.update(_with_descendants(_child_ids() - before))
            return {"problem": problem}
        case "fork":
            try:
                child = os.fork() if fork is None else fork(*descriptors)
            except OSError as error:
                return {"error": str(error)}
            finally:
                if os.getpid() == own:
                    for descriptor in descriptors:
                        os.close(descriptor)
            if child == 0:
                control.close()
                _become_worker(*descriptors)
            children.add(child)
            return {"pid": child}
        case _:  # bury
            children.discard(request["pid"])
            status = _reap(request["pid"])
            _end_orphans(children)
            return {"status": signal.SIGKILL if status is None else status}


_kept: set[int] = set()
"""Processes that modules have started while they were loaded, and those that could not be ended."""


def _child_ids(pid: int | None = None) -> set[int]:
    """Return the children of a process, by default of this one."""
    pid = os.getpid() if pid is None else pid
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123 - cheaper than a Path
            return {int(child) for child in file.read().split()}
    except (FileNotFoundError, ProcessLookupError):  # a kernel that does not list them, or the process has ended
        return set()


def _with_descendants(pids: Collection[int]) -> set[int]:
    """Return these processes and all that they have started, which this process adopts when its parent ends."""
    found, new = set[int](), set(pids)
    while new:
        found |= new
        new = {child for pid in new for child in _child_ids(pid)} - found
    return found


def _reap(pid: int) -> int | None:
    """Wait for a child that was killed, and return its status as waitpid(2) gives it.

    Return None if it does not end: the kernel may hold it, or it may have the rights of another user. It is left alone
    from then on, as the runner waits for this process.
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
            _kept.add(pid)
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


def _end_orphans(children: Collection[int]) -> None:
    """End what calls have started in processes that have ended, sessions of their own too."""
    while orphans := _child_ids() - _kept - set(children):
        for pid in orphans:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            _reap(pid)  # its own children are this process's from then on


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and the descriptors that came with it; empty where the runner is gone."""
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


def _load(request: Mapping[str, Any]) -> str | None:
    """Import what is asked for; what was wrong, if anything: a call says it again, with its place."""
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
        # What is done here is not done in each fork: a page that a fork writes to is copied, which takes longer still.
        logging.basicConfig(handlers=[_Log()], level=logging.INFO, force=True)
        gc.collect()
        gc.freeze()  # what is there already is shared by all forks as long as nobody touches it
    return None


# ------------------------------------------------------------------------------------------ The process that works


def _become_worker(connection: int, output: int) -> None:
    """Work for the runner until it closes the connection; never returns."""
    try:
        die_with_parent()
        adopt_orphans()
        # No session of its own: the kernel shares the processor between sessions, and a run's code would have as many
        # shares as processes, beside the one of the runner.
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        sys.stdout, sys.stderr = text_output(1), text_output(2)
        limit()
        reseed()
        work(connection)
    except BaseException:  # noqa: BLE001 - the parent's stack must never go on in a fork
        traceback.print_exc()
    finally:
        os._exit(0)


def work(connection: int, directory: str | None = None) -> None:
    """Serve the runner behind a connection, in its working directory or in that of this process alone."""
    if directory is not None:
        os.environ["HOME"] = directory
    Runner(socket.socket(fileno=connection), directory).work()


def limit() -> None:
    """Limit the memory of this process, and let others go first."""
    with suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    with suppress(OSError):
        adjust = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(adjust, b"%d" % OOM_EARLY)
        os.close(adjust)
    with suppress(OSError):
        os.nice(5)  # the runner's loop goes first


class _Log(logging.Handler):
    """Logs where the runner does."""

    def emit(self, record: logging.LogRecord) -> None:
        if _runner is None:  # while code is loaded
            return
        try:
            _runner.log(record.name[:LONGEST_NAME], record.levelno, record.getMessage()[:LONGEST_LOG])
        except Exception:  # noqa: BLE001 - as all handlers: what cannot be logged stops nobody
            self.handleError(record)


class Runner:
    """The runner, as foreign code in this process sees it: whoever lives there can be asked."""

    def __init__(self, connection: socket.socket, directory: str | None = None) -> None:
        self._connection, self._directory = connection, directory
        self._inbox = Inbox()
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self._calls: SimpleQueue[bytes] = SimpleQueue()
        self._reader: threading.Thread | None = None
        """Begun by the first question of a call: a call that asks nothing is read by the thread that does it, as waking
        another one costs more than many a reward."""
        self._answers: dict[int, Future[Any]] = {}
        self._count = 0
        self._pid = os.getpid()
        self._first: int | None = None
        """Number of the first object of the call that is being done; None between calls."""
        self.objects: dict[str, Any] = {}
        """What this process keeps for the runner between calls, such as a rollout's state."""

    def work(self) -> None:
        """Do one call after the other until the runner is gone."""
        while True:
            content = self._next()
            number, first, secret, ahead = HEADER.unpack_from(content)  # in no place where a call easily sees them
            self._first = first
            kind, value = self._perform(content[HEADER.size :], ahead)
            sys.stdout.flush()
            sys.stderr.flush()
            if os.getpid() != self._pid:  # the call has forked, and returned here too
                os._exit(0)
            reply = {"call": number, "secret": secret.hex()}
            try:
                message = to_json({**reply, kind: value})
            except (TypeError, ValueError, RecursionError) as error:
                message = to_json({**reply, "raised": _in_words(error, None)})
            with self._sending:
                self._first = None
                send(self._connection, message)

    def _next(self) -> bytes:
        """Wait for the next call."""
        with self._sending:  # nobody begins a reader meanwhile, which would keep what is taken here
            alone = self._reader is None and self._receiving.acquire()
        if alone:
            try:
                while self._reader is None and self._calls.empty():
                    self._receive()
            finally:
                self._receiving.release()
        return self._calls.get()

    def ask(self, number: int, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of an object of the runner; what it returns or raises comes later. Any thread may ask."""
        self._require_own()
        with self._sending:
            if self._first is None or number < self._first:
                raise RuntimeError("the call that was given this object has ended")
            self._count += 1
            answer: Future[Any] = Future()
            answer.set_running_or_notify_cancel()  # who waits no longer, as `wait_for` does, cannot cancel the answer
            self._answers[self._count] = answer
            if self._reader is None:
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()
            request = {"ask": self._count, "of": number, "method": method, "args": args, "kwargs": kwargs}
            send(self._connection, to_json(request))
        return answer

    def log(self, name: str, level: int, text: str) -> None:
        """Send a line for the runner's log, which needs no answer; what a fork of this process logs is left out."""
        if os.getpid() == self._pid:
            with self._sending:
                send(self._connection, to_json({"log": [name, level, text]}))

    def _require_own(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a fork of the process of user code cannot ask the runner")

    def _read(self) -> None:
        with self._receiving:  # a thread that a call left behind may ask while the next call is waited for
            while True:
                self._receive()

    def _receive(self) -> None:
        """Take what the runner says next; where it is gone, so is this process."""
        data = self._connection.recv(PIECE)
        if not data:
            os._exit(0)
        for message in self._inbox.add(data):
            if message[:1] == CALL:
                self._calls.put(message[1:])
            else:
                number, succeeded = ANSWER.unpack_from(message, 1)
                _settle(self._answers.pop(number), succeeded, message[1 + ANSWER.size :])

    def _perform(self, content: bytes, ahead: int) -> tuple[str, Any]:
        """Do a call; returns the kind of the reply and what it carries."""
        global _runner
        _runner = self
        function: Any = None
        try:
            for module, file in pickle.loads(content[:ahead]):
                Code(module, "", file).load_module()
            call = _unpickled(content[ahead:])
            os.chdir(self._directory or call.folder)  # without a look at where it is, as that folder may be gone
            function = call.code.load()
            returned = settled(function(**call.arguments))
            return "returned", load_object(call.plain)(returned)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it is told, and ends nothing
            try:
                return "raised", _in_words(error, function)
            except BaseException:  # noqa: BLE001 - code of the exception itself
                return "raised", {"text": "an exception whose text cannot be read"}


def _unpickled(content: bytes) -> ForeignCall:
    try:
        call: ForeignCall = pickle.loads(content)
    except Exception as error:
        raise ArgumentsError(
            f"its arguments cannot be made anew in another process ({type(error).__name__}: {error}); make the class "
            "of that object one that pickle can carry, or say `isolate: none`"
        ) from error
    return call


class ArgumentsError(Exception):
    """What a call was given cannot be unpickled here."""


def _settle(answer: Future[Any], succeeded: bool, content: bytes) -> None:
    try:
        value = pickle.loads(content)
    except BaseException as error:  # noqa: BLE001 - the call waits for an answer, whatever became of it
        succeeded, value = False, RuntimeError(f"an answer of the runner cannot be read here: {error!r}")
    answer.set_result(value) if succeeded else answer.set_exception(value)


class ForeignCall(NamedTuple):
    """What a process is to do once."""

    code: Code
    arguments: Mapping[str, Any]
    plain: str
    """Reference to the function that makes a plain value, for JSON, of what the code returns."""
    folder: str
    """Working directory of the runner, so that relative files mean the same."""


def settled(value: Any) -> Any:
    """Return what code has returned; where that has to be awaited, on an event loop in which no other call has left
    anything. Making a loop takes longer than many a tool, so the next call gets the same one if nothing is left."""
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
    """Return True if an event loop holds no task, timer, descriptor, thread or generator of a call. Only attributes of
    its own tell that."""
    import asyncio

    if not isinstance(loop, asyncio.SelectorEventLoop) or asyncio.all_tasks(loop):
        return False
    own: Any = loop
    handles = [handle for handle in (*own._ready, *own._scheduled) if not handle.cancelled()]
    left = handles or own._asyncgens or own._default_executor or own._signal_handlers
    return not left and len(own._selector.get_map()) == 1  # the one by which other threads wake it


def _in_words(error: BaseException, function: Callable[..., Any] | None) -> dict[str, Any]:
    """Return an exception as plain values; one of ours by its name, with what the runner makes it anew of."""
    missing = missing_variable(error)
    more = "" if missing is None else f"; {missing}"
    room = LONGEST_TEXT - len(more)
    if isinstance(error, HermesRLError):
        names = [kind.__name__ for kind in type(error).__mro__]
        return {"ours": names, "text": str(error)[:room] + more, "ending": getattr(error, "ending", None)}
    text = place_of(error, function) if function is not None else f"{type(error).__name__}: {error}"
    return {"text": text[:room] + more}


# ------------------------------------------------------------------- What lives in the runner, as seen from a call

_runner: Runner | None = None


def current_runner() -> Runner:
    """Return the runner whose call is being done; raises `RuntimeError` where this is no process of foreign code."""
    if _runner is None:
        raise RuntimeError("this is no process of foreign code")
    return _runner


def stand_in(reference: str, number: int, arguments: Mapping[str, Any]) -> Any:
    """Make what stands here for an object of the runner; pickled calls name this function."""
    return load_object(reference)(number, **arguments)
