"""Report the method of a hand-written environment that blocks the event loop, which all rollouts share.

A method that computes, or waits without await, stops every rollout, and no error names it. A watchdog thread pings the
loop; if the loop does not respond, the thread inspects the stack of the loop's thread.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Self

from hermes_rl.env.hooks import LIBRARIES
from hermes_rl.threads import stepping

logger = logging.getLogger(__name__)

HELD = 0.5
"""Seconds without a response of the loop after which the blocking method is logged."""
LOOKS = 0.1
"""Seconds between a response of the loop and the next ping."""


@dataclass
class _Holding:
    """Count and total duration of the blocks that a method caused."""

    times: int = 0
    seconds: float = 0.0
    next_line: int = 1
    """Count at which the next warning is logged: 1, 10, 100, and so on."""


class Watchman:
    """Context manager that watches the running loop, and warns of the class's user-written methods that block it."""

    def __init__(self, cls: type) -> None:
        self._methods = {
            code: f"{cls.__name__}.{name}"
            for base in cls.__mro__
            if base.__module__.partition(".")[0] not in LIBRARIES
            for name, member in vars(base).items()
            if (code := _code_of(member)) is not None
        }
        self._holdings: dict[str, _Holding] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        watched = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch, args=watched, name="hermes-rl-watchman", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _watch(self, loop: asyncio.AbstractEventLoop, thread: int) -> None:
        while not self._ended.wait(LOOKS):
            alive, since = threading.Event(), time.monotonic()
            try:
                loop.call_soon_threadsafe(alive.set)
            except RuntimeError:
                return  # the loop is closed
            if not alive.wait(HELD):
                location = self._locate_user_code(thread)
                if location is not None:
                    self._say_held(*location)
                while not alive.wait(HELD):
                    if self._ended.is_set():
                        return
                if location is not None:
                    self._holdings[location[0]].seconds += time.monotonic() - since

    def _locate_user_code(self, thread: int) -> tuple[str, str] | None:
        """Return the user-written method that the loop is running, and its current line, or None if it runs none."""
        frame = sys._current_frames().get(stepping.get(thread, thread))
        frames = [stack_frame for stack_frame, _ in traceback.walk_stack(frame)] if frame is not None else []
        method = next((frame.f_code for frame in reversed(frames) if frame.f_code in self._methods), None)
        if method is None:
            return None
        inside = next(frame for frame in frames if frame.f_code.co_filename == method.co_filename)
        return self._methods[method], f"{Path(method.co_filename).name}:{inside.f_lineno}"

    def _say_held(self, method: str, location: str) -> None:
        holding = self._holdings.setdefault(method, _Holding())
        holding.times += 1
        if holding.times != holding.next_line:
            return
        holding.next_line *= 10
        before = f" It has done so {holding.times} times, for {holding.seconds:.1f} s." if holding.times > 1 else ""
        logger.warning(
            "%s blocks the event loop, and every rollout with it: more than %g s at %s.%s Await what takes time, as "
            "with `await asyncio.to_thread(…)`, or define compute_reward without async: it then runs in a thread",
            *(method, HELD, location, before),
        )


def _code_of(member: object) -> CodeType | None:
    """Return the code of a method or property, decorated or not, or None for any other member."""
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    elif isinstance(member, property):
        member = member.fget
    code = getattr(inspect.unwrap(member), "__code__", None) if callable(member) else None
    return code if isinstance(code, CodeType) else None
