"""Run calls in a process for user code: forked from the warm one, watched during a call, killed if needed.

The event loop limits the time of a call, logs its output, and lets threads process its questions to objects that live
here. A process whose call times out, or that ends by itself, fails only that call. A message of a process consists of
plain values of a known form (`hermes_rl.user_code.messages`); any other form kills the process, and no message decides
where code runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

from hermes_rl.errors import RewardFailure
from hermes_rl.plugins import Code, files_named_in
from hermes_rl.terminal_text import escape_controls
from hermes_rl.threads import run_detached, run_in_thread
from hermes_rl.user_code.environment import listed_variables, user_code_variables
from hermes_rl.user_code.failures import EndedError, ForeignError, OvertimeError, exception_of
from hermes_rl.user_code.fork_server import FORK_SERVER
from hermes_rl.user_code.messages import LogLine, Question, Reply, read_message
from hermes_rl.user_code.process import CALL, CALL_HEADER, ForeignCall
from hermes_rl.user_code.served import ServedObjects
from hermes_rl.user_code.wire import LARGEST, LONG, Inbox, WireError, from_json, send

log = logging.getLogger(__name__)
T = TypeVar("T")

GLANCE = 0.1
"""Seconds between two checks of a working process."""
PIECE, FEW = 1 << 16, 1 << 12
"""Maximum bytes of one read, within a long message and otherwise: each question takes a thread, and a flood of them
must not block the event loop.
"""
PRINTED = 4_000
"""Characters of a call's output that are logged."""
MOST_PRINTED = 1 << 24
"""Bytes of output above which a call is killed."""
MOST_LINES = 100
"""Maximum number of log lines of a call."""
LINE = 100
"""Bytes of output as which each log line counts in addition to its text."""
START = 60.0
"""Maximum seconds for the first process to start on a busy host."""
LINGER = 5.0
"""Seconds for the warm process to end its forks and itself after the runner has ended."""
MODULES = ("hermes_rl.agent.result", "hermes_rl.scoring.reward_value", "hermes_rl.user_code.proxies")
"""Modules that calls need in addition to the code."""


class Warm:
    """The process that has loaded the code; a call without a free process forks it."""

    confined = False
    """True if it and its forks are in a sandbox."""

    def __init__(self) -> None:
        parent_end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.variables = listed_variables()
        self._environ = user_code_variables()
        with theirs:
            self._start(theirs.fileno())
        self._control = parent_end
        self._control.settimeout(START)
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self.loaded: frozenset[Code] = frozenset()
        """Code that each new fork has."""
        self.broken: frozenset[Code] = frozenset()
        """Code among it that failed to load, so that no call of it can have executed a policy's text."""

    def _start(self, control: int) -> None:
        """Start the process, with its end of the control socket."""
        self._process = FORK_SERVER.start(
            "hermes_rl.user_code.process:main",
            control,
            name="hermes-code",
            preload=MODULES,
            environ=self._environ,
            linger=LINGER,
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def load(self, code: Code) -> frozenset[Code]:
        """Import the code once, and return all loaded code; errors of the code are reported by the call."""
        with self._loading:
            if code not in self.loaded:
                now = user_code_variables()
                changed: dict[str, str | None] = {
                    name: value for name, value in now.items() if self._environ.get(name) != value
                }
                changed |= dict.fromkeys(self._environ.keys() - now.keys())
                request = {**self._start_request(changed), "modules": MODULES, "code": code}
                problem = self._ask({"do": "load", **request}).get("problem")
                self._environ = now
                if problem is not None:
                    log.info("a process of user code cannot load %s: %s", code.file or code.module, problem)
                    self.broken |= {code}
                self.loaded |= {code}
            return self.loaded

    def _start_request(self, changed: Mapping[str, str | None]) -> dict[str, Any]:
        """Return the module path and the changed variables for loading code."""
        return {"path": sys.path, "environ": changed}

    def fork(self, *descriptors: int) -> int:
        """Return the id of a new process that serves the other end of the first descriptor."""
        answer = self._ask({"do": "fork"}, descriptors)
        if "error" in answer:
            raise RewardFailure(f"no process for user code can be made: {answer['error']}")
        return int(answer["pid"])

    def bury(self, pid: int) -> int:
        """Wait until a process has ended, and return its status as in waitpid(2)."""
        return int(self._ask({"do": "bury", "pid": pid})["status"])

    def close(self) -> None:
        """End it and all of its forks."""
        self._control.close()
        with suppress(TimeoutError):
            self._process.wait(1.0)
        self._process.release()

    def _ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
                answer = self._control.recv(1 << 16)
            except OSError as error:
                raise RewardFailure(f"the process for user code is gone: {error}") from error
        if not answer:
            raise RewardFailure("the process for user code is gone")
        return dict(json.loads(answer))


# -------------------------------------------------------------------------------------------- The worker process


class Worker:
    """One process for user code. It runs one call at a time."""

    def __init__(self, warm: Warm) -> None:
        self.warm, self.confined = warm, warm.confined
        self.knows = warm.loaded
        self.connection, theirs = socket.socketpair()
        self.output, output = os.pipe()
        try:
            self.pid = warm.fork(theirs.fileno(), output)
        except BaseException:  # no other code knows these descriptors
            self.connection.close()
            os.close(self.output)
            raise
        finally:
            theirs.close()
            os.close(output)
        os.set_blocking(self.output, False)
        self.inbox, self.clock = Inbox(), _Clock(self.pid)
        self.calls = self.objects = 0
        """Number of calls and objects it received; each has a unique number in this process."""
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._buried = False
        self._end_cause: str | None = None

    @property
    def waits(self) -> bool:
        """True if it is alive and silent: a process that has ended, or sends data without a call, is unusable."""
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        return self.inbox.empty and not poller.poll(0)

    def fits(self, *codes: Code) -> bool:
        """Return True if it can run a call of this code now, and has the current variables listed by specs."""
        return self.knows.issuperset(codes) and self.warm.variables == listed_variables() and self.waits

    def end(self, cause: str) -> None:
        """Kill it immediately. Any thread may call this at any time."""
        with self._ending:
            if not self._buried:  # afterwards its id may belong to another process
                self._end_cause = self._end_cause or cause
                for kill in (os.killpg, os.kill):  # it may have no process group yet
                    with suppress(ProcessLookupError, PermissionError):  # it may run a program of another user
                        kill(self.pid, signal.SIGKILL)

    def close(self) -> str:
        """Kill it and release its resources; return the cause of its end as a predicate. Idempotent."""
        cause = self._end_cause
        self.end("was ended")
        if not self.let_go():
            return str(cause)
        status = self.warm.bury(self.pid)
        if os.WIFEXITED(status):
            return f"ended its process with status {os.WEXITSTATUS(status)}"
        return cause or f"lost its process to signal {os.WTERMSIG(status)}, perhaps because memory was used up"

    def let_go(self) -> bool:
        """Release the local resources without killing the process; return False if they were released before.

        It needs no kill if the warm process has ended: its forks have ended too."""
        with self._ending:
            if self._buried:
                return False
            self._buried = True
        self.connection.close()
        os.close(self.output)
        return True

    def send(self, *parts: bytes) -> None:
        with self._sending:
            send(self.connection, b"".join(parts))

    async def call(
        self, code: Code, arguments: Mapping[str, Any], converter: str, timeout: float, read: Callable[[Any], T]
    ) -> T:
        """Return the code's result as plain values; see `ProcessPool.call`."""
        served = ServedObjects(self)
        first, secret = self.objects, secrets.token_bytes(16)
        try:
            folder = os.getcwd()  # noqa: PTH109 - a Path would be made for nothing
        except FileNotFoundError:  # the directory was removed, for example by Ray after a node loss
            folder = "/"
        content = served.pickled(ForeignCall(code, arguments, converter, folder))
        if len(content) > LARGEST:
            raise EndedError(f"cannot be given {len(content) >> 20} MiB, at most {LARGEST >> 20}")
        ahead = pickle.dumps(files_named_in(content))
        self.calls += 1
        message = CALL_HEADER.pack(self.calls, first, secret, len(ahead)) + ahead + content
        try:
            with _Watch(self, served, timeout, secret.hex()) as watch:
                if len(message) > LONG:
                    await run_in_thread(partial(self.send, CALL, message))
                    self.clock.start()  # until now it has waited for this process
                else:
                    self.send(CALL, message)
                reply = await watch.answer
            if not self.inbox.empty:  # the reply to the next call would be mistaken for its continuation
                self.end("sent a part of a message after its reply")
            if reply.raised is None:
                return await run_in_thread(partial(read, reply.returned)) if watch.long else read(reply.returned)
            raised = exception_of(reply.raised, served.sent)
            if isinstance(raised, ForeignError) and code in self.warm.broken:
                raised = raised.claimed or raised
        except WireError as error:
            self.end(f"sent what cannot be read: {error}")
            raise EndedError from error
        except OSError as error:
            raise EndedError from error
        finally:
            if served.answering or served.entered:
                served.give_up()
                await run_in_thread(served.close)
        raise raised


class _Watch:
    """Watch a process on the event loop during a call: its reply, its questions, its output, its time."""

    def __init__(self, worker: Worker, served: ServedObjects, timeout: float, secret: str) -> None:
        self._worker, self._served, self._timeout = worker, served, timeout
        self._call_id, self._secret = worker.calls, secret
        self._loop = asyncio.get_running_loop()
        self._printed, self._clock = _Printed(worker.output), worker.clock
        self._clock.start()
        self._is_closed = self.long = False
        """`long`: True after a long message, so that the reply may take long to parse."""
        self.answer: asyncio.Future[Reply] = self._loop.create_future()

    def __enter__(self) -> Self:
        self._glance = min(GLANCE, self._timeout / 2)
        self._timer = self._loop.call_later(self._glance, self._check_time)
        self._descriptor = self._worker.connection.fileno()
        self._loop.add_reader(self._descriptor, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._timer.cancel()
        self._loop.remove_reader(self._descriptor)
        self._printed.read()
        self._printed.log()
        if self.answer.done() and not self.answer.cancelled():
            self.answer.exception()  # the waiting caller may have been cancelled at the same moment

    def _receive(self) -> None:
        try:
            size = PIECE if self._worker.inbox.size > FEW else FEW
            data = self._worker.connection.recv(size, socket.MSG_DONTWAIT)
            if not data:
                raise EndedError
            for message in self._worker.inbox.add(data):
                if len(message) > LONG:
                    self.long = True
                    run_detached(partial(self._read_aside, message))
                else:
                    self._handle(from_json(message))
        except BlockingIOError:
            return
        except (WireError, EndedError, OSError) as error:
            self._fail(error)

    def _read_aside(self, message: bytes) -> None:
        """Parse a long message in a thread, without blocking the loop."""
        try:
            content = from_json(message)
        except WireError as error:
            content = error
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._heed_later, content)

    def _heed_later(self, answer: Any) -> None:
        try:
            self._handle(answer)
        except WireError as error:
            self._fail(error)

    def _handle(self, content: Any) -> None:
        """Process a message; raise `WireError` if it has no known form."""
        if isinstance(content, WireError):
            raise content
        if self._is_closed or self.answer.done():
            raise WireError("a message after its reply")
        match message := read_message(content):
            case Question():
                self._served.serve(message)
            case LogLine():
                self._printed.line(message)
            case Reply():
                if (message.call, message.secret) != (self._call_id, self._secret):
                    raise WireError("the reply to another call")
                self.answer.set_result(message)

    def _check_time(self) -> None:
        self._receive()  # if this loop is late, an unread message is not a delay of the process
        if self.answer.done():
            return
        self._printed.read()
        if self._clock.used() > self._timeout:
            self._worker.end(f"did not return within {self._timeout:g} s")
            self._fail(OvertimeError())
        elif self._printed.much:
            self._worker.end(f"printed more than {MOST_PRINTED >> 20} MiB")
            self._fail(EndedError())
        else:
            # Longer calls are checked less often; a flood of output is read immediately.
            self._glance = GLANCE / 20 if self._printed.full else min(1.0, max(self._glance, GLANCE) * 1.2)
            remaining = max(self._timeout - self._clock.seconds, GLANCE / 2)
            self._timer = self._loop.call_later(min(self._glance, remaining), self._check_time)

    def _fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
        elif isinstance(error, WireError):  # the call has its reply; later data must not reach another call
            self._worker.end(f"sent what cannot be read: {error}")


class _Clock:
    """Time used by calls of a process: elapsed time without the time that it waits for a core.

    Time for which it is runnable while others compute does not count: a busy host does not make it late.
    """

    def __init__(self, pid: int) -> None:
        self._file = f"/proc/{pid}/schedstat"
        self._looked = self._waited = self.seconds = 0.0
        """Time of the last check, seconds waited for a core by then, and seconds used by the call."""

    def start(self) -> None:
        """Start a call. The waiting time is read at the first check, because most calls end earlier."""
        self._looked, self.seconds = time.monotonic(), 0.0

    def used(self) -> float:
        """Update and return the used seconds."""
        now, waited = time.monotonic(), self._waited
        try:
            with open(self._file, "rb") as file:  # noqa: PTH123 - cheaper than a Path
                waited = int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):
            pass  # the process has ended, or the system does not report it: then all of the time counts
        self.seconds += max(0.0, now - self._looked - (waited - self._waited))
        self._looked, self._waited = now, waited
        return self.seconds


class _Printed:
    """Output of a call: read on arrival, and mostly discarded."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._text = b""
        self._bytes = self._lines = 0
        self.full = False
        """True if more may be available immediately."""

    @property
    def much(self) -> bool:
        return self._bytes > MOST_PRINTED

    def read(self) -> None:
        """Read the available output, at most one pipe buffer."""
        self.full = False
        with suppress(BlockingIOError):
            data = os.read(self._descriptor, PIECE)
            self._text += data[: PRINTED - len(self._text)]
            self._bytes += len(data)
            self.full = len(data) >= PIECE // 2

    def line(self, line: LogLine) -> None:
        """Log a line that the call has logged; lines beyond the limit only count as output.

        Its own logger may have no handler, and then Python would write the text unescaped to the terminal.
        """
        self._lines += 1
        self._bytes += LINE + len(line.text)
        if self._lines <= MOST_LINES:
            log.log(line.level, "%s", escape_controls(f"{line.logger}: {line.text}"))

    def log(self) -> None:
        text = self._text.decode("utf-8", "replace").strip()
        if text:
            more = f" … ({self._bytes} bytes in all)" if self._bytes > PRINTED else ""
            log.info("code of a spec printed: %s%s", text, more)
