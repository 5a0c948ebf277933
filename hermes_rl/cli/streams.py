"""Handle standard streams that are closed, full, or without a reader, so that no command stops halfway.

The module also escapes log records without a handler, which Python would print to the terminal unescaped.

A closed descriptor is opened on /dev/null before anything else is opened, so that no file of a run gets its number and
then the printed output. A stream that can no longer be written to is replaced by /dev/null, for child processes too.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
from typing import Any

from hermes_rl.terminal_text import escape_controls

RESULTS_ELSEWHERE = frozenset({"run", "regrade", "serve-http", "serve-openenv", "view", "push", "init"})
"""Commands whose results are not their output, so that they do not fail if the output cannot be printed."""


class Output:
    """Wrapper of standard output or error that survives failed writes; `lost` is the reason if text was lost."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.write_error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write to the stream while that is possible."""
        return self._tried(self._stream.write, text) or 0

    def flush(self) -> None:
        """Flush the buffer while that is possible."""
        self._tried(self._stream.flush)

    def _tried(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except OSError as error:
            if error.errno != errno.EPIPE:  # a reader such as `head` has enough
                self.write_error = self.write_error or error
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        return method(*arguments)


class _Visible(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record))


def prepare() -> tuple[Output, Output]:
    """Make standard output and error usable in any state; return both."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free descriptor, this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w" if descriptor else "r", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the locale lacks must not end a command
    sys.stdout, sys.stderr = output, errors = Output(sys.stdout), Output(sys.stderr)
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())
    return output, errors


def final_status(status: int, command: str, output: Output) -> int:
    """Flush the output, report text that could not be printed, and return the command's exit status."""
    output.flush()
    if output.write_error is None:
        return status
    sys.stderr.write(f"stdout cannot be written to ({output.write_error.strerror}); what was printed there is lost\n")
    return status if command in RESULTS_ELSEWHERE else status or 1
