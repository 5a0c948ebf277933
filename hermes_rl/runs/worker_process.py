"""`ProcessHandle`: a worker that is a process of this machine, started with a socket; `worker` is what runs in it."""

from __future__ import annotations

import asyncio
import json
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hermes_rl.runs import handles
from hermes_rl.runs.handles import DiedError, WorkerAnswer, WorkerHandle, within
from hermes_rl.runs.player import Opening
from hermes_rl.runs.worker import BUFFER, framed, received

PROGRAM = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from hermes_rl.runs.worker import main
main(int(sys.argv[2]))
"""
"""What a worker runs; its arguments are the places of modules, as this process has them, and the number of a socket."""
EXIT = 5.0
"""Seconds that a process takes, at most, to be gone once its socket is closed or it is killed."""
ANSWER = b'{"id": '
"""How an answer to a request begins; everything else that a worker says is short."""


class ProcessHandle(WorkerHandle):
    """One worker process, which is told `opening` first, and keeps artifacts of sandboxes in the folder `artifacts`."""

    def __init__(
        self,
        opening: Opening,
        artifacts: Path | None,
        name: str,
        heard: Callable[[WorkerHandle, Mapping[str, Any]], None],
    ) -> None:
        super().__init__(name, heard)
        self._opening, self._artifacts = opening, artifacts
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def live(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-P", "-c", PROGRAM, json.dumps(sys.path), str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the run, which then ends its workers
                )  # fmt: skip
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=BUFFER)
            self._write((self._opening, self._artifacts, handles.SILENT))
            if self.closed:
                self.kill()
            while (
                message := await within(handles.SILENT if self.ready else handles.START, received(reader))
            ) is not None:
                self._take(message)
        except TimeoutError:
            self.ended = "it said nothing any more"
        except OSError as error:
            self.ended = f"it could not be started: {error}"
        finally:
            ours.close()
            await self._end()
            self.fail(DiedError())

    def tell(self, number: int, what: str, *given: Any) -> None:
        self._write((number, what, *given))

    def close(self) -> None:
        if self.ready and self._writer is not None and not self._writer.is_closing():
            with suppress(OSError):
                self._writer.write_eof()
        else:
            self.kill()
        self.closed = True

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _write(self, message: Any) -> None:
        """Send a message, as long as it listens."""
        if self._writer is not None and not self.closed and not self._writer.is_closing():
            self._writer.write(framed(pickle.dumps(message)))

    def _take(self, message: bytes) -> None:
        """Hand an answer to whoever waits for it. Only its first bytes are looked at: it may be large."""
        if message.startswith(ANSWER):
            self._answered(int(message[len(ANSWER) : message.index(b",")]), WorkerAnswer(message))
        else:
            self._said(json.loads(message))

    async def _end(self) -> None:
        """See to it that the process is gone, and find out how it ended."""
        if self._writer is not None:
            self._writer.close()
        if self._process is None:
            return
        try:
            await within(EXIT, self._process.wait())
        except TimeoutError:
            self.kill()
            await self._process.wait()
        status = self._process.returncode or 0
        how = f"ended with status {status}"
        if status < 0:
            memory = ", perhaps because the memory was used up" if -status == signal.SIGKILL else ""
            how = f"was ended by {signal.Signals(-status).name}{memory}"
        self.ended = self.ended or f"it {how}"
