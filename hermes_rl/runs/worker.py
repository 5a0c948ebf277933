"""A worker process: a `Player` at one end of a socket, whose other end the run holds (`hermes_rl.runs.workers`).

It ends with its run: when the other end of its socket is closed, it releases what it has.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import socket
import threading
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hermes_rl.rollouts.admission import LOOK
from hermes_rl.rollouts.sandboxes import keep_artifacts
from hermes_rl.runs.frames import BUFFER, FrameTooLargeError, framed, received
from hermes_rl.runs.player import Opening, Player, raised_of, written
from hermes_rl.threads import rare_full_collections

GRACE = 20.0
"""Seconds that a worker has to release its sandboxes when its run is gone."""


def main(descriptor: int) -> None:
    """Play for the run at the other end of this socket until it is closed; the entry point of the process."""
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)  # a sandbox that held it would keep the run's end open
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    with rare_full_collections():
        asyncio.run(_serve(connection))


def _end_with(descriptor: int) -> None:
    """End this process some time after the other end was closed, even where its event loop has stopped."""
    waiting = select.poll()
    waiting.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    waiting.poll()
    time.sleep(GRACE)
    os._exit(1)


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=BUFFER)
    if (opening := await received(reader)) is not None:
        await _Worker(reader, writer).work(*pickle.loads(opening))


class _Worker:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._answers: set[asyncio.Task[None]] = set()
        self._gone = False

    async def work(self, opening: Opening, artifacts: Path | None, silent: float) -> None:
        """Play until the run closes its end, which takes a worker that says nothing for `silent` seconds for dead."""
        keep = partial(keep_artifacts, artifacts) if artifacts is not None else None
        player = Player(opening, self._tell, keep)
        if (wrong := await player.open()) is not None:
            await self._send(written({"raised": wrong}))
            return
        await self._send(written({"ready": True}))
        telling = asyncio.create_task(self._tell_how_it_does(player, silent))
        try:
            while (message := await received(self._reader)) is not None:
                number, what, *given = pickle.loads(message)
                if number:
                    answer = asyncio.create_task(self._answer(number, player.answer(number, what, *given)))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answers.discard)
                else:
                    player.hear(what, *given)
        finally:
            telling.cancel()
            await player.close()
            await asyncio.gather(telling, *self._answers, return_exceptions=True)

    async def _answer(self, number: int, answer: Coroutine[Any, Any, bytes]) -> None:
        try:
            await self._send(await answer)
        except FrameTooLargeError as error:
            await self._send(written({"id": number, "retries": {}, "raised": raised_of(error)}))

    async def _tell_how_it_does(self, player: Player, silent: float) -> None:
        """Tell again and again what the run's admission looks at; the run hears by it that this worker lives."""
        while not self._gone:
            # The kernel ends a process that does not come here any more: code that never lets go of the interpreter
            # would outlive a run that was killed.
            signal.setitimer(signal.ITIMER_REAL, silent)
            await self._send(written(player.condition()))
            await asyncio.sleep(LOOK)

    async def _send(self, data: bytes) -> None:
        if not self._gone:
            self._writer.write(framed(data))
            try:
                await self._writer.drain()
            except ConnectionError:
                self._gone = True  # the end of the socket is noticed where it is read

    def _tell(self, message: Mapping[str, Any]) -> None:
        if not self._gone:
            self._writer.write(framed(written(message)))
