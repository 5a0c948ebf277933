"""Comparing mathematical expressions that a policy wrote, in a process of its own.

An answer such as ``9^{9^{9^9}}`` can keep a computer algebra system busy for ever while it holds the
interpreter's lock, so math-verify runs in a helper process (`mathematics_helper`), one comparison at a time, that
is killed when a comparison takes too long.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import threading
from decimal import Decimal
from pathlib import Path

from hermes_rl.errors import RewardFailure

START_SECONDS = 60.0
"""How long the helper may take to import the algebra system on a busy machine."""

HELPER = Path(__file__).with_name("mathematics_helper.py")

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def equal(answer: str, target: str, timeout: float) -> tuple[bool, str | None]:
    """Whether the last expression of `answer` equals `target`, and the reason if not.

    An evaluation that takes longer than `timeout` seconds counts as not equal.

    Raises:
        RewardFailure: the target is no expression, or the helper process could not be started.
    """
    boxed = _last_boxed(answer)
    if boxed is not None and _NUMBER.fullmatch(boxed) and _NUMBER.fullmatch(target.strip()):
        verdict: bool | None = Decimal(boxed) == Decimal(target.strip())
    else:
        verdict = _helper.compare(answer if boxed is None else f"\\boxed{{{boxed}}}", target, timeout)
    if verdict is None:
        return False, f"the answer could not be evaluated within {timeout:g} s"
    return verdict, None if verdict else f"{boxed or 'the answer'} is not equal to {target}"


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


class _Helper:
    """The process that evaluates; started on first use, killed and started again after a timeout."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, answer: str, target: str, timeout: float) -> bool | None:
        """Return True or False, or None when the evaluation took too long or killed the helper."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            process.stdin.write(json.dumps({"answer": answer, "target": target, "timeout": timeout}) + "\n")
            process.stdin.flush()
            line = self._read(process, timeout)
            if not line:
                self._kill()
                return None
            verdict: bool | None = json.loads(line)
        if verdict is None:
            raise RewardFailure(f"math_equal: the target {target!r} is no number or expression")
        return verdict

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        # -P: a file of the user's working directory must not take the place of a module.
        # A session of its own: Ctrl-C is for the run, and must not make answers in the helper wrong ones.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HELPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,
        )
        if self._read(self._process, START_SECONDS) != "ready\n":
            self._kill()
            raise RewardFailure(
                "math_equal: the process that compares expressions did not start; is math-verify there?"
            )
        return self._process

    @staticmethod
    def _read(process: subprocess.Popen[str], timeout: float) -> str:
        assert process.stdout is not None
        poll = select.poll()  # select() cannot take descriptors above 1023
        poll.register(process.stdout, select.POLLIN)
        return process.stdout.readline() if poll.poll(timeout * 1000) else ""

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_helper = _Helper()
