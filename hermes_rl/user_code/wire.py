"""Exchange messages between the runner and a process for user code: four bytes with the length, then the message.

The runner sends pickled messages. The other direction uses JSON, since any code may have written it: parsing it can
only create plain values. Bytes are encoded as base64.
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
"""Maximum bytes of a message; a process that sends more is killed."""
LONG = 1 << 16
"""Number of bytes from which a message is parsed in a thread."""
MOST_TEXTS, MOST_BETWEEN = 100_000, 1 << 21
"""Maximum number of texts in a message, and of bytes between them. A large file is one text, but the JSON module blocks
other threads while it creates values, and each takes at least two bytes.
"""
BYTES = "\0bytes"
"""Key of the only entry of an object that represents bytes."""


class WireError(Exception):
    """The received data is not a message."""


def send(connection: socket.socket, message: bytes) -> None:
    """Send a whole message; raise `OSError` if the peer has closed, `WireError` if it is too large."""
    if len(message) > LARGEST:
        raise WireError(f"a message of {len(message)} bytes; at most {LARGEST} are carried")
    connection.sendall(HEADER.pack(len(message)) + message)


class Inbox:
    """Assemble messages from the pieces that a connection delivers."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def size(self) -> int:
        """Bytes of the incomplete message."""
        return len(self._data)

    @property
    def empty(self) -> bool:
        """True if there is no incomplete message."""
        return not self._data

    def add(self, data: bytes) -> Iterator[bytes]:
        """Add a piece, and yield the messages that it completes; raise `WireError` for one that is too large."""
        self._data += data
        while len(self._data) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._data)
            if length > LARGEST:
                raise WireError(f"a message of {length} bytes; at most {LARGEST} are carried")
            end = HEADER.size + length
            if len(self._data) < end:
                return
            message = bytes(memoryview(self._data)[HEADER.size : end])  # copied once, on the event loop
            del self._data[:end]
            yield message


def to_json(value: Any) -> bytes:
    """Return a plain value as JSON; raise `TypeError` or `ValueError` for other values."""
    return json.dumps(value, default=_encode_bytes).encode("utf-8", "surrogatepass")


def from_json(message: bytes) -> Any:
    """Return the value written by `to_json`; raise `WireError` for anything else, and for too many values."""
    if len(message) > LONG:
        _require_few_values(message)
    try:
        return _DECODER.decode(message.decode("utf-8", "surrogatepass"))
    except (ValueError, TypeError, RecursionError) as error:  # TypeError: the value for bytes is not a text
        raise WireError(f"no JSON: {error}") from error


def _require_few_values(message: bytes) -> None:
    """Raise `WireError` for a message that would take long to parse, ignoring the content of its texts."""
    if message.count(b'"') - message.count(b'\\"') <= 2 * MOST_TEXTS:
        parts = message.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        if sum(map(len, parts[::2])) <= MOST_BETWEEN:
            return
    raise WireError("a message of too many values")


def _encode_bytes(value: object) -> dict[str, str]:
    if isinstance(value, bytes | bytearray | memoryview):
        return {BYTES: base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} is not a plain value")


def _decode_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


_DECODER = json.JSONDecoder(object_hook=_decode_bytes)
