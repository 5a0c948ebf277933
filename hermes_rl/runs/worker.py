"""A worker process: a `Player` at one end of a socket, whose other end the run holds (`hermes_rl.runs.workers`).

It ends with its run: when the other end of its socket is closed, it releases its resources. Both ends send frames, each
a length of four bytes and then the message. The run sends pickled objects: it is the parent of the worker and runs the
same code. A worker answers in JSON, in the form in which the record keeps a rollout, so that no data of an agent or a
reward is ever unpickled.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.rollouts.admission import POLL_INTERVAL
from hermes_rl.rollouts.sandboxes import keep_artifacts
from hermes_rl.runs.rollout_worker import RolloutWorker, WorkerSetup, raised_of
from hermes_rl.threads import reduce_gc_pauses
from hermes_rl.values import write_json

GRACE = 20.0
"""Maximum seconds for a worker to release its sandboxes when its run is gone."""
MESSAGE_BYTES = 1 << 30
"""Maximum bytes of one message; a rollout takes kilobytes to megabytes."""
BUFFER = 1 << 20
"""Bytes that a reader holds before the other side must wait."""
_LENGTH = struct.Struct(">I")


class FrameTooLargeError(ValueError):
    """A message is longer than the limit."""


def framed(message: bytes) -> bytes:
    """Return the bytes to send; raises `FrameTooLargeError`."""
    if len(message) > MESSAGE_BYTES:
        raise FrameTooLargeError(f"a message of {len(message)} bytes is longer than {MESSAGE_BYTES}")
    return _LENGTH.pack(len(message)) + message


async def received(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message, or None if the other side has ended."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length) if length <= MESSAGE_BYTES else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def main(descriptor: int) -> None:
    """Run rollouts for the run at the other end of this socket until it is closed; the entry point of the process."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # a sandbox that held it would keep the run's end open
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    with reduce_gc_pauses(), suppress(KeyboardInterrupt):  # which the spec's code may raise too
        asyncio.run(_serve_requests(connection))


def _end_with(descriptor: int) -> None:
    """End this process some time after the other end was closed, even if its event loop has stopped."""
    waiting = select.poll()
    waiting.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    waiting.poll()
    time.sleep(GRACE)
    os._exit(1)


async def _serve_requests(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER)
    if (opening := await received(reader)) is not None:
        await _Worker(reader, writer).work(*pickle.loads(opening))


class _Worker:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._answers: set[asyncio.Task[None]] = set()
        self._is_disconnected = False

    async def work(self, opening: WorkerSetup, artifacts: Path | None, silent: float) -> None:
        """Run rollouts until the run closes its end; the run takes a worker without messages for `silent` seconds as
        dead.
        """
        keep = partial(keep_artifacts, artifacts) if artifacts is not None else None
        player = RolloutWorker(opening, self._tell, keep)
        if (wrong := await player.open()) is not None:
            await self._send(write_json({"raised": wrong}))
            return
        await self._send(write_json({"ready": True}))
        telling = asyncio.create_task(self._tell_how_it_does(player, silent))
        try:
            while (message := await received(self._reader)) is not None:
                request_id, kind, *args = pickle.loads(message)
                if request_id:
                    answer = asyncio.create_task(self._answer(request_id, player.answer(request_id, kind, *args)))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answers.discard)
                else:
                    player.hear(kind, *args)
        finally:
            telling.cancel()
            await player.close()
            await asyncio.gather(telling, *self._answers, return_exceptions=True)

    async def _answer(self, request_id: int, answer: Coroutine[Any, Any, bytes]) -> None:
        try:
            await self._send(await answer)
        except FrameTooLargeError as error:
            await self._send(write_json({"id": request_id, "retries": {}, "raised": raised_of(error)}))

    async def _tell_how_it_does(self, player: RolloutWorker, silent: float) -> None:
        """Report at intervals the values that the run's admission uses; they also show the run that this worker
        lives.
        """
        while not self._is_disconnected:
            # The kernel ends a process that does not get here any more: code that never releases the interpreter would
            # outlive a killed run.
            signal.setitimer(signal.ITIMER_REAL, silent)
            await self._send(write_json(player.condition()))
            await asyncio.sleep(POLL_INTERVAL)

    async def _send(self, data: bytes) -> None:
        if not self._is_disconnected:
            self._writer.write(framed(data))
            try:
                await self._writer.drain()
            except ConnectionError:
                self._is_disconnected = True  # the reader notices the end of the socket

    def _tell(self, message: Mapping[str, Any]) -> None:
        if not self._is_disconnected:
            self._writer.write(framed(write_json(message)))
