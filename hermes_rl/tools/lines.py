"""Messages of one line each, from a process that the host talks to."""

from __future__ import annotations

from collections.abc import AsyncIterator

from hermes_rl.sandbox.base import Conversation


class LineTooLongError(Exception):
    """A line has more bytes than it may."""


async def lines_of(conversation: Conversation, limit: int) -> AsyncIterator[bytes]:
    """Yield the lines that come, without their ends, until the process closes its output.

    Raises `LineTooLongError` for one of more than `limit` bytes, which are never held in memory twice over.
    """
    rest = bytearray()
    while data := await conversation.read():
        rest += data
        *lines, rest = rest.split(b"\n") if b"\n" in data else [rest]
        if max(len(rest), *map(len, lines), 0) > limit:
            raise LineTooLongError(f"a line of more than {limit} bytes")
        for line in lines:
            yield bytes(line)
