"""A process of foreign code at work: forked from the warm one, watched while it does a call, ended by force.

The event loop watches the time of a call, carries what it prints to the log, and lets threads answer what it asks of
objects that live here. A process whose call takes too long, or that ends by itself, costs that call alone. A message of
a process is plain values of a known form (`hermes_rl.foreign.messages`); one of any other form ends the process, and
none decides where code runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
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
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

from hermes_rl.errors import RewardFailure
from hermes_rl.foreign.environment import listed_variables, user_code_variables
from hermes_rl.foreign.failures import EndedError, ForeignError, OvertimeError, exception_of
from hermes_rl.foreign.messages import LogLine, Question, Reply, read_message
from hermes_rl.foreign.process import CALL, HEADER, ForeignCall
from hermes_rl.foreign.served import ServedObjects
from hermes_rl.foreign.wire import LARGEST, LONG, Inbox, WireError, from_json, send
from hermes_rl.fork_server import FORK_SERVER
from hermes_rl.plugins import Code, files_named_in
from hermes_rl.threads import hand_over, in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

GLANCE = 0.1
"""Seconds between two looks at a process that works."""
PIECE, FEW = 1 << 16, 1 << 12
"""Bytes that are read at a time, of a long message and else: each question takes a thread, and a flood of them must not
hold the event loop."""
PRINTED = 4_000
"""Characters of what a call prints that are logged."""
MOST_PRINTED = 1 << 24
"""Bytes from which on a call that prints is ended."""
MOST_LINES = 100
"""Lines that a call may log."""
START = 60.0
"""Seconds that the first process may take to start on a busy machine."""
LINGER = 5.0
"""Seconds in which the warm process ends its forks and itself when the runner is gone."""
MODULES = ("hermes_rl.agent.result", "hermes_rl.scoring.value", "hermes_rl.foreign.stand_ins")
"""What calls need beside the code itself."""


class Warm:
    """The process that has loaded the code; each call that finds no free process is a fork of it."""

    confined = False
    """Whether it and its forks are in a sandbox."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listed = listed_variables()
        self._environ = user_code_variables()
        with theirs:
            self._process = FORK_SERVER.start(
                "hermes_rl.foreign.process:main",
                theirs.fileno(),
                name="hermes-code",
                preload=MODULES,
                environ=self._environ,
                linger=LINGER,
            )
        self._control = ours
        self._control.settimeout(START)
        self._lock, self._loading = threading.Lock(), threading.Lock()
        self.loaded: frozenset[Code] = frozenset()
        """Code that each new fork has."""
        self.broken: frozenset[Code] = frozenset()
        """Code among it that could not be loaded, so that no call of it has come to run the text of a policy."""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def load(self, code: Code) -> frozenset[Code]:
        """Let it import the code, once, and return all that it has; what is wrong with the code is told by the call."""
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
                    log.info("a process of foreign code cannot load %s: %s", code.file or code.module, problem)
                    self.broken |= {code}
                self.loaded |= {code}
            return self.loaded

    def _start_request(self, changed: Mapping[str, str | None]) -> dict[str, Any]:
        """Return the module path and the changed variables that code is loaded with."""
        return {"path": sys.path, "environ": changed}

    def fork(self, *descriptors: int) -> int:
        """Return the id of a new process that works for whoever has the other end of the first descriptor."""
        answer = self._ask({"do": "fork"}, descriptors)
        if "error" in answer:
            raise RewardFailure(f"no process for user code can be made: {answer['error']}")
        return int(answer["pid"])

    def bury(self, pid: int) -> int:
        """Wait until a process has ended, and return its status as waitpid(2) tells it."""
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
                raise RewardFailure(f"the process for foreign code is gone: {error}") from error
        if not answer:
            raise RewardFailure("the process for foreign code is gone")
        return dict(json.loads(answer))


# -------------------------------------------------------------------------------------------- A process that works


class Worker:
    """One process of foreign code. It does one call at a time."""

    def __init__(self, warm: Warm) -> None:
        self.warm, self.confined = warm, warm.confined
        self.knows = warm.loaded
        self.connection, theirs = socket.socketpair()
        self.output, output = os.pipe()
        try:
            self.pid = warm.fork(theirs.fileno(), output)
        except BaseException:  # whatever it is, nobody else knows of these descriptors
            self.connection.close()
            os.close(self.output)
            raise
        finally:
            theirs.close()
            os.close(output)
        os.set_blocking(self.output, False)
        self.inbox, self.clock = Inbox(), _Clock(self.pid)
        self.calls = self.objects = 0
        """How many it was given; each has a number that no other of this process has."""
        self._sending, self._ending = threading.Lock(), threading.Lock()
        self._buried = False
        self._why: str | None = None

    @property
    def waits(self) -> bool:
        """Whether it is alive and has nothing to say: what has ended, or speaks without a call, is of no use."""
        poller = select.poll()
        poller.register(self.connection, select.POLLIN)
        return self.inbox.empty and not poller.poll(0)

    def fits(self, *codes: Code) -> bool:
        """Return True if it can do a call of this code now, and sees the variables that specs list by now."""
        return self.knows.issuperset(codes) and self.warm.listed == listed_variables() and self.waits

    def end(self, why: str) -> None:
        """End it at once, whatever it does. Any thread may do this, at any time."""
        with self._ending:
            if not self._buried:  # its id may be another's by then
                self._why = self._why or why
                for kill in (os.killpg, os.kill):  # it may have no group of its own yet
                    with suppress(ProcessLookupError, PermissionError):  # it may run a program of another user
                        kill(self.pid, signal.SIGKILL)

    def close(self) -> str:
        """End it and give back what it holds; says as a predicate how it has ended. A second time does nothing."""
        why = self._why
        self.end("was ended")
        if not self.let_go():
            return str(why)
        status = self.warm.bury(self.pid)
        if os.WIFEXITED(status):
            return f"ended its process with status {os.WEXITSTATUS(status)}"
        return why or f"lost its process to signal {os.WTERMSIG(status)}, perhaps because memory was used up"

    def let_go(self) -> bool:
        """Give back what it holds here, and nothing more: where the warm process has ended, so have its forks."""
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
        self, code: Code, arguments: Mapping[str, Any], plain: str, timeout: float, read: Callable[[Any], T]
    ) -> T:
        """Return what the code returns, as plain values; see `ProcessPool.call`."""
        served = ServedObjects(self)
        first, secret = self.objects, secrets.token_bytes(16)
        try:
            folder = os.getcwd()  # noqa: PTH109 - a Path would be made for nothing
        except FileNotFoundError:  # somebody has removed it, as Ray does where a node is lost
            folder = "/"
        content = served.pickled(ForeignCall(code, arguments, plain, folder))
        if len(content) > LARGEST:
            raise EndedError(f"cannot be given {len(content) >> 20} MiB, at most {LARGEST >> 20}")
        ahead = pickle.dumps(files_named_in(content))
        self.calls += 1
        message = HEADER.pack(self.calls, first, secret, len(ahead)) + ahead + content
        try:
            with _Watch(self, served, timeout, secret.hex()) as watch:
                if len(message) > LONG:
                    await in_thread(partial(self.send, CALL, message))
                    self.clock.begin()  # until now it has waited for this process
                else:
                    self.send(CALL, message)
                reply = await watch.answer
            if not self.inbox.empty:  # the reply to the next call would be taken for the rest of it
                self.end("sent a part of a message after its reply")
            if reply.raised is None:
                return await in_thread(partial(read, reply.returned)) if watch.long else read(reply.returned)
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
                await in_thread(served.close)
        raise raised


class _Watchtower:
    """Everything that one event loop watches: one reader and one timer for all calls, as each of its own costs more
    than all the rest of a short call."""

    _of: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, _Watchtower]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, _Watch] = {}
        self._due = math.inf  # no handle of a timer, as that would keep its loop

    @classmethod
    def here(cls) -> _Watchtower:
        """Return that of the running loop."""
        loop = asyncio.get_running_loop()
        tower = cls._of.get(loop)
        if tower is None:
            tower = cls._of[loop] = cls()
            loop.add_reader(tower._epoll.fileno(), tower._hear)
        return tower

    def add(self, watch: _Watch, descriptor: int) -> None:
        self._watches[descriptor] = watch
        self._epoll.register(descriptor, select.EPOLLIN)
        self.set(watch.due)

    def remove(self, watch: _Watch, descriptor: int) -> None:
        if self._watches.get(descriptor) is watch:  # else its number is another's by now
            del self._watches[descriptor]
            with suppress(OSError):  # it is closed
                self._epoll.unregister(descriptor)

    def set(self, due: float) -> None:
        """Look at all that is due by then."""
        if due < self._due:
            self._due = due
            asyncio.get_running_loop().call_at(due, self._look)

    def _hear(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            watch = self._watches.get(descriptor)
            if watch is not None:  # one that was heard before it may have ended it
                watch.hear()

    def _look(self) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._due:
            return  # this timer was set before one that came earlier
        self._hear()  # on a busy machine this loop is late, and what it has not heard yet is no delay of theirs
        self._due = math.inf
        for watch in tuple(self._watches.values()):
            if watch.due <= now:
                watch.look()
        self.set(min((watch.due for watch in self._watches.values()), default=math.inf))


class _Watch:
    """Listens to a process on the event loop while it does a call: its answer, its questions, its prints, its time."""

    def __init__(self, worker: Worker, served: ServedObjects, timeout: float, secret: str) -> None:
        self._worker, self._served, self._timeout = worker, served, timeout
        self._number, self._secret = worker.calls, secret
        self._loop = asyncio.get_running_loop()
        self._tower = _Watchtower.here()
        self._printed, self._clock = _Printed(worker.output), worker.clock
        self._clock.begin()
        self._over = self.long = False
        """`long`: whether it has sent a long message, so that its reply may take long to read."""
        self.answer: asyncio.Future[Reply] = self._loop.create_future()

    def __enter__(self) -> Self:
        self._glance = min(GLANCE, self._timeout / 2)
        self.due = self._loop.time() + self._glance
        """When it is looked at next, by the clock of the loop."""
        self._descriptor = self._worker.connection.fileno()
        self._tower.add(self, self._descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._tower.remove(self, self._descriptor)
        self._printed.read()
        self._printed.log()
        if self.answer.done() and not self.answer.cancelled():
            self.answer.exception()  # whoever waited may have been cancelled in the same moment

    def hear(self) -> None:
        try:
            size = PIECE if self._worker.inbox.size > FEW else FEW
            data = self._worker.connection.recv(size, socket.MSG_DONTWAIT)
            if not data:
                raise EndedError
            for message in self._worker.inbox.add(data):
                if len(message) > LONG:
                    self.long = True
                    hand_over(partial(self._read_aside, message))
                else:
                    self._heed(from_json(message))
        except BlockingIOError:
            return
        except (WireError, EndedError, OSError) as error:
            self._fail(error)

    def _read_aside(self, message: bytes) -> None:
        """Read a long message in a thread, where it holds up nobody."""
        try:
            content = from_json(message)
        except WireError as error:
            content = error
        with suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(self._heed_later, content)

    def _heed_later(self, answer: Any) -> None:
        try:
            self._heed(answer)
        except WireError as error:
            self._fail(error)

    def _heed(self, content: Any) -> None:
        """Do what a message asks for; raises `WireError` where it has no form that is known."""
        if isinstance(content, WireError):
            raise content
        if self._over or self.answer.done():
            raise WireError("a message after its reply")
        match message := read_message(content):
            case Question():
                self._served.serve(message)
            case LogLine():
                self._printed.line(message)
            case Reply():
                if (message.call, message.secret) != (self._number, self._secret):
                    raise WireError("the reply to another call")
                self.answer.set_result(message)

    def look(self) -> None:
        if self.answer.done():
            self.due = math.inf
            return
        self._printed.read()
        if self._clock.used() > self._timeout:
            self._worker.end(f"did not return within {self._timeout:g} s")
            self._fail(OvertimeError())
            self.due = math.inf
        elif self._printed.much:
            self._worker.end(f"printed more than {MOST_PRINTED >> 20} MiB")
            self._fail(EndedError())
            self.due = math.inf
        else:
            # The longer it has taken, the less often it is looked at; a flood of prints is read as soon as it comes.
            self._glance = GLANCE / 20 if self._printed.full else min(1.0, max(self._glance, GLANCE) * 1.2)
            remaining = max(self._timeout - self._clock.seconds, GLANCE / 2)
            self.due = self._loop.time() + min(self._glance, remaining)

    def _fail(self, error: BaseException) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
        elif isinstance(error, WireError):  # the call has its reply; what comes after it is for no other call
            self._worker.end(f"sent what cannot be read: {error}")


class _Clock:
    """The time that calls of a process have used: that which passes, but for what it spends waiting for a core.

    Time in which it is ready to compute and others do is not its own: it is not late because the machine is busy.
    """

    def __init__(self, pid: int) -> None:
        self._file = f"/proc/{pid}/schedstat"
        self._looked = self._waited = self.seconds = 0.0
        """When it was looked at, seconds that it had waited for a core by then, and those that the call has used."""

    def begin(self) -> None:
        """Begin a call. What it waits for a core is read at the first look, as most calls end before that."""
        self._looked, self.seconds = time.monotonic(), 0.0

    def used(self) -> float:
        """Look, and return seconds."""
        now, waited = time.monotonic(), self._waited
        try:
            with open(self._file, "rb") as file:  # noqa: PTH123 - cheaper than a Path
                waited = int(file.read().split()[1]) / 1e9
        except (OSError, IndexError):
            pass  # it has ended, or this system does not tell: then all of the time is its own
        self.seconds += max(0.0, now - self._looked - (waited - self._waited))
        self._looked, self._waited = now, waited
        return self.seconds


class _Printed:
    """What a call prints: read as long as it comes, and little of it kept."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._text = b""
        self._bytes = self._lines = 0
        self.full = False
        """Whether there may be more at once."""

    @property
    def much(self) -> bool:
        return self._bytes > MOST_PRINTED

    def read(self) -> None:
        """Take what is there, a pipe's worth at most."""
        self.full = False
        with suppress(BlockingIOError):
            data = os.read(self._descriptor, PIECE)
            self._text += data[: PRINTED - len(self._text)]
            self._bytes += len(data)
            self.full = len(data) >= PIECE // 2

    def line(self, line: LogLine) -> None:
        """Log a line that the call has logged; more than a few are counted as printed alone."""
        self._lines += 1
        self._bytes += len(line.text)
        if self._lines <= MOST_LINES:
            logging.getLogger(line.logger).log(line.level, "%s", line.text)

    def log(self) -> None:
        text = self._text.decode("utf-8", "replace").strip()
        if text:
            more = f" … ({self._bytes} bytes in all)" if self._bytes > PRINTED else ""
            log.info("code of a spec printed: %s%s", text, more)
