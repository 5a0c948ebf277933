"""Run tests in several processes that are forks of one: `pytest -n 4`, or `-n auto` for two for each core.

Importing and collecting these tests takes longer than running most of their modules, so it is done once. Then each
worker is a fork, which asks the parent for chunks of neighbouring tests and sends back reports and warnings. The
parent's plugins (summary, `--lf`, `--durations`, `--junitxml`, `-x`) see them as if the tests had run there.

Tests marked `one_worker(name)` are one chunk: the same worker runs all of that name, one after the other, and such
chunks come first. A worker that dies fails the test that it was running, by name; another worker runs the rest.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import pytest

LONGEST = 40
"""Tests of a chunk. Towards the end chunks become shorter, so that the workers end at the same time."""
GRACE = 15.0
"""Seconds in which an interrupted worker must tear down its fixtures."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add = parser.getgroup("forks")._addoption  # `addoption` keeps lower-case letters for pytest itself
    add("-n", dest="workers", default="0", metavar="N", help="run tests in N forks; auto: two for each core")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the collected tests in workers, unless there are to be none; pytest itself then runs them here."""
    option = session.config.option
    # Most tests wait for processes, sandboxes and servers, so two share a core.
    count = 2 * len(os.sched_getaffinity(0)) if option.workers == "auto" else int(option.workers)
    failed_to_collect = session.testsfailed and not option.continue_on_collection_errors
    if count < 1 or not session.items or option.collectonly or option.usepdb or failed_to_collect:
        return None
    _Parent(session, count).run()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def chunks_of(items: Sequence[pytest.Item], workers: int) -> list[list[int]]:
    """Return the positions of the tests in the chunks that workers take, none with ungrouped tests of two modules."""
    groups: dict[str, list[int]] = {}
    others: deque[int] = deque()
    for position, item in enumerate(items):
        mark = item.get_closest_marker("one_worker")
        (groups.setdefault(mark.args[0], []) if mark else others).append(position)
    chunks = list(groups.values())
    while others:
        module = items[others[0]].nodeid.partition("::")[0]
        longest = max(1, min(LONGEST, len(others) // (4 * workers)))
        chunk = [others.popleft()]
        while others and len(chunk) < longest and items[others[0]].nodeid.partition("::")[0] == module:
            chunk.append(others.popleft())
        chunks.append(chunk)
    return chunks


def _messages(connection: Connection[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the messages that have come."""
    with suppress(EOFError, ConnectionResetError):
        while connection.poll():
            yield connection.recv()


class _Worker:
    """A worker as its parent sees it; reports carry it as `node`, which lets pytest name it."""

    def __init__(self, name: str, pid: int, connection: Connection[Any, Any]) -> None:
        self.gateway, self._workerinfocache = SimpleNamespace(id=name), f"[{name}]"
        self.pid, self.connection = pid, connection
        self.assigned: list[int] = []
        """Tests that it has taken and not finished."""
        self.started: int | None = None
        """The test that it has started last."""
        self.is_done = False


class _Parent:
    """The process that collected the tests, hands them out and hears the reports."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self.session, self.config = session, session.config
        self._chunks = deque(chunks_of(session.items, count))
        self._workers: list[_Worker] = []
        self._forked = 0
        self._folder = self.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self._count = min(count, len(self._chunks))

    def run(self) -> None:
        """Return when all tests have run, or the session must stop and each worker has ended its last test."""
        try:
            for _ in range(self._count):
                self._fork()
            while self._workers:
                self._hear(0.5)
        finally:
            self._end()

    def _fork(self) -> None:
        ours, theirs = Pipe()
        name = f"worker-{self._forked}"
        self._forked += 1
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            # With a copy of these open, a worker would not notice that its parent has gone.
            for connection in (ours, *(worker.connection for worker in self._workers)):
                connection.close()
            _Child(self.session, theirs).run(self._folder / name)
        theirs.close()
        self._workers.append(_Worker(name, pid, ours))

    def _hear(self, seconds: float) -> None:
        """Handle messages that come within this time, and the end of workers."""
        ready = wait([worker.connection for worker in self._workers], seconds)
        for worker in self._workers[:]:
            # A process that a test has left may hold the other end, so the end of the stream tells nothing.
            ended, status = os.waitpid(worker.pid, os.WNOHANG)
            if ended:
                self._workers.remove(worker)  # first, as one of its messages may end the run
            if worker.connection in ready or ended:
                for kind, value in _messages(worker.connection):
                    self._handle(worker, kind, value)
            if ended:
                worker.connection.close()
                if not worker.is_done:
                    self._bury(worker, status)

    def _handle(self, worker: _Worker, kind: str, value: Any) -> None:
        hook = self.config.hook
        if kind == "take":
            stopping = self.session.shouldfail or self.session.shouldstop
            chunk = self._chunks.popleft() if self._chunks and not stopping else []
            worker.assigned += chunk
            with suppress(BrokenPipeError, ConnectionResetError):
                worker.connection.send(chunk)
        elif kind == "start":
            worker.started = value
        elif kind == "finish":
            worker.assigned.remove(value)
            item = self.session.items[value]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        elif kind == "report":
            report = hook.pytest_report_from_serializable(config=self.config, data=value)
            report.node = worker
            self._log(report)
        elif kind == "warning":
            category, message, filename, line, source, when, nodeid = value
            # The class may be one that only the worker has imported; its name is all that is shown.
            warning = warnings.WarningMessage(message, type(category, (Warning,), {}), filename, line, line=source)
            given = {"warning_message": warning, "when": when, "nodeid": nodeid, "location": None}
            hook.pytest_warning_recorded.call_historic(kwargs=given)
        elif kind == "done":
            worker.is_done = True
            self.session.shouldfail = self.session.shouldfail or value
        elif kind == "exit":
            worker.is_done = True
            text, code = value
            pytest.exit(f"{worker.gateway.id}: {text}", returncode=code)

    def _log(self, report: pytest.TestReport) -> None:
        """Give a report to the plugins, and stop the workers if it is the last that is wanted."""
        was_stopping = self.session.shouldfail
        self.config.hook.pytest_runtest_logreport(report=report)
        if was_stopping:
            self.session.shouldfail = was_stopping  # not what a test says that was running already
        elif self.session.shouldfail:
            for worker in self._workers:
                with suppress(BrokenPipeError, ConnectionResetError):
                    worker.connection.send([])

    def _bury(self, worker: _Worker, status: int) -> None:
        """Fail the test that a dead worker was running, and let another worker run what it had not finished."""
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit status {code}"
        if worker.started is None:
            raise RuntimeError(f"{worker.gateway.id} ended before its first test: {how}")
        item = self.session.items[worker.started]
        message = f"{worker.gateway.id} ended while it was running this test: {how}"
        self._log(pytest.TestReport(item.nodeid, item.location, item.keywords, "failed", message, "call"))
        left = [position for position in worker.assigned if position != worker.started]
        if left:
            self._chunks.appendleft(left)
        if self._chunks and not (self.session.shouldfail or self.session.shouldstop):
            self._fork()

    def _end(self) -> None:
        """End the workers that are left: kindly, then by Ctrl-C, which may have reached them before, then by force."""
        for number, seconds in ((0, 1.0), (signal.SIGINT, GRACE), (signal.SIGKILL, GRACE)):
            deadline = time.monotonic() + seconds
            for worker in self._workers:
                worker.connection.close()
                os.kill(worker.pid, number)
            while self._workers and time.monotonic() < deadline:
                self._workers = [worker for worker in self._workers if os.waitpid(worker.pid, os.WNOHANG) == (0, 0)]
                time.sleep(0.02)


class _Child:
    """A worker: a fork that runs the tests it is given, and is a plugin that sends what their parent must hear."""

    def __init__(self, session: pytest.Session, connection: Connection[Any, Any]) -> None:
        self.session, self.config, self.connection = session, session.config, connection
        self._queue: deque[int] = deque()
        self._next: int | None = None
        self._is_apart = False

    def run(self, folder: Any) -> None:
        """Run tests until there are none left, and end this process."""
        status = 1
        try:
            self._set_up(folder)
            try:
                self._run_tests()
            except KeyboardInterrupt:
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, after the terminal's: nothing must be left
                raise
            finally:
                self.session._setupstate.teardown_exact(None)
            self.connection.send(("done", self.session.shouldfail or self.session.shouldstop))
            status = 0
        except (BrokenPipeError, ConnectionResetError, EOFError):
            pass  # the parent has gone, and nobody is left to tell
        except BaseException as error:  # noqa: BLE001, whatever it is, the parent tells it
            text = str(error) if isinstance(error, pytest.exit.Exception) else traceback.format_exc()
            is_wanted = isinstance(error, (pytest.exit.Exception, KeyboardInterrupt))
            with suppress(OSError):
                self.connection.send(("exit", (text, 2 if is_wanted else 3)))
                status = 0
        finally:
            with suppress(BaseException):
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _set_up(self, folder: Any) -> None:
        """Part from the parent: a folder, captured output and random numbers of its own, and no terminal."""
        folder.mkdir(mode=0o700)
        factory, plugins = self.config._tmp_path_factory, self.config.pluginmanager  # type: ignore[attr-defined]
        factory._basetemp = folder
        factory._exit_stack.pop_all()  # which removes old folders, once for all workers
        if capture := plugins.getplugin("capturemanager"):
            capture.stop_global_capturing()  # forks share the place in a file
            capture.start_global_capturing()
        if reporter := plugins.getplugin("terminalreporter"):
            plugins.unregister(reporter)
            plugins.register(SimpleNamespace(_tw=reporter._tw), "terminalreporter")  # for stacks of pytest-timeout
        plugins.register(self, "forks-child")
        self._is_apart = True
        random.seed()

    def _run_tests(self) -> None:
        self._find_next()
        while (position := self._next) is not None:
            self._next = None
            self.connection.send(("start", position))
            # Itself in the place of the next test: a worker that holds none yet leaves more for the others.
            self.config.hook.pytest_runtest_protocol(item=self.session.items[position], nextitem=self)
            self.connection.send(("finish", position))

    def listchain(self) -> list[Any]:
        """Return the nodes of the test that comes next, as pytest asks for at a teardown: their fixtures stay."""
        self._find_next()
        return [] if self._next is None else self.session.items[self._next].listchain()

    def _find_next(self) -> None:
        if self.session.shouldfail or self.session.shouldstop or self.connection.poll():
            return  # what comes unasked means: stop
        if not self._queue:
            self.connection.send(("take", None))
            self._queue.extend(self.connection.recv())
        if self._queue:
            self._next = self._queue.popleft()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.connection.send(("report", data))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str) -> None:
        if self._is_apart:  # a plugin that is registered also hears of all earlier warnings, those of the parent
            shown = warning_message
            place = shown.category.__name__, str(shown.message), shown.filename, shown.lineno, shown.line
            self.connection.send(("warning", (*place, when, nodeid)))
