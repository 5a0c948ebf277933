"""Processes of foreign code, as the runner sees them: begun from a warm one, watched while they work, ended by force.

This module owns which processes there are and who is in them. A call takes one that is free, or begins another; until
it has ended, the event loop watches its time, carries what it prints to the log, and lets threads answer what it asks
of objects that live here. A process whose call takes too long, or that ends by itself, costs that call alone. A message
of a process is plain values of a known form (`hermes_rl.foreign.messages`); one of any other form ends the process, and
none decides where code runs.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import copyreg
import inspect
import io
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
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakKeyDictionary

from hermes_rl.endings import Ending
from hermes_rl.errors import (
    AgentFault,
    Failure,
    HermesRLError,
    JudgeFailure,
    RewardFailure,
    RunError,
    SandboxFailure,
    ServerFailure,
    ToolServerFailure,
    UserError,
)
from hermes_rl.foreign.environment import listed_variables, user_code_variables, with_way_out
from hermes_rl.foreign.messages import LogLine, Question, Raised, Reply, read_message
from hermes_rl.foreign.process import ANSWER, ANSWERED, CALL, HEADER, ForeignCall, stand_in
from hermes_rl.foreign.stand_ins import LIVING
from hermes_rl.foreign.wire import LARGEST, Inbox, WireError, from_json, send
from hermes_rl.fork_server import FORK_SERVER
from hermes_rl.plugins import Code, files_named_in, itself
from hermes_rl.threads import done_in_thread, hand_over, in_thread, made_in_thread

log = logging.getLogger(__name__)
T = TypeVar("T")

FREE = max(4, 2 * len(os.sched_getaffinity(0)))
"""Processes that stay without work, and from which on a call waits a moment for one before another is begun."""
MOMENT = 0.02
"""Seconds of that wait."""
GLANCE = 0.1
"""Seconds between two looks at a process that works."""
PIECE = 1 << 16
IN_LOOP = 1 << 16
"""Bytes up to which a message is sent and read on the event loop; longer ones take a thread."""
PRINTED = 4_000
"""Characters of what a call prints that are logged."""
MOST_PRINTED = 1 << 24
"""Bytes from which on a call that prints is ended."""
MOST_OPEN = 1_000
"""Questions of a call that may wait for their answers."""
MOST_LINES = 100
"""Lines that a call may log."""
START = 60.0
"""Seconds that the first process may take to start on a busy machine."""
LINGER = 5.0
"""Seconds in which the warm process ends its forks and itself when the runner is gone."""
MODULES = ("hermes_rl.agent.result", "hermes_rl.scoring.value", "hermes_rl.foreign.stand_ins")
"""What calls need beside the code itself."""


class ForeignError(Exception):
    """Foreign code raised."""


class EndedError(Exception):
    """The process of foreign code ended, or was ended, before it had answered; the text says why, as a predicate."""


class OvertimeError(EndedError):
    """It was ended because its time was up."""


class NotCarriedError(EndedError):
    """What a call is to be given cannot be pickled, so that nothing was sent, and its process goes on."""


# ------------------------------------------------------------------------------------------------ The warm process


class Warm:
    """The process that has loaded the code; each call that finds no free process is a fork of it."""

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
        self.warm = warm
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
        self.inbox = Inbox()
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
        served = _Served(self)
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
                if len(message) > IN_LOOP:
                    await in_thread(partial(self.send, CALL, message))
                else:
                    self.send(CALL, message)
                reply = await watch.answer
            if not self.inbox.empty:  # the reply to the next call would be taken for the rest of it
                self.end("sent a part of a message after its reply")
            if reply.raised is None:
                return read(reply.returned)
            raised = _exception(reply.raised)
        except WireError as error:
            self.end(f"sent what cannot be read: {error}")
            raise EndedError from error
        except OSError as error:
            raise EndedError from error
        finally:
            if served.answering or served.entered:
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
        self._due = math.inf
        for watch in tuple(self._watches.values()):
            if watch.due <= now:
                watch.look()
        self.set(min((watch.due for watch in self._watches.values()), default=math.inf))


class _Watch:
    """Listens to a process on the event loop while it does a call: its answer, its questions, its prints, its time."""

    def __init__(self, worker: Worker, served: _Served, timeout: float, secret: str) -> None:
        self._worker, self._served, self._timeout = worker, served, timeout
        self._number, self._secret = worker.calls, secret
        self._loop = asyncio.get_running_loop()
        self._tower = _Watchtower.here()
        self._printed, self._clock = _Printed(worker.output), _Clock(worker.pid)
        self._over = False
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
            data = self._worker.connection.recv(PIECE, socket.MSG_DONTWAIT)
            if not data:
                raise EndedError
            for message in self._worker.inbox.add(data):
                if len(message) > IN_LOOP:
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


def _exception(raised: Raised) -> Exception:
    """Make the exception anew: one of ours as it was, by name; else a `ForeignError`. Raises `WireError`."""
    text = with_way_out(raised.text)
    if raised.ours is None:
        return ForeignError(text)
    kind = next((OURS[name] for name in raised.ours if name in OURS), HermesRLError)
    if not issubclass(kind, Failure):
        return kind(text)
    try:
        return kind(text, ending=Ending(str(raised.ending)))
    except ValueError as error:
        raise WireError("an ending that there is not") from error


OURS: Mapping[str, type[HermesRLError]] = {
    kind.__name__: kind
    for kind in (
        *(UserError, RunError, AgentFault, Failure, ServerFailure, SandboxFailure, ToolServerFailure, RewardFailure),
        JudgeFailure,
    )
}
"""Exceptions of ours that are raised here as they were raised there."""


class _Clock:
    """The time that a process has used: while it computes its processor time, while it waits the time that passes.

    Time in which it is ready to compute and others do is not its own: it is not late because the machine is busy.
    """

    def __init__(self, pid: int) -> None:
        self._stat = f"/proc/{pid}/stat"
        self._looked = time.monotonic()
        self._computed: float | None = None
        self.seconds = 0.0
        """What was used at the last look."""

    def used(self) -> float:
        """Look, and return seconds."""
        now = time.monotonic()
        passed = now - self._looked
        try:
            with open(self._stat, "rb") as file:  # noqa: PTH123 - cheaper than a Path
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return self.seconds
        computed = (int(fields[11]) + int(fields[12])) / _TICKS
        if fields[0] == b"R" and self._computed is not None:
            self.seconds += min(passed, computed - self._computed)
        else:
            self.seconds += passed
        self._looked, self._computed = now, computed
        return self.seconds


_TICKS = os.sysconf("SC_CLK_TCK")


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


# ------------------------------------------------------------------------- Objects that live here, and are asked for


class _Pickler(pickle.Pickler):
    """Carries what it can and puts stand-ins in the place of objects that live in the runner."""

    def __init__(self, file: io.BytesIO, served: _Served) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._served = served
        self.dispatch_table = {**copyreg.dispatch_table, **dict.fromkeys(LIVING, self._stand_in)}

    def _stand_in(self, obj: Any) -> Any:
        return stand_in, (LIVING[type(obj)], self._served.number(obj), obj.stand_in_fields())


class _Served:
    """The objects that one call may ask for, and the questions that are being answered."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._objects: dict[int, Any] = {}
        self.entered: dict[int, AbstractContextManager[Any]] = {}
        """What the call has entered and not left, by number."""
        self.answering: set[Future[None]] = set()
        self._context = contextvars.copy_context()

    def number(self, obj: Any) -> int:
        """Return by which number the call may ask for this object."""
        for number, known in self._objects.items():
            if known is obj:
                return number
        number = self._worker.objects
        self._worker.objects += 1
        self._objects[number] = obj
        return number

    def pickled(self, value: Any) -> bytes:
        """Return what is sent for a value; raises `NotCarriedError`, or `EndedError` where it nests too deeply."""
        file = io.BytesIO()
        try:
            _Pickler(file, self).dump(value)
        except RecursionError as error:
            raise EndedError("cannot be given what nests that deeply") from error
        except Exception as error:
            raise NotCarriedError(
                f"cannot be given what pickle cannot carry ({type(error).__name__}: {error}); leave that out of "
                "the row and the state, or say `isolate: none`"
            ) from error
        return file.getvalue()

    def serve(self, question: Question) -> None:
        """Begin to answer: several questions may be open, and the time is watched.

        A coroutine function is called on this event loop, any other method in a thread. Raises `WireError` for an
        object that the call was not given, and where too many questions are open.
        """
        if question.of not in self._objects:
            raise WireError("a question to an object that its call was not given")
        if len(self.answering) >= MOST_OPEN:
            raise WireError(f"more than {MOST_OPEN} questions at a time")
        done: Future[None] = Future()
        self.answering.add(done)
        context = self._context.copy()

        def ended(*_: object) -> None:
            self.answering.discard(done)
            done.set_result(None)

        def work() -> None:
            try:
                context.run(self._answer, question)
            finally:
                ended()

        if inspect.iscoroutinefunction(method := self._method(question)):
            task = asyncio.get_running_loop().create_task(self._answer_here(question, method), context=context)
            task.add_done_callback(ended)
        else:
            hand_over(work)

    def close(self) -> None:
        """Wait for answers that are under way, and leave what the call has not left; blocks."""
        wait(tuple(self.answering))
        for entered in self.entered.values():
            with suppress(HermesRLError):
                entered.__exit__(None, None, None)

    def _method(self, question: Question) -> Any:
        """Return the public attribute of an object that is asked for; None where there is none."""
        return None if question.method.startswith("_") else getattr(self._objects[question.of], question.method, None)

    async def _answer_here(self, question: Question, method: Callable[..., Awaitable[Any]]) -> None:
        try:
            answer = self._answered(question, await method(*question.args, **question.kwargs))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - carried to the foreign code
            answer = self._answered(question, error, succeeded=False)
        if len(answer) > IN_LOOP or len(self.answering) > 1:  # it may have to wait until the process has read others
            await in_thread(partial(self._send, answer))
        else:
            self._send(answer)

    def _answer(self, question: Question) -> None:
        try:
            answer = self._answered(question, self._asked(question))
        except BaseException as error:  # noqa: BLE001 - carried to the foreign code, whatever it is
            answer = self._answered(question, error, succeeded=False)
        self._send(answer)

    def _answered(self, question: Question, value: Any, *, succeeded: bool = True) -> bytes:
        """Return the answer to a question: what was returned, or is to be raised."""
        try:
            content = self.pickled(value)
        except EndedError:
            if succeeded:
                raise
            content = self.pickled(RuntimeError(f"{type(value).__name__}: {value}"))
        return ANSWERED + ANSWER.pack(question.number, succeeded) + content

    def _send(self, answer: bytes) -> None:
        with suppress(OSError, WireError):  # it has ended meanwhile
            self._worker.send(answer)

    def _asked(self, question: Question) -> Any:
        number, name = question.of, question.method
        if name == "leave" and number in self.entered:
            return self.entered.pop(number).__exit__(None, None, None)
        method = self._method(question)
        if not callable(method):
            raise AttributeError(f"{type(self._objects[number]).__name__} has no method {name!r}")
        value = method(*question.args, **question.kwargs)
        if isinstance(value, AbstractContextManager):
            entered = value.__enter__()
            self.entered[self.number(entered)] = value
            return entered
        return value


# ------------------------------------------------------------------------------------------------------- The pool


class ProcessPool:
    """All processes of foreign code of this runner, for all of its event loops."""

    def __init__(self) -> None:
        self._warm: Warm | None = None
        self._free: list[Worker] = []
        self._busy = self._ended = 0
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()

    async def call(
        self,
        code: Code,
        arguments: Mapping[str, Any],
        plain: str,
        timeout: float,
        read: Callable[[Any], T] = itself,
    ) -> T:
        """Call code in a process and return what `plain`, run there too, makes of its result.

        Who is cancelled while it waits ends the process.

        Args:
            code: a function, sync or async.
            arguments: of the function, by name.
            plain: reference to a function that makes plain values of what it returns.
            timeout: seconds that it may use.
            read: returns what the runner takes for the plain value; raises `WireError` where `plain` makes no such one.

        Raises:
            ForeignError: the code raised.
            HermesRLError: the code raised one of ours.
            OvertimeError, EndedError: it took too long, or its process ended, or sent what it may not send.
            NotCarriedError: the arguments cannot be pickled.
        """
        worker = await self._worker(code)
        stays = False
        try:
            returned = await worker.call(code, arguments, plain, timeout, read)
            stays = True
        except (ForeignError, HermesRLError, NotCarriedError):
            stays = True
            raise
        except EndedError as error:
            how = await done_in_thread(worker.close)
            raise type(error)(str(error) or how) from error
        finally:
            self._leave(worker, stays=stays)
        return returned

    async def hold(self, *codes: Code, reused: bool = False) -> OwnProcess:
        """Return a process with this code for one user alone, who closes it; `reused`: others may have had it."""
        worker = None
        if reused:
            with self._lock:
                worker = self._fit(*codes)
        if worker is None:
            worker = await made_in_thread(partial(self._begin, *codes), Worker.close)
        return OwnProcess(worker, self._take_back if reused else None)

    def _take_back(self, worker: Worker) -> None:
        """Let the next user have a process that one had alone."""
        with self._lock:
            self._busy += 1
        self._pass_on(worker)

    def load(self, *codes: Code) -> Warm:
        """Return the warm process, which has this code from now on; blocks while that is imported."""
        with self._lock:
            if self._warm is None or not self._warm.alive:
                self._let_go()
                self._warm = Warm()
            elif self._warm.listed != listed_variables():  # the old one stays until its last process has ended
                self._bury_free()
                self._warm = Warm()
            warm = self._warm
        for code in codes:
            warm.load(code)
        return warm

    def prepare(self, codes: Sequence[Code]) -> None:
        """Begin to load code in the background, so that the first call does not wait for it."""

        def load() -> None:
            try:
                self.load(*codes)
            except (OSError, RewardFailure) as error:
                log.info("the processes for rewards begin with the first one: %s", error)

        if codes:
            hand_over(load)

    def close(self) -> None:
        """End all processes; the next call begins anew."""
        with self._lock:
            warm, self._warm = self._warm, None
            self._let_go()
        if warm is not None:
            warm.close()

    def _bury_free(self) -> None:
        while self._free:
            hand_over(partial(_bury, self._free.pop()))

    def _let_go(self) -> None:
        while self._free:
            self._free.pop().let_go()

    async def _worker(self, code: Code) -> Worker:
        """Return a process that has this code: one that waits, or another one where none becomes free."""
        waiting = None
        with self._lock:
            worker = self._fit(code)
            if worker is None and self._busy >= FREE:
                waiting = _Waiting(code)
                self._waiting.append(waiting)
            else:
                self._busy += 1
        if waiting is not None:
            worker = await self._turn(waiting)
        try:
            return worker if worker is not None else await made_in_thread(partial(self._begin, code), Worker.close)
        except BaseException:  # a cancellation too: a place that is not given back is lost for good
            self._pass_on(None)
            raise

    def _begin(self, *codes: Code) -> Worker:
        return Worker(self.load(*codes))

    async def _turn(self, waiting: _Waiting) -> Worker | None:
        """Wait until somebody leaves a process, or its place alone, or until all are busy with something long."""
        waiting.look(self._overdue, self._ended)
        try:
            return await waiting.turn
        except asyncio.CancelledError:
            if not waiting.turn.cancelled():  # it came in the same moment
                self._pass_on(waiting.turn.result())
            raise
        finally:
            waiting.timer.cancel()

    def _overdue(self, waiting: _Waiting, ended: int) -> None:
        if waiting.turn.done():
            return
        with self._lock:
            late = ended == self._ended
            self._busy += late
        if late:
            waiting.turn.set_result(None)
        else:
            waiting.look(self._overdue, self._ended)

    def _fit(self, *codes: Code) -> Worker | None:
        """Take a free process that has this code; those that have not, or have ended, go."""
        while self._free:
            worker = self._free.pop()
            if worker.fits(*codes):
                return worker
            hand_over(partial(_bury, worker))
        return None

    def _leave(self, worker: Worker, *, stays: bool) -> None:
        """Give a process back after a call."""
        self._ended += 1
        stays = stays and self._warm is worker.warm
        self._pass_on(worker if stays else None)
        if not stays:
            worker.end("was given up")
            hand_over(partial(_bury, worker))

    def _pass_on(self, worker: Worker | None) -> None:
        """Give a process, or the place of one, to whoever has waited longest; nobody who comes later is before them."""
        with self._lock:
            while self._waiting:
                waiting = self._waiting.popleft()
                if not waiting.turn.done() and waiting.hand(partial(self._take, waiting, worker)):
                    return
            self._busy -= 1
            stays = worker is not None and len(self._free) < FREE and self._warm is worker.warm
            if worker is not None and stays:
                self._free.append(worker)
        if worker is not None and not stays:
            hand_over(partial(_bury, worker))

    def _take(self, waiting: _Waiting, worker: Worker | None) -> None:
        """On the loop of whoever waits: let it go on, unless it has meanwhile given up or begun another."""
        if waiting.turn.done():
            self._pass_on(worker)
        elif worker is None or worker.fits(waiting.code):
            waiting.turn.set_result(worker)
        else:
            hand_over(partial(_bury, worker))
            waiting.turn.set_result(None)


class _Waiting:
    """A call that waits for a process, on the loop that made it."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self._loop = asyncio.get_running_loop()
        self.turn: asyncio.Future[Worker | None] = self._loop.create_future()
        """The process, or None where there is a place for another one."""

    def look(self, overdue: Callable[[_Waiting, int], None], ended: int) -> None:
        """See in a moment whether any call has ended since."""
        self.timer = self._loop.call_later(MOMENT, overdue, self, ended)

    def hand(self, give: Callable[[], None]) -> bool:
        """Let its loop call this; False where the loop is closed."""
        with suppress(RuntimeError):
            if asyncio.get_running_loop() is self._loop:
                self._loop.call_soon(give)
            else:
                self._loop.call_soon_threadsafe(give)
            return True
        return False


def _bury(worker: Worker) -> None:
    with suppress(RewardFailure):  # the warm process is gone, and with it all of its forks
        worker.close()


class OwnProcess:
    """A process that one user has to itself: what its calls leave in memory is there for the next one."""

    def __init__(self, worker: Worker, take_back: Callable[[Worker], None] | None = None) -> None:
        self._worker: Worker | None = worker
        self._take_back = take_back
        self._calling = asyncio.Lock()
        self.ended: str | None = None
        """How it has ended, as a predicate; None while it is there."""

    async def call(
        self,
        code: Code,
        arguments: Mapping[str, Any],
        plain: str,
        timeout: float,
        read: Callable[[Any], T] = itself,
    ) -> T:
        """See `ProcessPool.call`; one call after the other. Behind one that has ended the process, each says so."""
        async with self._calling:
            worker = self._worker
            if worker is None:
                raise EndedError(self.ended or "was closed")
            try:
                return await worker.call(code, arguments, plain, timeout, read)
            except NotCarriedError:
                raise
            except EndedError as error:
                self._worker = None
                how = str(error) or await done_in_thread(worker.close)
                self.ended = f"{how} in an earlier call"
                raise type(error)(how) from error
            except asyncio.CancelledError:
                self._worker, self.ended = None, "was ended in an earlier call, for which nobody waited any more"
                worker.end("was given up")
                hand_over(partial(_bury, worker))
                raise

    async def close(self) -> None:
        """End the process, whatever it does; where it is to be reused and is at rest, it stays."""
        worker, self._worker = self._worker, None
        if worker is not None and self._take_back is not None and not self._calling.locked():
            self._take_back(worker)
        elif worker is not None:
            worker.end("was closed")
            await done_in_thread(partial(_bury, worker))


POOL = ProcessPool()
"""Of this process: what is loaded once serves all of its runs."""
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.__init__)  # type: ignore[misc]  # the processes are the parent's
