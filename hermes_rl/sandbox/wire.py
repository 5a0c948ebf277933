"""How the host and the helper inside a sandbox write their messages to each other.

This module owns the form of one message, and nothing of its meaning. The helper reads this file too, under whatever
Python the sandbox has (3.8 or later), so it needs no import.

A message is one datagram of a SOCK_SEQPACKET socket: four bytes with the length of a header, the header
(fields joined by NUL, which no path, argument or variable can hold), then raw bytes. A message that is too
long for a datagram is a bare `IN_FILE`, and its first descriptor is a file that holds the message. Where the helper
cannot send a descriptor, since others of its user have too many on their way, it sends the bytes in `PIECE`s.

::

    host    number, operation, arguments …     answered by  number, "ok", results …
                                               or by        number, "error", errno, text
    helper  "exit", number of the spawn, exit code
"""

from __future__ import annotations

FRAME_LIMIT = 60_000
"""Bytes of one datagram; the kernel's default socket buffer holds several of them."""

MAX_FDS = 8
"""Descriptors that one message carries at most."""

IN_FILE = b"\xff\xff\xff\xff"
"""As a length it would be longer than any header."""

PIECE, LAST_PIECE = b"\xff\xff\xff\xfe", b"\xff\xff\xff\xfd"
"""What pieces of an answer begin with, where the system passes on no more descriptors."""


def pack(fields: list[bytes], payload: bytes = b"") -> bytes:
    """Return the bytes of a message."""
    header = b"\0".join(fields)
    return len(header).to_bytes(4, "big") + header + payload


def unpack(frame: bytes) -> tuple[list[bytes], bytes]:
    """Return the fields and the raw bytes of a message."""
    end = 4 + int.from_bytes(frame[:4], "big")
    return frame[4:end].split(b"\0"), frame[end:]


def number(value: int) -> bytes:
    """Return an integer as a field."""
    return str(value).encode()
