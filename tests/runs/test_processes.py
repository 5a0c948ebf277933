"""The helper of tests that finds workers finds those that a run has started, and those that were forked for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.runs.processes import children, workers_of
from tests.waiting import until_blocking

RUN = """
import subprocess, sys
for _ in range(int(sys.argv[1])):
    subprocess.Popen([sys.executable, "-c", sys.argv[2], "hermes_rl.runs.worker"])
sys.stdin.read()
"""
WORKER = "import sys; sys.stdin.read()"
FORKS = """
import os, subprocess, sys
for _ in range(2):
    if os.fork() == 0:
        subprocess.run(["cat"])
        break
sys.stdin.read()
"""


@contextmanager
def run(count: int, code: str) -> Iterator[int]:
    """A process that stands for a run, and ends with all that it has started when its input is closed."""
    with subprocess.Popen([sys.executable, "-c", RUN, str(count), code], stdin=subprocess.PIPE) as process:
        yield process.pid


@pytest.mark.parametrize("count", [1, 3])
def test_workers_that_a_run_has_started_are_found(count: int) -> None:
    with run(count, WORKER) as pid:
        until_blocking(lambda: len(workers_of(pid)) == count)
        assert workers_of(pid) == children(pid)


def test_workers_that_a_server_has_forked_are_found_without_the_server() -> None:
    with run(1, FORKS) as pid:
        until_blocking(lambda: len(workers_of(pid)) == 2)
        (server,) = children(pid)
        assert workers_of(pid) == children(server)


def test_a_process_without_workers_has_none() -> None:
    assert workers_of(os.getpid()) == []
