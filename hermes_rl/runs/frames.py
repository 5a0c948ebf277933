"""How a run and its worker processes talk: frames over a socket, each a length of four bytes and then the message.

The run sends pickled objects: it is the parent of the worker and runs the same code. A worker answers in JSON, in
the form in which the record keeps a rollout, so that nothing that an agent or a reward has made is ever unpickled.
"""

from __future__ import annotations

import asyncio
import struct

MOST = 1 << 30
"""Bytes of one message; a rollout takes kilobytes to megabytes."""
BUFFER = 1 << 20
"""Bytes that a reader holds before the other side has to wait."""
_LENGTH = struct.Struct(">I")


class FrameTooLargeError(ValueError):
    """A message is longer than any that makes sense."""


def framed(message: bytes) -> bytes:
    """Return the bytes to send; raises `FrameTooLargeError`."""
    if len(message) > MOST:
        raise FrameTooLargeError(f"a message of {len(message)} bytes is longer than {MOST}")
    return _LENGTH.pack(len(message)) + message


async def received(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message; None where the other side has ended."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length) if length <= MOST else None
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
