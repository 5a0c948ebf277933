"""What a run says while it goes on. Everything goes to stderr; results are for stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from hermes_rl.rollouts.rollout import Group
from hermes_rl.visible import visible

EVERY = 5.0
"""Seconds between two lines where stderr is no terminal."""


class Progress:
    """Counts groups and prints one line now and then; on a terminal the line is rewritten in place."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self.stream = stream if stream is not None else sys.stderr
        self.quiet = quiet
        self.total: int | None = None
        self.what = "groups"
        self.scores: list[float] = []
        self.further: Callable[[], str] = str
        """Gives more to say in the line; empty where there is nothing."""
        self._inline = self.stream.isatty()
        self._open_line = False
        self._last = time.monotonic()

    def begin(self, total: int | None, done: int = 0, *, what: str = "groups", further: int = 0) -> None:
        """Say how much there is to do, and how much of it is there already; `further` rollouts of unfinished ones."""
        self.total, self.what = total, what
        if (done or further) and not self.quiet:
            more = f", and {further} rollouts of unfinished ones" if further else ""
            self.note(f"going on: {done} of {total or '?'} {what} are there already{more}")

    def step(self, done: int, group: Group) -> None:
        """A group has ended."""
        self.show(f"{done}/{self.total or '?'} {self.what}", group.scores, last=done == self.total)

    def show(self, text: str, scores: Sequence[float], *, last: bool = False) -> None:
        """Take scores into the mean, and print the line with it if the last one is some time ago."""
        self.scores += scores
        now = time.monotonic()
        if self.quiet or (now - self._last < (0.1 if self._inline else EVERY) and not last):
            return
        self._last = now
        self._show(" · ".join(filter(None, [text, f"mean score {self.mean()}", self.further()])))

    def mean(self) -> str:
        return f"{sum(self.scores) / len(self.scores):.3f}" if self.scores else "–"

    def note(self, message: str) -> None:
        """Something that the user should know, even with --quiet."""
        self.end()
        print(visible(message), file=self.stream, flush=True)

    def end(self) -> None:
        """Finish a line that is rewritten in place."""
        if self._open_line:
            self.stream.write("\n")
            self._open_line = False

    def _show(self, text: str) -> None:
        text = visible(text)
        if self._inline:
            self.stream.write(f"\r\x1b[2K{text}")
            self._open_line = True
        else:
            self.stream.write(text + "\n")
        self.stream.flush()
