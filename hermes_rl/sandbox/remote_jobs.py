"""A background process of a machine that only runs commands: its output lies in files there, which are looked at."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Awaitable, Callable

from hermes_rl.errors import SandboxFailure
from hermes_rl.sandbox import remote_scripts as scripts
from hermes_rl.sandbox.base import BackgroundProcess

POLL_SECONDS = 0.2
LOST_EXIT_CODE = 137
Ask = Callable[..., Awaitable[list[str]]]


class RemoteProcess(BackgroundProcess):
    """See `BackgroundProcess`; what it says of the process is as old as the last look, `POLL_SECONDS` and a way."""

    def __init__(self, pid: int, job: str, ask: Ask, kill: Callable[[str, int], Awaitable[None]]) -> None:
        self.pid = pid
        self.job = job
        self._ask, self._kill = ask, kill
        self._output: tuple[bytes, bool] = b"", False
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._following = asyncio.create_task(self._follow())

    def poll(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    def output(self) -> bytes:
        return self._output[0]

    @property
    def truncated(self) -> bool:
        return self._output[1]

    async def wait(self, timeout: float | None = None) -> int | None:
        done, _ = await asyncio.wait([self.ended], timeout=timeout)
        return self.ended.result() if done else None

    async def write_stdin(self, data: bytes) -> None:
        if self.poll() is not None:
            raise BrokenPipeError("the process has ended")
        await self._ask(scripts.FEED, data, job=self.job)

    async def close_stdin(self) -> None:
        await self._ask(scripts.HANG_UP, job=self.job)

    async def kill(self, signal: int = 9) -> None:
        if self.poll() is None:
            await self._kill(self.job, signal)

    def end(self) -> None:
        """The sandbox is gone."""
        self._following.cancel()
        if not self.ended.done():
            self.ended.set_result(LOST_EXIT_CODE)

    async def _follow(self) -> None:
        # An `OSError` means that its files are gone, and with them every way to hear of its end.
        with contextlib.suppress(SandboxFailure, OSError):
            while True:
                words = await self._ask(scripts.POLL, job=self.job)
                with scripts.reading():
                    self._output = parts(words[1:])
                    if words[0] != "-":
                        self.ended.set_result(int(words[0]))
                        return
                await asyncio.sleep(POLL_SECONDS)
        self.end()


def parts(words: list[str]) -> tuple[bytes, bool]:
    """An output, and whether something was left out of it: from its size, head (`+` and base64) and tail (or `-`).

    Raises:
        ValueError: they are none of these.
    """
    size, head, tail = words
    first, last = base64.b64decode(head[1:]), base64.b64decode(tail[1:])
    dropped = int(size) - len(first) - len(last)
    if tail == "-" or dropped <= 0:
        return first + last, False
    return first + f"\n[... {dropped} bytes of output left out ...]\n".encode() + last, True
