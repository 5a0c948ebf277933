"""Runs of pytest with plugins of these tests, each in a directory and process of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

PLUGINS = ("-p", "tests.forks", "-p", "tests.thorough", "-p", "tests.budget", "-p", "pytest_timeout")


def start(folder: Path, *options: str) -> int:
    """Start pytest with two workers, unless the options have another number, in a fork that need not import it."""
    if pid := os.fork():
        return pid
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.environ |= {"NOTES": str(folder / "notes"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "200"}
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = pytest.main([*PLUGINS, "-n", "2", *options])
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001, nothing may return to the run that this is a fork of
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def finish(folder: Path, pid: int) -> SimpleNamespace:
    """Wait for this run, and return its status and output."""
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    return SimpleNamespace(returncode=os.waitstatus_to_exitcode(ended[1]), stdout=(folder / "output").read_text())
