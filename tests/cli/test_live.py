"""The panel on a real terminal, its keys, and what is left of a run in run.log."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from hermes_rl.cli.live import LivePanel, duration, histogram
from hermes_rl.runs.directory import RunDirectory
from hermes_rl.runs.progress import RunStatus
from tests.commands import hermes
from tests.waiting import until, until_blocking

SPEC = """
dataset: {items: [{n: 1}, {n: 2}, {n: 3}]}
prompt: {user: "Sleep {{ n }}"}
toolsets: [terminal]
rewards: {one: {fn: "reward.py:one"}}
servers: {policy: {type: scripted}}
sandbox: {backend: bubblewrap}
process: {groups: GROUPS, group_size: 2, concurrency: 2}
"""
REWARD = """
import asyncio
import logging

async def one(result, item):
    await asyncio.sleep(0.2)
    logging.getLogger("hermes_rl.reward").warning("the key is %s", "sk-very-secret-123")
    return 1.0
"""


@dataclass
class Terminal:
    """A run on a terminal of its own, and what it has shown."""

    process: subprocess.Popen[bytes]
    screen: int
    shown: bytearray = field(default_factory=bytearray)

    def press(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def until(self, found: Callable[[str], object], seconds: float = 60.0) -> str:
        """Read on until what is shown has something; fails after so many seconds."""
        deadline = time.monotonic() + seconds
        while not found(self.text):
            assert time.monotonic() < deadline, self.text[-3000:]
            if not self._read() and self.process.poll() is not None:
                assert found(self.text), self.text[-3000:]
        return self.text

    def end(self) -> int:
        deadline = time.monotonic() + 60
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self._read()
        self._read()
        return self.process.returncode

    def _read(self) -> bool:
        if select.select([self.screen], [], [], 0.1)[0]:
            with suppress(OSError):
                self.shown += os.read(self.screen, 65536)
                return True
        return False

    @property
    def text(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.shown.decode(errors="replace"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start `hermes-rl run` in a folder with a spec of so many groups, on a terminal."""
    begun: list[Terminal] = []

    def begin(groups: int, *more: str, columns: int = 100) -> Terminal:
        (tmp_path / "sleepy.yaml").write_text(SPEC.replace("GROUPS", str(groups)))
        (tmp_path / "reward.py").write_text(REWARD)
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (30, columns))
        process = subprocess.Popen(
            [sys.executable, "-m", "hermes_rl.cli.main", "run", "sleepy.yaml", "process", "--out", "out", *more],
            cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            preexec_fn=lambda: _control(theirs),
            env={**os.environ, "TERM": "xterm", "HERMES_KEY": "sk-very-secret-123", "PYTHONPATH": str(Path.cwd())},
        )  # fmt: skip
        os.close(theirs)
        begun.append(Terminal(process, ours))
        return begun[-1]

    yield begin
    for one in begun:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
        os.close(one.screen)


def _control(terminal: int) -> None:
    """Make the terminal the one that the new session is controlled by."""
    import fcntl

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_a_run_is_watched_paused_and_finished_early(start: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = start(1000)
    before = termios.tcgetattr(terminal.screen)[3]
    shown = terminal.until(lambda text: re.search(r"[1-9]\d*/1000 groups", text) and "in flight" in text)
    assert "sleepy · process" in shown
    terminal.until(lambda text: "of 2)" in text and re.search(r"one +1\.000", text) and "Ctrl-C stop" in text)
    terminal.press("p")
    terminal.until(lambda text: "paused: press p to resume" in text)
    terminal.until(lambda text: "in flight 0 (of 2): nothing" in text)
    terminal.press("p+")
    terminal.until(lambda text: "of 3)" in text)
    terminal.press("f")
    terminal.until(lambda text: "finishing early" in text)
    assert terminal.end() == 1
    assert "ended early: you asked for it" in terminal.text
    assert "run directory: out" in terminal.text
    assert termios.tcgetattr(terminal.screen)[3] == before  # keys are shown again
    written = (tmp_path / "out" / "groups.jsonl").read_text().splitlines()
    assert 0 < len(written) < 1000
    log = (tmp_path / "out" / "run.log").read_text()
    assert "finishing early" in log
    assert "the key is ***" in log and "sk-very-secret-123" not in log


def test_an_interrupt_gives_the_terminal_back(start: Callable[..., Terminal]) -> None:
    terminal = start(1000)
    before = termios.tcgetattr(terminal.screen)[3]
    terminal.until(lambda text: "in flight 2" in text)
    terminal.press("\x03")
    assert terminal.end() == 130
    assert "interrupted; complete results are saved" in terminal.text
    assert termios.tcgetattr(terminal.screen)[3] == before


@pytest.mark.slow
def test_stopped_terminal_does_not_block_the_run(start: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = start(8)
    terminal.until(lambda text: "in flight" in text)
    terminal.press("\x13")  # Ctrl-S: whatever is written now waits
    until_blocking(lambda: len((tmp_path / "out" / "rollouts.jsonl").read_text().splitlines()) >= 16, seconds=60)
    terminal.press("\x11")
    assert terminal.end() == 0


@pytest.mark.parametrize("more", [["--quiet"], []])
def test_without_a_terminal_there_are_lines_and_no_controls(more: list[str], tmp_path: Path) -> None:
    (tmp_path / "sleepy.yaml").write_text(SPEC.replace("GROUPS", "2"))
    (tmp_path / "reward.py").write_text(REWARD)
    done = hermes("run", "sleepy.yaml", "process", "--out", "out", *more, cwd=tmp_path, env={"TERM": "xterm"})
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert done.stderr.count("the key is") == 4  # a warning is said, however quiet
    assert ("2/2 groups" in done.stderr) == (more == [])
    assert "the key is" in (tmp_path / "out" / "run.log").read_text()


@pytest.mark.parametrize("columns", [80, 200])
async def test_the_panel_fits_the_terminal(columns: int) -> None:
    class Busy(Watched):
        def status(self) -> RunStatus:
            return RunStatus(
                64, None, {"model": 50, "tools": 10, "rewards": 3}, 7, 1_234_567, 1.5,
                {"sandbox_failure": 3}, "rollouts retried: 3", False,
            )  # fmt: skip

    panel = LivePanel("a-rather-long-name-of-a-spec · process", Console(file=io.StringIO(), width=columns))
    panel.start(100, 0)
    panel.values = {f"reward-{n}": panel.values["score"].__class__([0.0, 0.5, 1.0]) for n in range(8)}

    def drawn() -> str:
        with panel.console.capture() as captured:
            panel.console.print(panel.panel())
        return captured.get()

    with panel.watching(Busy("outputs/" + "x" * 100)):
        await until(lambda: "in flight 64" in drawn())
        lines = drawn().splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert "waiting for the model 50" in text and "starting or waiting 1" in text and "7 calls wait" in text
    assert "not graded: sandbox_failure 3" in text and "1.50 $" in text
    assert "and 3 rewards more" in text


class Watched:
    """A run that says what was asked of it."""

    def __init__(self, folder: str) -> None:
        self.directory = RunDirectory(Path(folder))
        self.paused = self.finished = False

    def status(self) -> RunStatus:
        return RunStatus(2, 4, {"model": 2}, 0, 0, 0.0, {}, "", self.paused)

    def pause(self, paused: bool) -> None:
        self.paused = paused

    def finish(self) -> None:
        self.finished = True

    def set_concurrency(self, rollouts: int) -> None: ...


async def test_several_environments_are_parts_of_one_panel_and_keys_are_for_all() -> None:
    screen, keyboard = pty.openpty()
    said = io.StringIO()
    panel = LivePanel("both", Console(file=said, width=100), keyboard)
    runs = {name: Watched(f"run/{name}") for name in ("long", "short")}
    parts = {name: panel.for_environment(name) for name in runs}
    before = termios.tcgetattr(keyboard)[3]
    try:
        with ExitStack() as short:
            with parts["long"].watching(runs["long"]):
                short.enter_context(parts["short"].watching(runs["short"]))
                os.write(screen, b"pf")
                await until(lambda: all(run.paused and run.finished for run in runs.values()))
                parts["long"].note("this is new")
                with panel.console.capture() as captured:
                    panel.console.print(panel.panel())
            # The first that began has ended; the other is still drawn and steered.
            os.write(screen, b"p")
            await until(lambda: not runs["short"].paused)
        assert runs["long"].paused
        assert termios.tcgetattr(keyboard)[3] == before, "the terminal is as it was"
    finally:
        os.close(screen)
        os.close(keyboard)
    text = captured.get()
    assert re.search(r"long +run/long", text) and re.search(r"short +run/short", text)
    assert text.count("in flight 2 (of 4)") == 2 and text.count("Ctrl-C stop") == 1
    assert "long: this is new" in said.getvalue() and said.getvalue().count("finishing early") == 1


def test_what_a_run_says_is_text(tmp_path: Path) -> None:
    panel = LivePanel("x\x1b[2J", Console(width=80))
    with panel.console.capture() as captured:
        panel.console.print(panel.panel())
    assert "\x1b[2J" not in captured.get()


def test_a_histogram_shows_where_values_are() -> None:
    assert histogram([1.0, 1.0]) == " " * 9 + "█"
    shown = histogram([0.0] * 5 + [1.0])
    assert shown == "█" + " " * 8 + "▂"


def test_a_histogram_has_room_for_any_number() -> None:
    assert histogram([-1.7e308, 1.7e308]) == "█" + " " * 8 + "█"
    assert histogram([0.0, 5e-324]) == "█" + " " * 8 + "█"


async def test_panel_that_cannot_be_drawn_is_reported_once_and_keeps_notes() -> None:
    said = io.StringIO()
    panel = LivePanel("x", Console(file=said, width=100))
    panel.values["score"].append("no number")  # type: ignore[arg-type]
    with panel.watching(Watched("run")):
        await until(lambda: "cannot be drawn (TypeError" in said.getvalue())
        panel.note("a later warning")
        panel.values["score"].clear()
        await until(lambda: "a later warning" in said.getvalue())
    assert said.getvalue().count("cannot be drawn") == 1


@pytest.mark.parametrize(("seconds", "words"), [(4.9, "4 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")])
def test_times_are_for_people(seconds: float, words: str) -> None:
    assert duration(seconds) == words
