"""The runner's end of the conversation with a `remote_worker`.

Owns that process, and matching answers to commands. A machine that answers no more is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from hermes_rl.errors import SandboxFailure

LINE_LIMIT = 1 << 31
START_SECONDS = 900.0
"""How long it may take until there is a machine: a service may have to get a large image first."""
END_SECONDS = 20.0
"""How long a machine may take to be released."""
SPARE_SECONDS = 30.0
"""What a command may take beyond its own time, on its way there and back."""
SMALL = 1 << 20
"""Characters of an answer that is no more than a few words, with what a machine's shell may say before it."""


class Link:
    """One machine. Belongs to one event loop."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._closing: asyncio.Future[None] | None = None
        self._last = 0
        self._home = ""

    @property
    def open(self) -> bool:
        return self._closing is None and self._reader is not None and not self._reader.done()

    async def start(
        self, backend: str, arguments: Mapping[str, Any], farewell: str, environ: Mapping[str, str] | None = None
    ) -> None:
        """Start the machine, with the variables of `environ` (None: the process's own) for its program.

        Raises:
            SandboxFailure: it cannot be had.
        """
        self._home = tempfile.mkdtemp(prefix="hermes-rl-")
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "hermes_rl.sandbox.remote_worker", backend, json.dumps(arguments), farewell),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Its connections lie in TMPDIR; two machines must not share one.
            env={**(os.environ if environ is None else environ), "HERMES_HOME": self._home, "TMPDIR": self._home},
            limit=LINE_LIMIT,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise SandboxFailure(f"the {backend} sandbox did not start within {START_SECONDS:.0f} s") from None
        said = (
            json.loads(line) if line else {"error": "hermes-agent ended; is the extra installed (hermes-rl[hermes])?"}
        )
        if "error" in said:
            raise SandboxFailure(f"the {backend} sandbox did not start: {said['error']}")
        self._reader = asyncio.create_task(self._read(self._process.stdout))

    async def execute(self, command: str, stdin: str | None, timeout: float, most: int = SMALL) -> str:
        """What a command prints, `most` characters; raises `SandboxFailure` for more, and where there is no answer."""
        if not self.open or self._process is None or self._process.stdin is None:
            raise SandboxFailure("the sandbox is gone")
        self._last += 1
        number = self._last
        seconds = int(timeout + SPARE_SECONDS)
        asked = {"id": number, "command": command, "stdin": stdin, "timeout": seconds, "most": most}
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
            async with asyncio.timeout(seconds + SPARE_SECONDS):
                await self._process.stdin.drain()
                answer = await future
        except ConnectionError as error:
            raise SandboxFailure("the sandbox was lost") from error
        except TimeoutError:
            raise SandboxFailure("the sandbox was lost: hermes-agent does not answer") from None
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise SandboxFailure(f"the sandbox was lost: {answer['error']}")
        return str(answer["output"])

    async def close(self) -> None:
        """Release the machine, and those who wait for an answer at once; may be called twice, and while cancelled."""
        if self._process is None:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._release(self._process))
            self._answer_all("it is closed")
        await asyncio.shield(self._closing)

    async def _release(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)
            shutil.rmtree(self._home, ignore_errors=True)

    async def _read(self, lines: asyncio.StreamReader) -> None:
        try:
            while line := await lines.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer["id"])
                if future is not None and not future.done():
                    future.set_result(answer)
        finally:
            self._answer_all("hermes-agent ended")

    def _answer_all(self, error: str) -> None:
        for future in self._waiting.values():
            with contextlib.suppress(asyncio.InvalidStateError):
                future.set_result({"error": error})
