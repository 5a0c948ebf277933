"""A port for a server that is started a little later."""

from __future__ import annotations

import socket
from random import SystemRandom


def free_port() -> int:
    """Return a port of loopback that is free now.

    It lies below those that the system gives to connections and to whoever asks for any, so that no other test gets it
    before the server has begun, or while it is away.
    """
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", SystemRandom().randrange(12_000, 32_000)))
            except OSError:
                continue
            return int(probe.getsockname()[1])
