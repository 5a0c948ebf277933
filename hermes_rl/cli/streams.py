"""Standard streams that may be closed, full, or read by nobody: no command ends in the middle because of them.

A closed descriptor is opened on /dev/null before anything else is opened, so that no file of a run gets its number and
then what is printed. A stream that can no longer be written to goes on as /dev/null, for child processes too.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

KEPT = frozenset({"run", "regrade", "rollouts", "openenv", "view", "push", "init"})
"""Commands whose results are not what they print, so that they are complete without it."""


class Output:
    """Standard output or error; otherwise as the stream that it wraps. `lost` is why text was lost, if any was."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.lost: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream as long as that is possible."""
        return self._tried(self._stream.write, text) or 0

    def flush(self) -> None:
        """Write what is buffered as long as that is possible."""
        self._tried(self._stream.flush)

    def _tried(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError as error:
            if error.errno != errno.EPIPE:  # who reads, as `head`, has enough
                self.lost = self.lost or error
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        return method(*arguments)


def prepare() -> tuple[Output, Output]:
    """Make standard output and error usable whatever they are; return both."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free: this
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without such a character ends no command
    sys.stdout, sys.stderr = output, errors = Output(sys.stdout), Output(sys.stderr)
    return output, errors


def final_status(status: int, command: str, output: Output) -> int:
    """Return the exit status of a command, once all is printed, and say if something could not be."""
    output.flush()
    if output.lost is None:
        return status
    sys.stderr.write(f"stdout cannot be written to ({output.lost.strerror}); what was printed there is lost\n")
    return status if command in KEPT else status or 1
