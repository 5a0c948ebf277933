"""What all benchmarks print: the machine, and tables of medians with their range."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("aiohttp", "openai")


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
