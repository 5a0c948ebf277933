"""`run.log`: messages of a run and log records of hermes_rl while it was open, with the time and without secrets.

It is for a reader who did not watch the run: the output of the terminal is gone by then. It contains everything that
hermes_rl logs from INFO on, with or without `--verbose`.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from hermes_rl.active_environment import ENVIRONMENT
from hermes_rl.runs.progress import Progress
from hermes_rl.terminal_text import escape_controls

NAME = "run.log"
LARGEST = 1 << 25
"""Bytes after which the file becomes `run.log.1`, and a new one starts."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
"""Variables with such a name hold secrets."""
SHORTEST = 8
"""Minimum length of a secret in characters; shorter values would remove parts of ordinary words."""


@contextmanager
def run_log(folder: Path, progress: Progress, environ: Mapping[str, str] | None) -> Iterator[None]:
    """Write `run.log` in this directory while the run is open, with the messages of the progress to the user.

    The secrets of `environ` are not written; None: the secrets of this process's environment.
    """
    handler = _File(folder / NAME, secrets_of(os.environ if environ is None else environ), progress)
    logger = logging.getLogger("hermes_rl")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logger.getEffectiveLevel(), logging.INFO))
    progress.noted = handler.note
    try:
        yield
    finally:
        progress.noted = None
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.close()


def secrets_of(environ: Mapping[str, str]) -> list[str]:
    """Return the values of variables whose names say that they hold secrets, the longest first."""
    secrets = {value for name, value in environ.items() if SECRET.search(name) and len(value) >= SHORTEST}
    return sorted(secrets, key=len, reverse=True)


def redacted(text: str, secrets: Iterable[str]) -> str:
    """Return the text with each secret as ``***``."""
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


class _File(RotatingFileHandler):
    """Writes lines while the file system accepts them; the first failure is reported once."""

    def __init__(self, path: Path, secrets: list[str], progress: Progress) -> None:
        self._secrets, self._progress, self._failed = secrets, progress, False
        self._environment = ENVIRONMENT.get()
        super().__init__(path, maxBytes=LARGEST, backupCount=1, encoding="utf-8", errors="backslashreplace", delay=True)
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        self.setFormatter(formatter)

    def note(self, message: str) -> None:
        """Write a message that the user has seen."""
        self.handle(logging.LogRecord("hermes_rl", logging.INFO, "", 0, message, None, None))

    def format(self, record: logging.LogRecord) -> str:
        return redacted(escape_controls(super().format(record)), self._secrets).replace("\n", "\n    ")

    def emit(self, record: logging.LogRecord) -> None:
        if ENVIRONMENT.get() not in ("", self._environment):
            return  # it belongs into the log of another environment's run
        if not self._failed:
            super().emit(record)
        alone = logging.getLogger("hermes_rl").handlers == [self] and not logging.getLogger().handlers
        if record.levelno >= logging.WARNING and alone:  # hermes_rl's log records have no other handler
            assert logging.lastResort is not None
            logging.lastResort.handle(record)  # as it would be without this file

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        self._failed = True
        self._progress.say(f"stopped writing {self.baseFilename}: writing failed; the run continues without it")
