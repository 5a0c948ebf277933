"""The way by which the helper in a container reaches the runner: a socket in a folder that both see.

Owns that folder, the listening socket in it, and the first lines that the helper's Python runs in the container. Once
the helper has connected, both are gone: nothing in the container can connect after it, and nothing lies about.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path

from hermes_rl.sandbox.bundle import BOOT

DOOR_FOLDER = "/.hermes-rl-door"
"""Where the container sees the folder."""
NAME = "door"

CONNECT = f"""
import _socket, os, sys
control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
control.connect("{DOOR_FOLDER}/{NAME}")
rest = control.recvmsg(1, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC)[1]
sys.argv[1:] = [str(control.detach()), str(int.from_bytes(rest[0][2][:4], sys.byteorder))]
"""
"""Connects and gets the helper's code; what comes then finds both descriptors where it expects them."""


class Door:
    """Made before the container; `close` may be called twice."""

    def __init__(self) -> None:
        # Nobody else of this machine may enter the outer folder; the container is shown the inner one.
        self._outer = Path(tempfile.mkdtemp(prefix="hermes-rl-"))
        self.folder = self._outer / "in"
        self.folder.mkdir()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            self._listen()
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        entered = os.open(self.folder, os.O_PATH | os.O_DIRECTORY)
        try:  # by descriptor: a path of a socket has 107 bytes at most
            self._listener.bind(f"/proc/self/fd/{entered}/{NAME}")
        finally:
            os.close(entered)
        self._listener.listen(1)
        self.folder.chmod(0o755)
        (self.folder / NAME).chmod(0o666)  # whoever the container's user is on this machine

    async def enter(self, code: int) -> tuple[socket.socket, int]:
        """Wait for the helper and hand it its code, a descriptor; its socket and its process id on this machine."""
        control, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        try:
            socket.send_fds(control, [b"x"], [code])
            peer = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except BaseException:
            control.close()
            raise
        return control, int(struct.unpack("3i", peer)[0])

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self._outer, ignore_errors=True)


def boot_code() -> str:
    """The program of the container's first process."""
    return CONNECT + BOOT
