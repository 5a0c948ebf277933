"""Serve objects of the runner that a process for user code calls while it runs a call."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import io
import pickle
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Protocol

from hermes_rl.errors import HermesRLError
from hermes_rl.threads import WAITS, Waits, run_detached, run_in_thread
from hermes_rl.user_code.failures import EndedError, NotCarriedError
from hermes_rl.user_code.messages import Question
from hermes_rl.user_code.process import ANSWER, ANSWERED, stand_in
from hermes_rl.user_code.proxies import LIVING
from hermes_rl.user_code.wire import LARGEST, LONG, WireError

MOST_OPEN = 1_000
"""Maximum number of open questions of a call."""
AT_ONCE = 16
"""Number of open questions of a call that are answered in threads at a time; each answer may be as long as a file."""
MOST_SENT = 100
"""Number of most recent hermes-rl exceptions sent to a call that are remembered."""


class AskingProcess(Protocol):
    """The process that asks."""

    objects: int
    """Number of objects it received; each has a unique number in this process."""
    confined: bool
    """True if it is in a sandbox."""

    def send(self, *parts: bytes) -> None: ...


class _Pickler(pickle.Pickler):
    """Pickle values, replacing objects that live in the runner by proxies."""

    def __init__(self, file: io.BytesIO, served: ServedObjects) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._served = served

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in LIVING:
            return NotImplemented
        return stand_in, (LIVING[type(obj)], self._served.register(obj), obj.stand_in_fields())


class ServedObjects:
    """The objects that one call may use, and its open questions."""

    def __init__(self, worker: AskingProcess) -> None:
        self._worker = worker
        self._objects: dict[int, Any] = {}
        self._asked_of: dict[int, Any] = {}
        """Object that receives the calls, by number."""
        self.entered: dict[int, AbstractContextManager[Any]] = {}
        """Context managers that the call has entered and not left, by number."""
        self.answering: set[Future[None]] = set()
        self.sent: deque[Exception] = deque(maxlen=MOST_SENT)
        """hermes-rl exceptions that were raised in the runner and sent as results."""
        self._context = contextvars.copy_context()
        self._slots = threading.Semaphore(AT_ONCE)
        self._waits = Waits()
        self._context.run(WAITS.set, self._waits)
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks of the questions that are processed on the event loop."""

    def register(self, obj: Any) -> int:
        """Return the number by which the call may use this object."""
        for object_id, existing in self._objects.items():
            if existing is obj:
                return object_id
        object_id = self._worker.objects
        self._worker.objects += 1
        self._objects[object_id] = obj
        # Code in a sandbox could escape through an object with access to the outside.
        self._asked_of[object_id] = obj.confined() if self._worker.confined and hasattr(obj, "confined") else obj
        return object_id

    def pickled(self, value: Any) -> bytes:
        """Return the pickled value; raise `NotCarriedError`, or `EndedError` if it is nested too deeply."""
        file = io.BytesIO()
        try:
            _Pickler(file, self).dump(value)
        except RecursionError as error:
            raise EndedError("cannot be given what nests that deeply") from error
        except Exception as error:
            raise NotCarriedError(
                f"cannot be given what pickle cannot carry ({type(error).__name__}: {error}); leave that out of "
                "the row and the state, or set `isolate: none`"
            ) from error
        return file.getvalue()

    def serve(self, question: Question) -> None:
        """Start processing a question: several may be open, and the time is limited.

        A coroutine function is called on this event loop, any other method in a thread.

        Raises:
            WireError: the call did not receive this object, or too many questions are open.
        """
        if question.object_id not in self._objects:
            raise WireError("a question to an object that its call did not receive")
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
                with self._slots:
                    context.run(self._answer_question, question)
            finally:
                ended()

        if inspect.iscoroutinefunction(method := self._method(question)):
            task = asyncio.get_running_loop().create_task(self._answer_here(question, method), context=context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(ended)
        else:
            run_detached(work)

    def give_up(self) -> None:
        """Cancel pending results, which nothing awaits: the call, which limited their time, has ended."""
        self._waits.give_up()
        for task in tuple(self._tasks):
            task.cancel()

    def close(self) -> None:
        """Wait for pending results, and leave the context managers that the call has not left; blocks."""
        wait(tuple(self.answering))
        for entered in self.entered.values():
            with suppress(HermesRLError):
                entered.__exit__(None, None, None)

    def _method(self, question: Question) -> Any:
        """Return the requested public attribute of an object, or None."""
        return (
            None
            if question.method.startswith("_")
            else getattr(self._asked_of[question.object_id], question.method, None)
        )

    async def _answer_here(self, question: Question, method: Callable[..., Awaitable[Any]]) -> None:
        try:
            answer = self._encode_answer(question, await method(*question.args, **question.kwargs))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - carried to the foreign code
            answer = self._encode_answer(question, error, succeeded=False)
        if len(answer) > LONG or len(self.answering) > 1:  # it may have to wait until the process has read others
            await run_in_thread(partial(self._send, answer))
        else:
            self._send(answer)

    def _answer_question(self, question: Question) -> None:
        try:
            answer = self._encode_answer(question, self._call_method(question))
        except BaseException as error:  # noqa: BLE001 - carried to the foreign code, whatever it is
            answer = self._encode_answer(question, error, succeeded=False)
        self._send(answer)

    def _encode_answer(self, question: Question, value: Any, *, succeeded: bool = True) -> bytes:
        """Return the encoded result of a question: returned or raised."""
        if not succeeded and isinstance(value, HermesRLError):
            self.sent.append(value)
        try:
            content = self.pickled(value)
        except EndedError:
            if succeeded:
                raise
            content = self.pickled(RuntimeError(f"{type(value).__name__}: {value}"))
        if len(content) > LARGEST - 100:  # with the header; a process that gets no answer would wait for it
            mib = f"an answer of {len(content) >> 20} MiB; at most {LARGEST >> 20} are carried"
            succeeded, content = False, self.pickled(RuntimeError(mib))
        return ANSWERED + ANSWER.pack(question.question_id, succeeded) + content

    def _send(self, answer: bytes) -> None:
        with suppress(OSError, WireError):  # the process has ended meanwhile
            self._worker.send(answer)

    def _call_method(self, question: Question) -> Any:
        object_id, name = question.object_id, question.method
        if name == "leave" and object_id in self.entered:
            return self.entered.pop(object_id).__exit__(None, None, None)
        method = self._method(question)
        if not callable(method):
            raise AttributeError(f"{type(self._objects[object_id]).__name__} has no method {name!r}")
        value = method(*question.args, **question.kwargs)
        if isinstance(value, AbstractContextManager):
            entered = value.__enter__()
            self.entered[self.register(entered)] = value
            return entered
        return value
