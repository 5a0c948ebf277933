"""Interpret the test messages of a command's processes on the host; see `reporter`.

Each process that runs tests first registers, announces its tests, reports the start and outcome of each, and finally
reports its end. Messages in another order, a process that ends otherwise, or an interrupted session invalidate all of
them: then code other than the test runner has interfered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ENDED = {"0", "1", "5"}
"""Exit statuses of pytest: all passed, some failed, no tests."""
INTERRUPTED = "the session of tests was interrupted"
UNFINISHED = "a process that runs tests did not come to its end"
DISORDER = "tests were reported in an order in which none runs"
LEFT = "the code under test has ended the script that tests it"
SCRIPT_FAILED = "the script has failed, whatever its exit status is"
TOO_MUCH = "more was reported than tests have to say"


@dataclass
class RunnerReport:
    """Results of all processes that ran tests."""

    spoke: bool = False
    """True if at least one process has registered."""
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    """Tests, with the full path of their file, and the outcome of each."""
    problem: str | None = None
    """Reason for which none of it counts, or None."""


@dataclass
class _Process:
    runner: str
    names: list[str] = field(default_factory=list)
    outcomes: dict[int, str] = field(default_factory=dict)
    running: int | None = None
    status: str | None = None
    changed: list[str] = field(default_factory=list)
    finished: bool = False

    def take(self, kind: str, fields: list[str]) -> str | None:
        """Process one message; return the problem or None."""
        if kind == "interrupted" and not self.finished:
            return INTERRUPTED
        if self.finished or (self.status is not None and kind != "finish"):
            return DISORDER
        if kind == "end" and self.running is not None and len(fields) == 2 and fields[0] == str(self.running):
            self.outcomes[self.running], self.running = fields[1], None
            return None
        return DISORDER if self.running is not None else self._take_between(kind, fields)

    def _take_between(self, kind: str, fields: list[str]) -> str | None:
        """Process a message while no test runs."""
        if kind == "tests":
            self.names += fields
        elif kind == "start" and (test_index := self._next(fields)) is not None:
            self.running = test_index
        elif kind == "session" and self.runner in ("pytest", "script"):
            (self.status,) = fields[:1] or [""]
            return None if self.status in ENDED else INTERRUPTED
        elif kind == "finish" and (
            self.status is not None or self.runner == "unittest" or (self.runner == "pytest" and not self.names)
        ):
            self.finished, self.changed = True, [name for name in fields if name]
            return f"{self.changed[0]} was replaced" if self.runner == "script" and self.changed else None
        else:
            return LEFT if self.runner == "script" and kind == "finish" else DISORDER
        return None

    def _next(self, fields: list[str]) -> int | None:
        """Return the number of the starting test if it was announced and has not run, or None."""
        is_index = len(fields) == 1 and fields[0].isascii() and fields[0].isdecimal() and len(fields[0]) < 10
        test_index = int(fields[0]) if is_index else -1
        return test_index if 0 <= test_index < len(self.names) and test_index not in self.outcomes else None


def parse_report(messages: Iterable[tuple[int, str]] | None) -> RunnerReport:
    """Return the combined report; `messages` are (process id, text), or None if there were too many.

    Messages of a process that has not registered are ignored: it may be a copy of one that runs tests.
    """
    if messages is None:
        return RunnerReport(spoke=True, problem=TOO_MUCH)
    report = RunnerReport()
    processes: dict[int, _Process] = {}
    ended_processes: list[_Process] = []
    for sender, text in messages:
        _, _, message = text.removesuffix("\n").partition("\t")
        kind, *fields = message.split("\t")
        if kind == "begin":
            before = processes.get(sender)
            if before is not None:
                report.problem = report.problem or (None if before.finished else UNFINISHED)
                ended_processes.append(before)
            processes[sender] = _Process(fields[0] if fields else "")
        elif sender in processes:
            report.problem = report.problem or processes[sender].take(kind, fields)
    ended_processes += processes.values()
    report.spoke = bool(ended_processes)
    if not all(process.finished for process in ended_processes):
        report.problem = report.problem or UNFINISHED
    if next((process.status for process in reversed(ended_processes) if process.runner == "script"), "0") != "0":
        report.problem = report.problem or SCRIPT_FAILED
    for process in ended_processes:
        tampered = f"with {', '.join(process.changed)}" if process.changed else None
        report.outcomes += [
            (process.names[test_index], tampered or outcome) for test_index, outcome in process.outcomes.items()
        ]
    return report
