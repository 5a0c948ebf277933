"""What benchmarks of commands measure, and what all benchmarks print: the machine, and tables of medians."""

from __future__ import annotations

import datetime
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("aiohttp", "openai")
PAIRS = 7
"""The fewest pairs of which the range is an interval of 95 % for the median."""


@dataclass(frozen=True)
class Usage:
    """What a command used, with the processes that it waited for."""

    cpu: float
    """Seconds of processor time."""
    peak: float
    """MiB of the process with the most memory."""
    ready: float
    """Seconds until the command was ready: its end, or the event that it was measured to."""


def usage(
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    ready: Callable[[str], bool] | None = None,
    *,
    ends: bool = True,
) -> Usage:
    """Run a command in a directory and return its usage; ends the benchmark with its output if it fails.

    Args:
        ready: Returns True from some output of the command on, whose seconds are measured.
        ends: False for a command that ends only when it is told to, which happens as soon as it is ready.
    """
    with tempfile.TemporaryFile("w+") as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        ready_after = None
        while ready is not None and ready_after is None and os.waitid(os.P_PID, process.pid, _NO_WAIT) is None:
            if ready(_text(output.fileno())):
                ready_after = time.perf_counter() - started
            else:
                time.sleep(0.005)
        if not ends:
            process.send_signal(signal.SIGINT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - started
        if (ends and process.returncode) or (ready is not None and ready_after is None):
            sys.exit(f"{' '.join(command)}: exit status {process.returncode}\n{_text(output.fileno())}")
    return Usage(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, took if ready_after is None else ready_after)


_NO_WAIT = os.WEXITED | os.WNOHANG | os.WNOWAIT


def _text(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


@dataclass(frozen=True)
class Interval:
    """A median with an interval of at least 95 % for it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float]) -> Interval:
    """Return the median and the interval between two of the values, which assumes nothing of their distribution.

    With fewer values than `PAIRS` even their range is less than an interval of 95 %; the range is returned.
    """
    ordered = sorted(values)
    count, cut = len(ordered), 0
    # The median is below the value after `cut` others with the probability of at most `cut` heads of `count` coins.
    while 2 * sum(math.comb(count, heads) for heads in range(cut + 2)) <= 0.05 * 2**count:
        cut += 1
    return Interval(statistics.median(ordered), ordered[cut], ordered[-1 - cut])


def ratio(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return the median ratio of pairs that were measured one after the other."""
    return interval([value / base for value, base in zip(values, baseline, strict=True)])


def machine() -> str:
    """One line that says where and when the figures come from."""
    cores = len(os.sched_getaffinity(0))
    python = f"{platform.python_implementation()} {platform.python_version()}"
    versions = ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{_processor()}, {cores} cores, Linux {platform.release()}, {python}, {versions}, {today}"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    lines = [heads, ["---", *["---:" for _ in heads[1:]]], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, with the smallest and the largest."""
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return f"{statistics.median(values):.{digits}f} ({low} to {high})"


def say(text: str) -> None:
    """A result, on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123 - a device, not a file of ours
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
