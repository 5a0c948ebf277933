"""An event loop whose clock jumps to the next timer, so that minutes of a simulation take milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self._virtual = 0.0
        real = self._selector.select  # type: ignore[attr-defined]

        def select(timeout: float | None) -> Any:
            events = real(0)
            if not events and timeout:
                self._virtual += timeout
            return events

        self._selector.select = select  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._virtual


def simulated(work: Coroutine[Any, Any, T], loop: VirtualLoop) -> T:
    """Run it on that loop."""
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
