"""Show a live panel of a run on a terminal: progress, phases of rollouts, scores, failures, and keys to steer the run.

This module draws in a separate thread, so that a stopped terminal (Ctrl-S, a slow connection) never blocks the run. It
reads single keys while the panel is shown. The content comes from `hermes_rl.runs.progress.Watched`. If stderr is not a
terminal, `hermes_rl.runs.progress.Progress` writes lines instead.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import termios
import threading
import time
import tty
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hermes_rl.rollouts.rollout import Group as RolloutGroup
from hermes_rl.runs.progress import Progress, RunStatus, Watched
from hermes_rl.terminal_text import escape_controls

EVERY = 0.5
"""Seconds between two drawings."""
HISTOGRAM_VALUES = 2000
"""Number of latest values of each reward that its histogram shows."""
RATE = 60.0
"""Seconds over which the rate is measured."""
BARS = "▁▂▃▄▅▆▇█"
BINS = 10
LAST = 2.0
"""Maximum seconds for the last drawing when the run ends, so that a stopped terminal does not block the end."""
NAMES = 4
"""Maximum number of rewards that the panel shows; the run's files have the others."""
KEYS = "p pause · f finish early · + and - how many at a time · Ctrl-C stop"
STEP = 0.25
"""Fraction by which + and - change the number of rollouts in flight."""


class LivePanel(Progress):
    """Progress of a run on a terminal: notes above, and a panel below them that is redrawn.

    `keys` is the descriptor of the keyboard, and `of` the panel that contains this one, if several environments run
    together; that panel draws.
    """

    def __init__(
        self, title: str, console: Console | None = None, keys: int | None = None, parent: LivePanel | None = None
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        super().__init__()
        self.title, self._keys, self._parent = title, keys, parent
        self._parts: list[LivePanel] = []
        self._watched: list[tuple[LivePanel, Watched]] = []
        """Runs that are drawn and steered."""
        self._open = ExitStack()
        """Resources that are released when the last watched run ends."""
        self.values: dict[str, deque[float]] = {"score": deque(maxlen=HISTOGRAM_VALUES)}
        """Latest values by name of the reward, the score first."""
        self.done = 0
        self.text = ""
        """Status text of a run without a known number of groups."""
        self._status: RunStatus | None = None
        self._started = time.monotonic()
        self._ends: deque[tuple[float, int]] = deque()
        """Pairs of a time at which a group ended, and the number of ended groups at that time."""
        self._notes: deque[str] = deque()
        self._stop: threading.Event | None = None
        self._drawing: threading.Thread | None = None
        self._folder = ""

    # ------------------------------------------------------------------ messages of the run

    @contextmanager
    def watching(self, watched: Watched) -> Iterator[None]:
        """Draw the panel while the run is open."""
        loop = asyncio.get_running_loop()
        self._folder, self._started = str(watched.directory.path), time.monotonic()
        with super().watching(watched), (self._parent or self)._show_run(self, watched, loop):
            yield

    @contextmanager
    def _show_run(self, part: LivePanel, watched: Watched, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Add a run to the panel within the block; the first run starts the drawing, and the last one ends it."""
        if not self._watched:
            self._open.enter_context(self._keyboard(loop))
            self._open.callback(self.end)
            self._stop = threading.Event()
            self._drawing = threading.Thread(target=self._draw, args=(self._stop,), name="live panel", daemon=True)
            self._drawing.start()
        self._watched.append((part, watched))
        try:
            yield
        finally:
            self._watched.remove((part, watched))
            if not self._watched:
                self._open.close()

    def for_environment(self, name: str) -> Progress:
        """Return the progress of one of several environments, as a part of this panel."""
        part = LivePanel(name, self.console, parent=self)
        self._parts.append(part)
        return part

    async def _refresh(self, watched: Watched) -> None:
        """Update the status of the run, in the thread that changes it."""
        while True:
            self._status = watched.status()
            await asyncio.sleep(EVERY)

    def step(self, done: int, group: RolloutGroup) -> None:
        """Count a group that has ended."""
        for rollout in group.rollouts:
            for name, value in rollout.rewards.items():
                if value.value is not None:
                    self.values.setdefault(name, deque(maxlen=HISTOGRAM_VALUES)).append(value.value)
        self.done = done
        self._count_end("", group.scores)

    def show(self, text: str, scores: Sequence[float], *, last: bool = False) -> None:
        """Add the scores of a group that was passed on, with the status text of its consumer."""
        self.done += 1
        self._count_end(text, scores)

    def _count_end(self, text: str, scores: Sequence[float]) -> None:
        now = time.monotonic()
        self.text = text
        self.values["score"].extend(scores)
        self._ends.append((now, self.done))
        while len(self._ends) > 2 and now - self._ends[0][0] > RATE:
            self._ends.popleft()

    def say(self, message: str) -> None:
        """Show a line above the panel."""
        if self._parent is not None:
            self._parent.say(f"{self.title}: {message}")
        elif self._drawing is None:
            super().say(message)
        else:
            self._notes.append(message)

    def end(self) -> None:
        """Remove the panel; notes remain."""
        drawing, self._drawing = self._drawing, None
        if drawing is not None and self._stop is not None:
            self._stop.set()
            drawing.join(LAST)

    # ------------------------------------------------------------------ drawing

    def _draw(self, stop: threading.Event) -> None:
        """Draw until `stop` is set; report an error of the panel itself once, and still print notes."""
        reported = False
        with suppress(OSError), Live(console=self.console, auto_refresh=False, transient=True) as live:
            while True:
                stopping = stop.wait(EVERY)
                while self._notes:
                    self.console.print(
                        escape_controls(self._notes.popleft()), markup=False, highlight=False, soft_wrap=True
                    )
                if stopping:
                    return
                try:
                    live.update(self.panel(), refresh=True)
                except OSError:  # the terminal is gone
                    raise
                except Exception as error:  # noqa: BLE001
                    if not reported:
                        self.say(f"the panel cannot be drawn ({type(error).__name__}: {error}); the run continues")
                    reported = True

    def panel(self) -> RenderableType:
        """Return the content to draw."""
        lines = [line for part in self._parts or [self] for line in part._lines()]
        if self._keys is not None:
            lines.append(Text(KEYS, style="dim"))
        return Group(*lines)

    def _lines(self) -> list[RenderableType]:
        status = self._status
        head = Table.grid(expand=True)
        head.add_column(no_wrap=True)
        head.add_column(justify="right", no_wrap=True, overflow="ellipsis")
        head.add_row(Text(escape_controls(self.title), style="bold"), Text(escape_controls(self._folder), style="dim"))
        lines: list[RenderableType] = [head, self._render_progress()]
        return lines if status is None else [*lines, self._flight(status), *self._scores(), *self._failures(status)]

    def _render_progress(self) -> RenderableType:
        elapsed = time.monotonic() - self._started
        rate = 0.0  # groups per second
        if len(self._ends) > 1:
            (then, before), (_, now) = self._ends[0], self._ends[-1]
            rate = (now - before) / max(time.monotonic() - then, 0.001)
        parts = [f"{self.done}/{self.total} {self.unit}" if self.total else self.text or f"{self.done} {self.unit}"]
        if rate:
            parts.append(f"{rate * 60:.3g} a minute" if rate < 10 else f"{rate:.0f} a second")
        parts.append(duration(elapsed))
        if rate and self.total and self.done < self.total:
            parts.append(f"{duration((self.total - self.done) / rate)} left")
        if not self.total:
            return Text(" · ".join(parts))
        grid = Table.grid(padding=(0, 1))
        grid.add_row(ProgressBar(self.total, self.done, width=20), Text(" · ".join(parts)))
        return grid

    def _flight(self, status: RunStatus) -> Text:
        starting = status.in_flight - sum(status.phases.values())
        parts = [f"{NAMES_OF_PHASES[name]} {count}" for name, count in sorted(status.phases.items()) if count]
        parts += [f"starting or waiting {starting}"] if starting > 0 else []
        parts += [f"{status.waiting_calls} calls wait for a server"] if status.waiting_calls else []
        bound = "as many as fit" if status.concurrency is None else f"of {status.concurrency}"
        text = Text(f"in flight {status.in_flight} ({bound}): {', '.join(parts) or 'nothing'}")
        if status.paused:
            text.append("  paused: press p to resume", style="bold yellow")
        return text

    def _scores(self) -> Iterator[RenderableType]:
        nonempty_values = {name: values for name, values in self.values.items() if values}
        if not nonempty_values:
            return
        table = Table.grid(padding=(0, 2))
        for name, values in list(nonempty_values.items())[: NAMES + 1]:
            recent = list(values)
            low, high = min(recent), max(recent)
            table.add_row(
                Text(escape_controls(name), style="bold" if name == "score" else ""),
                f"{sum(value / len(recent) for value in recent):.3f}",
                Text(histogram(recent), style="cyan"),
                Text(f"{low:g} to {high:g}", style="dim"),
            )
        yield table
        if len(nonempty_values) > NAMES + 1:
            yield Text(f"and {len(nonempty_values) - NAMES - 1} rewards more", style="dim")

    def _failures(self, status: RunStatus) -> Iterator[RenderableType]:
        parts = [f"{status.tokens:,} tokens"] if status.tokens else []
        parts += [f"{status.cost:.2f} $"] if status.cost else []
        if parts:
            yield Text(" · ".join(parts))
        if status.failures:
            causes = ", ".join(f"{cause} {count}" for cause, count in Counter(status.failures).most_common(5))
            yield Text(f"not graded: {causes}", style="red")
        if status.retry_summary:
            yield Text(status.retry_summary, style="yellow")

    # ------------------------------------------------------------------ steering

    @contextmanager
    def _keyboard(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Read keys one by one, without their echo, while the panel is shown."""
        if self._keys is None:
            yield
            return
        with unbuffered(self._keys):
            loop.add_reader(self._keys, self._handle_key, loop)
            try:
                yield
            finally:
                loop.remove_reader(self._keys)

    def _handle_key(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._keys is not None
        pressed = ""
        with suppress(OSError):  # the terminal was hung up
            pressed = os.read(self._keys, 64).decode(errors="replace")
        if not pressed:
            loop.remove_reader(self._keys)  # the terminal is gone
        for key in pressed:
            for _, watched in self._watched:
                self._steer(key, watched)
            if key == "f":
                self.note("finishing early: rollouts in flight complete, no new ones start")
        for part, watched in self._watched:
            part._status = watched.status()

    def _steer(self, key: str, watched: Watched) -> None:
        status = watched.status()
        if key == "p":
            watched.pause(not status.paused)
        elif key == "f":
            watched.finish()
        elif key in "+-":
            now = status.concurrency or max(1, status.in_flight)
            change = max(1, int(now * STEP))
            watched.set_concurrency(max(1, now + (change if key == "+" else -change)))


NAMES_OF_PHASES = {"model": "waiting for the model", "tools": "in tools", "rewards": "in rewards"}
_restore: Callable[[], None] | None = None
"""Function that restores the terminal's settings; None if they are unchanged."""


@contextmanager
def unbuffered(keyboard: int) -> Iterator[None]:
    """Let a terminal deliver each key immediately and without echo; Ctrl-C still interrupts."""
    global _restore
    before = termios.tcgetattr(keyboard)
    _restore = lambda: termios.tcsetattr(keyboard, termios.TCSADRAIN, before)  # noqa: E731
    try:
        tty.setcbreak(keyboard, termios.TCSADRAIN)
        yield
    finally:
        restore_terminal()


def restore_terminal() -> None:
    """Restore the terminal's settings, also from a handler that ends the process."""
    global _restore
    restore, _restore = _restore, None
    if restore is not None:
        with suppress(termios.error):  # it is gone
            restore()
        sys.stderr.write("\x1b[?25h")
        sys.stderr.flush()


def histogram(values: Sequence[float]) -> str:
    """Return one character per tenth of the range, higher for more values in it."""
    low, high = min(values), max(values)
    if math.isinf(high - low):
        return histogram([value / 2 for value in values])
    counts = [0] * BINS
    for value in values:
        counts[min(BINS - 1, int((value - low) / (high - low) * BINS)) if high > low else BINS - 1] += 1
    max_count = max(counts)
    return "".join(BARS[-(-count * len(BARS) // max_count) - 1] if count else " " for count in counts)


def duration(seconds: float) -> str:
    """Return a duration for people: ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    whole_seconds = int(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60:02d} min"


def progress_of(title: str, *, quiet: bool) -> Progress:
    """Return the progress display of a run: a panel on a terminal, lines elsewhere."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") in (None, "dumb"):
        return Progress(quiet=quiet)
    return LivePanel(title, keys=_keyboard_descriptor())


def _keyboard_descriptor() -> int | None:
    """Return the descriptor of the keyboard, if this program is in the foreground."""
    with suppress(OSError, ValueError, AttributeError):
        descriptor = sys.stdin.fileno()
        return descriptor if os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp() else None
    return None
