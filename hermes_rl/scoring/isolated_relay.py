"""Multiplex conversations over one input and output, between test programs and processes of the code under test.

In the sandbox of the tests, the relay listens on a socket, and each program that connects is a conversation (`listen`).
In the sandbox of the code, it starts a process for each conversation (`answer`). The runner forwards the two outputs to
each other without parsing them. A packet consists of the number of its conversation, its length, and the bytes; a
length of 0 closes the conversation. An invalid packet closes all of them.
"""

# ruff: noqa: UP035  # Python 3.8, and no pathlib before the code runs

from __future__ import annotations

import os
import selectors
import signal
import socket
import struct
from typing import Any, Callable

PIECE = 1 << 16
MOST = 64
"""Maximum number of concurrent conversations."""
_HEAD = struct.Struct("!II")


class Relay:
    """Exchange packets on descriptors 0 and 1; `opened` creates the local end when the peer opens a conversation."""

    def __init__(self, opened: Callable[[int], Any]) -> None:
        self.opened = opened
        self.ends: dict[int, Any] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(0, selectors.EVENT_READ, self.take)

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                key.data()

    def add(self, conversation_id: int, end: Any) -> None:
        """Forward data received from `end` from now on."""
        self.ends[conversation_id] = end
        self.selector.register(end, selectors.EVENT_READ, lambda: self.pass_on(conversation_id))

    def close(self, conversation_id: int) -> None:
        end = self.ends.pop(conversation_id, None)
        if end is not None:
            self.selector.unregister(end)
            end.close()

    def pass_on(self, conversation_id: int) -> None:
        """Send one packet of data from a conversation."""
        try:
            data = self.ends[conversation_id].recv(PIECE)
        except OSError:
            data = b""
        self.write(_HEAD.pack(conversation_id, len(data)) + data)
        if not data:
            self.close(conversation_id)

    def write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]

    def take(self) -> None:
        """Receive one packet from the peer."""
        conversation_id, length = _HEAD.unpack(self.exactly(_HEAD.size))
        if length > PIECE:
            os._exit(1)
        data = self.exactly(length)
        if not data:
            self.close(conversation_id)
            return
        end = self.ends.get(conversation_id)
        if end is None and len(self.ends) < MOST:
            end = self.opened(conversation_id)
        try:
            if end is not None:
                end.sendall(data)
        except OSError:
            self.close(conversation_id)

    def exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = os.read(0, size - len(data))
            if not chunk:
                os._exit(0)
            data += chunk
        return data


def listen(path: str) -> None:
    """Accept connections on a socket at `path`, and relay them."""
    relay = Relay(lambda _: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(MOST)
    last = [0]

    def accept() -> None:
        end, _ = listener.accept()
        last[0] += 1
        relay.add(last[0], end)

    relay.selector.register(listener, selectors.EVENT_READ, accept)
    relay.run()


def answer(serve: Callable[[Any, str], None], folder: str) -> None:
    """Start a process that serves each conversation."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    def opened(conversation_id: int) -> Any:
        parent_end, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                parent_end.close()
                nothing = os.open(os.devnull, os.O_RDWR)
                for descriptor in (0, 1, 2):
                    os.dup2(nothing, descriptor)
                serve(theirs, folder)
            finally:
                os._exit(1)
        theirs.close()
        relay.add(conversation_id, parent_end)
        return parent_end

    relay = Relay(opened)
    relay.run()
