"""Messages of the processes of a command to the host, over a descriptor other than its outputs.

`ReportListener` owns the host's end of a socket; the other end is descriptor `REPORT_FD` of the command and of all
processes that inherit it. The kernel names the sender of each message, so no process can pose as another one. No
process in the sandbox can read, change or withdraw a sent message, and messages after the end of the command are
ignored. The meaning of the messages belongs to the caller.
"""

from __future__ import annotations

import asyncio
import socket
import struct

from hermes_rl.sandbox.launcher import socket_pair

REPORT_FD = 8
"""Descriptor that shells leave open for their children; one digit, since some shells know no other descriptors."""
SIZE_LIMIT, COUNT_LIMIT = 16 << 20, 200_000
"""Maximum bytes and messages of one command; after the limit no more messages are received."""
MESSAGE_LIMIT = 1 << 17
MESSAGES_AT_ONCE = 200
"""Messages that are received before other tasks of the event loop have their turn."""
_SENDER = struct.Struct("3i")

Message = tuple[int, str]
"""Process id of the sender, which differs for each process of a command, and its message."""


class ReportListener:
    """Host's end, on the running event loop. Use it as ``with``, and close `theirs` after passing it on."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.overflow = False
        """True if the messages exceeded a limit."""
        self._bytes_left = SIZE_LIMIT
        self._host_end, self.theirs = socket_pair(socket.SOCK_SEQPACKET)
        self._host_end.setblocking(False)
        self._host_end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._host_end, self._take)

    def __enter__(self) -> ReportListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.theirs.close()
        self._end()

    def collect_messages(self) -> list[Message]:
        """Return all messages received so far and stop listening."""
        while self._take():
            pass
        self._end()
        return self.messages

    def _end(self) -> None:
        if self._host_end.fileno() >= 0:
            self._loop.remove_reader(self._host_end)
            self._host_end.close()

    def _take(self) -> bool:
        """Receive some messages; return False if there are no more for now, or ever."""
        for _ in range(MESSAGES_AT_ONCE):
            if self._host_end.fileno() < 0:
                return False
            try:
                data, rest, _, _ = self._host_end.recvmsg(MESSAGE_LIMIT, socket.CMSG_SPACE(_SENDER.size))
            except BlockingIOError:
                return False
            except OSError:
                data, rest = b"", []
            self._bytes_left -= len(data)
            if self._bytes_left < 0 or len(self.messages) == COUNT_LIMIT:
                self.overflow, data = True, b""
            if not data:
                self._end()
                return False
            senders = [raw for level, kind, raw in rest if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)]
            sender = _SENDER.unpack(senders[0])[0] if senders else 0
            self.messages.append((sender, data.decode("utf-8", "backslashreplace")))
        return True


def read_report_file(data: bytes) -> list[Message]:
    """Return the messages written into a file, one per line; the senders are not verified."""
    lines = data.decode("utf-8", "backslashreplace").split("\n")[:COUNT_LIMIT]
    return [(_parse_pid(line.partition("\t")[0]), line) for line in lines]


def _parse_pid(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
