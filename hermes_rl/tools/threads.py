"""Running a function that blocks without holding up the event loop.

A thread of its own for each call, and one that does not keep the program alive: the pool of the event loop
has few threads, and a function that hangs would take one of them from everybody for good.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """The result of `function`. When the caller is cancelled the thread runs on, and its result is dropped."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def settle(deliver: Callable[[], None]) -> None:
        if not future.done():
            deliver()

    def work() -> None:
        try:
            result = context.run(function)
        except BaseException as error:  # noqa: BLE001 - carried to the caller, whatever it is
            failure = _carried(error)
            deliver = lambda: future.set_exception(failure)  # noqa: E731
        else:
            deliver = lambda: future.set_result(result)  # noqa: E731
        try:
            loop.call_soon_threadsafe(settle, deliver)
        except RuntimeError:
            return  # the loop was closed: nobody waits any more

    threading.Thread(target=work, name="hermes-rl-tool", daemon=True).start()
    return await future


def _carried(error: BaseException) -> BaseException:
    """The exception as a future can hold it: StopIteration would end the coroutine that waits."""
    if isinstance(error, StopIteration):
        return RuntimeError(f"the function raised StopIteration: {error}")
    return error
