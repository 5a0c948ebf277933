"""Define the format of the messages between the host and the helper inside a sandbox.

This module owns the format of one message; its meaning belongs to the callers. The helper reads this file too, under
whatever Python the sandbox has (3.8 or later), so it needs no import.

A message is one datagram of a SOCK_SEQPACKET socket: four bytes with the length of a header, the header (fields joined
by NUL, which no path, argument or variable can hold), then raw bytes. A message that is too long for a datagram is a
bare `IN_FILE`, and its first descriptor is a file that holds the message. If the helper cannot send a descriptor, since
other processes of its user have too many in transit, it sends the bytes in `PIECE`s.

::

    host    number, operation, arguments …     answered by  number, "ok", results …
                                               or by        number, "error", errno, text
    helper  "exit", number of the spawn, exit code
"""

from __future__ import annotations

FRAME_LIMIT = 60_000
"""Maximum bytes of one datagram; the kernel's default socket buffer holds several of them."""

MAX_FDS = 8
"""Maximum descriptors that one message carries."""

IN_FILE = b"\xff\xff\xff\xff"
"""Marker instead of a length; longer than any header."""

PIECE, LAST_PIECE = b"\xff\xff\xff\xfe", b"\xff\xff\xff\xfd"
"""Prefix of each piece of a response, and of the last one, if the system passes on no more descriptors."""


def pack(fields: list[bytes], payload: bytes = b"") -> bytes:
    """Return the bytes of a message."""
    header = b"\0".join(fields)
    return len(header).to_bytes(4, "big") + header + payload


def unpack(frame: bytes) -> tuple[list[bytes], bytes]:
    """Return the fields and the raw bytes of a message."""
    end = 4 + int.from_bytes(frame[:4], "big")
    return frame[4:end].split(b"\0"), frame[end:]


def encode_number(value: int) -> bytes:
    """Return an integer as a field."""
    return str(value).encode()
