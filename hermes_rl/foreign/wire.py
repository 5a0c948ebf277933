"""Messages between the runner and a process of foreign code: four bytes with the length, then the message.

What the runner sends is pickled. What comes back is JSON, since any code may have written it: reading it can make
nothing but plain values. Bytes travel in it as base64.
"""

from __future__ import annotations

import base64
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("!I")
LARGEST = 1 << 26
"""Bytes of a message; a process that sends more is ended."""
LONG = 1 << 16
"""Bytes from which on a message is read in a thread."""
MOST_TEXTS, MOST_BETWEEN = 100_000, 1 << 21
"""Texts in a message, and bytes between them. A large file is one text, but the JSON module lets no other thread work
while it makes values, and each of these takes two bytes."""
BYTES = "\0bytes"
"""Key of the only entry of an object that stands for bytes."""


class WireError(Exception):
    """What came over the wire is no message."""


def send(connection: socket.socket, message: bytes) -> None:
    """Send a whole message; raises `OSError` where nobody is there to read it, `WireError` where it is too large."""
    if len(message) > LARGEST:
        raise WireError(f"a message of {len(message)} bytes; at most {LARGEST} are carried")
    connection.sendall(HEADER.pack(len(message)) + message)


class Inbox:
    """Puts whole messages together from what a connection delivers in pieces."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def size(self) -> int:
        """Bytes of the part of a message that is there."""
        return len(self._data)

    @property
    def empty(self) -> bool:
        """Whether there is no part of a message."""
        return not self._data

    def add(self, data: bytes) -> Iterator[bytes]:
        """Take a piece, and give the messages that it completes; raises `WireError` for one that is too large."""
        self._data += data
        while len(self._data) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._data)
            if length > LARGEST:
                raise WireError(f"a message of {length} bytes; at most {LARGEST} are carried")
            end = HEADER.size + length
            if len(self._data) < end:
                return
            message = bytes(self._data[HEADER.size : end])
            del self._data[:end]
            yield message


def to_json(value: Any) -> bytes:
    """Return a plain value as JSON; raises `TypeError` or `ValueError` where it is none."""
    return json.dumps(value, default=_bytes).encode("utf-8", "surrogatepass")


def from_json(message: bytes) -> Any:
    """Read what `to_json` wrote; raises `WireError` for anything else, and for too many values."""
    if len(message) > LONG:
        _require_few_values(message)
    try:
        return _DECODER.decode(message.decode("utf-8", "surrogatepass"))
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: bytes that are no text
        raise WireError(f"no JSON: {error}") from error


def _require_few_values(message: bytes) -> None:
    """Raise `WireError` for a message that would take long to read, without a look at what is in its texts."""
    if message.count(b'"') - message.count(b'\\"') <= 2 * MOST_TEXTS:
        parts = message.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        if sum(map(len, parts[::2])) <= MOST_BETWEEN:
            return
    raise WireError("a message of too many values")


def _bytes(value: object) -> dict[str, str]:
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is no plain value")


def _plain(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


_DECODER = json.JSONDecoder(object_hook=_plain)
